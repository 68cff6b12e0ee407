// SPDX-License-Identifier: Apache-2.0
// Stores of mma fragments to shared memory (PTX ISA, "Warp-level matrix store instruction: stmatrix"). sm_90 and newer.
#pragma once

namespace ptx {

// stmatrix.x4.trans: stores four 8 x 8 matrices of 16-bit values, transposed. Lane 4g + t holds row g, columns 2t and
// 2t + 1, of matrix i in values[i]; lanes 8i .. 8i + 7 pass the addresses of the columns (16 bytes each) of matrix i.
__device__ __forceinline__ void stmatrix_x4_trans(unsigned shared_address, const unsigned (&values)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address),
               "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

}
