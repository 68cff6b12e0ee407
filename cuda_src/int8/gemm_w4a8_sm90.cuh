// SPDX-License-Identifier: Apache-2.0
// The compile-time constants, the shared memory, the CTA tile and the epilogue of gemm_w4a8_sm90.
#pragma once

#include "common/epilogue.cuh"
#include "hopper/cluster_reduction.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"
#include "int8/products.cuh"
#include "ptx/barrier.cuh"

constexpr bool kRowScales = ROW_SCALES;
constexpr int kBlockM = BLOCK_M;
constexpr int kWarpgroups = WARPGROUPS;  // number of warpgroups per consumer
constexpr int kM64Tiles = M64_TILES;     // number of m64 tiles per warpgroup
constexpr int kConsumers = CONSUMERS;    // number of consumers, which take turns at the stages
constexpr int kStages = STAGES;
constexpr int kKTiles = K_TILES;  // number of k tiles per stage
constexpr int kSplitK = SPLIT_K;  // number of CTAs per tile; each computes the tile over its slice of K
constexpr int kShareX = SHARE_X;  // number of CTAs with adjacent columns that share the copies of A by multicast
constexpr int kClusterSize = kSplitK * kShareX;
constexpr bool kHasOffsetTiles = OFFSET_TILES;  // FP8: whether tiles of offsets apply the zero points
// Whether the dependent kernel may start only when the preceding kernel has finished; see gemm_sm90_tile.cuh.
constexpr bool kStartsNextLate = START_NEXT_LATE;

constexpr int kBlockK = 128;
constexpr int kColumnTiles = kWarpgroups * kM64Tiles;  // number of weight tiles along n per CTA tile
constexpr int kBlockN = kColumnTiles * 64;
constexpr int kAccumulators = kBlockM / 2;  // number of accumulators per thread and m64 tile
// Whether the products of a k tile need a parameter of each row of x: its scale, or with FP8 the sum of its values.
constexpr bool kHasXParameters = (kFp8 && !kHasOffsetTiles) || !kRowScales;
constexpr int kConsumerThreads = kConsumers * kWarpgroups * 128;
constexpr int kProducerWarp = kConsumerThreads / 32;
constexpr int kThreads = kConsumerThreads + (kHasXParameters ? 64 : 32);

// A weight tile is 64 columns x 128 k: the codes, the scales and the zero points of its columns.
constexpr int kCodeBytes = 64 * kBlockK / 2;
constexpr int kScaleBytes = 64 * sizeof(SCALE);
constexpr int kWeightTileBytes = kCodeBytes + kScaleBytes + 64;
constexpr int kXTileBytes = kBlockM * kBlockK;
constexpr int kOffsetTileGroups = 32;  // number of k tiles whose offsets are in one tile of offsets

// The number of rows of the tile that a CTA stores; the last CTAs of the cluster may store fewer, or none.
constexpr int kOwnedRows = ceil_div(kBlockM, kSplitK);
constexpr int kRowFloats = kBlockN + 4;  // 4 floats of padding put the rows of a store into different banks

static_assert(kBlockM % (8 * kShareX) == 0, "each CTA that shares A copies a multiple of 8 rows");
static_assert(kClusterSize <= 8, "larger clusters are not portable");
static_assert(kStages % kConsumers == 0, "a stage belongs to one consumer");
static_assert(!kFp8 || kRowScales, "FP8 implies ROW_SCALES");
static_assert(!kHasOffsetTiles || (kFp8 && kKTiles == 1), "a tile of offsets takes the place of one k tile of FP8");

