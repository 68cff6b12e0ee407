// SPDX-License-Identifier: Apache-2.0
// The operands and the arithmetic of gemm_int8_simt, gemm_int8_sm75, gemm_int8_sm80 and gemv_int8:
//
//   y[m, n] = activation(sum over quantization blocks b of sX*(C*sW + sumX*oW) + oX*(sumW*sW + k_b*oW) + bias[n])
//   C = sum over the k_b columns of b of xq * w, in int32
//
// This is the product of x = xq*sX + oX and W = w*sW + oW. Only the float32 sums over the blocks are rounded. "Block"
// means a quantization block: block_size columns of x and W with the same scale and offset.
//
//   xq          int8 [m, k]
//   x_scale     float32 [m, blocks], sX
//   x_offset    float32 [m, blocks], oX; null without X_OFFSET
//   x_sums      int32 [m, blocks], sumX, the sum of xq
//   codes       w, padded with zeros to k_padded, which is k rounded up to 32. BITS = 8: int8 [n, k_padded]. BITS = 4:
//               bytes [n, k_padded / 2]; byte i of the 16 bytes of 32 k holds k = i in its low nibble and k = 16 + i in
//               its high nibble, both in two's complement
//   parameters  float32 [3, blocks, n_padded], where n_padded is n rounded up to 128: sW, oW, sumW*sW. With BITS = 4,
//               sW is divided by 16, because the kernels use a nibble as the high half of a byte, which is 16 times w
//   bias        BIAS [n] or null
//   y           Y [m, n], row stride ldy
//   partials, counters   the split-K workspace (common/reduce.cuh)
//
// FP8: xq is e4m3 with one scale per row, x_scale [m], and x_sums are float32 sums of the values of xq. The 4-bit codes
// are unsigned. The kernels use a code as the low half of a byte, which is code * 2^-9 as e4m3; sW and oW include this
// factor and the zero point.
#pragma once

#include "common/epilogue.cuh"
#include "int8/products.cuh"
#include "ptx/mma_e4m3.cuh"
#include "ptx/mma_s8.cuh"

using int8_t = signed char;
constexpr uint32_t kHighNibbles = 0xf0f0f0f0u;
constexpr uint32_t kLowNibbles = 0x0f0f0f0fu;

// Return the low or the high nibbles of the four bytes of a word as bytes. For int8 a nibble becomes the high half of
// its byte (16 times the code), for FP8 the low half.
template <bool kFp8> __device__ __forceinline__ uint32_t low_nibbles(uint32_t word) {
  return kFp8 ? word & kLowNibbles : (word << 4) & kHighNibbles;
}
template <bool kFp8> __device__ __forceinline__ uint32_t high_nibbles(uint32_t word) {
  return kFp8 ? (word >> 4) & kLowNibbles : word & kHighNibbles;
}

// Returns c plus the dot product of two words of four int8 (dp4a).
__device__ __forceinline__ int32_t dot(uint32_t a, uint32_t b, int32_t c) {
#if __CUDA_ARCH__ >= 610
  return __dp4a(static_cast<int>(a), static_cast<int>(b), c);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  return c;
#endif
}

// Computes c += a * b with m = 16, n = 8 and k = 32, with the fragments of ptx/mma_s8.cuh.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ptx::mma_m16n8k32_e4m3(c, a, b0, b1);
}
__device__ __forceinline__ void mma(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    const int32_t (&c)[4]) {
  if constexpr (__CUDA_ARCH__ >= 800) {
    ptx::mma_m16n8k32_s8(d, a, b0, b1, c);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (int i = half * 2; i < half * 2 + 2; ++i) d[i] = c[i];
      ptx::mma_m8n8k16_s8(d[half * 2], d[half * 2 + 1], a[half], b0);
      ptx::mma_m8n8k16_s8(d[half * 2], d[half * 2 + 1], a[half + 2], b1);
    }
  }
}
__device__ __forceinline__ void mma(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma(c, a, b0, b1, c);
}

// kMagicBits are the bits of the float32 1.5 * 2^23. If an int32 sum of magnitude below 2^22 is accumulated on top of
// kMagicBits, the result is the bits of 1.5 * 2^23 + sum. Subtracting 1.5 * 2^23 then converts the sum to float32,
// which is faster than cvt.
constexpr int32_t kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912.0f;
__device__ __forceinline__ float magic_to_float(int32_t value) { return __int_as_float(value) - kMagic; }

// add_block and add_offsets add the terms of one quantization block to an accumulator `sum`: `product` is C, `row` is
// sX*sumX + k_b*oX (row_term), and `column` is sumW*sW.
__device__ __forceinline__ float add_block(float sum, float product, float x_scale, float scale) {
  return fmaf(product, x_scale * scale, sum);
}
template <class C>
__device__ __forceinline__ float add_offsets(float sum, float row, float x_offset, float offset, float column) {
  if constexpr (C::kWeightOffset) sum = fmaf(row, offset, sum);
  if constexpr (C::kXOffset) sum = fmaf(x_offset, column, sum);
  return sum;
}
template <class C>
__device__ __forceinline__ float row_term(float x_scale, typename C::Product x_sum, float x_offset, int columns) {
  const float term = x_scale * static_cast<float>(x_sum);
  return C::kXOffset ? fmaf(static_cast<float>(columns), x_offset, term) : term;
}
