// SPDX-License-Identifier: Apache-2.0
// x in gemm_sm90_mma.cu and gemm_sm90_mma_invariant.cu: the consumers copy x themselves with cp.async, which has a
// lower latency than TMA for few rows.
#pragma once

#include "gemm/gemm_sm90.cuh"
#include "common/warp.cuh"
#include "hopper/swizzle.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/prefetch.cuh"

// The constants of the ring. Host is a GemmSm90Config with kXRows, the number of rows of x in shared memory (a power of
// two), and kXStages.
template <class Host> struct GemmSm90X : GemmSm90<Host> {
  static constexpr int kStageK = Host::kKTiles * kWeightTileK;
  static constexpr int kXChunks = kStageK / 8;  // number of 16-byte chunks per row of x in shared memory

  static_assert(Host::kXStageBytes == 0, "the consumers copy x themselves");
  static_assert(Host::kXRows <= Host::kBlockM, "a tile has no more rows of x");
};

// Returns the largest power of two up to `value`.
__device__ constexpr int last_power_of_two(int value) { return value < 2 ? 1 : 2 * last_power_of_two(value / 2); }

// The ring of x of one consumer: kXStages stages [row][kStageK], swizzled (swizzle.cuh) and filled by cp.async. A stage
// of x covers the same k as a stage of the weight.
template <class C> class XRing {
  using T = typename C::T;

 public:
  __device__ __forceinline__ XRing(const T* x, int ldx, const Tile<C>& tile, int consumer, int m, int k)
      : consumer_(consumer) {
    const int thread = threadIdx.x % kConsumerSize;
    const int row = thread / kRowLanes;
    const int chunk = thread % kRowLanes;
    const int k_begin = tile.k_tile_begin * kWeightTileK + consumer * C::kStageK + chunk * 8;
    x_ = x + static_cast<int64_t>(tile.m_begin + row) * ldx + k_begin;
    ldx_ = ldx;
    rows_left_ = ptx::opaque(row < kPassRows ? m - tile.m_begin - row : kCopiesNothing);
    k_left_ = min(k, tile.k_tile_end * kWeightTileK) - k_begin;
    ring_ = tile.shared.begin + consumer * kRingBytes;
    first_chunk_ = ptx::opaque((row * C::kXChunks + (chunk ^ swizzle_bits(row))) * 16);
  }

  // Starts the copies to all stages but the last.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int stage = 0; stage < kRingStages - 1; ++stage) copy(stage * kStageBytes);
  }

  // Waits for the x of the consumer's next iteration, starts to refill the stage of the preceding iteration, and
  // returns the shared address of the next stage.
  __device__ __forceinline__ uint32_t next() {
    ptx::cp_async_wait_group<kRingStages - 2>();
    if constexpr (C::kConsumerWarps == 1) {
      __syncwarp();
    } else {
      ptx::barrier_sync(consumer_ + 1, kConsumerSize);
    }
    copy((read_ + (kRingStages - 1) * kStageBytes) % kRingBytes);
    const uint32_t begin = ring_ + read_;
    read_ = (read_ + kStageBytes) % kRingBytes;
    return begin;
  }

  // Waits for the copies behind the last iteration. They write zeros to memory that the accumulators are about to
  // reuse.
  __device__ __forceinline__ void end() { ptx::cp_async_wait_group<0>(); }

 private:
  static constexpr int kRingStages = C::kXStages;
  static constexpr uint32_t kStageBytes = C::kXRows * C::kXChunks * 16;
  static constexpr uint32_t kRingBytes = kRingStages * kStageBytes;
  static constexpr int kConsumerSize = C::kConsumerWarps * 32;           // number of threads per consumer
  static constexpr int kRowLanes = C::kXChunks < 32 ? C::kXChunks : 32;  // number of threads that copy one row together
  // The number of rows that the consumer copies per pass: a power of two, so that the swizzled offsets of a thread's
  // rows differ by a compile-time XOR.
  static constexpr int kPassRows =
      last_power_of_two(C::kXRows * kRowLanes < kConsumerSize ? C::kXRows : kConsumerSize / kRowLanes);
  static constexpr int kCopiesNothing = -C::kXRows;  // value of rows_left_ in a thread that copies nothing

  static_assert(C::kXRingBytes == C::kConsumers * kRingBytes, "each consumer has a ring of its own");
  static_assert(C::kConsumerWarps == 1 || C::kConsumers < 16, "there are 16 named barriers, and sync_cta takes one");

  // Starts to copy this thread's part of the next stage of x to the byte offset `offset` of the ring.
  __device__ __forceinline__ void copy(uint32_t offset) {
    if (kPassRows * kRowLanes == kConsumerSize || rows_left_ != kCopiesNothing) {
      const uint32_t target = ring_ + offset;
#pragma unroll
      for (int row = 0; row < C::kXRows; row += kPassRows) {
#pragma unroll
        for (int chunk = 0; chunk < C::kXChunks; chunk += kRowLanes) {
          const bool is_valid = row < rows_left_ && chunk * 8 < k_left_;
          ptx::cp_async_16(target + (first_chunk_ ^ swizzle_bits(row) * 16) + (row * C::kXChunks + chunk) * 16,
                           x_ + static_cast<int64_t>(row) * ldx_ + chunk * 8, is_valid ? 16 : 0);
        }
      }
    }
    ptx::cp_async_commit_group();
    x_ += C::kConsumers * C::kStageK;
    k_left_ -= C::kConsumers * C::kStageK;
  }

  int consumer_;
  const T* x_;  // address of this thread's first chunk of x (16 bytes) for the next stage to fill
  int ldx_;
  int rows_left_, k_left_;  // numbers of rows and of columns of x from this thread's first chunk on
  uint32_t ring_;
  uint32_t first_chunk_;  // byte offset of this thread's first chunk in a stage
  uint32_t read_ = 0;     // byte offset in the ring of the next stage to read
};

// Prefetches into L2 the part of x that this CTA reads.
template <class C>
__device__ __forceinline__ void prefetch_x(const Tile<C>& tile, const typename C::T* x, int ldx, int m, int k) {
  constexpr int kLine = 128 / sizeof(typename C::T);
  const int k_end = min(k, tile.k_tile_end * kWeightTileK);
  for (int part = tile.n_block % kXParts + threadIdx.x * kXParts;; part += C::kConsumerThreads * kXParts) {
    const int row = tile.m_begin + part % C::kXRows;
    const int column = tile.k_tile_begin * kWeightTileK + part / C::kXRows * kLine;
    if (column >= k_end) break;
    if (row < m) ptx::prefetch_global_l2(x + static_cast<int64_t>(row) * ldx + column);
  }
}
