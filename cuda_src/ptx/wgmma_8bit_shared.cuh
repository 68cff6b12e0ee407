// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (wgmma), with both 8-bit operands in
// shared memory with K contiguous; sm_90a only. ptx/wgmma.cuh has the fences and groups.
//
// A has 64 rows and B has N rows, each of 128 bytes (128 values along k) with the 128-byte swizzle of TMA. `a` and `b`
// are the matrix descriptors (wgmma_descriptor) of A and B, plus 2 for each step of 32 along k within the 128 bytes.
// Warp w of the warpgroup holds rows 16 w .. 16 w + 15 of D: d[4 j .. 4 j + 3] for columns 8 j .. 8 j + 7, as in mma
// m16n8k32 (ptx/mma_s8.cuh).
#pragma once

#include "ptx/wgmma_8bit.cuh"

namespace ptx {

// clang-format off
// Defines wgmma.mma_async.m64nNk32: NAME_first, d = a * b, and NAME, d += a * b, where d has N / 2 accumulators with
// the constraint R ("r" or "f"). A and B are the operand numbers of a and b in the asm statement, after those of d.
#define WGMMA_8BIT_SHARED(NAME, T, R, TYPES, SIGNS, N, A, B) \
  __device__ __forceinline__ void NAME##_first(T (&d)[N / 2], unsigned long long a, unsigned long long b) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;" \
      "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" WGMMA_TEXT_##N "}, %" #A ", %" #B ", p" SIGNS ";}" \
      : WGMMA_D_##N("=" R) : "l"(a), "l"(b)); \
  } \
  __device__ __forceinline__ void NAME(T (&d)[N / 2], unsigned long long a, unsigned long long b) { \
    asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0;" \
      "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" WGMMA_TEXT_##N "}, %" #A ", %" #B ", p" SIGNS ";}" \
      : WGMMA_D_##N("+" R) : "l"(a), "l"(b)); \
  }

WGMMA_8BIT_SHARED(wgmma_s8, int, "r", "s32.s8.s8", "", 64, 32, 33)
WGMMA_8BIT_SHARED(wgmma_e4m3, float, "f", "f32.e4m3.e4m3", ", 1, 1", 64, 32, 33)
WGMMA_8BIT_SHARED(wgmma_e4m3, float, "f", "f32.e4m3.e4m3", ", 1, 1", 128, 64, 65)

#undef WGMMA_8BIT_SHARED
// clang-format on

}
