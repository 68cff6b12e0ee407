// SPDX-License-Identifier: Apache-2.0
// The integer GEMM of gemm_int8.cuh, which describes the arguments, on CUDA cores; any k, any block_size, any
// architecture. ALIGNED: quantization blocks begin at multiples of 32 columns, and rows of xq at multiples of 8 bytes.
//
// A CTA of 256 threads computes a 64 x 64 tile; a thread has 4 x 4 accumulators. Shared memory holds 32 columns of x
// and W at a time, all of one quantization block, in words of four codes.
#include "int8/gemm_int8.cuh"

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>,
                ProductOptions<FP8, X_OFFSET, WEIGHT_OFFSET> {};
constexpr int kBits = BITS;
constexpr bool kAligned = ALIGNED;
constexpr int kTile = 64;
constexpr int kStep = 32;
constexpr int kThreads = 256;
constexpr int kWords = kStep / 4;
constexpr int kRow = kWords + 1;  // row pitch in words; with one word of padding, rows start in different banks

extern "C" __global__ void __launch_bounds__(kThreads)
    gemm_int8_simt(const int8_t* xq, const float* x_scale, const float* x_offset, const int32_t* x_sums,
                   const uint8_t* codes, const float* parameters, const BIAS* bias, Y* y, float* partials,
                   uint32_t* counters, int m, int n, int k, int block_size, int n_padded, int ldy, float low,
                   float high) {
  __shared__ uint32_t x_words[kTile * kRow];
  __shared__ uint32_t weight_words[kTile * kRow];
  const int m_begin = blockIdx.x * kTile;
  const int n_begin = blockIdx.y * kTile;
  const int blocks = ceil_div(k, block_size);
  const int k_padded = ceil_div(k, kStep) * kStep;

  // A thread copies 8 codes of one row of each operand, from column `load_k` of the 32 columns.
  const int load_row = threadIdx.x / 4;
  const int load_k = threadIdx.x % 4 * 8;
  const int8_t* x_row = xq + static_cast<int64_t>(min(m_begin + load_row, m - 1)) * k;
  const uint8_t* weight_row =
      codes + static_cast<int64_t>(min(n_begin + load_row, n - 1)) * (kBits == 8 ? k_padded : k_padded / 2);

  auto weight_code = [&](int at) -> uint32_t {
    if constexpr (kBits == 8) return weight_row[at];
    const uint32_t byte = weight_row[at / kStep * 16 + at % 16];
    return at % kStep < 16 ? (byte << 4) & 0xf0u : byte & 0xf0u;
  };
  auto fetch_to_shared = [&](int begin, int end) {
    const int at = begin + load_k;
    Vector<uint32_t, 2> x_part = {};
    Vector<uint32_t, 2> weight_part = {};
    if constexpr (kAligned) {
      if (at < end) {
        load<true>(x_part, reinterpret_cast<const uint32_t*>(x_row + at));
        const int byte = kBits == 8 ? at : begin / 2 + load_k % 16;
        load<true>(weight_part, reinterpret_cast<const uint32_t*>(weight_row + byte));
        if constexpr (kBits == 4) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t word = weight_part.values[i];
            weight_part.values[i] = load_k < 16 ? low_nibbles<Config::kFp8>(word) : high_nibbles<Config::kFp8>(word);
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (at + i >= end) break;
        x_part.values[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(x_row[at + i])) << (i % 4 * 8);
        weight_part.values[i / 4] |= weight_code(at + i) << (i % 4 * 8);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x_words[load_row * kRow + load_k / 4 + i] = x_part.values[i];
      weight_words[load_row * kRow + load_k / 4 + i] = weight_part.values[i];
    }
  };

  // A thread's accumulators: rows m_begin + tm + 16 i and columns n_begin + tn + 16 j of y, for i and j from 0 to 3.
  const int tm = threadIdx.x / 16;
  const int tn = threadIdx.x % 16;
  float accumulators[4][4] = {};
  for (int b = 0; b < blocks; ++b) {
    const int block_begin = b * block_size;
    const int block_end = min(block_begin + block_size, k);
    int32_t products[4][4] = {};
    for (int begin = block_begin; begin < block_end; begin += kStep) {
      fetch_to_shared(begin, block_end);
      __syncthreads();
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        uint32_t x_values[4];
        uint32_t weight_values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x_values[i] = x_words[(tm + 16 * i) * kRow + word];
          weight_values[i] = weight_words[(tn + 16 * i) * kRow + word];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) products[i][j] = dot(x_values[i], weight_values[j], products[i][j]);
        }
      }
      __syncthreads();
    }
    float scale[4];
    float offset[4];
    float column[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* of_column = parameters + static_cast<int64_t>(b) * n_padded + n_begin + tn + 16 * j;
      const int64_t plane = static_cast<int64_t>(blocks) * n_padded;
      scale[j] = of_column[0];
      offset[j] = Config::kWeightOffset ? of_column[plane] : 0.0f;
      column[j] = Config::kXOffset ? of_column[2 * plane] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = static_cast<int64_t>(min(m_begin + tm + 16 * i, m - 1)) * blocks + b;
      const float of_x = Config::kXOffset ? x_offset[at] : 0.0f;
      const float row =
          Config::kWeightOffset ? row_term<Config>(x_scale[at], x_sums[at], of_x, block_end - block_begin) : 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        accumulators[i][j] = add_block(accumulators[i][j], static_cast<float>(products[i][j]), x_scale[at], scale[j]);
        accumulators[i][j] = add_offsets<Config>(accumulators[i][j], row, of_x, offset[j], column[j]);
      }
    }
  }

  const Epilogue<Y, Config> epilogue{bias, nullptr, low, high, n, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = m_begin + tm + 16 * i;
      const int column = n_begin + tn + 16 * j;
      if (row < m && column < n)
        y[static_cast<int64_t>(row) * ldy + column] = epilogue.finish(accumulators[i][j], row, column);
    }
  }
}
