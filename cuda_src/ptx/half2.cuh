// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Half Precision Floating Point Instructions" on two 16-bit values in one register. The suffix .rn keeps
// ptxas from fusing a multiplication and an addition that must be rounded separately.
#pragma once

namespace ptx {

// sub.rn.f16x2: returns a - b; sm_53 and newer.
__device__ __forceinline__ unsigned sub_f16x2(unsigned a, unsigned b) {
  unsigned out;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// mul.rn.f16x2: returns a * b; sm_53 and newer.
__device__ __forceinline__ unsigned mul_f16x2(unsigned a, unsigned b) {
  unsigned out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// fma.rn.f16x2: returns a * b + c with one rounding; sm_53 and newer.
__device__ __forceinline__ unsigned fma_f16x2(unsigned a, unsigned b, unsigned c) {
  unsigned out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// fma.rn.bf16x2: returns a * b + c with one rounding; sm_80 and newer (PTX has sub and mul for bf16x2 only on sm_90).
__device__ __forceinline__ unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
  unsigned out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// mov.b32: returns one 16-bit half of `pair` in both halves of a register. This is often free, because many
// instructions can select halves of an operand.
template <int HALF> __device__ __forceinline__ unsigned twice(unsigned pair) {
  unsigned out;
  if constexpr (HALF == 0) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(out) : "r"(pair));
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(out) : "r"(pair));
  }
  return out;
}

}
