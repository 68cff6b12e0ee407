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

// A tile of a persistent CTA: a unit, which is up to kBlockM rows of x that take the same expert (kTokens: the slots of
// one token), and a block of columns of W.
struct Tile {
  int index;     // the number of the tile, or a number past the last tile
  int n_block;   // the block of columns
  int rows;      // the number of rows of the unit; kSorted: those before its padding
  int pair;      // kSorted: lane i holds the pair of row i; otherwise the first pair of the unit
  int expert;    // the expert; kTokens: lane i holds the expert of slot i
  float weight;  // kTokens: lane i holds the weight of slot i; otherwise whether the unit has an expert, 1 or 0

  // Returns the pair of row `row` or, past the last row, of the last row. All lanes call this.
  __device__ __forceinline__ int row_pair(int row) const {
    return kRows == Rows::kSorted ? __shfl_sync(kFullWarp, pair, min(row, rows - 1)) : pair;
  }
};

// The tiles of a persistent CTA in their order. Units are in the order of the routing arrays; the tiles of one unit,
// one per block of columns, follow each other. The routing of a tile is loaded one tile ahead of its weights.
class TileQueue {
 public:
  // `capacity` is the length of sorted_pairs.
  __device__ __forceinline__ TileQueue(const Arguments& arguments, int capacity) : arguments_(arguments) {
    n_blocks_ = ceil_div(kGated ? arguments.n / 2 : arguments.n, kStoreN);
    if constexpr (kRows == Rows::kSorted) {
      const int count = *arguments.sorted_count;
      // Entries past the count may be read, but are not used.
      tiles_ = capacity / kBlockM * n_blocks_;
      load(blockIdx.x);
      tiles_ = min(count, capacity) / kBlockM * n_blocks_;
    } else {
      tiles_ = (kRows == Rows::kPairs ? arguments.pairs : arguments.pairs / arguments.top_k) * n_blocks_;
      load(blockIdx.x);
    }
  }
  __device__ __forceinline__ bool has(const Tile& tile) const { return tile.index < tiles_; }

  // Returns the next tile that has rows. With kSorted, units without rows or without an expert are left out.
  __device__ __forceinline__ Tile take() {
    while (true) {
      Tile tile = loaded_;
      if (!has(tile)) return tile;
      if constexpr (!kOneTile) load(tile.index + gridDim.x);
      const bool is_expert = arguments_.is_expert(tile.expert);
      if constexpr (kRows == Rows::kSorted) {
        const bool exists = static_cast<unsigned>(tile.pair) < static_cast<unsigned>(arguments_.pairs);
        tile.rows = __ffs(~__ballot_sync(kFullWarp, exists)) - 1;
        if (tile.rows == 0 || !is_expert) continue;
      }
      // A pair without an expert takes the weight of expert 0, and its results are not used.
      if (!is_expert) tile.expert = 0;
      if (!is_expert) tile.weight = 0.0f;
      return tile;
    }
  }

 private:
  // Starts the loads of the routing of a tile.
  __device__ __forceinline__ void load(int index) {
    const int lane = threadIdx.x % 32;
    const int unit = index / n_blocks_;
    loaded_ = {index, index % n_blocks_, 1, 0, 0, 1.0f};
    if (!has(loaded_)) return;
    if constexpr (kRows == Rows::kSorted) {
      loaded_.expert = arguments_.experts[static_cast<int64_t>(unit) * kBlockM / arguments_.route_block];
      loaded_.pair = lane < kBlockM ? arguments_.sorted_pairs[unit * kBlockM + lane] : arguments_.pairs;
    } else if constexpr (kRows == Rows::kPairs) {
      loaded_.expert = arguments_.experts[unit];
      loaded_.pair = unit;
    } else {
      loaded_.pair = unit * arguments_.top_k;
      if (lane < arguments_.top_k) {
        loaded_.expert = arguments_.experts[loaded_.pair + lane];
        if constexpr (kHasRowWeights) loaded_.weight = arguments_.row_weights[loaded_.pair + lane];
      }
    }
  }

