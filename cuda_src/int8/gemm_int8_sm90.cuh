// SPDX-License-Identifier: Apache-2.0
// The compile-time constants, shared memory, tile scheduler and epilogue of gemm_int8_sm90.
#pragma once

#include "common/epilogue.cuh"
#include "hopper/cluster_reduction.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"
#include "hopper/tile_scheduler.cuh"
#include "hopper/tma.cuh"
#include "int8/products.cuh"
#include "ptx/barrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/thread_index.cuh"

constexpr bool kRowScales = ROW_SCALES;
constexpr int kXBlocks = X_BLOCKS;
constexpr int kStages = STAGES;
constexpr int kClusterSize = CLUSTER;
constexpr int kSplitK = SPLIT_K;
constexpr int kM64Tiles = M64_TILES;

// True if the warpgroups divide the columns of a CTA tile, and each computes kBlockM rows; false if they divide the rows,
// 64 per warpgroup. wgmma with N = 128 reads less shared memory than two with N = 64; int8 uses N = 64, as it converts
// its accumulators to float32.
constexpr bool kHasAllRows = HAS_ALL_ROWS;
constexpr int kWarpgroups = WARPGROUPS;  // number of consumer warpgroups
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kXParameterWarps = 2;
constexpr int kThreads = (kConsumerWarps + 4) * 32;
constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 232;
constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 40;
constexpr int kBlockM = 128;
constexpr int kBlockN = kM64Tiles * 64;
constexpr int kBlockK = 128;
constexpr int kWarpgroupM = kHasAllRows ? kBlockM : kBlockM / kWarpgroups;
constexpr int kWarpgroupTiles = kHasAllRows ? kM64Tiles / kWarpgroups : kM64Tiles;  // number of m64 tiles per warpgroup
constexpr int kWarpgroupN = kWarpgroupTiles * 64;
constexpr int kAccumulators = kWarpgroupM / 2;  // number of accumulators per thread and m64 tile
// The sets of products per warpgroup. With several, which take turns, also from the last m64 tile of a k tile to the
// first one of the next k tile, the tensor cores compute one while the warpgroup scales another. With one, the other
// warpgroups keep the tensor cores busy.
constexpr int kProductSets = kHasAllRows ? 1 : kM64Tiles % 2 == 0 ? 2 : kM64Tiles;
// With SPLIT_K, a CTA stores kOwnedOctets * 8 rows of each warpgroup.
constexpr int kOctets = kWarpgroupM / 8;
constexpr int kOwnedOctets = kOctets / kSplitK;
// The number of wgmma instructions per quantization block of a stage; each multiplies 32 columns of A and W.
constexpr int kBlockSteps = kBlockK / 32 / kXBlocks;
// The number of spans (see produce_x_parameters) whose parameters of x a lane loads at once, to overlap latencies; as
// many as registers allow.
constexpr int kLoadedSpans = X_OFFSET ? 1 : 2;

constexpr int kParameters = 1 + kWeightOffset + kXOffset;  // number of parameters per column and quantization block
constexpr int kOffsetParameter = 1;
constexpr int kSumParameter = 1 + kWeightOffset;
constexpr int kParameterTileBytes = kXBlocks * kParameters * 64 * 4;
constexpr int kXParameterBytes = kXBlocks * kParameters * kBlockM * 4;

constexpr int kStoreRows = sizeof(Y) == 2 ? 16 : 8;
constexpr int kStoreRowBytes = kWarpgroupN * sizeof(Y) + 16;  // 16 bytes of padding: 8 rows start in different banks

