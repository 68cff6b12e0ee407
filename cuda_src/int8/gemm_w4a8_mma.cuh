// SPDX-License-Identifier: Apache-2.0
// The constants that follow from those of the host, the copies and the main loop of gemm_w4a8_mma.cu.
#pragma once

#include "common/copy_to_shared.cuh"
#include "gemm/gemm_mma_fragments_epilogue.cuh"
#include "gemm/gemm_mma_fragments_mainloop.cuh"
#include "int8/gemm_int8.cuh"

// The constants that follow from those of the host. Host is the Config of gemm_w4a8_mma.cu.
template <class Host> struct GemmW4A8Mma : Host {
  using Product = Select<Host::kFp8, float, int32_t>;
  static constexpr int kThreads = 32 * Host::kWarpsN;
  static constexpr int kBlockK = 128, kStepK = 32;
  static constexpr int kBlockN = 32 * Host::kWarpsN, kStoreN = kBlockN;
  static constexpr int kCtaSums = Host::kBlockM * kBlockN;  // number of partial sums of a CTA
  static constexpr int kM8Tiles = Host::kBlockM / 8;
  static constexpr int kN16Tiles = 2;  // number of mma tiles of 16 columns per warp
  // The largest number of m8 tiles whose products a warp accumulates at a time. There are no registers for three.
  static constexpr int kChunkTiles = 2;
  static constexpr int kChunks = ceil_div(kM8Tiles, kChunkTiles);
  // The shape that Output and store_accumulators read: one slice of K, with 32 columns per warp.
  static constexpr int kSlices = 1, kWarpColumns = 1;

  static_assert(Host::kBlockM % 8 == 0, "ldmatrix loads eight rows of x at a time");

  // A stage holds
  //   x        [row][128], swizzled (hopper/swizzle.cuh)
  //   weight   [warp]: a weight tile of repacked_layout.cuh
  //   sX       float32 [row], without kRowScales
  //   sums     float32 [row], with FP8
  // After the main loop, the accumulators of kPassRows rows overwrite the stages. The padding avoids bank conflicts.
  static constexpr int kHalfScaleBytes = 16 * sizeof(typename Host::Scale);  // those of 16 columns
  static constexpr int kHalfGroupBytes = kHalfScaleBytes + (Host::kZeros == Zeros::kPacked ? 16 : 0);
  static constexpr int kWeightTileBytes = kCodeBytes + 2 * kHalfGroupBytes;
  static constexpr int kXBytes = Host::kBlockM * kBlockK;
  static constexpr int kXScale = kXBytes + Host::kWarpsN * kWeightTileBytes;   // offset of sX
  static constexpr int kRowBytes = Host::kRowScales ? 0 : Host::kFp8 ? 8 : 4;  // those of sX and sums
  static constexpr int kStageBytes = ceil_div(kXScale + Host::kBlockM * kRowBytes, 128) * 128;
  static constexpr int kPitch = kBlockN + 4;

  using Scheduler = StreamKTileScheduler<1, Host::kStreamK>;

  struct SharedStorage {
    using Ring = SharedArray<0, Host::kStages, kStageBytes>;
    using Pass = SharedArray<0, Host::kPassRows, kPitch * 4>;
    static constexpr int kBytes = Ring::kEnd > Pass::kEnd ? Ring::kEnd : Pass::kEnd;
  };
  ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);
};

