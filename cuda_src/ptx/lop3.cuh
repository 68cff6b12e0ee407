// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Logic and Shift Instructions: lop3". sm_50 and newer.
#pragma once

namespace ptx {

// (a & b) | c in one instruction. The table's index is (a << 2) | (b << 1) | c, so the columns of a, b and c are 0xF0,
// 0xCC and 0xAA, and the operation is (0xF0 & 0xCC) | 0xAA = 0xEA.
__device__ __forceinline__ unsigned lop3_and_or(unsigned a, unsigned b, unsigned c) {
  unsigned out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

}  // namespace ptx