  const Arguments& arguments_;
  int n_blocks_, tiles_;
  Tile loaded_;
};

// The position of a warp along the k tiles of its slice; with kTokens, along those of all slots.
struct KPosition {
  int slot = 0;
  int k_tile;

  __device__ __forceinline__ KPosition(int slice, int k_tiles) : k_tile(0) { advance(k_tiles, slice); }
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

// The weight of a warp for one tile of the CTA, from which it loads its k tiles one after the other.
class Weight {
 public:
  __device__ __forceinline__ Weight(const Arguments& arguments, const Tile& of, int slice)
      : expert_(of.expert), at_(slice, arguments.k_tiles()) {
    if constexpr (kRows != Rows::kTokens) tile_ = address(arguments, of.expert);
    const int n_block = of.n_block;
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
  // Starts the loads of the next k tile.
  __device__ __forceinline__ void load(const Arguments& arguments, WeightPart (&parts)[kColumnTiles]) {
    if constexpr (kRows == Rows::kTokens) {
      tile_ = address(arguments, __shfl_sync(kFullWarp, expert_, at_.slot));
      at_.advance(arguments.k_tiles());
    }
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int k64 = 0; k64 < 2; ++k64) ptx::ld_global_no_allocate(parts[i].words[k64], tile_ + codes_[i] + k64 * 1024);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const uint8_t* scales = tile_ + scales_[i] + group * kGroupBytes;
        parts[i].groups[group].scales = __ldg(reinterpret_cast<const unsigned*>(scales));
        parts[i].groups[group].zeros = 0x0808u;
        if constexpr (kZeros == Zeros::kPacked) {
          const uint8_t* zeros = scales + 32 - threadIdx.x % 32 / 4 * 2;
          parts[i].groups[group].zeros = __ldg(reinterpret_cast<const unsigned short*>(zeros));
        }
        parts[i].groups[group].offsets = 0;
      }
    }
    if constexpr (kRows != Rows::kTokens) tile_ += kSlices * kWeightTileBytes;
  }

 private:
  // Returns the address of the k tile `at_` of an expert, in its first tile column.
  __device__ __forceinline__ const uint8_t* address(const Arguments& arguments, int expert) const {
    return arguments.weight + expert * arguments.expert_bytes + at_.k_tile * kWeightTileBytes;
  }

  int expert_;  // kTokens: lane i holds the expert of slot i
  KPosition at_;
  const uint8_t* tile_;
  // Byte offsets of this lane's codes and scales in the weight tiles of a column.
  uint32_t codes_[kColumnTiles], scales_[kColumnTiles];
};