struct SharedStorage {
  // Used during the main loop.
  using X = SharedArray<0, kStages, kKTiles * kXTileBytes>;  // [k tile][row][128 k], swizzled
  using Weight = SharedArray<X::kEnd, kStages, kColumnTiles * kKTiles * kWeightTileBytes>;  // [column tile][k tile]
  using XParameters = SharedArray<Weight::kEnd, kStages, kHasXParameters ? kKTiles * kBlockM * 4 : 0>;  // [k tile][row]
  // Used after the main loop, in the memory of the stages: the accumulators of each consumer, [row][column].
  using Accumulators = SharedArray<0, kConsumers, kBlockM * kRowFloats * 4>;
  static constexpr int kOverlaidEnd = XParameters::kEnd > Accumulators::kEnd ? XParameters::kEnd : Accumulators::kEnd;
  // Other CTAs may release stages and write partial sums at any time.
  using Barriers = SharedArray<kOverlaidEnd, 2 * kStages, kBarrierBytes>;
  using ReceivedBarrier = SharedArray<Barriers::kEnd, kSplitK == 1 ? 0 : 1, 16>;
  using Received = SharedArray<ReceivedBarrier::kEnd, kSplitK - 1, kOwnedRows * kRowFloats * 4>;
  static constexpr int kBytes = Received::kEnd;

  uint32_t begin;  // shared address of the first byte, a multiple of 1024

  __device__ __forceinline__ uint32_t x(int stage_idx) const { return X::at(begin, stage_idx); }
  __device__ __forceinline__ uint32_t weight(int stage_idx) const { return Weight::at(begin, stage_idx); }
  __device__ __forceinline__ Pipeline<kStages, Barriers::kBegin> pipeline() const { return {begin}; }
  __device__ __forceinline__ PartialSumBarrier received_barrier() const { return {ReceivedBarrier::at(begin)}; }
};
ASSERT_SHARED_BYTES(SharedStorage);

// The work of one CTA: kBlockM rows, kBlockN columns, and the k tiles [k_tile_begin, k_tile_end), where tiles of offsets
// follow the last k tile of the weight. An iteration of the main loop consumes one stage: kKTiles k tiles, or fewer in
// the last iteration.
struct Tile {
  SharedStorage shared;
  int m_begin, n_begin;
  int split;  // index of the CTA's slice of K
  int share;  // index of the CTA among those that share A; its rank in the cluster is split * kShareX + share
  int k_tile_begin, k_tile_end;
  int weight_k_tiles;  // number of k tiles of the weight

  __device__ __forceinline__ Tile(uint32_t shared_begin, int k, int m_blocks) : shared{shared_begin} {
    const int rank = cluster_rank<kClusterSize>();
    split = rank / kShareX;
    share = rank % kShareX;
    const int cluster_idx = blockIdx.x / kClusterSize;
    m_begin = cluster_idx % m_blocks * kBlockM;
    n_begin = (cluster_idx / m_blocks * kShareX + share) * kBlockN;
    weight_k_tiles = ceil_div(k, kBlockK);
    const int k_tiles = weight_k_tiles + (kHasOffsetTiles ? ceil_div(weight_k_tiles, kOffsetTileGroups) : 0);
    const int iterations = ceil_div(k_tiles, kKTiles);
    k_tile_begin = iterations * split / kSplitK * kKTiles;
    k_tile_end = min(k_tiles, iterations * (split + 1) / kSplitK * kKTiles);
  }
  __device__ __forceinline__ int iterations() const { return ceil_div(k_tile_end - k_tile_begin, kKTiles); }
  // Returns the number of iterations before those for tiles of offsets.
  __device__ __forceinline__ int weight_iterations() const {
    return kHasOffsetTiles ? max(0, min(k_tile_end, weight_k_tiles) - k_tile_begin) : iterations();
  }
  __device__ __forceinline__ int k_tiles(int iteration) const {
    return kKTiles == 1 ? 1 : min(kKTiles, k_tile_end - k_tile_begin - iteration * kKTiles);
  }
  // Returns the number of bytes of partial sums that other CTAs write to this CTA.
  __device__ __forceinline__ int received_bytes() const {
    return (kSplitK - 1) * max(0, min(kOwnedRows, kBlockM - split * kOwnedRows)) * kBlockN * 4;
  }
};

// Synchronizes the consumers.
__device__ __forceinline__ void sync_consumers() { ptx::barrier_sync(1, kConsumerThreads); }