static_assert(kRowScales || !kFp8, "FP8 implies ROW_SCALES");
static_assert(!kRowScales || !(kXOffset || (kWeightOffset && !kFp8)), "ROW_SCALES excludes offsets");
static_assert(kM64Tiles > 1 && kM64Tiles <= 4, "the accumulators and products fit in registers, products in turns");
static_assert(kHasAllRows ? kM64Tiles % kWarpgroups == 0 : kWarpgroups == 2, "a warpgroup has whole m64 tiles");
static_assert(kClusterSize == 1 || (kClusterSize == 2 && kSplitK == 1), "two CTAs share copies, or K is split");
static_assert(kSplitK == 1 || kSplitK == 2, "a CTA stores whole blocks of kStoreRows rows");
static_assert(kWarpgroups * kConsumerRegisters + kProducerRegisters <= kThreads / 128 * (65536 / kThreads / 8 * 8),
              "setmaxnreg would wait forever for registers that the CTA does not have");

struct SharedStorage {
  using X = SharedArray<0, kStages, kBlockM * kBlockK>;            // [row][k], swizzled
  using Codes = SharedArray<X::kEnd, kStages, kBlockN * kBlockK>;  // [column][k], swizzled
  using Parameters = SharedArray<Codes::kEnd, kStages, kM64Tiles * kParameterTileBytes>;
  using XParameters = SharedArray<Parameters::kEnd, kStages, kXParameterBytes>;  // float [block][parameter][row]
  using Store = SharedArray<XParameters::kEnd, kWarpgroups, kStoreRows * kStoreRowBytes>;
  using Barriers = SharedArray<Store::kEnd, 2 * kStages, kBarrierBytes>;
  static constexpr int kBytes = Barriers::kEnd;

  uint32_t begin;

  __device__ __forceinline__ uint32_t x(int stage_idx) const { return X::at(begin, stage_idx); }
  __device__ __forceinline__ uint32_t codes(int stage_idx) const { return Codes::at(begin, stage_idx); }
  __device__ __forceinline__ uint32_t parameters(int stage_idx) const { return Parameters::at(begin, stage_idx); }
  __device__ __forceinline__ Pipeline<kStages, Barriers::kBegin> pipeline() const { return {begin}; }
};
ASSERT_SHARED_BYTES(SharedStorage);
static_assert(kSplitK == 1 || kBlockM * kBlockN * 4 <= SharedStorage::Codes::kEnd,
              "the partial sums fit in the memory of the stages");

using State = PipelineState<kStages>;

static_assert(kBandRows % kClusterSize == 0, "a band has whole rows of units");

// The tile scheduler of a persistent cluster, whose CTAs compute adjacent tiles along m, or slices of K of one tile.
struct TileScheduler : PersistentTileScheduler<kClusterSize * kSplitK> {
  int m_blocks, n_blocks;  // numbers of units along m and n; a unit is one tile per CTA

  __device__ __forceinline__ TileScheduler(int m_blocks, int n_blocks)
      : PersistentTileScheduler(m_blocks * n_blocks), m_blocks(m_blocks), n_blocks(n_blocks) {}
  // Returns the coordinates of this CTA's tile.
  __device__ __forceinline__ TileCoordinates tile() const {
    const TileCoordinates at = rasterize<kBandRows / kClusterSize>(unit, m_blocks, n_blocks);
    return {at.m_block * kClusterSize + cluster_rank<kClusterSize>(), at.n_block};
  }
};

// The k tiles of a CTA: all of them, or its slice of K.
struct KTiles {
  int begin, end;

  explicit __device__ __forceinline__ KTiles(int k) : begin(0), end(ceil_div(k, kBlockK)) {
    if constexpr (kSplitK > 1) {
      const int rank = cluster_rank<kSplitK>();
      begin = end * rank / kSplitK;
      end = end * (rank + 1) / kSplitK;
    }
  }
};

using OwnedAccumulators = float[kWarpgroupTiles][kOwnedOctets * 4];

