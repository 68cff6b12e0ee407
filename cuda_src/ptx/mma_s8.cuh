// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Warp-level matrix instructions: mma", with int8 operands and int32 accumulators.
//
// The fragments of lane 4 g + t; a register holds four adjacent k (columns of A, rows of B), where "4t.." means 4t to
// 4t + 3:
//   A  a[0]: row g, k 4t..   a[1]: row g + 8, k 4t..   a[2]: row g, k 4t + 16..   a[3]: row g + 8, k 4t + 16..
//   B  b0: k 4t.., column g   b1: k 4t + 16.., column g
//   C  c[0], c[1]: row g, columns 2t, 2t + 1   c[2], c[3]: row g + 8, the same columns
#pragma once

namespace ptx {

// mma.m8n8k16 with int8: computes c += a * b; sm_75 and newer. `a` holds row g, k 4t.., and `b` holds k 4t.., column g.
__device__ __forceinline__ void mma_m8n8k16_s8(int& c0, int& c1, unsigned a, unsigned b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+r"(c0), "+r"(c1)
      : "r"(a), "r"(b));
}

// mma.m16n8k32 with int8: computes d = a * b + c; sm_80 and newer.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                                const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// The same with d = c.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma_m16n8k32_s8(c, a, b0, b1, c);
}

}
