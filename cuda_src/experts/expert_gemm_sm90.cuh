// SPDX-License-Identifier: Apache-2.0
// The constants and the shared-memory layout of expert_gemm_sm90.cu, and its epilogue.
#pragma once

#include "common/warp.cuh"
#include "gemm/gemm_sm90_large.cuh"
#include "gemm/gemm_sm90_large_epilogue.cuh"
#include "hopper/transposed_store.cuh"
#include "ptx/barrier.cuh"

// The constants that follow from those of the host, and those of the dense kernel. Host is the Config of the .cu file.
template <class Host> struct ExpertGemmSm90 : GemmSm90Large<Host> {
  using Dense = GemmSm90Large<Host>;
  using Scheduler = typename Dense::Scheduler;
  // The row warps need more registers than the producer of the dense kernel.
  static constexpr int kConsumerRegisters = Host::kWarpgroups == 2 ? 224 : 152;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kRowWarps = 3, kRowThreads = 32 * kRowWarps;  // of the producers: those that copy x
  static_assert(Host::kBlockM % 16 == 0, "rows are stored in chunks of 16");
  static_assert(Host::kWarpgroups == 2 || Host::kWarpgroups == 3, "registers are divided for these");
  static_assert(Host::kCluster == 1 && !Dense::kRingReduction && !Host::kHasResidual, "as the epilogue assumes");

  // A tile, or the part of its k tiles that this CTA computes, as the row warps announce it to the other warps, with
  // its first stage.
  struct Tile {
    int32_t n_block;  // -1 after the last tile
    int32_t expert;
    int32_t ends[4];  // by row warp: the index of the last pair among its rows, plus 1; the maximum is that of the tile
    int32_t k_tile_begin, k_tile_end;  // the k tiles of this CTA
    int32_t unit;                      // the number of the tile
    int32_t first_cta;                 // the first CTA that computes k tiles; -1 if another CTA computes the last one
    int32_t claimed;                   // how many tiles had been claimed before this CTA claimed its next one
    int32_t unused;
    uint32_t x[Host::kBlockM];     // byte offsets of the rows of x, [block of 8 rows][row % 2][row / 2 % 4]
    int32_t pairs[Host::kBlockM];  // -1 in the padding
    float weights[Host::kBlockM];  // the router's weights

    __device__ __forceinline__ int end() const { return max(max(ends[0], ends[1]), ends[2]); }
  };
  using Tiles = SharedArray<Dense::SharedStorage::kBytes, Host::kTiles, sizeof(Tile)>;
  using Copied = SharedArray<Tiles::kEnd, Host::kStages, kBarrierBytes>;  // barriers, see expert_gemm_sm90.cu
  static_assert(Copied::kEnd == Host::kAllSharedBytes, "shared_bytes of the host's configuration differs");

  // Returns the scheduler of a CTA. Units, blocks of BLOCK_M rows of one expert, are its m blocks. With stream_k, the
  // CTAs share the tiles of the last wave, which is not full, and of the wave before it.
  static __device__ __forceinline__ Scheduler make_scheduler(int units, int n_blocks, int k_tiles, bool stream_k) {
    const int ctas = gridDim.x;
    const int tiles = units * n_blocks;
    const int shared_tiles = stream_k && tiles % ctas != 0 ? tiles - max(tiles / ctas - 1, 0) * ctas : 0;
    return Scheduler(units, n_blocks, k_tiles, shared_tiles, min(ctas, max(shared_tiles * k_tiles / 2, 1)));
  }
};

// Returns the lowest of the heights kRows, kLower, kLowest... with at least `end` rows; they descend.
template <int kRows, int kLower = 0, int... kLowest> __device__ __forceinline__ int lowest_height(int end) {
  if constexpr (kLower > 0) {
    if (end <= kLower) return lowest_height<kLower, kLowest...>(end);
  }
  return kRows;
}

// Runs the main loop with the lowest of the tiles of kRows, kLower, kLowest... rows that has `end` rows. A function for
// each height would be one that wgmma crosses, and more heights would need more registers than there are.
template <int kRows, int kLower = 0, int... kLowest, class Loop, class Accumulators, class State>
__device__ __forceinline__ void run_lowest(Loop& loop, Accumulators& accumulators, State& state, int end, int k_tiles,
                                           int lane) {
  if constexpr (kLower > 0) {
    if (end <= kLower) {
      run_lowest<kLower, kLowest...>(loop, accumulators, state, end, k_tiles, lane);
      return;
    }
  }
  loop.template run<kRows>(accumulators, state, k_tiles, lane);
}

// The members of a scheduler that reduce_shared_unit reads, for an announced tile.
template <class Tile> struct AnnouncedShare {
  const Tile& tile;
  int unit = tile.unit;
  int cluster_idx = blockIdx.x;

  __device__ __forceinline__ bool has_first_k_tile() const { return tile.k_tile_begin == 0; }
  __device__ __forceinline__ bool has_last_k_tile() const { return tile.first_cta >= 0; }
  __device__ __forceinline__ int first_sharer() const { return tile.first_cta; }
};

