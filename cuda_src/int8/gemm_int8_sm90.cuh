// SPDX-License-Identifier: Apache-2.0
// The constants that follow from those of the host, the shared memory, tile scheduler and epilogue of gemm_int8_sm90.
#pragma once

#include "common/epilogue.cuh"
#include "common/tile_scheduler.cuh"
#include "hopper/cluster.cuh"
#include "hopper/cluster_reduction.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"
#include "hopper/tma.cuh"
#include "hopper/transposed_store.cuh"
#include "int8/products.cuh"
#include "ptx/barrier.cuh"
#include "ptx/thread_index.cuh"

// The constants that follow from those of the host. Host is the Config of gemm_int8_sm90.cu.
template <class Host> struct GemmInt8Sm90 : Host {
  static constexpr int kConsumerWarps = Host::kWarpgroups * 4;
  static constexpr int kXParameterWarps = 2;
  static constexpr int kThreads = (kConsumerWarps + 4) * 32;
  static constexpr int kConsumerRegisters = Host::kWarpgroups == 3 ? 160 : 232;
  static constexpr int kProducerRegisters = Host::kWarpgroups == 3 ? 32 : 40;
  static constexpr int kBlockM = 128;
  static constexpr int kBlockN = Host::kM64Tiles * 64;
  static constexpr int kBlockK = 128;
  static constexpr int kWarpgroupM = Host::kHasAllRows ? kBlockM : kBlockM / Host::kWarpgroups;
  static constexpr int kWarpgroupTiles =
      Host::kHasAllRows ? Host::kM64Tiles / Host::kWarpgroups : Host::kM64Tiles;  // number of m64 tiles per warpgroup
  static constexpr int kWarpgroupN = kWarpgroupTiles * 64;
  static constexpr int kAccumulators = kWarpgroupM / 2;  // number of accumulators per thread and m64 tile
  // The sets of products per warpgroup. With several, which take turns, also from the last m64 tile of a k tile to the
  // first one of the next k tile, the tensor cores compute one while the warpgroup scales another. With one, the other
  // warpgroups keep the tensor cores busy.
  static constexpr int kProductSets = Host::kHasAllRows ? 1 : Host::kM64Tiles % 2 == 0 ? 2 : Host::kM64Tiles;
  // With SPLIT_K, a CTA stores kOwnedOctets * 8 of the rows of each warpgroup; the other CTAs store the others.
  static constexpr int kOctets = kWarpgroupM / 8;
  static constexpr int kOwnedOctets = kOctets / Host::kSplitK;
  // The number of wgmma instructions per quantization block of a stage; each multiplies 32 columns of x and W.
  static constexpr int kBlockSteps = kBlockK / 32 / Host::kXBlocks;
  // The number of spans (see produce_x_parameters) whose parameters of x a lane loads at once, to overlap latencies; as
  // many as registers allow.
  static constexpr int kLoadedSpans = Host::kXOffset ? 1 : 2;

  static constexpr int kParameters =
      // Number of parameters per column and quantization block: scale, offset, sum.
      1 + Host::kWeightOffset + Host::kXOffset;
  static constexpr int kOffsetParameter = 1;
  static constexpr int kSumParameter = 1 + Host::kWeightOffset;
  static constexpr int kParameterTileBytes = Host::kXBlocks * kParameters * 64 * 4;
  static constexpr int kXParameterBytes = Host::kXBlocks * kParameters * kBlockM * 4;

  static constexpr int kStoreRows = sizeof(typename Host::T) == 2 ? 16 : 8;
  static constexpr int kStoreRowBytes =
      kWarpgroupN * sizeof(typename Host::T) + 16;  // 16 bytes of padding: 8 rows start in different banks

  static_assert(Host::kRowScales || !Host::kFp8, "FP8 implies ROW_SCALES");
  static_assert(!Host::kRowScales || !(Host::kXOffset || (Host::kWeightOffset && !Host::kFp8)),
                "ROW_SCALES excludes offsets");
  static_assert(Host::kM64Tiles > 1 && Host::kM64Tiles <= 4,
                "the accumulators and products fit in registers, products in turns");
  static_assert(Host::kHasAllRows ? Host::kM64Tiles % Host::kWarpgroups == 0 : Host::kWarpgroups == 2,
                "a warpgroup has whole m64 tiles");
  static_assert(Host::kClusterSize == 1 || (Host::kClusterSize == 2 && Host::kSplitK == 1),
                "two CTAs share copies, or K is split");
  static_assert(Host::kSplitK == 1 || Host::kSplitK == 2, "a CTA stores whole blocks of kStoreRows rows");
  static_assert(Host::kWarpgroups * kConsumerRegisters + kProducerRegisters <=
                    kThreads / 128 * (65536 / kThreads / 8 * 8),
                "setmaxnreg would wait forever for registers that the CTA does not have");

  struct SharedStorage {
    using X = SharedArray<0, Host::kStages, kBlockM * kBlockK>;            // a stage is [row][k], swizzled
    using Codes = SharedArray<X::kEnd, Host::kStages, kBlockN * kBlockK>;  // likewise [column][k]
    using Parameters = SharedArray<Codes::kEnd, Host::kStages, Host::kM64Tiles * kParameterTileBytes>;
    using XParameters =
        // The parameters of x in a stage: float [quantization block][parameter][row].
        SharedArray<Parameters::kEnd, Host::kStages, kXParameterBytes>;
    using Store = SharedArray<XParameters::kEnd, Host::kWarpgroups, kStoreRows * kStoreRowBytes>;
    using Barriers = SharedArray<Store::kEnd, 2 * Host::kStages, kBarrierBytes>;
    static constexpr int kBytes = Barriers::kEnd;

    uint32_t begin;

    __device__ __forceinline__ uint32_t x(int stage_idx) const { return X::at(begin, stage_idx); }
    __device__ __forceinline__ uint32_t codes(int stage_idx) const { return Codes::at(begin, stage_idx); }
    __device__ __forceinline__ uint32_t parameters(int stage_idx) const { return Parameters::at(begin, stage_idx); }
    __device__ __forceinline__ Pipeline<Host::kStages, Barriers::kBegin> pipeline() const { return {begin}; }
  };
  ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);
  static_assert(Host::kSplitK == 1 || kBlockM * kBlockN * 4 <= SharedStorage::Codes::kEnd,
                "the partial sums fit in the memory of the stages");

  using State = PipelineState<Host::kStages>;

  static_assert(kBandRows % Host::kClusterSize == 0, "a band has whole rows of units");

  using OwnedAccumulators = float[kWarpgroupTiles][kOwnedOctets * 4];
};

