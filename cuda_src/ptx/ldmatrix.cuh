// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Warp-level matrix load instruction: ldmatrix". sm_75 and newer.
#pragma once

namespace ptx {

// ldmatrix.x4: four 8 x 8 matrices of 16-bit values; lanes 8i..8i+7 give the shared addresses of the rows of matrix i,
// 16 bytes each. Lane 4g + t receives of each matrix row g, columns 2t and 2t + 1.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&out)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// ldmatrix.x2: two of them, by the addresses of lanes 0 to 15.
__device__ __forceinline__ void ldmatrix_x2(unsigned (&out)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(address)
               : "memory");
}

// ldmatrix.x4.trans: the same, transposed: lane 4g + t receives of each matrix rows 2t and 2t + 1, column g.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&out)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

}  // namespace ptx
