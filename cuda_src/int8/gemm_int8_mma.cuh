// SPDX-License-Identifier: Apache-2.0
// The GEMM of gemm_int8.cuh with mma.sync, of int8 or (FP8) e4m3; the caller passes the way of copying
// (common/copy_to_shared.cuh). The products of each quantization block, int32 or with FP8 float32, are scaled and added
// to float32 accumulators in registers.
//
// Limits: k % 16 == 0; block_size % 32 == 0 or block_size == k; xq starts at a multiple of 16 bytes. EVEN: rows of y
// start at multiples of two elements. X_BLOCKS: the largest number of blocks that overlap a stage.
//
// A CTA has WARPS_M x WARPS_N warps, each with WARP_M rows and 32 columns of y. It has STAGES pipeline stages in shared
// memory, each of 128 columns of x and W. A stage holds:
//   x [BLOCK_M][128] bytes; the 16-byte chunk c of row r is stored as chunk c ^ (r % 8)
//   weight [BLOCK_N][128] bytes with the same swizzle; for 4 bits [BLOCK_N][64] with chunk c as chunk c ^ (r / 2 % 4)
//   sX, oX, sumX [X_BLOCKS][3][BLOCK_M] and sW, oW, sumW*sW [X_BLOCKS][3][BLOCK_N]
#pragma once

#include "common/copy_to_shared.cuh"
#include "int8/gemm_int8.cuh"
#include "ptx/ldmatrix.cuh"
#include "common/reduce.cuh"

// The constants of the host (gemm_int8_mma_config.cuh), and those that follow from them.
template <class Host> struct GemmInt8Mma : Host {
  static constexpr int kTilesM = Host::kWarpM / 16;  // number of mma tiles of 16 rows per warp
  static constexpr int kTilesN = 4;
  static constexpr int kThreads = Host::kWarpsM * Host::kWarpsN * 32;
  static constexpr int kBlockM = Host::kWarpsM * Host::kWarpM;
  static constexpr int kBlockN = Host::kWarpsN * kTilesN * 8;
  static constexpr int kBlockK = 128, kStepK = 32;
  // The number of steps after which a block may end: one, or all steps of a stage if a stage lies in one block.
  static constexpr int kCheckSteps = Host::kXBlocks == 1 ? kBlockK / kStepK : 1;
  static constexpr int kXBytes = kBlockM * kBlockK;
  static constexpr int kChunksN = Host::kBits;  // number of 16-byte chunks per row of the weight in a stage
  static constexpr int kWeightBytes = kBlockN * kChunksN * 16;
  // Byte offset in a stage of the parameters of x: scales sX, offsets oX and sums of codes sumX.
  static constexpr int kXParameters = kXBytes + kWeightBytes;
  static constexpr int kWeightParameters = kXParameters + Host::kXBlocks * 3 * kBlockM * 4;
  static constexpr int kStageBytes = kWeightParameters + Host::kXBlocks * 3 * kBlockN * 4;
  static constexpr int kAccumulators = kTilesM * kTilesN * 4;

  static_assert(!(Host::kFp8 && Host::kShortBlocks), "magic_to_float needs integer products");
  static_assert(kBlockM * 8 % kThreads == 0 && kBlockN * kChunksN % kThreads == 0, "the copies divide evenly");
};

// Converts a product to float32. In a block of at most 256 columns (kShortBlocks), its magnitude is below 2^22, as
// magic_to_float requires.
template <class C> __device__ __forceinline__ float to_product(typename C::Product value) {
  return C::kShortBlocks ? magic_to_float(value) : static_cast<float>(value);
}

