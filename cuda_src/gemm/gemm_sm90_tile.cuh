// SPDX-License-Identifier: Apache-2.0
// The constants that follow from those of the host, the shared-memory layout and the CTA tile of gemm_sm90.cu and
// gemm_sm90_mma*.cu.
#pragma once

#include "common/epilogue.cuh"
#include "common/tile_scheduler.cuh"
#include "gemm/repacked_layout.cuh"
#include "hopper/cluster.cuh"
#include "hopper/cluster_reduction.cuh"
#include "hopper/next_weight.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/residual_stream.cuh"
#include "hopper/shared_storage.cuh"
#include "hopper/tma.cuh"
#include "ptx/cluster.cuh"

// The constants that follow from those of the configuration. Host is a GemmSm90Config (gemm_sm90_config.cuh), whose
// constants the host sets.
template <class Host> struct GemmSm90 : Host {
  static constexpr int kProducerRegisters = 40;

  static constexpr int kBlockN = Host::kWeightTiles * kWeightTileN;
  // Number of columns of y per CTA tile; gate and up together give one.
  static constexpr int kStoreN = Host::kGated ? kBlockN / 2 : kBlockN;
  static constexpr int kProducerWarp =
      Host::kConsumers * Host::kConsumerWarps;  // warps 0 .. kProducerWarp - 1 are consumers
  static constexpr int kConsumerThreads = kProducerWarp * 32;
  // Whether an additional warp computes the RMSNorm factors (gemm_sm90_mma). In gemm_sm90, whose tiles have more rows,
  // all consumer warps compute the factors while they wait for x.
  static constexpr bool kHasFactorWarp = Host::kRmsNormsX && Host::kXStageBytes == 0;
  static constexpr int kThreads = kConsumerThreads + (Host::kConsumerRegisters != 0 ? 128 : kHasFactorWarp ? 64 : 32);
  // The number of rows of the tile that a CTA stores; the last CTAs of the cluster store fewer, or none.
  static constexpr int kOwnedRows = ceil_div(Host::kBlockM / 2, Host::kSplitK) * 2;
  static constexpr bool kOwnsEvenly = kOwnedRows * Host::kSplitK == Host::kBlockM;

  static_assert(Host::kBlockM % 8 == 0, "mma and wgmma take 8 rows of x at a time");
  static_assert(Host::kSplitK <= 8, "larger clusters are not portable");
  // Each stage needs a fixed consumer, which waits for every phase of the stage: see pipeline.cuh.
  static_assert(Host::kStages % Host::kConsumers == 0, "a stage belongs to one consumer");
  // setmaxnreg.inc blocks forever if the CTA has too few registers at launch.
  static_assert(kProducerWarp / 4 * Host::kConsumerRegisters +
                        (Host::kConsumerRegisters != 0 ? kProducerRegisters : 0) <=
                    kThreads / 128 * (65536 / kThreads / 8 * 8),
                "setmaxnreg takes registers from those that the CTA starts with");
  static_assert(!Host::kGated || Host::kWeightTiles % 2 == 0, "the gate has half of the weight tiles");
  static_assert(Host::kPrefetchWeights || Host::kXStageBytes != 0,
                "only the producer of x can copy the weight after the wait");
  static_assert(Host::kWindow == Host::kStages ||
                    (Host::kPrefetchWeights && Host::kXStageBytes == 0 && Host::kWindow < Host::kStages),
                "a stage that also holds x does not land before the preceding kernel ends");
  static_assert(sizeof(typename Host::T) == 2, "tensor cores take 16-bit x");
  static_assert(!Host::kAddsToStream || (!Host::kGated && !Host::kHasResidual && Host::kAligned),
                "only a plain, aligned y can be added to the residual stream");

  // The layout of accumulators in shared memory: blocks of 2 * ROW_PAIRS rows and 16 columns. A block is float4
  // [column % 8][ROW_PAIRS]; a float4 holds (row, column), (row + 1, column), (row, column + 8), (row + 1, column + 8),
  // which are the four values of a lane after mma or wgmma. 8 floats of padding per block put the same column % 8 of
  // adjacent blocks into different banks.
  template <int ROW_PAIRS> struct AccumulatorBlocks {
    static constexpr int kRowPairs = ROW_PAIRS;
    static constexpr int kColumnFloats = ROW_PAIRS * 4;
    static constexpr int kFloats = 8 * kColumnFloats + 8;

    // Returns where the float4 lies that holds rows `row`, `row` + 1 and columns `column`, `column` + 8 of the
    // accumulators.
    static __device__ __forceinline__ uint32_t index(uint32_t row, uint32_t column) {
      const uint32_t block = row / (2 * ROW_PAIRS) * (kBlockN / 16) + column / 16;
      return block * kFloats + column % 8 * kColumnFloats + row / 2 % ROW_PAIRS * 4;
    }
    // Adds to `out` the accumulators of `row` in the 8 columns from `column`, which is a multiple of 8.
    static __device__ __forceinline__ void add(float (&out)[8], const float* blocks, uint32_t row, uint32_t column) {
      const float* source = blocks + index(row, column) + column / 8 % 2 * 2 + row % 2;
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] += source[i * kColumnFloats];
    }
  };
  // The accumulators of one consumer in shared memory, for all rows of the tile.
  using ConsumerBlocks = AccumulatorBlocks<4>;
  // The partial sums that one other CTA of the cluster has sent, for the rows that this CTA owns.
  using ReceivedBlocks = AccumulatorBlocks<(kOwnedRows % 8 == 0 ? 4 : kOwnedRows % 4 == 0 ? 2 : 1)>;
  static constexpr int kConsumerFloats = Host::kBlockM / 8 * (kBlockN / 16) * ConsumerBlocks::kFloats;
  static constexpr int kReceivedFloats =
      kOwnedRows / (2 * ReceivedBlocks::kRowPairs) * (kBlockN / 16) * ReceivedBlocks::kFloats;
  // The layout of the accumulators, for send_partial_sums and add_all (cluster_reduction.cuh).
  struct Sums {
    using Consumer = ConsumerBlocks;
    using Received = ReceivedBlocks;
    static constexpr int kConsumers = Host::kConsumers, kConsumerFloats = GemmSm90::kConsumerFloats;
    static constexpr int kSplitK = Host::kSplitK, kReceivedFloats = GemmSm90::kReceivedFloats;
    static constexpr bool kSendsEach = false, kRankOrder = Host::kRankOrder;
    static constexpr int kOwnedRows = GemmSm90::kOwnedRows, kRows = Host::kBlockM;
    static constexpr uint32_t kUnits = kOwnedRows / 2 * (kBlockN / 2);
    static constexpr int kRankStep = 1;
    static constexpr uint32_t kThreads = kConsumerThreads;

    // A float4 holds two rows and two columns, so the owned rows have kOwnedRows / 2 * kBlockN / 2 of them.
    static constexpr uint32_t kPairs = ReceivedBlocks::kRowPairs;
    static __device__ __forceinline__ uint32_t row(uint32_t unit) {
      return unit % kPairs * 2 + unit / (kPairs * (kBlockN / 2)) * (2 * kPairs);
    }
    static __device__ __forceinline__ uint32_t column(uint32_t unit) {
      return unit / kPairs % 8 + unit / (kPairs * 8) % (kBlockN / 16) * 16;
    }
  };
  static constexpr int kWeightStageBytes = Host::kWeightTiles * Host::kKTiles * Host::kWeightTileBytes;
  // The largest number of stages whose weights are copied before griddepcontrol.wait without kPrefetchWeights. The more
  // rows, the longer x takes to arrive; on an H100, 1.4 MB divided by the number of rows was the fastest of ten rules.
  static constexpr int kMaxStagesAhead = 1400000 / Host::kBlockM / kWeightStageBytes < Host::kStages
                                             ? 1400000 / Host::kBlockM / kWeightStageBytes
                                             : Host::kStages;

  struct SharedStorage {
    // The arrays of the main loop, with their layout: the stages of x and of the weight.
    using XRing = SharedArray<0, 1, Host::kXRingBytes>;
    using WeightStages = SharedArray<XRing::kEnd, Host::kStages, kWeightStageBytes>;  // [stage][tile column][k tile]
    using Barriers = SharedArray<WeightStages::kEnd, 2 * Host::kStages, kBarrierBytes>;
    // The accumulators, which overwrite the stages after the main loop.
    using Accumulators = SharedArray<0, Host::kConsumers, kConsumerFloats * 4>;
    // These arrays have memory of their own, because other CTAs may write partial sums while this CTA is in its main
    // loop.
    static constexpr int kOverlaidEnd = Barriers::kEnd > Accumulators::kEnd ? Barriers::kEnd : Accumulators::kEnd;
    using ReceivedBarrier = SharedArray<kOverlaidEnd, Host::kSplitK == 1 ? 0 : 1, 16>;
    using Received = SharedArray<ReceivedBarrier::kEnd, Host::kSplitK - 1, kReceivedFloats * 4>;
    using Factors =
        // Factors by which RMSNorm multiplies the owned rows.
        SharedArray<Received::kEnd, Host::kRmsNormsX ? kOwnedRows : 0, 4>;
    static constexpr int kBytes = Factors::kEnd;

    uint32_t begin;  // shared address of the first byte, a multiple of 1024

    __device__ __forceinline__ uint32_t x(int stage_idx) const { return begin + stage_idx * Host::kXStageBytes; }
    __device__ __forceinline__ uint32_t weight(int stage_idx) const { return WeightStages::at(begin, stage_idx); }
    __device__ __forceinline__ Pipeline<Host::kStages, Barriers::kBegin> pipeline() const { return {begin}; }
    __device__ __forceinline__ PartialSumBarrier received_barrier() const { return {ReceivedBarrier::at(begin)}; }
  };
  ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);
};