// Sums the accumulators of all consumers and all CTAs of a cluster, and stores y. The order of additions is fixed: the
// consumers of this CTA, then the other CTAs by rank. The sums are in units of `unit`.
__device__ __forceinline__ void store_tile(const Tile& tile, uint8_t* memory,
                                           const float (&accumulators)[kM64Tiles][kAccumulators], int consumer,
                                           int warpgroup, const float* x_row_scale, float unit,
                                           const Epilogue<Y>& epilogue, Y* y, int m, int n, int ldy, bool aligned) {
  const int lane = threadIdx.x % 32;
  auto* sums = reinterpret_cast<float*>(memory);
  sync_consumers();  // All stages have been read, so the accumulators can overwrite them.
#pragma unroll
  for (int i = 0; i < kM64Tiles; ++i) {
    const int column = (i * kWarpgroups + warpgroup) * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    float* target = sums + (consumer * kBlockM + lane % 4 * 2) * kRowFloats + column;
#pragma unroll
    for (int v = 0; v < kAccumulators; ++v) {
      target[(v / 4 * 8 + v % 2) * kRowFloats + v / 2 % 2 * 8] = accumulators[i][v];
    }
  }
  sync_consumers();
  // Adds the consumers' accumulators of 4 adjacent columns to total[0 .. 3].
  auto add_consumers = [&](float* total, int row, int column) {
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      Vector<float, 4> values;
      load<true>(values, sums + (c * kBlockM + row) * kRowFloats + column);
#pragma unroll
      for (int v = 0; v < 4; ++v) total[v] += values.values[v];
    }
  };
  if constexpr (kSplitK > 1) {
    constexpr int kUnits = kOwnedRows * (kBlockN / 4);
    for (int index = threadIdx.x; index < (kSplitK - 1) * kUnits; index += kConsumerThreads) {
      const int owner = (tile.split + 1 + index / kUnits) % kSplitK;
      const int row = index % kUnits / (kBlockN / 4);
      const int column = index % (kBlockN / 4) * 4;
      if (owner * kOwnedRows + row >= kBlockM) continue;
      float total[4] = {};
      add_consumers(total, owner * kOwnedRows + row, column);
      const int slot = tile.split < owner ? tile.split : tile.split - 1;
      tile.shared.received_barrier().write(
          owner * kShareX + tile.share,
          SharedStorage::Received::at(tile.shared.begin, slot) + (row * kRowFloats + column) * 4, total);
    }
  }
  constexpr int kVectorColumns = 16 / sizeof(Y);
  for (int index = threadIdx.x; index < kOwnedRows * (kBlockN / kVectorColumns); index += kConsumerThreads) {
    const int owned_row = index / (kBlockN / kVectorColumns);
    const int tile_row = tile.split * kOwnedRows + owned_row;
    const int tile_column = index % (kBlockN / kVectorColumns) * kVectorColumns;
    const int row = tile.m_begin + tile_row;
    const int column = tile.n_begin + tile_column;
    if (tile_row >= kBlockM || row >= m || column >= n) continue;
    float total[kVectorColumns] = {};
#pragma unroll
    for (int i = 0; i < kVectorColumns; i += 4) add_consumers(total + i, tile_row, tile_column + i);
    if constexpr (kSplitK > 1) {
      tile.shared.received_barrier().wait_for_all();
#pragma unroll
      for (int other = 0; other < kSplitK - 1; ++other) {
        const auto* received = reinterpret_cast<const float*>(memory + SharedStorage::Received::kBegin) +
                               (other * kOwnedRows + owned_row) * kRowFloats + tile_column;
#pragma unroll
        for (int i = 0; i < kVectorColumns; ++i) total[i] += received[i];
      }
    }
    const float x_scale = kRowScales ? x_row_scale[row] * unit : 1.0f;
    Vector<Y, kVectorColumns> out;
#pragma unroll
    for (int i = 0; i < kVectorColumns; ++i) {
      const float value = kRowScales ? total[i] * x_scale : total[i];
      out.values[i] = epilogue.finish(value, row, min(column + i, n - 1));
    }
    Y* target = y + static_cast<int64_t>(row) * ldy + column;
    if (aligned && column + kVectorColumns <= n) {
      store<true>(target, out);
    } else {
#pragma unroll
      for (int i = 0; i < kVectorColumns; ++i) {
        if (column + i < n) target[i] = out.values[i];
      }
    }
  }
  // Do not exit while other CTAs write to this CTA's shared memory.
  if constexpr (kSplitK > 1) tile.shared.received_barrier().wait_for_all();
}
