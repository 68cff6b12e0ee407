// SPDX-License-Identifier: Apache-2.0
// The copies of gemm_mma_fragments.cu from global memory to the stages of a slice.
#pragma once

#include "common/warp.cuh"
#include "gemm/gemm_mma_fragments.cuh"
#include "hopper/swizzle.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/st_shared.cuh"

// Copies the stages of a slice, in order, with cp.async (kAsync) or through registers. A warp copies the codes and
// groups of its own tile columns. Addresses are 64-bit addresses that all lanes share, plus 32-bit offsets.
template <class C> class Copies {
  using T = typename C::T;

 public:
  // The copies begin at `k_tile`, for columns from those of `n_block` on. `row_of` maps a row of the CTA tile to a row
  // of x; the rows lie within 2^31 elements.
  template <class RowOf>
  __device__ __forceinline__ Copies(const T* x, const uint8_t* weight, const RowOf& row_of, int n_block, int k_tile,
                                    uint32_t ring, int n, int k, int ldx)
      : ring_(ring), k_left_(k - k_tile * kWeightTileK) {
    const int lane = threadIdx.x % 32;
    const int warp = uniform_warp() % C::kWarpsN;
    const int thread = warp * 32 + lane;
    // In a gated tile, the first half of the tile columns belongs to the gate projection, the second half to the up
    // projection.
    constexpr int kAdjacent = C::kGated ? C::kTileColumns / 2 : C::kTileColumns;
    const TileColumns<C> columns(weight, n_block * kAdjacent, k_tile, n, k);
    weight_ = columns.begin;
#pragma unroll
    for (int i = 0; i < C::kWarpColumns; ++i) {
      const int column = warp * C::kWarpColumns + i;
      const int index = column < kAdjacent ? column : n / 2 / kWeightTileN + column - kAdjacent;
      weight_offsets_[i] = min(index, columns.last) * columns.column_bytes + lane * 16;
    }
    weight_target_ = C::kXStageBytes + warp * C::kWarpColumns * C::kPartBytes + lane * 16;
    x_ = reinterpret_cast<const uint8_t*>(x + k_tile * kWeightTileK);
#pragma unroll
    for (int i = 0; i < kXPasses; ++i) {
      const int index = i * C::kSliceThreads + thread;
      const int row = row_of(index / 8 % C::kXRows);
      x_offsets_[i] = (row * ldx + index / (8 * C::kXRows) * 64 + index % 8 * 8) * sizeof(T);
    }
    x_target_ = thread / 8 * 128 + (thread % 8 ^ swizzle_bits(thread / 8 % C::kXRows)) * 16;
  }

  // Starts the copies of the next stage, part PART of a weight tile, into stage `stage_idx`: of x, of the weight, or of
  // both.
  template <int PART, bool kX = true, bool kWeight = true> __device__ __forceinline__ void start(int stage_idx) {
    const uint32_t stage = ring_ + stage_idx * C::kStageBytes;
    for_each<PART, kX, kWeight>([&](int, uint32_t target, const uint8_t* source, bool is_valid) {
      ptx::cp_async_16(stage + target, source, is_valid ? 16 : 0);
    });
    advance<PART, kX, kWeight>();
  }

  // Loads the next stage, part PART of a weight tile, into registers.
  template <int PART> __device__ __forceinline__ void load_next() {
    for_each<PART>([&](int i, uint32_t, const uint8_t* source, bool is_valid) {
      loaded_[i] = {};
      if (is_valid) load<true>(loaded_[i], reinterpret_cast<const uint32_t*>(source));
    });
    advance<PART>();
  }
  // Stores the stage that load_next has loaded into registers to stage `stage_idx` of shared memory.
  __device__ __forceinline__ void store_loaded(int stage_idx) const {
    const uint32_t stage = ring_ + stage_idx * C::kStageBytes;
    for_each<0>(
        [&](int i, uint32_t target, const uint8_t*, bool) { ptx::st_shared(stage + target, loaded_[i].values); });
  }

 private:
  static constexpr int kXChunks = C::kXRows * C::kStageK / 8;
  static constexpr int kXPasses = ceil_div(kXChunks, C::kSliceThreads);
  // Number of 16-byte vectors of codes that a lane copies per tile column (32 columns) and stage.
  static constexpr int kCodeVectors = C::kStageCodeBytes / 512;
  static constexpr int kGroupVectors = ceil_div(C::kStageGroups * C::kGroupBytes, 512);
  static constexpr int kVectors = kXPasses + C::kWarpColumns * (kCodeVectors + kGroupVectors);

  static_assert(C::kWarpsN == 1 || C::kWarpsN % 2 == 0, "the rows of a pass are a multiple of 8, or 4");

  static __device__ __forceinline__ int thread_in_slice() { return threadIdx.x % C::kSliceThreads; }

  // Calls copy(i, target, source, is_valid) for the i-th vector of 16 bytes of a stage that this thread copies.
  // `target` is relative to the stage; the vector is zero if it is not valid.
  template <int PART, bool kX = true, bool kWeight = true, class Copy>
  __device__ __forceinline__ void for_each(const Copy& copy) const {
#pragma unroll
    for (int i = 0; i < (kX ? kXPasses : 0); ++i) {
      const int first = i * C::kSliceThreads;
      if (first + C::kSliceThreads > kXChunks && first + thread_in_slice() >= kXChunks) continue;
      // The last weight tile may be longer than K; zeros fill it.
      const int k64 = (8 * C::kXRows % C::kSliceThreads == 0 ? first : first + thread_in_slice()) / (8 * C::kXRows);
      // A pass of four rows changes bit 2 of the row, so that the swizzle flips bit 2 of the chunk.
      const uint32_t target = C::kXRows % 8 == 0 && C::kSliceThreads == 32 ? x_target_ ^ i % 2 * 64 : x_target_;
      copy(i, target + first / 8 * 128, x_ + x_offsets_[i] + PART * 128, (PART * C::kK64Parts + k64) * 64 < k_left_);
    }
#pragma unroll
    for (int column = 0; column < (kWeight ? C::kWarpColumns : 0); ++column) {
      const int first = kXPasses + column * (kCodeVectors + kGroupVectors);
      const uint32_t target = weight_target_ + column * C::kPartBytes;
      const uint8_t* source = weight_ + weight_offsets_[column];
#pragma unroll
      for (int i = 0; i < kCodeVectors; ++i) {
        copy(first + i, target + i * 512, source + PART * C::kStageCodeBytes + i * 512, true);
      }
      constexpr int kGroupsBegin = C::kTileCodeBytes + (C::kGroups > 1 ? PART * C::kStageGroups * C::kGroupBytes : 0);
#pragma unroll
      for (int i = 0; i < kGroupVectors; ++i) {
        if (i * 512 + static_cast<int>(threadIdx.x % 32) * 16 >= C::kStageGroups * C::kGroupBytes) continue;
        copy(first + kCodeVectors + i, target + C::kStageCodeBytes + i * 512, source + kGroupsBegin + i * 512, true);
      }
    }
  }

  // Moves on to the next weight tile (128 k) after the last part of the current one.
  template <int PART, bool kX = true, bool kWeight = true> __device__ __forceinline__ void advance() {
    if constexpr (PART + 1 < C::kParts) return;
    if constexpr (kX) x_ += C::kSlices * kWeightTileK * sizeof(T);
    if constexpr (kWeight) weight_ += C::kSlices * C::kWeightTileBytes;
    if constexpr (kX) k_left_ -= C::kSlices * kWeightTileK;
  }

  uint32_t ring_;
  int k_left_;  // number of rows of W from the current weight tile to the end of K
  const uint8_t* weight_;
  uint32_t weight_offsets_[C::kWarpColumns];
  uint32_t weight_target_;
  const uint8_t* x_;
  uint32_t x_offsets_[kXPasses];
  uint32_t x_target_;
  Vector<uint32_t, 4> loaded_[C::kAsync ? 1 : kVectors];
};
