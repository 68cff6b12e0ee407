// SPDX-License-Identifier: Apache-2.0
// The integer GEMM of gemm_int8.cuh with mma.sync; the caller passes the way of copying (common/copy_to_shared.cuh).
// The int32 products of each quantization block are scaled and added to float32 accumulators in registers.
//
// Limits: k % 16 == 0; block_size % 32 == 0 or block_size == k; xq starts at a multiple of 16 bytes. EVEN: rows of y
// start at multiples of two elements. X_BLOCKS: the largest number of blocks that overlap a stage.
//
// A CTA has WARPS_M x WARPS_N warps, each with WARP_M rows and 32 columns of y. It has STAGES pipeline stages in shared
// memory, each of 128 columns of A and W. A stage holds:
//   x [BLOCK_M][128] bytes; the 16-byte chunk c of row r is stored as chunk c ^ (r % 8)
//   weight [BLOCK_N][128] bytes with the same swizzle; for 4 bits [BLOCK_N][64] with chunk c as chunk c ^ (r / 2 % 4)
//   sA, oA, sumA [X_BLOCKS][3][BLOCK_M] and sB, oB, sumB*sB [X_BLOCKS][3][BLOCK_N]
#pragma once

#include "common/copy_to_shared.cuh"
#include "int8/gemm_int8.cuh"
#include "ptx/ldmatrix.cuh"
#include "common/reduce.cuh"

constexpr int kWarpsM = WARPS_M;
constexpr int kWarpsN = WARPS_N;
constexpr int kTilesM = WARP_M / 16;  // number of mma tiles per warp along m
constexpr int kTilesN = 4;
constexpr int kStages = STAGES;
constexpr int kXBlocks = X_BLOCKS;
constexpr bool kShortBlocks = SHORT_BLOCKS;  // whether products are int32 and blocks have at most 256 columns

constexpr int kThreads = kWarpsM * kWarpsN * 32;
constexpr int kBlockM = kWarpsM * WARP_M;
constexpr int kBlockN = kWarpsN * kTilesN * 8;
constexpr int kBlockK = 128;
constexpr int kStepK = 32;
// The number of steps after which a block may end: one, or all steps of a stage if a stage lies in one block.
constexpr int kCheckSteps = X_BLOCKS == 1 ? kBlockK / kStepK : 1;
constexpr int kXBytes = kBlockM * kBlockK;
constexpr int kChunksN = kBits;  // number of 16-byte chunks per row of the weight in a stage
constexpr int kWeightBytes = kBlockN * kChunksN * 16;
constexpr int kXParameters = kXBytes + kWeightBytes;  // byte offset of sA, oA, sumA in a stage
constexpr int kWeightParameters = kXParameters + kXBlocks * 3 * kBlockM * 4;
constexpr int kStageBytes = kWeightParameters + kXBlocks * 3 * kBlockN * 4;
constexpr int kAccumulators = kTilesM * kTilesN * 4;

static_assert(!(kFp8 && kShortBlocks), "magic_to_float needs integer products");
static_assert(kBlockM * 8 % kThreads == 0 && kBlockN * kChunksN % kThreads == 0, "the copies divide evenly");

// Converts a product to float32. In a block of at most 256 columns (kShortBlocks), its magnitude is below 2^22, as
// magic_to_float requires.
__device__ __forceinline__ float to_product(Product value) {
  return kShortBlocks ? magic_to_float(value) : static_cast<float>(value);
}

