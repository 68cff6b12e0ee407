// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Warp-level matrix instructions: mma", with float16 or bfloat16 operands and float32 accumulators.
//
// The fragments of lane 4 g + t; a register holds two adjacent k (columns of A, rows of B), where "2t.." means 2t and
// 2t + 1:
//   A  a[0]: row g, k 2t..   a[1]: row g + 8, k 2t..   a[2]: row g, k 2t + 8..   a[3]: row g + 8, k 2t + 8..
//   B  b[0]: k 2t.., column g   b[1]: k 2t + 8.., column g
//   C  c[0], c[1]: row g, columns 2t, 2t + 1   c[2], c[3]: row g + 8, the same columns
// m16n8k8 has only k 0 .. 7, so only a[0], a[1] and b[0].
#pragma once

namespace ptx {

// mma.m16n8k8 with float16: computes c += a * b; sm_75 and newer.
__device__ __forceinline__ void mma_m16n8k8_f16(float (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// mma.m16n8k16 with float16: computes c += a * b; sm_80 and newer.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.m16n8k16 with bfloat16: computes c += a * b; sm_80 and newer.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}
