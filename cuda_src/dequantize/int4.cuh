// SPDX-License-Identifier: Apache-2.0
// Conversion of the 4-bit codes of AWQ words to floating point.
//
// A word holds columns 8 c .. 8 c + 7 of one row of the weight in AWQ order:
//
//   bits      31..28  27..24  23..20  19..16  15..12  11..8   7..4    3..0
//   column    7       5       3       1       6       4       2       0
//
// The even columns are in the low half of the word, the odd columns in the high half. So one mask extracts two adjacent
// columns into the two 16-bit halves of a register.
#pragma once

#include "ptx/half2.cuh"
#include "ptx/lop3.cuh"
#include "common/types.cuh"

// The kind of zero points: packed 4-bit codes, none (all zero points are 8), or float offsets o (w = q * s + o).
enum class Zeros { kPacked, kSymmetric, kOffset };

constexpr uint32_t kSymmetricZeros = 0x88888888u;

// Returns the lowest bit of the code of a column (0 .. 7) in an AWQ word.
__device__ constexpr int nibble_shift(int column) { return (column >> 1) * 4 + (column & 1) * 16; }

// Returns the 4-bit code of a column (0 .. 7) of an AWQ word.
__device__ __forceinline__ uint32_t code(uint32_t word, int column) { return (word >> nibble_shift(column)) & 15u; }

// Conversion of two codes minus their zero points to two 16-bit values in one register, exactly. `low` converts the
// codes at bits 0 and 16 of a word, `high` the codes at bits 4 and 20. The second argument of `low` and `high` is the
// result of `zero_low` and `zero_high` for the word of zero points.
template <class T> struct Codes;

template <> struct Codes<half_t> {
  // float16 has 10 mantissa bits, so the last mantissa bit of 1024 = 2^10 has the value 1. 1024 has exponent
  // 10 + 15 = 25 and mantissa 0: 25 << 10 = 0x6400. A code OR-ed into the low four bits adds q; four bits higher it
  // adds 16 q. All values stay below 2048, up to which float16 represents every integer.
  static constexpr uint32_t kMagic = 0x64006400u;
  static constexpr uint32_t kSixteenth = 0x2c002c00u;       // 2^-4 in both halves: exponent -4 + 15 = 11, 11 << 10
  static constexpr uint32_t kMinusSixteenth = 0xac00ac00u;  // -2^-4 in both halves

  // Returns 1024 + z for the zero points z that `low` subtracts.
  static __device__ __forceinline__ uint32_t zero_low(uint32_t word) {
    return ptx::lop3_and_or(word, 0x000f000fu, kMagic);
  }
  // Returns (1024 + 16 z) / -16 = -(64 + z) for the zero points z that `high` adds.
  static __device__ __forceinline__ uint32_t zero_high(uint32_t word) {
    return ptx::fma_f16x2(ptx::lop3_and_or(word, 0x00f000f0u, kMagic), kMinusSixteenth, 0u);
  }
  // Returns q - z = (1024 + q) - (1024 + z) for the codes q at bits 0 and 16.
  static __device__ __forceinline__ uint32_t low(uint32_t word, uint32_t zero) {
    return ptx::sub_f16x2(ptx::lop3_and_or(word, 0x000f000fu, kMagic), zero);
  }
  // Returns q - z = (1024 + 16 q) / 16 - (64 + z) for the codes q at bits 4 and 20.
  static __device__ __forceinline__ uint32_t high(uint32_t word, uint32_t zero) {
    return ptx::fma_f16x2(ptx::lop3_and_or(word, 0x00f000f0u, kMagic), kSixteenth, zero);
  }
  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) { return ptx::mul_f16x2(a, b); }
  static __device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    return ptx::fma_f16x2(a, b, c);
  }
};

template <> struct Codes<bfloat16_t> {
  // bfloat16 has 7 mantissa bits, so the last mantissa bit of 128 = 2^7 has the value 1. 128 has exponent 7 + 127 = 134
  // and mantissa 0: 134 << 7 = 0x4300. A code four bits higher would overlap the exponent, so `high` shifts the word.
  static constexpr uint32_t kMagic = 0x43004300u;
  static constexpr uint32_t kOne = 0x3f803f80u;    // 1.0 in both halves: exponent 127, 127 << 7 = 0x3f80
  static constexpr uint32_t kSigns = 0x80008000u;  // the sign bits of both halves, which is -0

  // Returns -(128 + z) for zero points z.
  static __device__ __forceinline__ uint32_t zero_low(uint32_t word) {
    return ptx::lop3_and_or(word, 0x000f000fu, kMagic | kSigns);
  }
  static __device__ __forceinline__ uint32_t zero_high(uint32_t word) { return zero_low(word >> 4); }
  // Returns q - z = (128 + q) - (128 + z) for codes q.
  static __device__ __forceinline__ uint32_t low(uint32_t word, uint32_t zero) {
    return ptx::fma_bf16x2(ptx::lop3_and_or(word, 0x000f000fu, kMagic), kOne, zero);
  }
  static __device__ __forceinline__ uint32_t high(uint32_t word, uint32_t zero) { return low(word >> 4, zero); }
  // Returns a * b as an fma with addend -0, which preserves the sign of a zero product.
  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) { return ptx::fma_bf16x2(a, b, kSigns); }
  static __device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    return ptx::fma_bf16x2(a, b, c);
  }
};

// Conversion of 4-bit codes to fragments of operand A with masks only, without subtracting the zero point. Codes i and
// i + 4 of a word, which are two adjacent k of one column, become register i of the fragment, with the value
// (kOffset + q) / kUnits[i % 2].
//
// The zero point is subtracted from the float32 accumulators:
//   sum of x (q - z) = sum of x (kOffset + q) - (kOffset + z) * sum of x
// The sum of x is an mma with kOne, or with kOnes (1 / kUnits) as operand A. Only the float32 accumulation rounds. In
// bfloat16, sums of x * (128 + q) overflow for |x| above 1e34.
template <class T> struct RawCodes;

template <> struct RawCodes<half_t> {
  // As the bits of a float16, a code in the low four bits is the subnormal q * 2^-24, a code four bits higher is
  // q * 2^-20. Tensor cores multiply subnormals exactly.
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

template <> struct RawCodes<bfloat16_t> {
  static constexpr float kOffset = 128.0f;
  static constexpr float kUnits[2] = {1.0f, 1.0f};
  static constexpr uint32_t kOne = 0x3f803f80u;
  static constexpr uint32_t kOnes[2] = {kOne, kOne};

  static __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ptx::lop3_and_or(word >> (4 * i), 0x000f000fu, Codes<bfloat16_t>::kMagic);
  }
};