// The work of one CTA: kBlockM rows, kBlockN columns, and the k tiles [k_tile_begin, k_tile_end). An iteration of the
// main loop consumes one stage: kKTiles k tiles, or fewer in the last iteration.
template <class C> struct Tile {
  typename C::SharedStorage shared;
  int n_block;
  int m_begin;      // first row of x in the tile
  int store_begin;  // first row that this tile stores; rows m_begin .. store_begin - 1 belong to the preceding tile
  uint32_t split;   // rank of the CTA in its cluster, which is the index of its slice of K
  int k_tile_begin;
  int k_tile_end;

  // Returns the number of rows that CTA `rank` of the cluster owns.
  static __device__ __forceinline__ int owned_rows(uint32_t rank) {
    if constexpr (C::kOwnsEvenly) return C::kOwnedRows;
    return min(C::kOwnedRows, max(0, C::kBlockM - static_cast<int>(rank) * C::kOwnedRows));
  }
  __device__ __forceinline__ int iterations() const { return ceil_div(k_tile_end - k_tile_begin, C::kKTiles); }
  // Returns the number of iterations whose stages the prologue fills: the first use of each stage.
  __device__ __forceinline__ int prologue_iterations() const { return min(iterations(), C::kStages); }
  // Returns the number of stages whose weights are copied before griddepcontrol.wait without kPrefetchWeights: one, or
  // at most a quarter of the CTA's weights.
  __device__ __forceinline__ int stages_ahead() const { return max(1, min(C::kMaxStagesAhead, iterations() / 4)); }
  __device__ __forceinline__ int k_tiles(int iteration) const {
    return C::kKTiles == 1 ? 1 : min(C::kKTiles, k_tile_end - k_tile_begin - iteration * C::kKTiles);
  }
};

template <class C> __device__ __forceinline__ Tile<C> make_tile(uint8_t* memory, int m, int k) {
  Tile<C> tile;
  tile.shared.begin = ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(memory)));
  const TileCoordinates at = StaticTileScheduler<C::kSplitK>::tile();
  tile.n_block = at.n_block;
  tile.m_begin = tile_row_begin<C::kBlockM>(at.m_block, m);
  tile.store_begin = at.m_block * C::kBlockM;
  tile.split = cluster_rank<C::kSplitK>();
  const int k_tiles = ceil_div(k, kWeightTileK);
  const int iterations = ceil_div(k_tiles, C::kKTiles);
  tile.k_tile_begin = slice_begin(iterations, tile.split, C::kSplitK) * C::kKTiles;
  tile.k_tile_end = min(k_tiles, slice_begin(iterations, tile.split + 1, C::kSplitK) * C::kKTiles);
  return tile;
}
