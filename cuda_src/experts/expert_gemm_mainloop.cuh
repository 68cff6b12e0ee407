// SPDX-License-Identifier: Apache-2.0
// The load and the main loop of expert_gemm.cu: weights to registers, x to shared memory, accumulators of a warp.
#pragma once

#include "experts/expert_gemm.cuh"
#include "hopper/swizzle.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ld.cuh"
#include "ptx/ldmatrix.cuh"

struct Arguments {
  const uint8_t* weight;
  const BIAS* bias;
  const float* row_weights;
  X* y;
  const X* shared;
  const int32_t* sorted_pairs;
  const int32_t* experts;
  const int32_t* sorted_count;
  const X* x;
  int64_t expert_bytes;
  int pairs, expert_count, n, k, x_divisor, top_k, route_block, ldx, ldy, ld_shared;

  __device__ __forceinline__ int k_tiles() const { return ceil_div(k, kWeightTileK); }
  __device__ __forceinline__ bool is_expert(int expert) const {
    return static_cast<unsigned>(expert) < static_cast<unsigned>(expert_count);
  }
  // Returns the weighted sum of the biases of a token's experts, whose first pair is `first`, for one column.
  __device__ __forceinline__ float sum_biases(int first, int column) const {
    float sum = 0.0f;
#pragma unroll 1
    for (int pair = first; pair < first + top_k; ++pair) {
      if (!is_expert(experts[pair])) continue;
      const BIAS added = bias[static_cast<int64_t>(experts[pair]) * n + column];
      sum = fmaf(to_float(added), kHasRowWeights ? row_weights[pair] : 1.0f, sum);
    }
    return sum;
  }
};

// Synchronizes the warps of one slice of K by a named barrier, or by __syncwarp if a slice is one warp.
__device__ __forceinline__ void sync_slice(int slice) {
  if constexpr (kWarpsN == 1) {
    __syncwarp();
  } else if constexpr (kSlices == 1) {
    __syncthreads();
  } else {
    ptx::barrier_sync(1 + slice, kSliceThreads);
  }
}

// The position of a warp along the k tiles of its slice; with kTokens, along those of all slots. All lanes hold the
// same position, and lane i the expert and the weight of slot i.
struct KPosition {
  int slot = 0;
  int k_tile;
  int expert;
  float weight;

  __device__ __forceinline__ void advance(int k_tiles, int step = kSlices) {
    k_tile += step;
    if constexpr (kRows == Rows::kTokens) {
      while (k_tile >= k_tiles) {
        k_tile -= k_tiles;
        ++slot;
      }
    }
  }
};

// A warp's operands from one weight tile, for 16 columns: codes of 2 x 64 k, scales and zero points of the groups.
struct WeightPart {
  uint32_t words[2][4];
  Group<Config> groups[kGroups];
};

// The weight of a warp: which tile columns it computes, and the registers into which it loads them ahead of time.
class Weight {
 public:
  __device__ __forceinline__ Weight(const Arguments& arguments, int n_block) : arguments_(arguments) {
    const int lane = threadIdx.x % 32;
    const int warp = uniform_warp() % kWarpsN;
    const int last = ceil_div(arguments.n, 128) * 8 - 1;
    // In a gated tile, the first half of the columns belongs to the gate projection, the second half to the up
    // projection.
    constexpr int kAdjacent = kGated ? kCtaColumnTiles / 2 : kCtaColumnTiles;
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      const int local = warp * kColumnTiles + i;
      const int up_begin = local < kAdjacent ? 0 : arguments.n / 32;
      const int tile = min(up_begin + n_block * kAdjacent + local % kAdjacent, last);
      const uint32_t begin = static_cast<uint32_t>(tile / 2 * arguments.k_tiles()) * kWeightTileBytes;
      codes_[i] = begin + tile % 2 * 512 + lane * 16;
      scales_[i] = begin + kCodeBytes + tile % 2 * kHalfGroupBytes + lane / 4 * 4;
    }
  }
  __device__ __forceinline__ void load(WeightPart (&parts)[kColumnTiles], const KPosition& at) const {
    int expert = at.expert;
    if constexpr (kRows == Rows::kTokens) expert = __shfl_sync(kFullWarp, at.expert, at.slot);
    const uint8_t* tile = arguments_.weight + expert * arguments_.expert_bytes + at.k_tile * kWeightTileBytes;
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int k64 = 0; k64 < 2; ++k64) ptx::ld_global_no_allocate(parts[i].words[k64], tile + codes_[i] + k64 * 1024);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const uint8_t* scales = tile + scales_[i] + group * kGroupBytes;
        parts[i].groups[group].scales = __ldg(reinterpret_cast<const unsigned*>(scales));
        parts[i].groups[group].zeros = 0x0808u;
        if constexpr (kZeros == Zeros::kPacked) {
          const uint8_t* zeros = scales + 32 - threadIdx.x % 32 / 4 * 2;
          parts[i].groups[group].zeros = __ldg(reinterpret_cast<const unsigned short*>(zeros));
        }
        parts[i].groups[group].offsets = 0;
      }
    }
  }

 private:
  const Arguments& arguments_;
  // Byte offsets of this lane's codes and scales in the weight tiles of a column.
  uint32_t codes_[kColumnTiles], scales_[kColumnTiles];
};

