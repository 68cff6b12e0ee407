// SPDX-License-Identifier: Apache-2.0
// The instruction lop3 (PTX ISA, "Logic and Shift Instructions: lop3"). sm_50 and newer.
#pragma once

namespace ptx {

// lop3.b32: returns (a & b) | c. The immediate is the result of the operation for a = 0xF0, b = 0xCC and c = 0xAA:
// (0xF0 & 0xCC) | 0xAA = 0xEA.
__device__ __forceinline__ unsigned lop3_and_or(unsigned a, unsigned b, unsigned c) {
  unsigned out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

}
