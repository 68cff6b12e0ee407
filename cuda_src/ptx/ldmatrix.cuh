// SPDX-License-Identifier: Apache-2.0
// Loads of mma fragments from shared memory (PTX ISA, "Warp-level matrix load instruction: ldmatrix"). sm_75 and newer.
#pragma once

namespace ptx {

// ldmatrix.x4: loads four 8 x 8 matrices of 16-bit values. Lanes 8i .. 8i + 7 pass the shared addresses of the rows (16
// bytes each) of matrix i. Lane 4g + t receives row g, columns 2t and 2t + 1, of each matrix. OFFSET bytes are added to
// all addresses; as an immediate, they take no instruction.
template <int OFFSET = 0> __device__ __forceinline__ void ldmatrix_x4(unsigned (&out)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address), "n"(OFFSET)
               : "memory");
}

// ldmatrix.x2: loads two 8 x 8 matrices like ldmatrix.x4; lanes 0 .. 15 pass the addresses.
__device__ __forceinline__ void ldmatrix_x2(unsigned (&out)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(address)
               : "memory");
}

// ldmatrix.x4.trans: loads four 8 x 8 matrices, transposed: lane 4g + t receives rows 2t and 2t + 1, column g, of each.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&out)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

}