// The copies of the x of one slice of K to its ring of stages in shared memory.
class Copies {
 public:
  // `pairs` are the pairs of the unit, in shared memory, of which the first `rows` exist.
  __device__ __forceinline__ Copies(const Arguments& arguments, const int32_t* pairs, int rows, uint32_t ring)
      : arguments_(arguments), ring_(ring), copied_rows_(kM8Tiles == 1 ? rows : 16) {
    // With 16 rows, those past the last one are copies of it; the resulting rows of y are not stored.
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) x_rows_[pass] = pairs[min(row(pass), rows - 1)] / arguments.x_divisor;
  }

  // Starts the copy of x for a k tile to stage `stage_idx`.
  __device__ __forceinline__ void start(int stage_idx, const KPosition& at) const {
    const uint32_t stage = ring_ + stage_idx * kStageBytes;
    const int chunk = threadIdx.x % 16;
    const int column = at.k_tile * kWeightTileK + chunk * 8;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (row(pass) >= copied_rows_) continue;
      const int x_row = x_rows_[pass] + (kRows == Rows::kTokens ? at.slot : 0);
      const X* source = arguments_.x + static_cast<int64_t>(x_row) * arguments_.ldx + column;
      const uint32_t target = chunk / 8 * (kXRows * 128) + row(pass) * 128 + (chunk % 8 ^ swizzle_bits(row(pass))) * 16;
      // The last weight tile may be longer than K; zeros fill it.
      ptx::cp_async_16(stage + target, source, column < arguments_.k ? 16 : 0);
    }
  }

 private:
  static constexpr int kPasses = ceil_div(kXRows * 16, kSliceThreads);

  // Returns the row of the unit of which this thread copies 16 bytes in pass `pass`.
  static __device__ __forceinline__ int row(int pass) {
    return (pass * kSliceThreads + threadIdx.x % kSliceThreads) / 16;
  }

  const Arguments& arguments_;
  uint32_t ring_;
  int copied_rows_;
  int x_rows_[kPasses];
};

using Accumulators = float[kColumnTiles][kM8Tiles][4];

// The main loop of a warp: adds up the products of a unit's rows and the warp's columns.
class MainLoop {
 public:
  __device__ __forceinline__ MainLoop(uint32_t ring, int rows) {
    const int lane = threadIdx.x % 32;
    // ldmatrix loads matrices 0 and 1 from rows 0 .. 7 of x at k 0 .. 7 and k 8 .. 15, and matrices 2 and 3 from rows 8
    // .. 15 at the same k. With 8 rows, it loads all four matrices from these rows, at k 0 .. 31; lanes past the last
    // row of x load that row again.
    const int row = kM8Tiles == 1 ? min(lane % 8, rows - 1) : lane / 16 * 8 + lane % 8;
    const int chunk = kM8Tiles == 1 ? lane / 8 : lane / 8 % 2;
    x_ = ring + row * 128 + (chunk ^ swizzle_bits(row)) * 16;
  }

  // Adds the products of one k tile, whose x is in stage `stage_idx`.
  __device__ __forceinline__ void multiply(Accumulators& accumulators, const WeightPart (&parts)[kColumnTiles],
                                           int stage_idx, float slot_weight) {
    const uint32_t stage = stage_idx * kStageBytes;
    for_each_constant<kGroups>([&](int group) {
      Accumulators sums = {};
      uint32_t zeros[kColumnTiles];
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) zeros[i] = ExactCodes<X>::zeros(parts[i].groups[group].zeros);
#pragma unroll
      for (int of_group = 0; of_group < kGroupSteps; ++of_group) {
        const int step = group * kGroupSteps + of_group;
        uint32_t a[kColumnTiles][4];
#pragma unroll
        for (int i = 0; i < kColumnTiles; ++i)
          ExactCodes<X>::convert(a[i], parts[i].words[step / 4][step % 4], zeros[i]);
        const uint32_t begin = stage + step / 4 * (kXRows * 128);
        if constexpr (kM8Tiles == 1) {
          if (step % 2 == 0) ptx::ldmatrix_x4(b_, (x_ ^ step / 2 % 2 * 64) + begin);
#pragma unroll
          for (int i = 0; i < kColumnTiles; ++i) mma<X>(sums[i][0], a[i], b_[step % 2 * 2], b_[step % 2 * 2 + 1]);
        } else {
          ptx::ldmatrix_x4(b_, (x_ ^ step % 4 * 32) + begin);
#pragma unroll
          for (int i = 0; i < kColumnTiles; ++i) {
            mma<X>(sums[i][0], a[i], b_[0], b_[1]);
            mma<X>(sums[i][kM8Tiles - 1], a[i], b_[2], b_[3]);
          }
        }
      }
      add_group(accumulators, sums, parts, group, slot_weight);
    });
  }

 private:
  // Adds the sums over one quantization group, multiplied by the group's scales, to the accumulators.
  __device__ __forceinline__ void add_group(Accumulators& accumulators, const Accumulators& sums,
                                            const WeightPart (&parts)[kColumnTiles], int group, float slot_weight) {
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kM8Tiles; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          float scale = parts[i].groups[group].scale(v / 2);
          // A slot without an expert has the weight 0; the product with an infinite scale would be NaN.
          if constexpr (kRows == Rows::kTokens) scale = slot_weight == 0.0f ? 0.0f : scale * slot_weight;
          accumulators[i][j][v] = fmaf(sums[i][j][v], scale, accumulators[i][j][v]);
        }
      }
    }
  }

  uint32_t x_;  // shared address of the row that this lane passes to ldmatrix, in stage 0
  uint32_t b_[4];
};