// Copies the stages of a CTA tile, one k tile after the other. A warp copies the weights of its own columns. Addresses
// are 64-bit addresses that all lanes share, plus 32-bit offsets.
template <class C> class StageCopies {
 public:
  __device__ __forceinline__ StageCopies(int thread, const int8_t* xq, const uint8_t* weight, const float* x_scale,
                                         const float* x_sums, TileCoordinates tile, int k_tile, uint32_t ring, int m,
                                         int n, int k, int block_size)
      : thread_(thread), ring_(ring), k_(k), k_left_(k - k_tile * C::kBlockK - thread % 8 * 16) {
    const int lane = thread % 32;
    const int warp = uniform(thread / 32);
    weight_ = TileColumns<C>(weight, tile.n_block * C::kWarpsN, k_tile, n, k).tile(warp, 0);
    weight_target_ = C::kXBytes + warp * C::kWeightTileBytes + lane * 16;

    // Rows past m are copies of the last row; the resulting rows of y are not stored.
    const int row_begin = tile.m_block * C::kBlockM;
    last_row_ = m - 1 - row_begin;
    const int thread_row = thread / 8;
    x_ = xq + static_cast<int64_t>(row_begin) * k + k_tile * C::kBlockK;
    x_target_ = thread_row * C::kBlockK + (thread % 8 ^ swizzle_bits(thread_row)) * 16;

    block_k_tiles_ = ceil_div(block_size, C::kBlockK);
    block_left_ = block_k_tiles_ - k_tile % block_k_tiles_;
    const int64_t row = row_begin + min(thread, last_row_);
    x_scale_ = x_scale + row * ceil_div(k, block_size) + k_tile / block_k_tiles_;
    if constexpr (C::kFp8) x_sums_ = x_sums + row * ceil_div(k, C::kBlockK) + k_tile;
  }

  // Starts the copies of the next k tile into stage `stage_idx`.
  __device__ __forceinline__ void start(int stage_idx) {
    const typename C::Copies copies;
    // Offsets of the thread are computed again for each stage, because the main loop needs all registers.
    const int thread = ptx::opaque(thread_);
    const uint32_t stage = ring_ + stage_idx * C::kStageBytes;
#pragma unroll
    for (int i = 0; i < kXPasses; ++i) {
      const int row = i * kPassRows + thread / 8;
      if ((i + 1) * kPassRows > C::kBlockM && row >= C::kBlockM) continue;
      // The last k tile may be longer than K; zeros fill it.
      copies.start_16(stage + x_target_ + i * kPassRows * C::kBlockK,
                      x_ + static_cast<uint32_t>(min(row, last_row_) * k_ + thread % 8 * 16), k_left_ > 0);
    }
#pragma unroll
    for (int i = 0; i < C::kWeightTileBytes; i += 512) {
      if (i == kCodeBytes && thread % 32 >= C::kHalfGroupBytes / 8) continue;
      copies.start_16(stage + weight_target_ + i, weight_ + thread % 32 * 16 + i, true);
    }
    if (!C::kRowScales && (C::kThreads == C::kBlockM || thread < C::kBlockM)) {
      copies.start_4(stage + C::kXScale + thread * 4, x_scale_, true);
      if constexpr (C::kFp8) copies.start_4(stage + C::kXScale + (C::kBlockM + thread) * 4, x_sums_++, true);
    }
    if (--block_left_ == 0) {
      block_left_ = block_k_tiles_;
      ++x_scale_;
    }
    x_ += C::kBlockK;
    k_left_ -= C::kBlockK;
    weight_ += C::kWeightTileBytes;
  }

 private:
  static constexpr int kPassRows = C::kThreads / 8;
  static constexpr int kXPasses = ceil_div(C::kBlockM, kPassRows);
  static_assert(C::kThreads >= C::kBlockM, "a thread copies sX of one row");

  int thread_;
  uint32_t ring_;
  int k_, last_row_;
  int k_left_;  // number of k from this thread's first one to the end of K
  const uint8_t* weight_;
  uint32_t weight_target_;
  const int8_t* x_;
  uint32_t x_target_;
  const float *x_scale_, *x_sums_;
  int block_k_tiles_, block_left_;
};

// The weights of two columns of a lane, g and g + 8, as operand A: q - z, or with FP8 q / 512, which is the e4m3 with
// the bits of q.
template <class C> struct WeightColumns {
  float scales[2];     // with FP8, times 512
  uint32_t biases[2];  // 128 - z in each byte, which is added to codes
  float offsets[2];    // with FP8, -z times the scale

  // Loads the scales and the zero points of the 16 columns at the shared address `group`.
  __device__ __forceinline__ void load_shared(uint32_t group) {
    const int g = threadIdx.x % 32 / 4;
    Vector<uint32_t, sizeof(typename C::Scale) / 2> words;
    ptx::ld_shared(words.values, group + g * (C::kHalfScaleBytes / 8));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (sizeof(typename C::Scale) == 4) {
        scales[i] = __uint_as_float(words.values[i]);
      } else {
        scales[i] = to_float(typename C::Scale{static_cast<uint16_t>(words.values[0] >> (16 * i))});
      }
    }
    uint32_t zeros = 0x0808u;
    if constexpr (C::kZeros == Zeros::kPacked) zeros = ptx::ld_shared_u16(group + C::kHalfScaleBytes + g * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t zero = zeros >> (8 * i) & 0xffu;
      biases[i] = 0x80808080u - zero * 0x01010101u;
      if constexpr (C::kFp8) {
        offsets[i] = -static_cast<float>(zero) * scales[i];
        scales[i] *= 512.0f;
      }
    }
  }

  // Converts the codes of 32 k, two words of repacked_layout.cuh. Byte b of a register has k 2t + b / 2 + b % 2 * 8 of
  // its 16 k, which is the order of xq.
  __device__ __forceinline__ void convert(uint32_t (&a)[4], const uint32_t* words) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = (words[i / 2] >> (i % 2 * 4)) & 0x0f0f0f0fu;
      // q + 128 - z does not carry into the next byte; flipping the highest bit subtracts 128.
      a[i] = C::kFp8 ? codes : (codes + biases[i % 2]) ^ 0x80808080u;
    }
  }
};