// The tile scheduler of a persistent cluster, whose CTAs compute adjacent tiles along m, or slices of K of one tile.
template <class C> struct TileScheduler : PersistentTileScheduler<C::kClusterSize * C::kSplitK> {
  int m_blocks, n_blocks;  // numbers of units along m and n; a unit is one tile per CTA of the cluster

  __device__ __forceinline__ TileScheduler(int m_blocks, int n_blocks)
      : PersistentTileScheduler<C::kClusterSize * C::kSplitK>(m_blocks * n_blocks),
        m_blocks(m_blocks),
        n_blocks(n_blocks) {}
  // Returns the coordinates of this CTA's tile.
  __device__ __forceinline__ TileCoordinates tile() const {
    const TileCoordinates at = rasterize<kBandRows / C::kClusterSize>(this->unit, m_blocks, n_blocks);
    return {at.m_block * C::kClusterSize + cluster_rank<C::kClusterSize>(), at.n_block};
  }
};

// The k tiles (128 k each) that a CTA computes: all of them or, with SPLIT_K, its slice of K.
template <class C> struct KTiles {
  int begin, end;

  explicit __device__ __forceinline__ KTiles(int k) : begin(0), end(ceil_div(k, C::kBlockK)) {
    if constexpr (C::kSplitK > 1) {
      const int rank = cluster_rank<C::kSplitK>();
      begin = slice_begin(end, rank, C::kSplitK);
      end = slice_begin(end, rank + 1, C::kSplitK);
    }
  }
};