// Stores a warpgroup's owned rows of a tile, the octets from `first_octet`, through shared memory: adjacent accumulators
// of a thread belong to different rows of y, but a 16-byte store writes adjacent columns of one row.
template <class T>
__device__ __forceinline__ void store_tile(uint8_t* memory, const OwnedAccumulators& accumulators,
                                           const TileCoordinates& tile, const Epilogue<T>& epilogue, T* y, int m, int n,
                                           int ldy, bool aligned, int first_octet) {
  constexpr int kVectorColumns = 16 / sizeof(T);
  // Read %tid here, so that values derived from the thread index occupy no registers during the main loop.
  const int index = ptx::thread_index_now();
  const int warpgroup = index / 128;
  const int thread = index % 128;
  const int lane = thread % 32;
  const int row_begin =
      tile_row_begin<kBlockM>(tile.m_block, m) + (kHasAllRows ? 0 : warpgroup * kWarpgroupM) + first_octet * 8;
  const int column_begin = tile.n_block * kBlockN + (kHasAllRows ? warpgroup * kWarpgroupN : 0);
  uint8_t* buffer = memory + SharedStorage::Store::kBegin + warpgroup * kStoreRows * kStoreRowBytes;
  // accumulators[i][v] belongs to column my_column of m64 tile i if v % 4 < 2, else to column my_column + 8.
  const int my_column = thread / 32 * 16 + lane / 4;
  float biases[kWarpgroupTiles][2] = {};
  if constexpr (kHasBias) {
#pragma unroll
    for (int i = 0; i < kWarpgroupTiles * 2; ++i) {
      const int column = column_begin + my_column + i / 2 * 64 + i % 2 * 8;
      if (column < n) biases[i / 2][i % 2] = to_float(epilogue.bias[column]);
    }
  }
  auto finish = [&](int i, int index) {
    const float value = kHasBias ? accumulators[i][index] + biases[i][index / 2 % 2] : accumulators[i][index];
    return from_float<T>(epilogue.activate(value));
  };
#pragma unroll
  for (int chunk = 0; chunk < kOwnedOctets * 8 / kStoreRows; ++chunk) {
    ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < kWarpgroupTiles; ++i) {
      if constexpr (sizeof(T) == 2) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(buffer)) +
                                (lane / 16 * 8 + lane % 8) * kStoreRowBytes +
                                (i * 64 + thread / 32 * 16 + lane / 8 % 2 * 8) * 2;
        uint32_t values[4];
#pragma unroll
        for (int matrix = 0; matrix < 4; ++matrix) {
          const int index = chunk * (kStoreRows / 2) + matrix * 2;
          values[matrix] = finish(i, index).bits | static_cast<uint32_t>(finish(i, index + 1).bits) << 16;
        }
        ptx::stmatrix_x4_trans(target, values);
      } else {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          uint8_t* target = buffer + (lane % 4 * 2 + v % 2) * kStoreRowBytes;
          reinterpret_cast<T*>(target)[i * 64 + my_column + v / 2 * 8] = finish(i, chunk * 4 + v);
        }
      }
    }
    ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
    for (int pass = 0; pass < ceil_div(kStoreRows * kWarpgroupN / kVectorColumns, 128); ++pass) {
      const int index = pass * 128 + thread;
      const int local_row = index / (kWarpgroupN / kVectorColumns);
      const int local_column = index % (kWarpgroupN / kVectorColumns) * kVectorColumns;
      const int row = row_begin + chunk * kStoreRows + local_row;
      const int column = column_begin + local_column;
      // The last tile also computes rows of the preceding tile (hopper/tma.cuh).
      if (row >= tile.m_block * kBlockM && row < m && column < n) {
        T* target = y + static_cast<int64_t>(row) * ldy + column;
        const T* values = reinterpret_cast<const T*>(buffer + local_row * kStoreRowBytes) + local_column;
        if (aligned && column + kVectorColumns <= n) {
          store<true>(target, *reinterpret_cast<const Vector<T, kVectorColumns>*>(values));
        } else {
#pragma unroll 1
          for (int i = 0; i < min(kVectorColumns, n - column); ++i) target[i] = values[i];
        }
      }
    }
  }
}