// The operands of a k tile, and the products of two chunks of rows: those of a chunk are scaled while the tensor cores
// compute those of the next one.
template <class C> struct KTile {
  static constexpr int kSteps = C::kBlockK / C::kStepK;

  uint32_t a[2][kSteps][4];  // the weights
  WeightColumns<C> columns[2];
  uint32_t x;                        // the shared address of x, as ldmatrix takes it
  const float* x_scale;              // those of the lane's first two rows
  uint32_t b[2][C::kChunkTiles][4];  // [64 k] of the rows of x of a chunk
  typename C::Product products[2][C::kChunkTiles][2][4];

  static __device__ constexpr int first_tile(int chunk) { return chunk * C::kM8Tiles / C::kChunks; }

  // Loads and converts the weights of a warp, which begin at the shared address `weight`.
  __device__ __forceinline__ void load_weight(uint32_t weight) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      columns[i].load_shared(weight + kCodeBytes + i * C::kHalfGroupBytes);
#pragma unroll
      for (int k64 = 0; k64 < 2; ++k64) {
        uint32_t words[4];
        ptx::ld_shared(words, weight + k64 * 1024 + i * 512 + lane * 16);
        columns[i].convert(a[i][k64 * 2], words);
        columns[i].convert(a[i][k64 * 2 + 1], words + 2);
      }
    }
  }

  // Adds the products of chunk CHUNK and of the later ones, as far as they have some of the tile's `rows`; those of one
  // chunk more are computed and dropped.
  template <int CHUNK = 0>
  __device__ __forceinline__ void add_products(Accumulators<C>& accumulators, const int32_t (&magic)[4], int rows) {
    if constexpr (CHUNK < C::kChunks) {
      // The branch also keeps ptxas from loading the x of later chunks early, for which there are no registers.
      if (CHUNK > 1 && rows <= first_tile(CHUNK - 1) * 8) return;
      multiply(CHUNK, magic);
    }
    if constexpr (CHUNK > 0) scale(CHUNK - 1, accumulators);
    if constexpr (CHUNK < C::kChunks) add_products<CHUNK + 1>(accumulators, magic, rows);
  }

  // Loads 64 k of the rows of x of a chunk.
  __device__ __forceinline__ void load_x(int chunk, int k64) {
    const int first = first_tile(chunk), tiles = first_tile(chunk + 1) - first;
#pragma unroll
    for (int j = 0; j < tiles; ++j) ptx::ldmatrix_x4(b[k64][j], (x ^ k64 * 64) + (first + j) * (8 * C::kBlockK));
  }

 private:
  // Computes the products of a chunk, of which the first 64 k of x are loaded, and loads those of the next chunk.
  __device__ __forceinline__ void multiply(int chunk, const int32_t (&magic)[4]) {
    const int tiles = first_tile(chunk + 1) - first_tile(chunk);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == 0) load_x(chunk, 1);
      if (step == 2 && chunk + 1 < C::kChunks) load_x(chunk + 1, 0);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < tiles; ++j) {
          typename C::Product(&sums)[4] = products[chunk % 2][j][i];
          const uint32_t (&x64)[4] = b[step / 2][j];
          if constexpr (C::kFp8) {
            if (step == 0) sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
            mma(sums, a[i][step], x64[step % 2 * 2], x64[step % 2 * 2 + 1]);
          } else if (C::kRowScales && step == 0) {
            const int32_t zeros[4] = {};
            mma(sums, a[i][step], x64[0], x64[1], zeros);
          } else {
            const int32_t (&addend)[4] = step == 0 ? magic : static_cast<const int32_t (&)[4]>(sums);
            mma(sums, a[i][step], x64[step % 2 * 2], x64[step % 2 * 2 + 1], addend);
          }
        }
      }
    }
  }

  // Adds the products of a chunk, multiplied by the scales, to the accumulators.
  __device__ __forceinline__ void scale(int chunk, Accumulators<C>& accumulators) const {
    const int first = first_tile(chunk), tiles = first_tile(chunk + 1) - first;
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      Vector<float, 2> x_scales, x_sums;
      if constexpr (!C::kRowScales) load<true>(x_scales, x_scale + (first + j) * 8);
      if constexpr (C::kFp8) load<true>(x_sums, x_scale + C::kBlockM + (first + j) * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          float& sum = accumulators[i][first + j][v];
          const typename C::Product product = products[chunk % 2][j][i][v];
          const float scale = columns[i].scales[v / 2];
          if constexpr (C::kRowScales) {
            sum = fmaf(static_cast<float>(product), scale, sum);
            continue;
          }
          float scaled;
          if constexpr (C::kFp8) {
            scaled = fmaf(product, scale, columns[i].offsets[v / 2] * x_sums.values[v % 2]);
          } else if constexpr (sizeof(typename C::Scale) == 2) {
            // A 16-bit scale times kMagic is exact, so that fma replaces a subtraction and a multiplication.
            scaled = fmaf(__int_as_float(product), scale, -kMagic * scale);
          } else {
            scaled = magic_to_float(product) * scale;
          }
          sum = fmaf(scaled, x_scales.values[v % 2], sum);
        }
      }
    }
  }
};