// The copies of the x of one slice of K and one tile of the CTA to the slice's ring of stages in shared memory.
class Copies {
 public:
  __device__ __forceinline__ Copies(const Arguments& arguments, const Tile& of, int slice)
      : at_(slice, arguments.k_tiles()), copied_rows_(kM8Tiles == 1 ? of.rows : 16) {
    target_ = row(0) * 128 + chunk() / 8 * (kXRows * 128) + (chunk() % 8 ^ swizzle_bits(row(0))) * 16;
    // With 16 rows, those past the last one are copies of it; the resulting rows of y are not stored.
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      sources_[pass] = of.row_pair(row(pass)) / arguments.x_divisor * (arguments.ldx / 8) + chunk();
    }
  }

  // Starts the copy of x for the next k tile to the stage at the shared address `stage`.
  __device__ __forceinline__ void start(const Arguments& arguments, uint32_t stage) {
    const int column = at_.k_tile * kWeightTileK;
    const X* begin = arguments.x + column + (kRows == Rows::kTokens ? at_.slot * arguments.ldx : 0);
    // The last weight tile may be longer than K; zeros fill it.
    const int bytes = column + chunk() * 8 < arguments.k ? 16 : 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (row(pass) >= copied_rows_) continue;
      // Row row(0) + pass * kPassRows; the bits of both summands differ.
      const uint32_t target = (target_ ^ swizzle_bits(pass * kPassRows) * 16) + pass * kPassRows * 128;
      ptx::cp_async_16(stage + target, begin + static_cast<uint64_t>(sources_[pass]) * 8, bytes);
    }
    at_.advance(arguments.k_tiles());
  }

 private:
  static constexpr int kPasses = ceil_div(kXRows * 16, kSliceThreads);
  static constexpr int kPassRows = kSliceThreads / 16;

  // Returns the row of the unit of which this thread copies 16 bytes in pass `pass`.
  static __device__ __forceinline__ int row(int pass) {
    return (pass * kSliceThreads + threadIdx.x % kSliceThreads) / 16;
  }
  // Returns which 16 bytes of a row's k tile this thread copies.
  static __device__ __forceinline__ int chunk() { return threadIdx.x % 16; }

  KPosition at_;
  int copied_rows_;
  uint32_t target_;            // offset in a stage of the bytes of row row(0) that this thread copies
  uint32_t sources_[kPasses];  // offsets in x, in units of eight values, of what this thread copies at k = 0
};

using Accumulators = float[kColumnTiles][kM8Tiles][4];

// The main loop of a warp: adds up the products of a unit's rows and the warp's columns.
class MainLoop {
 public:
  __device__ __forceinline__ MainLoop(uint32_t ring) : ring_(ring) { set_rows(1); }
  __device__ __forceinline__ void set_rows(int rows) {
    const int lane = threadIdx.x % 32;
    // ldmatrix loads matrices 0 and 1 from rows 0 .. 7 of x at k 0 .. 7 and k 8 .. 15, and matrices 2 and 3 from rows 8
    // .. 15 at the same k. With 8 rows, it loads all four matrices from these rows, at k 0 .. 31; lanes past the last
    // row of x load that row again.
    const int row = kM8Tiles == 1 ? min(lane % 8, rows - 1) : lane / 16 * 8 + lane % 8;
    const int chunk = kM8Tiles == 1 ? lane / 8 : lane / 8 % 2;
    x_ = ring_ + row * 128 + (chunk ^ swizzle_bits(row)) * 16;
  }

