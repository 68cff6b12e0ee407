// SPDX-License-Identifier: Apache-2.0
// The constants that follow from those of the host, the shared memory, the CTA tile and the epilogue of gemm_w4a8_sm90.
#pragma once

#include "common/epilogue.cuh"
#include "common/tile_scheduler.cuh"
#include "hopper/cluster_reduction.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"
#include "int8/products.cuh"
#include "ptx/barrier.cuh"

// The constants that follow from those of the host. Host is the Config of gemm_w4a8_sm90.cu.
template <class Host> struct GemmW4A8Sm90 : Host {
  static constexpr int kClusterSize = Host::kSplitK * Host::kShareX;
  static constexpr int kBlockK = 128;
  static constexpr int kColumnTiles =
      Host::kWarpgroups * Host::kM64Tiles;  // number of column tiles (64 columns each) per CTA tile
  static constexpr int kBlockN = kColumnTiles * 64;
  static constexpr int kAccumulators = Host::kBlockM / 2;  // number of accumulators per thread and m64 tile
  // Whether the products of a k tile need a parameter of each row of x: its scale, or with FP8 the sum of its values.
  static constexpr bool kHasXParameters = (Host::kFp8 && !Host::kHasOffsetTiles) || !Host::kRowScales;
  static constexpr int kConsumerThreads = Host::kConsumers * Host::kWarpgroups * 128;
  static constexpr int kProducerWarp = kConsumerThreads / 32;
  static constexpr int kThreads = kConsumerThreads + (kHasXParameters ? 64 : 32);

  // A weight tile is 64 columns x 128 k: the codes, the scales and the zero points of its columns.
  static constexpr int kCodeBytes = 64 * kBlockK / 2;
  static constexpr int kScaleBytes = 64 * sizeof(typename Host::Scale);
  static constexpr int kWeightTileBytes = kCodeBytes + kScaleBytes + 64;
  static constexpr int kXTileBytes = Host::kBlockM * kBlockK;
  static constexpr int kOffsetTileGroups = 32;  // number of k tiles whose offsets are in one tile of offsets

  // The number of rows of the tile that a CTA stores; the last CTAs of the cluster may store fewer, or none.
  static constexpr int kOwnedRows = ceil_div(Host::kBlockM, Host::kSplitK);
  static constexpr int kRowFloats = kBlockN + 4;  // 4 floats of padding put the rows of a store into different banks

  static_assert(Host::kBlockM % (8 * Host::kShareX) == 0, "each CTA that shares x copies a multiple of 8 rows");
  static_assert(kClusterSize <= 8, "larger clusters are not portable");
  static_assert(Host::kStages % Host::kConsumers == 0, "a stage belongs to one consumer");
  static_assert(!Host::kFp8 || Host::kRowScales, "FP8 implies ROW_SCALES");
  static_assert(!Host::kHasOffsetTiles || (Host::kFp8 && Host::kKTiles == 1),
                "a tile of offsets takes the place of one k tile of FP8");

  struct SharedStorage {
    // The arrays of the main loop, with the layout of a stage: x, the weight, and the values of x per row.
    using X = SharedArray<0, Host::kStages, Host::kKTiles * kXTileBytes>;  // [k tile][row][128 k], swizzled
    using Weight = SharedArray<X::kEnd, Host::kStages,
                               kColumnTiles * Host::kKTiles * kWeightTileBytes>;  // [column tile][k tile] of a stage
    using XParameters = SharedArray<Weight::kEnd, Host::kStages,
                                    kHasXParameters ? Host::kKTiles * Host::kBlockM * 4 : 0>;  // [k tile][row]
    // Used after the main loop, in the memory of the stages: the accumulators of each consumer, [row][column].
    using Accumulators = SharedArray<0, Host::kConsumers, Host::kBlockM * kRowFloats * 4>;
    static constexpr int kOverlaidEnd = XParameters::kEnd > Accumulators::kEnd ? XParameters::kEnd : Accumulators::kEnd;
    // The barriers and the received partial sums have memory of their own: other CTAs may release stages and write
    // partial sums at any time.
    using Barriers = SharedArray<kOverlaidEnd, 2 * Host::kStages, kBarrierBytes>;
    using ReceivedBarrier = SharedArray<Barriers::kEnd, Host::kSplitK == 1 ? 0 : 1, 16>;
    using Received = SharedArray<ReceivedBarrier::kEnd, Host::kSplitK - 1, kOwnedRows * kRowFloats * 4>;
    static constexpr int kBytes = Received::kEnd;

    uint32_t begin;  // shared address of the first byte, a multiple of 1024

    __device__ __forceinline__ uint32_t x(int stage_idx) const { return X::at(begin, stage_idx); }
    __device__ __forceinline__ uint32_t weight(int stage_idx) const { return Weight::at(begin, stage_idx); }
    __device__ __forceinline__ Pipeline<Host::kStages, Barriers::kBegin> pipeline() const { return {begin}; }
    __device__ __forceinline__ PartialSumBarrier received_barrier() const { return {ReceivedBarrier::at(begin)}; }
  };
  ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);

  // The layout of the accumulators, for send_partial_sums and add_all (cluster_reduction.cuh).
  struct Sums : RowMajorSums<kBlockN, kRowFloats> {
    static constexpr int kConsumers = Host::kConsumers;
    static constexpr int kConsumerFloats = Host::kBlockM * kRowFloats;
    static constexpr int kSplitK = Host::kSplitK;
    static constexpr int kReceivedFloats = kOwnedRows * kRowFloats;
    static constexpr bool kSendsEach = false, kRankOrder = false;
    static constexpr int kOwnedRows = GemmW4A8Sm90::kOwnedRows, kRows = Host::kBlockM;
    static constexpr uint32_t kUnits = kOwnedRows * (kBlockN / 4);
    static constexpr int kRankStep = Host::kShareX;
    static constexpr uint32_t kThreads = kConsumerThreads;
  };
};