// Adds the products of `k_tiles` k tiles to the accumulators of a tile, of which x has `rows` rows from the first on.
// `magic` is kMagicBits four times, in values that the compiler does not know.
template <class C> __device__ __forceinline__ void run_main_loop(Accumulators<C>& accumulators, StageCopies<C>& copies,
                                                                 const int32_t (&magic)[4], int thread, int rows,
                                                                 uint32_t ring, int k_tiles) {
  const typename C::Copies waits;
  const int lane = thread % 32;
  const uint32_t weight = ring + C::kXBytes + uniform(thread / 32) * C::kWeightTileBytes;
  // ldmatrix loads 64 k of eight rows of x: matrix i has k 16 i .. 16 i + 15.
  const uint32_t x = ring + lane % 8 * C::kBlockK + (lane / 8 ^ swizzle_bits(lane % 8)) * 16;
  extern __shared__ __align__(128) uint8_t memory[];

#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (i < k_tiles) copies.start(i);
    waits.commit();
  }
  int stage_idx = 0;
#pragma unroll 1
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    waits.template wait<C::kStages - 2>();
    // The k tile has landed, and all warps have read the stage of the preceding one, which is refilled.
    __syncthreads();
    const uint32_t stage = stage_idx * C::kStageBytes;
    KTile<C> operands;
    operands.x = x + stage;
    operands.load_x(0, 0);
    operands.load_weight(weight + stage);
    if (k_tile + C::kStages - 1 < k_tiles) copies.start(stage_idx == 0 ? C::kStages - 1 : stage_idx - 1);
    waits.commit();
    operands.x_scale = reinterpret_cast<const float*>(memory + stage + C::kXScale) + lane % 4 * 2;
    operands.add_products(accumulators, magic, rows);
    stage_idx = stage_idx + 1 == C::kStages ? 0 : stage_idx + 1;
  }
}

// With kRowScales, multiplies the accumulators of a tile, whose rows begin at `first_row`, by the scales of the rows.
template <class C> __device__ __forceinline__ void scale_rows(Accumulators<C>& accumulators, const float* x_scale,
                                                              int first_row, int last_row) {
#pragma unroll
  for (int j = 0; j < C::kM8Tiles; ++j) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float scale = x_scale[min(first_row + j * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + v, last_row)];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        accumulators[i][j][v] *= scale;
        accumulators[i][j][v + 2] *= scale;
      }
    }
  }
}