  // Adds the products of one k tile, whose x is in stage `stage_idx`.
  __device__ __forceinline__ void multiply(Accumulators& accumulators, const WeightPart (&parts)[kColumnTiles],
                                           int stage_idx, float slot_weight) {
    const uint32_t stage = stage_idx * kStageBytes;
    float x_sums[2] = {};
    if constexpr (kHasOneRow) sum_x(x_sums, ring_ + stage);
    for_each_constant<kGroups>([&](int group) {
      Accumulators sums[kChains] = {};
      uint32_t zeros[kColumnTiles];
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) zeros[i] = ExactCodes<X>::zeros(parts[i].groups[group].zeros);
#pragma unroll
      for (int of_group = 0; of_group < kGroupSteps; ++of_group) {
        const int step = group * kGroupSteps + of_group;
        Accumulators& chain = sums[of_group % kChains];
        uint32_t a[kColumnTiles][4];
#pragma unroll
        for (int i = 0; i < kColumnTiles; ++i) {
          const uint32_t word = parts[i].words[step / 4][step % 4];
          if constexpr (kHasOneRow) {
            RawCodes<X>::convert(a[i], word);
          } else {
            ExactCodes<X>::convert(a[i], word, zeros[i]);
          }
        }
        const uint32_t begin = stage + step / 4 * (kXRows * 128);
        if constexpr (kM8Tiles == 1) {
          if (step % 2 == 0) ptx::ldmatrix_x4(b_, (x_ ^ step / 2 % 2 * 64) + begin);
#pragma unroll
          for (int i = 0; i < kColumnTiles; ++i) mma<X>(chain[i][0], a[i], b_[step % 2 * 2], b_[step % 2 * 2 + 1]);
        } else {
          ptx::ldmatrix_x4(b_, (x_ ^ step % 4 * 32) + begin);
#pragma unroll
          for (int i = 0; i < kColumnTiles; ++i) {
            mma<X>(chain[i][0], a[i], b_[0], b_[1]);
            mma<X>(chain[i][kM8Tiles - 1], a[i], b_[2], b_[3]);
          }
        }
      }
      add_group(accumulators, sums, x_sums, parts, group, slot_weight);
    });
  }

 private:
  // Sums the row of x of a k tile, at the shared address `x`, over each group, as one product with ones: column j of
  // operand B holds the values 16 j .. 16 j + 15, so lane t of four gets the sums of slices 2 t and 2 t + 1. With eight
  // groups, these are stored; otherwise sums[0] is the sum over the lane's group.
  static __device__ __forceinline__ void sum_x(float (&sums)[2], uint32_t x) {
    constexpr uint32_t kOnes[4] = {RawCodes<X>::kOne, RawCodes<X>::kOne, RawCodes<X>::kOne, RawCodes<X>::kOne};
    const int lane = threadIdx.x % 32;
    uint32_t b[2];
    ptx::ldmatrix_x2(b, x + (lane % 8 * 2 + lane / 8 % 2) * 16);
    float products[4] = {};
    mma<X>(products, kOnes, b[0], b[1]);
    sums[0] = kGroups == 8 ? products[0] : products[0] + products[1];
    sums[1] = products[1];
    if constexpr (kGroups <= 2) sums[0] += __shfl_xor_sync(kFullWarp, sums[0], 1);
    if constexpr (kGroups == 1) sums[0] += __shfl_xor_sync(kFullWarp, sums[0], 2);
  }
  // Returns the sum of x over a group from the results of `sum_x`.
  static __device__ __forceinline__ float group_sum(const float (&sums)[2], int group) {
    if constexpr (kGroups == 1) return sums[0];
    const int t = group * 4 / kGroups;
    return __shfl_sync(kFullWarp, sums[kGroups == 8 ? group % 2 : 0], threadIdx.x % 32 / 4 * 4 + t);
  }

  // Adds the sums over one quantization group, multiplied by the group's scales, to the accumulators. With one row, the
  // zero points are subtracted here.
  __device__ __forceinline__ void add_group(Accumulators& accumulators, const Accumulators (&sums)[kChains],
                                            const float (&x_sums)[2], const WeightPart (&parts)[kColumnTiles],
                                            int group, float slot_weight) {
    const float x_sum = kHasOneRow ? group_sum(x_sums, group) : 0.0f;
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      const Group<Config>& parameters = parts[i].groups[group];
#pragma unroll
      for (int v = 0; v < 4; v += 3 - kLaneRows) {
        float scale = parameters.scale(v / 2);
        // A slot without an expert has the weight 0; the product with an infinite scale would be NaN.
        if constexpr (kRows == Rows::kTokens) scale = slot_weight == 0.0f ? 0.0f : scale * slot_weight;
        const float zero = -(parameters.zero(v / 2) + RawCodes<X>::kOffset) / RawCodes<X>::kUnits[v / 2];
#pragma unroll
        for (int j = 0; j < kM8Tiles; ++j) {
          float sum = kChains == 1 ? sums[0][i][j][v] : sums[0][i][j][v] + sums[kChains - 1][i][j][v];
          if constexpr (kHasOneRow) sum = fmaf(zero, x_sum, sum);
          accumulators[i][j][v] = fmaf(sum, scale, accumulators[i][j][v]);
        }
      }
    }
  }

  uint32_t ring_;
  uint32_t x_;  // shared address of the row that this lane passes to ldmatrix, in stage 0
  uint32_t b_[4];
};
