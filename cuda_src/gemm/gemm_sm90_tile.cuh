// SPDX-License-Identifier: Apache-2.0
// The compile-time constants, the shared-memory layout and the CTA tile of gemm_sm90.cu and gemm_sm90_mma*.cu.
#pragma once

#include "common/epilogue.cuh"
#include "gemm/repacked_layout.cuh"
#include "hopper/cluster_reduction.cuh"
#include "hopper/next_weight.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/residual_stream.cuh"
#include "hopper/shared_storage.cuh"
#include "hopper/tile_scheduler.cuh"
#include "hopper/tma.cuh"
#include "ptx/cluster.cuh"

constexpr bool kAligned = ALIGNED;
constexpr int kBlockM = BLOCK_M;
constexpr int kWeightTiles = WEIGHT_TILES;      // number of weight tiles along n per CTA tile
constexpr int kConsumers = CONSUMERS;           // number of consumers, which take turns at the stages
constexpr int kConsumerWarps = CONSUMER_WARPS;  // number of warps per consumer
constexpr int kStages = STAGES;
constexpr int kKTiles = K_TILES;  // number of weight tiles along k per stage, copied together for each tile column
constexpr int kSplitK = SPLIT_K;  // number of CTAs per cluster; each computes the tile over its slice of K
constexpr bool kRankOrder = RANK_ORDER;  // whether partial sums are added by rank of the CTA (gemm_sm90_epilogue.cuh)
constexpr int kCtasPerSm = CTAS_PER_SM;
constexpr int kXStageBytes = X_STAGE_BYTES;  // bytes of x that the producer copies per stage; 0: the consumers copy x
constexpr int kXRingBytes = X_RING_BYTES;    // bytes of all stages of x
// Whether the weights of all stages, or only those of the first stages (Tile::stages_ahead), are copied before
// griddepcontrol.wait. TMA serves copies in order, so x arrives after all weights that were copied before it. Copying
// the weights of all stages suits a CTA that starts long before the preceding kernel ends; a CTA that starts later
// needs x earlier.
constexpr bool kPrefetchWeights = PREFETCH_WEIGHTS;
// Whether the dependent kernel may start only after griddepcontrol.wait, when the preceding kernel has finished. With an
// earlier start, CTAs of three kernels may be resident at once: two CTAs of one kernel may then share an SM, which takes
// them up to twice as long, while other SMs have none.
constexpr bool kStartsNextLate = START_NEXT_LATE;
// The largest number of stages in flight. The loads of the preceding kernel, which may still be running, and the loads
// of x queue behind the copies in flight.
constexpr int kWindow = WINDOW;
// The number of registers per consumer thread after setmaxnreg has moved registers from the producer's warpgroup, or 0
// if the kernel does not use setmaxnreg; the producer is then a single warp, not a warpgroup.
constexpr int kConsumerRegisters = CONSUMER_REGISTERS;
constexpr int kProducerRegisters = 40;

constexpr int kBlockN = kWeightTiles * kWeightTileN;
constexpr int kProducerWarp = kConsumers * kConsumerWarps;  // warps 0 .. kProducerWarp - 1 are consumers
constexpr int kConsumerThreads = kProducerWarp * 32;
// Whether an additional warp computes the RMSNorm factors (gemm_sm90_mma). In gemm_sm90, whose tiles have more rows,
// all consumer warps compute the factors while they wait for x.
constexpr bool kHasFactorWarp = kRmsNormsX && kXStageBytes == 0;
constexpr int kThreads = kConsumerThreads + (kConsumerRegisters != 0 ? 128 : kHasFactorWarp ? 64 : 32);
// The number of rows of the tile that a CTA stores; the last CTAs of the cluster store fewer, or none.
constexpr int kOwnedRows = ceil_div(kBlockM / 2, kSplitK) * 2;
constexpr bool kOwnsEvenly = kOwnedRows * kSplitK == kBlockM;

