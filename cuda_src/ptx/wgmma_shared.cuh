// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions": wgmma as in ptx/wgmma.cuh, but with
// both operands in shared memory; sm_90a only. A has 64 rows and B has N rows, each of 128 bytes (64 values along k)
// with the 128-byte swizzle of TMA. `a` and `b` are the matrix descriptors of A and B, plus 2 for each step of 16 along
// k within the 128 bytes.
#pragma once

#include "ptx/wgmma.cuh"

namespace ptx {

// clang-format off
// Defines wgmma.mma_async.m64nNk16: d += a * b, where d has N / 2 accumulators. A and B are the operand numbers of a
// and b in the asm statement, where the operands of d come first.
#define WGMMA(TYPE, N, A, B) \
  __device__ __forceinline__ void wgmma_##TYPE(float (&d)[N / 2], unsigned long long a, unsigned long long b) { \
    asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0;" \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE " {" WGMMA_TEXT_##N "}, " \
      "%" #A ", %" #B ", p, 1, 1, 0, 0;}" \
      : WGMMA_D_##N("+f") : "l"(a), "l"(b)); \
  }
#define WGMMA_TYPES(N, A, B) WGMMA(f16, N, A, B) WGMMA(bf16, N, A, B)
WGMMA_TYPES(56, 28, 29)
WGMMA_TYPES(64, 32, 33)
WGMMA_TYPES(80, 40, 41)
WGMMA_TYPES(96, 48, 49)
WGMMA_TYPES(112, 56, 57)
WGMMA_TYPES(128, 64, 65)
WGMMA_TYPES(200, 100, 101)
WGMMA_TYPES(256, 128, 129)
#undef WGMMA_TYPES
#undef WGMMA
// clang-format on

}
