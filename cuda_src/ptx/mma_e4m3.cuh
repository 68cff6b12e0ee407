// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Warp-level matrix instructions: mma", with e4m3 (8-bit float) operands and float32 accumulators. The
// fragments are those of ptx/mma_s8.cuh.
#pragma once

namespace ptx {

// mma.m16n8k32 with e4m3: computes c += a * b; sm_89 and newer.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}
