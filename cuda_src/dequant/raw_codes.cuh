// SPDX-License-Identifier: Apache-2.0
// Codes to the registers of operand A by masks alone. Of a word the nibbles i and i + 4, two adjacent k of one column,
// become register i, as (kOffset + q) / kUnits[i % 2]. The zero point is subtracted from the sums, in float32: sum x
// (offset + q) - (offset + z) sum x. The second sum is a product with kOne, or with kOnes in the units of codes. What
// cancels is exact but for the float32 sums themselves; in bfloat16, sums of (128 + q) x overflow from |x| of 1e34 on.
#pragma once

#include "dequant/int4.cuh"
#include "common/mma.cuh"

template <class T>
struct RawCodes;

template <>
struct RawCodes<half_t> {
  // Subnormal numbers, which tensor cores take as they are.
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
