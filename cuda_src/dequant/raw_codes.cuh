// SPDX-License-Identifier: Apache-2.0
// Conversion of 4-bit codes to fragments of operand A by masks alone, without a subtraction. Codes i and i + 4 of a
// word, two adjacent k of one column, become register i of the fragment, as (kOffset + q) / kUnits[i % 2].
//
// The zero point is subtracted from the accumulators, in float32:
//   sum of x (q - z) = sum of x (kOffset + q) - (kOffset + z) * sum of x
// The sum of x is a product with kOne, or with kOnes in the units of the codes. Only the float32 accumulation rounds.
// In bfloat16, sums of x (128 + q) overflow for |x| above 1e34.
#pragma once

#include "dequant/int4.cuh"
#include "common/mma.cuh"

template <class T>
struct RawCodes;

template <>
struct RawCodes<half_t> {
  // A code in the low bits of a float16 is the subnormal q * 2^-24, one four bits higher is q * 2^-20; tensor cores
  // multiply subnormals exactly.
  static constexpr float kOffset = 0.0f;
  static constexpr float kUnits[2] = {16777216.0f, 1048576.0f};
  static constexpr uint32_t kOne = 0x3c003c00u;
  static constexpr uint32_t kOnes[2] = {0x00010001u, 0x00100010u};

  static __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) {
    const uint32_t upper = word >> 8;
    a[0] = word & 0x000f000fu;
    a[1] = word & 0x00f000f0u;
    a[2] = upper & 0x000f000fu;
    a[3] = upper & 0x00f000f0u;
  }
};

template <>
struct RawCodes<bfloat16_t> {
  static constexpr float kOffset = 128.0f;
  static constexpr float kUnits[2] = {1.0f, 1.0f};
  static constexpr uint32_t kOne = 0x3f803f80u;
  static constexpr uint32_t kOnes[2] = {kOne, kOne};

  static __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ptx::lop3_and_or(word >> (4 * i), 0x000f000fu, Codes<bfloat16_t>::kMagic);
  }
};
