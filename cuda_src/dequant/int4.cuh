// SPDX-License-Identifier: Apache-2.0
// 4-bit codes of AWQ words to floating point.
//
// A word holds columns 8c .. 8c + 7 of one row; nibble p (bits 4p .. 4p + 3) is column 0, 2, 4, 6, 1, 3, 5, 7 of these
// for p = 0 .. 7. So the even columns lie in the low half of the word and the odd ones in the high half, and one mask
// takes two adjacent columns at once, each into its own 16-bit half.
#pragma once

#include "ptx/half2.cuh"
#include "ptx/lop3.cuh"
#include "common/types.cuh"

// How the zero point of a group is stored: 4-bit codes, none (it is 8), or an offset in place of it (w = q * s + o).
enum class Zeros { kPacked, kSymmetric, kOffset };

constexpr uint32_t kSymmetricZeros = 0x88888888u;

// Bit position of a column's nibble.
__device__ constexpr int nibble_shift(int column) { return (column >> 1) * 4 + (column & 1) * 16; }

__device__ __forceinline__ uint32_t code(uint32_t word, int column) { return (word >> nibble_shift(column)) & 15u; }

// Two codes minus two zero points, exactly, as two adjacent 16-bit values: `low` takes the nibbles at bits 0 and 16 of
// a word, `high` those at bits 4 and 20. `zero_low` and `zero_high` prepare the zero points, which stand at the same
// bits of their word.
template <class T>
struct Codes;

template <>
struct Codes<half_t> {
  // 0x6400 is 1024.0, whose last mantissa bit is worth 1: a nibble OR-ed into its low bits adds q, one OR-ed four bits
  // higher adds 16 q. All values stay below 2048, where float16 holds every integer.
  static constexpr uint32_t kMagic = 0x64006400u;
  static constexpr uint32_t kSixteenth = 0x2c002c00u;
  static constexpr uint32_t kMinusSixteenth = 0xac00ac00u;

  // 1024 + z
  static __device__ __forceinline__ uint32_t zero_low(uint32_t word) {
    return ptx::lop3_and_or(word, 0x000f000fu, kMagic);
  }
  // (1024 + 16 z) / -16 = -(64 + z)
  static __device__ __forceinline__ uint32_t zero_high(uint32_t word) {
    return ptx::fma_f16x2(ptx::lop3_and_or(word, 0x00f000f0u, kMagic), kMinusSixteenth, 0u);
  }
  // (1024 + q) - (1024 + z)
  static __device__ __forceinline__ uint32_t low(uint32_t word, uint32_t zero) {
    return ptx::sub_f16x2(ptx::lop3_and_or(word, 0x000f000fu, kMagic), zero);
  }
  // (1024 + 16 q) / 16 - (64 + z)
  static __device__ __forceinline__ uint32_t high(uint32_t word, uint32_t zero) {
    return ptx::fma_f16x2(ptx::lop3_and_or(word, 0x00f000f0u, kMagic), kSixteenth, zero);
  }
  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) { return ptx::mul_f16x2(a, b); }
  static __device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    return ptx::fma_f16x2(a, b, c);
  }
};

template <>
struct Codes<bfloat16_t> {
  // 0x4300 is 128.0, whose last mantissa bit is worth 1. A nibble four bits higher would reach the exponent, so the
  // word is shifted instead.
  static constexpr uint32_t kMagic = 0x43004300u;
  static constexpr uint32_t kOne = 0x3f803f80u;
  static constexpr uint32_t kSigns = 0x80008000u;

  // -(128 + z)
  static __device__ __forceinline__ uint32_t zero_low(uint32_t word) {
    return ptx::lop3_and_or(word, 0x000f000fu, kMagic | kSigns);
  }
  static __device__ __forceinline__ uint32_t zero_high(uint32_t word) { return zero_low(word >> 4); }
  // (128 + q) - (128 + z)
  static __device__ __forceinline__ uint32_t low(uint32_t word, uint32_t zero) {
    return ptx::fma_bf16x2(ptx::lop3_and_or(word, 0x000f000fu, kMagic), kOne, zero);
  }
  static __device__ __forceinline__ uint32_t high(uint32_t word, uint32_t zero) { return low(word >> 4, zero); }
  // Adding -0 keeps the sign of a product that is zero.
  static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) { return ptx::fma_bf16x2(a, b, kSigns); }
  static __device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    return ptx::fma_bf16x2(a, b, c);
  }
};
