// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Warp-level matrix store instruction: stmatrix". sm_90 and newer.
#pragma once

namespace ptx {

// stmatrix.x4.trans: four 8 x 8 matrices of 16-bit values. Lane l holds row l / 4, columns 2 (l % 4) and the next, of
// matrix i in values[i], and gives the address for column l % 8 of matrix l / 8: 16 bytes.
__device__ __forceinline__ void stmatrix_x4_trans(unsigned shared_address, const unsigned (&values)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address),
               "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

}  // namespace ptx