static_assert(kBlockM % 8 == 0, "mma and wgmma take 8 rows of x at a time");
static_assert(kSplitK <= 8, "larger clusters are not portable");
// Each stage needs a fixed consumer, which waits for every phase of the stage: see pipeline.cuh.
static_assert(kStages % kConsumers == 0, "a stage belongs to one consumer");
// setmaxnreg.inc blocks forever if the CTA has too few registers at launch.
static_assert(kProducerWarp / 4 * kConsumerRegisters + (kConsumerRegisters != 0 ? kProducerRegisters : 0) <=
                  kThreads / 128 * (65536 / kThreads / 8 * 8),
              "setmaxnreg takes registers from those that the CTA starts with");
static_assert(!kGated || kWeightTiles % 2 == 0, "the gate has half of the weight tiles");
static_assert(kPrefetchWeights || kXStageBytes != 0, "only the producer of x can copy the weight after the wait");
static_assert(kWindow == kStages || (kPrefetchWeights && kXStageBytes == 0 && kWindow < kStages),
              "a stage that also holds x does not land before the preceding kernel ends");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");
static_assert(!kAddsToStream || (!kGated && !kHasResidual && kAligned),
              "only a plain, aligned y can be added to the residual stream");

// The layout of accumulators in shared memory: blocks of 2 * ROW_PAIRS rows and 16 columns. A block is float4
// [column % 8][ROW_PAIRS]; a float4 holds (row, column), (row + 1, column), (row, column + 8), (row + 1, column + 8),
// which are the four values of a lane after mma or wgmma. 8 floats of padding per block put the same column % 8 of
// adjacent blocks into different banks.
template <int ROW_PAIRS>
struct AccumulatorBlocks {
  static constexpr int kRowPairs = ROW_PAIRS;
  static constexpr int kColumnFloats = ROW_PAIRS * 4;
  static constexpr int kFloats = 8 * kColumnFloats + 8;

  // Returns the index of the float4 that holds rows `row`, `row` + 1 and columns `column`, `column` + 8.
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
// The accumulators of one consumer, for all rows of the tile.
using ConsumerBlocks = AccumulatorBlocks<4>;
// The partial sums received from one other CTA, for the owned rows.
using ReceivedBlocks = AccumulatorBlocks<(kOwnedRows % 8 == 0 ? 4 : kOwnedRows % 4 == 0 ? 2 : 1)>;
constexpr int kConsumerFloats = kBlockM / 8 * (kBlockN / 16) * ConsumerBlocks::kFloats;
constexpr int kReceivedFloats = kOwnedRows / (2 * ReceivedBlocks::kRowPairs) * (kBlockN / 16) * ReceivedBlocks::kFloats;
constexpr int kWeightStageBytes = kWeightTiles * kKTiles * kWeightTileBytes;
// The largest number of stages whose weights are copied before griddepcontrol.wait without kPrefetchWeights. The more
// rows, the longer x takes to arrive; on an H100, 1.4 MB divided by the number of rows was the fastest of ten rules.
constexpr int kMaxStagesAhead =
    1400000 / kBlockM / kWeightStageBytes < kStages ? 1400000 / kBlockM / kWeightStageBytes : kStages;

struct SharedStorage {
  // Used during the main loop.
  using XRing = SharedArray<0, 1, kXRingBytes>;
  using WeightStages = SharedArray<XRing::kEnd, kStages, kWeightStageBytes>;  // [stage][tile column][k tile]
  using Barriers = SharedArray<WeightStages::kEnd, 2 * kStages, kBarrierBytes>;
  // Used after the main loop, in the memory of the stages.
  using Accumulators = SharedArray<0, kConsumers, kConsumerFloats * 4>;
  // These arrays have memory of their own, because other CTAs may write partial sums while this CTA is in its main
  // loop.
  static constexpr int kOverlaidEnd = Barriers::kEnd > Accumulators::kEnd ? Barriers::kEnd : Accumulators::kEnd;
  using ReceivedBarrier = SharedArray<kOverlaidEnd, kSplitK == 1 ? 0 : 1, 16>;
  using Received = SharedArray<ReceivedBarrier::kEnd, kSplitK - 1, kReceivedFloats * 4>;
  using Factors = SharedArray<Received::kEnd, kRmsNormsX ? kOwnedRows : 0, 4>;  // RMSNorm factors of the owned rows
  static constexpr int kBytes = Factors::kEnd;