// Stores a warpgroup's columns of a tile: row r goes to row tile.pairs[r] of y. stmatrix transposes the accumulators
// into `buffer`, as in gemm_sm90_large_epilogue.cuh.
template <class C> __device__ __forceinline__ void store_pairs(const typename C::Accumulators& accumulators,
                                                               uint8_t* buffer, const typename C::Tile& tile,
                                                               int warpgroup,
                                                               const Epilogue<typename C::T, C>& epilogue,
                                                               typename C::T* y, int n, int ldy, float result_factor) {
  using T = typename C::T;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int n_out = C::kGated ? ptx::opaque(n) / 2 : n;  // opaque: not kept in a register during the main loop
  const int end = uniform(tile.end());
  const int column_begin = (tile.n_block * C::kWarpgroups + warpgroup) * C::kStoreN;
  // accumulators[i][v] belongs to column my_column if v % 4 < 2, else to my_column + 8 (both plus 64 i), and to row
  // v / 4 * 8 + my_row + v % 2.
  const int my_column = column_begin + thread / 32 * 16 + lane / 4;
  const int my_row = lane % 4 * 2;
  float biases[C::kM64Tiles][2] = {};
  if constexpr (C::kHasBias) {
#pragma unroll
    for (int i = 0; i < C::kM64Tiles; ++i) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int column = my_column + upper * 8 + (C::kGated ? 0 : i * 64);
        if (column < n_out) biases[i][upper] = epilogue.biased(0.0f, column + (C::kGated ? i * (n / 2) : 0));
      }
    }
  }
  // Without a bias, the power of two result_factor scales the router's weights in place of the accumulators.
  constexpr bool kScalesWeights =
      C::kHasRowWeights && !C::kHasBias && !C::kGated && C::kActivation == Activation::kNone;
  float weights[4] = {};  // of this thread's rows of a chunk: my_row, my_row + 1, my_row + 8, my_row + 9
  auto finish = [&](int i, int v) {
    const float weight = weights[v / 4 % 2 * 2 + v % 2];
    if constexpr (kScalesWeights) return from_float<T>(accumulators[i][v] * weight);
    const int upper = v / 2 % 2;
    const auto biased = [&](int j) { return fmaf(accumulators[j][v], result_factor, biases[j][upper]); };
    const float value = C::kGated ? epilogue.multiply(biased(0), biased(1)) : epilogue.activate(biased(i));
    return from_float<T>(C::kHasRowWeights ? value * weight : value);
  };
  constexpr int kVectors = C::kStoreN / 8;   // number of 16-byte vectors per row
  constexpr int kPassRows = 128 / kVectors;  // number of rows that the warpgroup stores at a time
  const int row = thread / kVectors, column = column_begin + thread % kVectors * 8;
  const unsigned pairs_end = column < n_out ? 0x80000000u : 0u;
  const uint32_t target = ptx::opaque(transposed_address<C::kStoreRowBytes>(buffer, thread / 32, lane));
  const uint32_t source = ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(buffer)) +
                                      row * C::kStoreRowBytes + thread % kVectors * 16);
  const uint32_t pairs_at = ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(tile.pairs + row)));
  const uint32_t weights_at = ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(tile.weights + my_row)));
  uint8_t* y_column = reinterpret_cast<uint8_t*>(y + column);
  const unsigned row_bytes = ldy * sizeof(T);
  for_each_constant<C::kBlockM / 16>([&](int chunk) {
    if (chunk * 16 >= end) return;
    unsigned pairs[16 / kPassRows];
#pragma unroll
    for (int pass = 0; pass < 16 / kPassRows; ++pass) {
      pairs[pass] = ptx::ld_shared_u32(pairs_at + (chunk * 16 + pass * kPassRows) * 4);
    }
    if constexpr (C::kHasRowWeights) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t bits[2];
        ptx::ld_shared(bits, weights_at + (chunk * 16 + half * 8) * 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          weights[half * 2 + i] = __uint_as_float(bits[i]) * (kScalesWeights ? result_factor : 1.0f);
        }
      }
    }
    ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < C::kStoreN / 64; ++i) {
      store_transposed<C::kAccumulators>(target + i * 128, chunk * 8, [&](int v) { return finish(i, v); });
    }
    ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
    for (int pass = 0; pass < 16 / kPassRows; ++pass) {
      if (pairs[pass] >= pairs_end) continue;
      Vector<uint32_t, 4> values;
      ptx::ld_shared(values.values, source + pass * kPassRows * C::kStoreRowBytes);
      *reinterpret_cast<Vector<uint32_t, 4>*>(y_column + uint64_t{pairs[pass]} * row_bytes) = values;
    }
  });
}