template <class C, class Copies>
__device__ __forceinline__ void gemm_int8_mma(const int8_t* xq, const float* x_scale, const float* x_offset,
                                              const typename C::Product* x_sums, const uint8_t* codes,
                                              const float* parameters, const typename C::Bias* bias, typename C::T* y,
                                              float* partials, uint32_t* counters, int m, int n, int k, int block_size,
                                              int n_padded, int ldy, float low, float high, Copies copies) {
  using T = typename C::T;
  using Product = typename C::Product;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t shared_begin = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int lane = threadIdx.x % 32;
  const int warp_m = threadIdx.x / 32 % C::kWarpsM * C::kWarpM;
  const int warp_n = threadIdx.x / 32 / C::kWarpsM * C::kTilesN * 8;
  const int m_begin = blockIdx.x * C::kBlockM;
  const int n_begin = blockIdx.y * C::kBlockN;
  const int blocks = ceil_div(k, block_size);
  const int tiles = ceil_div(k, C::kBlockK);
  const int tile_begin = slice_begin<int64_t>(tiles, blockIdx.z, gridDim.z);
  const int tile_end = slice_begin<int64_t>(tiles, blockIdx.z + 1, gridDim.z);
  const int row_bytes = ceil_div(k, C::kStepK) * C::kStepK * C::kBits / 8;
  const int64_t plane = static_cast<int64_t>(blocks) * n_padded;

  auto start_stage = [&](int tile, int stage) {
    const uint32_t begin = shared_begin + stage * C::kStageBytes;
#pragma unroll
    for (int i = 0; i < C::kBlockM * 8 / C::kThreads; ++i) {
      const int index = i * C::kThreads + threadIdx.x;
      const int row = index / 8;
      const int chunk = index % 8;
      const int at = tile * C::kBlockK + chunk * 16;
      const bool valid = m_begin + row < m && at < k;
      const int8_t* source = valid ? xq + static_cast<int64_t>(m_begin + row) * k + at : xq;
      copies.start_16(begin + (row * 8 + (chunk ^ (row % 8))) * 16, source, valid);
    }
#pragma unroll
    for (int i = 0; i < C::kBlockN * C::kChunksN / C::kThreads; ++i) {
      const int index = i * C::kThreads + threadIdx.x;
      const int row = index / C::kChunksN;
      const int chunk = index % C::kChunksN;
      const int at = (tile * C::kChunksN + chunk) * 16;
      const bool valid = n_begin + row < n && at < row_bytes;
      const uint8_t* source = valid ? codes + static_cast<int64_t>(n_begin + row) * row_bytes + at : codes;
      const int swizzled = C::kBits == 8 ? chunk ^ (row % 8) : chunk ^ (row / 2 % 4);
      copies.start_16(begin + C::kXBytes + (row * C::kChunksN + swizzled) * 16, source, valid);
    }
    const int first = tile * C::kBlockK / block_size;
    for (int index = threadIdx.x; index < C::kXBlocks * C::kBlockM; index += C::kThreads) {
      const int row = min(m_begin + index % C::kBlockM, m - 1);
      const int64_t at = static_cast<int64_t>(row) * blocks + min(first + index / C::kBlockM, blocks - 1);
      const uint32_t target = begin + C::kXParameters + (index / C::kBlockM * 3 * C::kBlockM + index % C::kBlockM) * 4;
      copies.start_4(target, x_scale + (C::kFp8 ? row : at), true);
      if constexpr (C::kXOffset) copies.start_4(target + C::kBlockM * 4, x_offset + at, true);
      if constexpr (C::kWeightOffset) copies.start_4(target + 2 * C::kBlockM * 4, x_sums + at, true);
    }
    for (int index = threadIdx.x; index < C::kXBlocks * C::kBlockN / 4; index += C::kThreads) {
      const int column = index % (C::kBlockN / 4) * 4;
      const int within = index / (C::kBlockN / 4);
      const float* source = parameters + static_cast<int64_t>(min(first + within, blocks - 1)) * n_padded;
      const uint32_t target = begin + C::kWeightParameters + (within * 3 * C::kBlockN + column) * 4;
      copies.start_16(target, source + n_begin + column, true);
      if constexpr (C::kWeightOffset) copies.start_16(target + C::kBlockN * 4, source + plane + n_begin + column, true);
      if constexpr (C::kXOffset)
        copies.start_16(target + 2 * C::kBlockN * 4, source + 2 * plane + n_begin + column, true);
    }
  };

  // The accumulators of all blocks, and the products of the current block; both [mma tile along m][mma tile along n]
  // [value of the fragment].
  float accumulators[C::kTilesM][C::kTilesN][4] = {};
  Product products[C::kTilesM][C::kTilesN][4];
  auto clear = [&] {
#pragma unroll
    for (int i = 0; i < C::kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < C::kTilesN; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) products[i][j][v] = C::kShortBlocks ? kMagicBits : 0;
      }
    }
  };

  // Adds the scaled products of block `b`, which is block `within` of the stage, to the accumulators. At the end of the
  // block (`is_end`), also adds the terms of the offsets.
  auto close_block = [&](int stage, int within, int b, bool is_end) {
    const auto* of_x = reinterpret_cast<const float*>(shared + stage * C::kStageBytes + C::kXParameters) +
                       within * 3 * C::kBlockM + warp_m + lane / 4;
    const auto* x_sums_of_block = reinterpret_cast<const Product*>(of_x) + 2 * C::kBlockM;
    const auto* of_weight = reinterpret_cast<const float*>(shared + stage * C::kStageBytes + C::kWeightParameters) +
                            within * 3 * C::kBlockN + warp_n + lane % 4 * 2;
    const int columns = min(block_size, k - b * block_size);
    float scale[C::kTilesN][2];
#pragma unroll
    for (int j = 0; j < C::kTilesN; ++j) {
#pragma unroll
      for (int v = 0; v < 2; ++v) scale[j][v] = of_weight[j * 8 + v];
    }
#pragma unroll
    for (int i = 0; i < C::kTilesM; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const float x_part = of_x[i * 16 + v / 2 * 8];
#pragma unroll
        for (int j = 0; j < C::kTilesN; ++j) {
          accumulators[i][j][v] =
              add_block(accumulators[i][j][v], to_product<C>(products[i][j][v]), x_part, scale[j][v % 2]);
        }
      }
    }
    if constexpr (C::kWeightOffset || C::kXOffset) {
      if (is_end) {
#pragma unroll
        for (int i = 0; i < C::kTilesM; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = i * 16 + half * 8;
            const float x_part = C::kXOffset ? of_x[C::kBlockM + at] : 0.0f;
            const float row = C::kWeightOffset ? row_term<C>(of_x[at], x_sums_of_block[at], x_part, columns) : 0.0f;
#pragma unroll
            for (int j = 0; j < C::kTilesN; ++j) {
#pragma unroll
              for (int v = 0; v < 2; ++v) {
                const float offset = C::kWeightOffset ? of_weight[C::kBlockN + j * 8 + v] : 0.0f;
                const float column = C::kXOffset ? of_weight[2 * C::kBlockN + j * 8 + v] : 0.0f;
                float& sum = accumulators[i][j][half * 2 + v];
                sum = add_offsets<C>(sum, row, x_part, offset, column);
              }
            }
          }
        }
      }
    }
    clear();
  };

  auto matmul = [&](int stage, int step) {
    const uint32_t x_begin = shared_begin + stage * C::kStageBytes;
    const uint32_t weight_begin = x_begin + C::kXBytes;
    uint32_t b[C::kTilesN][2];
    if constexpr (C::kBits == 8) {
#pragma unroll
      for (int pair = 0; pair < C::kTilesN / 2; ++pair) {
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
      for (int j = 0; j < C::kTilesN; ++j) {
        b[j][0] = low_nibbles<C::kFp8>(words[j]);
        b[j][1] = high_nibbles<C::kFp8>(words[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < C::kTilesM; ++i) {
      // ldmatrix loads matrices 0 and 1 from rows 0 .. 7 and 8 .. 15 at k 0 .. 15, and matrices 2 and 3 from the same
      // rows at k 16 .. 31.
      const int row = warp_m + i * 16 + lane % 16;
      const int chunk = step * 2 + lane / 16;
      uint32_t a[4];
      ptx::ldmatrix_x4(a, x_begin + (row * 8 + (chunk ^ (row % 8))) * 16);
#pragma unroll
      for (int j = 0; j < C::kTilesN; ++j) mma(products[i][j], a, b[j][0], b[j][1]);
    }
  };

#pragma unroll
  for (int stage = 0; stage < C::kStages - 1; ++stage) {
    if (tile_begin + stage < tile_end) start_stage(tile_begin + stage, stage);
    copies.commit();
  }
  clear();
  int stage = 0;
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    copies.template wait<C::kStages - 2>();
    __syncthreads();
    // All warps have finished reading the preceding stage, which can now be refilled.
    const int tile_ahead = tile + C::kStages - 1;
    if (tile_ahead < tile_end) start_stage(tile_ahead, stage == 0 ? C::kStages - 1 : stage - 1);
    copies.commit();
    const int first = tile * C::kBlockK / block_size;
    int within = 0;
    int block_end = min(first * block_size + block_size, k);
#pragma unroll
    for (int step = 0; step < C::kBlockK / C::kStepK; ++step) {
      const int step_end = tile * C::kBlockK + (step + 1) * C::kStepK;
      matmul(stage, step);
      if ((step + 1) % C::kCheckSteps != 0) continue;
      // A block that ends within a step, at the end of K, is closed after that step: past k, all codes are 0.
      const bool is_end = step_end >= block_end && step_end - C::kCheckSteps * C::kStepK < block_end;
      const bool is_last = step == C::kBlockK / C::kStepK - 1 && tile + 1 == tile_end;
      if (is_end || is_last) {
        close_block(stage, within, first + within, is_end);
        if (is_end && within + 1 < C::kXBlocks) {
          ++within;
          block_end = min(block_end + block_size, k);
        }
      }
    }
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }

  const int tile = blockIdx.y * gridDim.x + blockIdx.x;
  auto& flat = reinterpret_cast<float (&)[C::kAccumulators]>(accumulators);
  if (!reduce_split_k<C::kAccumulators, C::kThreads>(flat, partials, counters, tile, blockIdx.z, gridDim.z)) return;

  const Epilogue<T, C> epilogue{bias, nullptr, low, high, n, 0};
#pragma unroll
  for (int i = 0; i < C::kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m_begin + warp_m + i * 16 + half * 8 + lane / 4;
      if (row >= m) continue;
      T* target = y + static_cast<int64_t>(row) * ldy;
#pragma unroll
      for (int j = 0; j < C::kTilesN; ++j) {
        const int column = n_begin + warp_n + j * 8 + lane % 4 * 2;
        if (column + 1 < n) {
          Vector<T, 2> out;
#pragma unroll
          for (int v = 0; v < 2; ++v)
            out.values[v] = epilogue.finish(accumulators[i][j][half * 2 + v], row, column + v);
          store<C::kEven>(target + column, out);
        } else if (column < n) {
          target[column] = epilogue.finish(accumulators[i][j][half * 2], row, column);
        }
      }
    }
  }
}