template <class Copies>
__device__ __forceinline__ void gemm_int8_mma(const int8_t* xq, const float* x_scale, const float* x_offset,
                                              const Product* x_sums, const uint8_t* codes, const float* parameters,
                                              const BIAS* bias, Y* y, float* partials, uint32_t* counters, int m, int n,
                                              int k, int block_size, int n_padded, int ldy, float low, float high,
                                              Copies copies) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t shared_begin = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x % 32;
  const int warp_m = threadIdx.x / 32 % kWarpsM * WARP_M;
  const int warp_n = threadIdx.x / 32 / kWarpsM * kTilesN * 8;
  const int m_begin = blockIdx.x * kBlockM;
  const int n_begin = blockIdx.y * kBlockN;
  const int blocks = ceil_div(k, block_size);
  const int tiles = ceil_div(k, kBlockK);
  const int tile_begin = static_cast<int>(static_cast<int64_t>(tiles) * blockIdx.z / gridDim.z);
  const int tile_end = static_cast<int>(static_cast<int64_t>(tiles) * (blockIdx.z + 1) / gridDim.z);
  const int row_bytes = ceil_div(k, kStepK) * kStepK * kBits / 8;
  const int64_t plane = static_cast<int64_t>(blocks) * n_padded;

  auto start_stage = [&](int tile, int stage) {
    const uint32_t begin = shared_begin + stage * kStageBytes;
#pragma unroll
    for (int i = 0; i < kBlockM * 8 / kThreads; ++i) {
      const int index = i * kThreads + threadIdx.x;
      const int row = index / 8;
      const int chunk = index % 8;
      const int at = tile * kBlockK + chunk * 16;
      const bool valid = m_begin + row < m && at < k;
      const int8_t* source = valid ? xq + static_cast<int64_t>(m_begin + row) * k + at : xq;
      copies.start_16(begin + (row * 8 + (chunk ^ (row % 8))) * 16, source, valid);
    }
#pragma unroll
    for (int i = 0; i < kBlockN * kChunksN / kThreads; ++i) {
      const int index = i * kThreads + threadIdx.x;
      const int row = index / kChunksN;
      const int chunk = index % kChunksN;
      const int at = (tile * kChunksN + chunk) * 16;
      const bool valid = n_begin + row < n && at < row_bytes;
      const uint8_t* source = valid ? codes + static_cast<int64_t>(n_begin + row) * row_bytes + at : codes;
      const int swizzled = kBits == 8 ? chunk ^ (row % 8) : chunk ^ (row / 2 % 4);
      copies.start_16(begin + kXBytes + (row * kChunksN + swizzled) * 16, source, valid);
    }
    const int first = tile * kBlockK / block_size;
    for (int index = threadIdx.x; index < kXBlocks * kBlockM; index += kThreads) {
      const int row = min(m_begin + index % kBlockM, m - 1);
      const int64_t at = static_cast<int64_t>(row) * blocks + min(first + index / kBlockM, blocks - 1);
      const uint32_t target = begin + kXParameters + (index / kBlockM * 3 * kBlockM + index % kBlockM) * 4;
      copies.start_4(target, x_scale + (kFp8 ? row : at), true);
      if constexpr (kXOffset) copies.start_4(target + kBlockM * 4, x_offset + at, true);
      if constexpr (kWeightOffset) copies.start_4(target + 2 * kBlockM * 4, x_sums + at, true);
    }
    for (int index = threadIdx.x; index < kXBlocks * kBlockN / 4; index += kThreads) {
      const int column = index % (kBlockN / 4) * 4;
      const int within = index / (kBlockN / 4);
      const float* source = parameters + static_cast<int64_t>(min(first + within, blocks - 1)) * n_padded;
      const uint32_t target = begin + kWeightParameters + (within * 3 * kBlockN + column) * 4;
      copies.start_16(target, source + n_begin + column, true);
      if constexpr (kWeightOffset) copies.start_16(target + kBlockN * 4, source + plane + n_begin + column, true);
      if constexpr (kXOffset) copies.start_16(target + 2 * kBlockN * 4, source + 2 * plane + n_begin + column, true);
    }
  };

  // The accumulators of all blocks, and the products of the current block; both [mma tile along m][mma tile along n]
  // [value of the fragment].
  float accumulators[kTilesM][kTilesN][4] = {};
  Product products[kTilesM][kTilesN][4];
  auto clear = [&] {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) products[i][j][v] = kShortBlocks ? kMagicBits : 0;
      }
    }
  };

  // Adds the scaled products of block `b`, which is block `within` of the stage, to the accumulators. At the end of the
  // block (`is_end`), also adds the terms of the offsets.
  auto close_block = [&](int stage, int within, int b, bool is_end) {
    const auto* of_x = reinterpret_cast<const float*>(shared + stage * kStageBytes + kXParameters) +
                       within * 3 * kBlockM + warp_m + lane / 4;
    const auto* x_sums_of_block = reinterpret_cast<const Product*>(of_x) + 2 * kBlockM;
    const auto* of_weight = reinterpret_cast<const float*>(shared + stage * kStageBytes + kWeightParameters) +
                            within * 3 * kBlockN + warp_n + lane % 4 * 2;
    const int columns = min(block_size, k - b * block_size);
    float scale[kTilesN][2];
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
      for (int v = 0; v < 2; ++v) scale[j][v] = of_weight[j * 8 + v];
    }
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const float x_part = of_x[i * 16 + v / 2 * 8];
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          accumulators[i][j][v] =
              add_block(accumulators[i][j][v], to_product(products[i][j][v]), x_part, scale[j][v % 2]);
        }
      }
    }
    if constexpr (kWeightOffset || kXOffset) {
      if (is_end) {
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = i * 16 + half * 8;
            const float x_part = kXOffset ? of_x[kBlockM + at] : 0.0f;
            const float row = kWeightOffset ? row_term(of_x[at], x_sums_of_block[at], x_part, columns) : 0.0f;
#pragma unroll
            for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
              for (int v = 0; v < 2; ++v) {
                const float offset = kWeightOffset ? of_weight[kBlockN + j * 8 + v] : 0.0f;
                const float column = kXOffset ? of_weight[2 * kBlockN + j * 8 + v] : 0.0f;
                float& sum = accumulators[i][j][half * 2 + v];
                sum = add_offsets(sum, row, x_part, offset, column);
              }
            }
          }
        }
      }
    }
    clear();
  };

  auto matmul = [&](int stage, int step) {
    const uint32_t x_begin = shared_begin + stage * kStageBytes;
    const uint32_t weight_begin = x_begin + kXBytes;
    uint32_t b[kTilesN][2];
    if constexpr (kBits == 8) {
#pragma unroll
      for (int pair = 0; pair < kTilesN / 2; ++pair) {
        // ldmatrix loads matrices 0 and 1 from columns 0 .. 7 at k 0 .. 15 and k 16 .. 31, and matrices 2 and 3 from
        // columns 8 .. 15 at the same k.
        const int row = warp_n + pair * 16 + lane / 16 * 8 + lane % 8;
        const int chunk = step * 2 + lane / 8 % 2;
        uint32_t words[4];
        ptx::ldmatrix_x4(words, weight_begin + (row * 8 + (chunk ^ (row % 8))) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[pair * 2 + i / 2][i % 2] = words[i];
      }
    } else {
      const int row = warp_n + lane;
      uint32_t words[4];
      ptx::ldmatrix_x4(words, weight_begin + (row * 4 + (step ^ (row / 2 % 4))) * 16);
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        b[j][0] = low_nibbles(words[j]);
        b[j][1] = high_nibbles(words[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      // ldmatrix loads matrices 0 and 1 from rows 0 .. 7 and 8 .. 15 at k 0 .. 15, and matrices 2 and 3 from the same
      // rows at k 16 .. 31.
      const int row = warp_m + i * 16 + lane % 16;
      const int chunk = step * 2 + lane / 16;
      uint32_t a[4];
      ptx::ldmatrix_x4(a, x_begin + (row * 8 + (chunk ^ (row % 8))) * 16);
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) mma(products[i][j], a, b[j][0], b[j][1]);
    }
  };

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (tile_begin + stage < tile_end) start_stage(tile_begin + stage, stage);
    copies.commit();
  }
  clear();
  int stage = 0;
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    copies.template wait<kStages - 2>();
    __syncthreads();
    // All warps have finished reading the preceding stage, which can now be refilled.
    const int tile_ahead = tile + kStages - 1;
    if (tile_ahead < tile_end) start_stage(tile_ahead, stage == 0 ? kStages - 1 : stage - 1);
    copies.commit();
    const int first = tile * kBlockK / block_size;
    int within = 0;
    int block_end = min(first * block_size + block_size, k);
#pragma unroll
    for (int step = 0; step < kBlockK / kStepK; ++step) {
      const int step_end = tile * kBlockK + (step + 1) * kStepK;
      matmul(stage, step);
      if ((step + 1) % kCheckSteps != 0) continue;
      // A block that ends within a step, at the end of K, is closed after that step: past k, all codes are 0.
      const bool is_end = step_end >= block_end && step_end - kCheckSteps * kStepK < block_end;
      const bool is_last = step == kBlockK / kStepK - 1 && tile + 1 == tile_end;
      if (is_end || is_last) {
        close_block(stage, within, first + within, is_end);
        if (is_end && within + 1 < kXBlocks) {
          ++within;
          block_end = min(block_end + block_size, k);
        }
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  const int tile = blockIdx.y * gridDim.x + blockIdx.x;
  auto& flat = reinterpret_cast<float (&)[kAccumulators]>(accumulators);
  if (!reduce_split_k<kAccumulators, kThreads>(flat, partials, counters, tile, blockIdx.z, gridDim.z)) return;

  const Epilogue<Y> epilogue{bias, nullptr, low, high, n, 0};
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m_begin + warp_m + i * 16 + half * 8 + lane / 4;
      if (row >= m) continue;
      Y* target = y + static_cast<int64_t>(row) * ldy;
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        const int column = n_begin + warp_n + j * 8 + lane % 4 * 2;
        if (column + 1 < n) {
          Vector<Y, 2> out;
#pragma unroll
          for (int v = 0; v < 2; ++v)
            out.values[v] = epilogue.finish(accumulators[i][j][half * 2 + v], row, column + v);
          store<EVEN>(target + column, out);
        } else if (column < n) {
          target[column] = epilogue.finish(accumulators[i][j][half * 2], row, column);
        }
      }
    }
  }
}