// The work of one CTA: kBlockM rows, kBlockN columns, and the k tiles [k_tile_begin, k_tile_end), where tiles of
// offsets follow the last k tile of the weight. An iteration of the main loop consumes one stage: kKTiles k tiles, or
// fewer in the last iteration.
template <class C> struct Tile {
  typename C::SharedStorage shared;
  int m_begin, n_begin;
  int split;  // index of the CTA's slice of K
  int share;  // index of the CTA among those that share x; its rank in the cluster is split * kShareX + share
  int k_tile_begin, k_tile_end;
  int weight_k_tiles;  // number of k tiles of the weight

  __device__ __forceinline__ Tile(uint32_t shared_begin, int k, int m_blocks) : shared{shared_begin} {
    const int rank = cluster_rank<C::kClusterSize>();
    split = rank / C::kShareX;
    share = rank % C::kShareX;
    const int cluster_idx = blockIdx.x / C::kClusterSize;
    m_begin = cluster_idx % m_blocks * C::kBlockM;
    n_begin = (cluster_idx / m_blocks * C::kShareX + share) * C::kBlockN;
    weight_k_tiles = ceil_div(k, C::kBlockK);
    const int k_tiles = weight_k_tiles + (C::kHasOffsetTiles ? ceil_div(weight_k_tiles, C::kOffsetTileGroups) : 0);
    const int iterations = ceil_div(k_tiles, C::kKTiles);
    k_tile_begin = slice_begin(iterations, split, C::kSplitK) * C::kKTiles;
    k_tile_end = min(k_tiles, slice_begin(iterations, split + 1, C::kSplitK) * C::kKTiles);
  }
  __device__ __forceinline__ int iterations() const { return ceil_div(k_tile_end - k_tile_begin, C::kKTiles); }
  // Returns the number of iterations (stages) for k tiles of the weight, which precede those for tiles of offsets.
  __device__ __forceinline__ int weight_iterations() const {
    return C::kHasOffsetTiles ? max(0, min(k_tile_end, weight_k_tiles) - k_tile_begin) : iterations();
  }
  __device__ __forceinline__ int k_tiles(int iteration) const {
    return C::kKTiles == 1 ? 1 : min(C::kKTiles, k_tile_end - k_tile_begin - iteration * C::kKTiles);
  }
  // Returns the number of bytes of partial sums that other CTAs write to this CTA.
  __device__ __forceinline__ int received_bytes() const {
    return (C::kSplitK - 1) * max(0, min(C::kOwnedRows, C::kBlockM - split * C::kOwnedRows)) * C::kBlockN * 4;
  }
};

