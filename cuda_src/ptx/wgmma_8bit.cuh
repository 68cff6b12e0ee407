// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (wgmma) with 8-bit operands: A in
// registers, B in shared memory with K contiguous; sm_90a only. ptx/wgmma.cuh has the fences, groups and descriptors.
//
// Warp w of the warpgroup holds rows 16 w .. 16 w + 15 of the 64 rows of A and D, in the fragments of mma m16n8k32
// (ptx/mma_s8.cuh): a[0 .. 3], and d[4 j .. 4 j + 3] for columns 8 j .. 8 j + 7. B is N rows of 128 bytes with the
// 128-byte swizzle of TMA; `b` is its matrix descriptor, plus 2 for each step of 32 along k within the 128 bytes.
#pragma once

#include "ptx/wgmma.cuh"

namespace ptx {

// clang-format off
// Defines wgmma.mma_async.m64nNk32: d = a * b (+ d if ACCUMULATE), where d has N / 2 accumulators. A0 .. A3, B and
// P are the operand numbers of a, b and ACCUMULATE in the asm statement, where the operands of d come first.
#define WGMMA_8BIT(NAME, T, C, TYPES, SIGNS, N, A0, A1, A2, A3, B, P) \
  template <bool ACCUMULATE> \
  __device__ __forceinline__ void NAME(T (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P ", 0;" \
      "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" WGMMA_TEXT_##N "}, " \
      "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p" SIGNS ";}" \
      : WGMMA_D_##N(C) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACCUMULATE ? 1 : 0)); \
  }
#define WGMMA_E4M3(N, ...) WGMMA_8BIT(wgmma_e4m3, float, "+f", "f32.e4m3.e4m3", ", 1, 1", N, __VA_ARGS__)
// N of an integer wgmma is 8, 24, or a multiple of 16.
#define WGMMA_BOTH(N, ...) \
  WGMMA_E4M3(N, __VA_ARGS__) \
  WGMMA_8BIT(wgmma_s8, int, "+r", "s32.s8.s8", "", N, __VA_ARGS__)

WGMMA_BOTH(8, 4, 5, 6, 7, 8, 9)
WGMMA_BOTH(16, 8, 9, 10, 11, 12, 13)
WGMMA_BOTH(24, 12, 13, 14, 15, 16, 17)
WGMMA_BOTH(32, 16, 17, 18, 19, 20, 21)
WGMMA_E4M3(40, 20, 21, 22, 23, 24, 25)
WGMMA_BOTH(48, 24, 25, 26, 27, 28, 29)
WGMMA_E4M3(56, 28, 29, 30, 31, 32, 33)
WGMMA_BOTH(64, 32, 33, 34, 35, 36, 37)
WGMMA_E4M3(72, 36, 37, 38, 39, 40, 41)
WGMMA_BOTH(80, 40, 41, 42, 43, 44, 45)
WGMMA_E4M3(88, 44, 45, 46, 47, 48, 49)
WGMMA_BOTH(96, 48, 49, 50, 51, 52, 53)
WGMMA_E4M3(104, 52, 53, 54, 55, 56, 57)
WGMMA_BOTH(112, 56, 57, 58, 59, 60, 61)
WGMMA_E4M3(120, 60, 61, 62, 63, 64, 65)
WGMMA_BOTH(128, 64, 65, 66, 67, 68, 69)

#undef WGMMA_BOTH
#undef WGMMA_E4M3
#undef WGMMA_8BIT
// clang-format on

}