// Stores a warpgroup's owned rows of a tile, the octets from `first_octet`, through shared memory: adjacent
// accumulators of a thread belong to different rows of y, but a 16-byte store writes adjacent columns of one row.
template <class C>
__device__ __forceinline__ void store_tile(uint8_t* memory, const typename C::OwnedAccumulators& accumulators,
                                           const TileCoordinates& tile, const Epilogue<typename C::T, C>& epilogue,
                                           typename C::T* y, int m, int n, int ldy, bool aligned, int first_octet) {
  using T = typename C::T;
  constexpr int kVectorColumns = 16 / sizeof(T);
  // Read %tid here, so that values derived from the thread index occupy no registers during the main loop.
  const int index = ptx::thread_index_now();
  const int warpgroup = index / 128;
  const int thread = index % 128;
  const int lane = thread % 32;
  const int row_begin =
      tile_row_begin<C::kBlockM>(tile.m_block, m) + (C::kHasAllRows ? 0 : warpgroup * C::kWarpgroupM) + first_octet * 8;
  const int column_begin = tile.n_block * C::kBlockN + (C::kHasAllRows ? warpgroup * C::kWarpgroupN : 0);
  uint8_t* buffer = memory + C::SharedStorage::Store::kBegin + warpgroup * C::kStoreRows * C::kStoreRowBytes;
  // accumulators[i][v] belongs to column my_column of m64 tile i if v % 4 < 2, else to column my_column + 8.
  const int my_column = thread / 32 * 16 + lane / 4;
  float biases[C::kWarpgroupTiles][2] = {};
  if constexpr (C::kHasBias) {
#pragma unroll
    for (int i = 0; i < C::kWarpgroupTiles * 2; ++i) {
      const int column = column_begin + my_column + i / 2 * 64 + i % 2 * 8;
      if (column < n) biases[i / 2][i % 2] = to_float(epilogue.bias[column]);
    }
  }
  auto finish = [&](int i, int index) {
    const float value = C::kHasBias ? accumulators[i][index] + biases[i][index / 2 % 2] : accumulators[i][index];
    return from_float<T>(epilogue.activate(value));
  };
#pragma unroll
  for (int chunk = 0; chunk < C::kOwnedOctets * 8 / C::kStoreRows; ++chunk) {
    ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < C::kWarpgroupTiles; ++i) {
      if constexpr (sizeof(T) == 2) {
        store_transposed<C::kOwnedOctets * 4>(
            transposed_address<C::kStoreRowBytes>(buffer, thread / 32, lane) + i * 128, chunk * (C::kStoreRows / 2),
            [&](int index) { return finish(i, index); });
      } else {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          uint8_t* target = buffer + (lane % 4 * 2 + v % 2) * C::kStoreRowBytes;
          reinterpret_cast<T*>(target)[i * 64 + my_column + v / 2 * 8] = finish(i, chunk * 4 + v);
        }
      }
    }
    ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
    for (int pass = 0; pass < ceil_div(C::kStoreRows * C::kWarpgroupN / kVectorColumns, 128); ++pass) {
      const int index = pass * 128 + thread;
      const int local_row = index / (C::kWarpgroupN / kVectorColumns);
      const int local_column = index % (C::kWarpgroupN / kVectorColumns) * kVectorColumns;
      const int row = row_begin + chunk * C::kStoreRows + local_row;
      const int column = column_begin + local_column;
      // The last tile along m begins early, so its first rows belong to the preceding tile (hopper/tma.cuh).
      if (row >= tile.m_block * C::kBlockM && row < m && column < n) {
        T* target = y + static_cast<int64_t>(row) * ldy + column;
        const T* values = reinterpret_cast<const T*>(buffer + local_row * C::kStoreRowBytes) + local_column;
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