  uint32_t begin;  // shared address of the first byte, a multiple of 1024

  __device__ __forceinline__ uint32_t x(int stage_idx) const { return begin + stage_idx * kXStageBytes; }
  __device__ __forceinline__ uint32_t weight(int stage_idx) const { return WeightStages::at(begin, stage_idx); }
  __device__ __forceinline__ Pipeline<kStages, Barriers::kBegin> pipeline() const { return {begin}; }
  __device__ __forceinline__ PartialSumBarrier received_barrier() const { return {ReceivedBarrier::at(begin)}; }
};
ASSERT_SHARED_BYTES(SharedStorage);

// The work of one CTA: kBlockM rows, kBlockN columns, and the k tiles [k_tile_begin, k_tile_end). An iteration of the
// main loop consumes one stage: kKTiles k tiles, or fewer in the last iteration.
struct Tile {
  SharedStorage shared;
  int n_block;
  int m_begin;      // first row of x in the tile
  int store_begin;  // first row that this tile stores; rows m_begin .. store_begin - 1 belong to the preceding tile
  uint32_t split;   // rank of the CTA in its cluster
  int k_tile_begin;
  int k_tile_end;

  // Returns the number of rows that CTA `rank` of the cluster owns.
  static __device__ __forceinline__ int owned_rows(uint32_t rank) {
    if constexpr (kOwnsEvenly) return kOwnedRows;
    return min(kOwnedRows, max(0, kBlockM - static_cast<int>(rank) * kOwnedRows));
  }
  __device__ __forceinline__ int iterations() const { return ceil_div(k_tile_end - k_tile_begin, kKTiles); }
  // Returns the number of iterations whose stages the prologue fills: the first use of each stage.
  __device__ __forceinline__ int prologue_iterations() const { return min(iterations(), kStages); }
  // Returns the number of stages whose weights are copied before griddepcontrol.wait without kPrefetchWeights: one, or
  // at most a quarter of the CTA's weights.
  __device__ __forceinline__ int stages_ahead() const { return max(1, min(kMaxStagesAhead, iterations() / 4)); }
  __device__ __forceinline__ int k_tiles(int iteration) const {
    return kKTiles == 1 ? 1 : min(kKTiles, k_tile_end - k_tile_begin - iteration * kKTiles);
  }
};

__device__ __forceinline__ Tile make_tile(uint8_t* memory, int m, int k) {
  Tile tile;
  tile.shared.begin = ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(memory)));
  tile.n_block = blockIdx.x / kSplitK;
  int m_block = 0;
  if (gridDim.y > 1) {
    const int n_blocks = gridDim.x / kSplitK;
    const TileCoordinates at = rasterize(blockIdx.y * n_blocks + tile.n_block, gridDim.y, n_blocks);
    m_block = at.m_block;
    tile.n_block = at.n_block;
  }
  tile.m_begin = tile_row_begin<kBlockM>(m_block, m);
  tile.store_begin = m_block * kBlockM;
  tile.split = cluster_rank<kSplitK>();
  const int k_tiles = ceil_div(k, kWeightTileK);
  const int iterations = ceil_div(k_tiles, kKTiles);
  tile.k_tile_begin = iterations * tile.split / kSplitK * kKTiles;
  tile.k_tile_end = min(k_tiles, iterations * (tile.split + 1) / kSplitK * kKTiles);
  return tile;
}