// Synchronizes all consumer warps of the CTA, without the producer.
template <class C> __device__ __forceinline__ void sync_consumers() { ptx::barrier_sync(1, C::kConsumerThreads); }

// Sums the accumulators of all consumers and all CTAs of a cluster, and stores y. The order of additions is fixed: the
// consumers of this CTA, then the other CTAs by rank. The sums are in units of `unit`.
template <class C>
__device__ __forceinline__ void store_tile(const Tile<C>& tile, uint8_t* memory,
                                           const float (&accumulators)[C::kM64Tiles][C::kAccumulators], int consumer,
                                           int warpgroup, const float* x_row_scale, float unit,
                                           const Epilogue<typename C::T, C>& epilogue, typename C::T* y, int m, int n,
                                           int ldy, bool aligned) {
  using T = typename C::T;
  const int lane = threadIdx.x % 32;
  auto* sums = reinterpret_cast<float*>(memory);
  sync_consumers<C>();  // All stages have been read, so the accumulators can overwrite them.
#pragma unroll
  for (int i = 0; i < C::kM64Tiles; ++i) {
    const int column = (i * C::kWarpgroups + warpgroup) * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    float* target = sums + (consumer * C::kBlockM + lane % 4 * 2) * C::kRowFloats + column;
#pragma unroll
    for (int v = 0; v < C::kAccumulators; ++v) {
      target[(v / 4 * 8 + v % 2) * C::kRowFloats + v / 2 % 2 * 8] = accumulators[i][v];
    }
  }
  sync_consumers<C>();
  if constexpr (C::kSplitK > 1) {
    send_partial_sums<typename C::Sums>(tile.shared, sums, tile.split, tile.share);
  }
  const auto* received = reinterpret_cast<const float*>(memory + C::SharedStorage::Received::kBegin);
  constexpr int kVectorColumns = 16 / sizeof(T);
  for (int index = threadIdx.x; index < C::kOwnedRows * (C::kBlockN / kVectorColumns); index += C::kConsumerThreads) {
    const int owned_row = index / (C::kBlockN / kVectorColumns);
    const int tile_row = tile.split * C::kOwnedRows + owned_row;
    const int tile_column = index % (C::kBlockN / kVectorColumns) * kVectorColumns;
    const int row = tile.m_begin + tile_row;
    const int column = tile.n_begin + tile_column;
    if (tile_row >= C::kBlockM || row >= m || column >= n) continue;
    float total[kVectorColumns];
    add_all<typename C::Sums>(total, tile.shared, sums, received, tile.split, owned_row, tile_column);
    const float x_scale = C::kRowScales ? x_row_scale[row] * unit : 1.0f;
    Vector<T, kVectorColumns> out;
#pragma unroll
    for (int i = 0; i < kVectorColumns; ++i) {
      const float value = C::kRowScales ? total[i] * x_scale : total[i];
      out.values[i] = epilogue.finish(value, row, min(column + i, n - 1));
    }
    T* target = y + static_cast<int64_t>(row) * ldy + column;
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
  if constexpr (C::kSplitK > 1) tile.shared.received_barrier().wait_for_all();
}
