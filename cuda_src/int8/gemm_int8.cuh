// SPDX-License-Identifier: Apache-2.0
// What the kernels of the integer product share:
//   y[m, n] = epilogue(sum over blocks b of sA*(C*sB + sumA*oB) + oA*(sumB*sB + k_b*oB)),  C = sum over k in b of a*w
// so that A = a*sA + oA and B = w*sB + oB are multiplied with no error but that of float32 sums over blocks.
//
//   xq          int8 [m, k]
//   x_scale, x_offset, x_sums   float32, float32, int32 [m, blocks]: sA, oA (null without X_OFFSET), sumA
//   codes       the weight, w: BITS 8: int8 [n, k_padded]; BITS 4: [n, k_padded / 2] bytes, where byte i of the 16 of a
//               step of 32 k holds k = i in its low and k = 16 + i in its high nibble, both as two's complement.
//               k_padded is k rounded up to 32, and codes past k are 0.
//   parameters  float32 [3, blocks, n_padded]: sB, oB and sumB*sB. For 4 bits sB is a sixteenth: a nibble is used where
//               it stands, in the high half of a byte, where it is worth 16 times as much.
//   y           Y [m, n], row stride ldy values
//
// FP8: xq is e4m3 with one scale a row, x_scale [m], and x_sums are float32, of its values. Codes, of 4 bits, are
// unsigned and used in the low half of a byte, where they are e4m3 of code * 2^-9; sB and oB allow for it.
#pragma once

#include "common/epilogue.cuh"
#include "ptx/mma_e4m3.cuh"
#include "ptx/mma_s8.cuh"

using int8_t = signed char;
#if FP8
using Product = float;
#else
using Product = int32_t;
#endif

constexpr bool kFp8 = FP8;
constexpr int kBits = BITS;
constexpr bool kXOffset = X_OFFSET;
constexpr bool kWeightOffset = WEIGHT_OFFSET;
constexpr uint32_t kHighNibbles = 0xf0f0f0f0u;
constexpr uint32_t kLowNibbles = 0x0f0f0f0fu;

// The low nibbles of four bytes, and the high ones, where their codes are used.
__device__ __forceinline__ uint32_t low_nibbles(uint32_t word) {
  return kFp8 ? word & kLowNibbles : (word << 4) & kHighNibbles;
}
__device__ __forceinline__ uint32_t high_nibbles(uint32_t word) {
  return kFp8 ? (word >> 4) & kLowNibbles : word & kHighNibbles;
}

// c + the products of four pairs of int8.
__device__ __forceinline__ int32_t dot(uint32_t a, uint32_t b, int32_t c) {
#if __CUDA_ARCH__ >= 610
  return __dp4a(static_cast<int>(a), static_cast<int>(b), c);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  return c;
#endif
}

// c + the products of 16 rows and 8 columns over 32 k: see mma_s8.cuh.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ptx::mma_m16n8k32_e4m3(c, a, b0, b1);
}
__device__ __forceinline__ void mma(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (__CUDA_ARCH__ >= 800) {
    ptx::mma_m16n8k32_s8(c, a, b0, b1);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::mma_m8n8k16_s8(c[half * 2], c[half * 2 + 1], a[half], b0);
      ptx::mma_m8n8k16_s8(c[half * 2], c[half * 2 + 1], a[half + 2], b1);
    }
  }
}

// Sums within 2^22 that began with the bits of 1.5 * 2^23 are its mantissa: a subtraction makes a float of them, which
// is faster than the conversion.
constexpr int32_t kMagicBits = 0x4b400000;
__device__ __forceinline__ float magic_to_float(int32_t value) { return __int_as_float(value) - 12582912.0f; }

// What a block adds to a sum. `product` is C, `row` sA*sumA + k_b*oA.
__device__ __forceinline__ float add_block(float sum, float product, float x_scale, float scale) {
  return fmaf(product, x_scale * scale, sum);
}
__device__ __forceinline__ float add_offsets(float sum, float row, float x_offset, float offset, float column) {
  if constexpr (kWeightOffset) sum = fmaf(row, offset, sum);
  if constexpr (kXOffset) sum = fmaf(x_offset, column, sum);
  return sum;
}
__device__ __forceinline__ float row_term(float x_scale, Product x_sum, float x_offset, int columns) {
  const float term = x_scale * static_cast<float>(x_sum);
  return kXOffset ? fmaf(static_cast<float>(columns), x_offset, term) : term;
}
