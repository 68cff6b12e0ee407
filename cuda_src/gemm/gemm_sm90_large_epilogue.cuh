// SPDX-License-Identifier: Apache-2.0
// The epilogue of gemm_sm90_large.cu: sums the accumulators of units that clusters share (stream-K), and stores a tile.
#pragma once

#include "common/epilogue.cuh"
#include "common/reduce.cuh"
#include "gemm/gemm_sm90_large.cuh"
#include "hopper/tma.cuh"
#include "hopper/transposed_store.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence_proxy.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/stmatrix.cuh"

// Without kRingReduction: sums the accumulators of a unit that several clusters share, and returns whether this CTA has
// the total and stores the tile. A CTA without the unit's last k tile writes its
// accumulators to `partials`, float4 [CTA][warpgroup][m64 tile][kAccumulators / 4][128 threads], and increments
// `counters` [unit][CTA of the cluster][warpgroup]. The CTA with the last k tile waits for the others and adds their
// partial sums to its accumulators, in the order of the clusters.
template <class C, class Share>
__device__ __forceinline__ bool reduce_shared_unit(typename C::Accumulators& accumulators, const Share& scheduler,
                                                   int warpgroup, float* partials, uint32_t* counters) {
  if (scheduler.has_first_k_tile() && scheduler.has_last_k_tile()) return true;
  constexpr int kVectors = C::kAccumulators / 4;
  const int thread = threadIdx.x % 128;
  const auto slot = [&](int cluster_idx) {
    const int cta = cluster_idx * C::kCluster + cluster_rank<C::kCluster>();
    return reinterpret_cast<Vector<float, 4>*>(partials) +
           (cta * C::kWarpgroups + warpgroup) * (C::kM64Tiles * kVectors * 128) + thread;
  };
  uint32_t* counter =
      counters + (scheduler.unit * C::kCluster + cluster_rank<C::kCluster>()) * C::kWarpgroups + warpgroup;
  if (!scheduler.has_last_k_tile()) {
    Vector<float, 4>* target = slot(scheduler.cluster_idx);
#pragma unroll
    for (int i = 0; i < C::kM64Tiles; ++i) store_partials<128>(target + i * kVectors * 128, accumulators[i]);
    ptx::barrier_sync(1 + warpgroup, 128);
    if (thread == 0) signal_partials(counter);
    return false;
  }
  const int first = scheduler.first_sharer();
  if (thread == 0) wait_for_partials(counter, scheduler.cluster_idx - first);
  ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll 1
  for (int cluster_idx = first; cluster_idx < scheduler.cluster_idx; ++cluster_idx) {
    const Vector<float, 4>* source = slot(cluster_idx);
#pragma unroll
    for (int i = 0; i < C::kM64Tiles; ++i) add_partials<128>(accumulators[i], source + i * kVectors * 128);
  }
  return true;
}

// With kRingReduction, the partial sums of units that clusters share pass through the pipeline. Each CTA without the
// unit's last k tile writes its accumulators to `partials`, float [CTA][warpgroup][kXStageBytes / 4], and increments
// `counters` [unit][CTA of the cluster]. In the CTA with the last k tile, the producer copies the partial sums of the
// others, in the order of the clusters, to the stages behind this k tile: those of a warpgroup take as many bytes as a
// stage of x. So the copies overlap with the last k tiles.
//
//   consumers   write their accumulators and arrive at a named barrier without waiting          write_partial_sums
//   signaler    a warp that waits for the CTA's consumers and increments the counter            signal_partial_sums
//   producer    waits for the counter, resets it, and copies partial sums to the stages         copy_partial_sums
//   consumers   add the partial sums of their warpgroup                                         add_partial_sums

// Returns the counter of a shared unit for this CTA's rank: how many clusters have written their partial sums.
template <class C>
__device__ __forceinline__ uint32_t* unit_counter(const typename C::Scheduler& scheduler, uint32_t* counters) {
  return counters + scheduler.unit * C::kCluster + cluster_rank<C::kCluster>();
}

// Returns where the partial sums of a warpgroup begin in `partials` (with kRingReduction), in floats. The warpgroup is
// that of the CTA that has this CTA's rank in the cluster `cluster_idx`.
template <class C> __device__ __forceinline__ int64_t partial_sums(int cluster_idx, int warpgroup) {
  const int cta = cluster_idx * C::kCluster + cluster_rank<C::kCluster>();
  return static_cast<int64_t>(cta * C::kWarpgroups + warpgroup) * C::kWarpgroupSums;
}

// Writes the warpgroup's accumulators as partial sums, float4 [kAccumulators / 4][128 threads].
template <class C> __device__ __forceinline__ void write_partial_sums(const typename C::Accumulators& accumulators,
                                                                      const typename C::Scheduler& scheduler,
                                                                      int warpgroup, float* partials) {
  auto target = reinterpret_cast<Vector<float, 4>*>(partials + partial_sums<C>(scheduler.cluster_idx, warpgroup)) +
                threadIdx.x % 128;
  store_partials<128>(target, accumulators[0]);
  ptx::barrier_arrive(C::kSignalBarrier, C::kSignalThreads);
}

// The role of the signaler warp, which announces partial sums while the consumers start their next tiles.
template <class C>
__device__ __forceinline__ void signal_partial_sums(typename C::Scheduler& scheduler, uint32_t* counters) {
  while (scheduler.advance()) {
    if (scheduler.has_last_k_tile()) continue;
    ptx::barrier_sync(C::kSignalBarrier, C::kSignalThreads);
    if (threadIdx.x % 32 == 0) signal_partials(unit_counter<C>(scheduler, counters));
    __syncwarp();
  }
}

// Copies the partial sums of the other clusters to the stages from `state` on; called by the producer.
template <class C> __device__ __forceinline__ void copy_partial_sums(const typename C::SharedStorage& shared,
                                                                     const typename C::Scheduler& scheduler,
                                                                     PipelineState<C::kStages>& state,
                                                                     const float* partials, uint32_t* counters,
                                                                     bool is_leader) {
  const auto pipeline = shared.pipeline();
  const int first = scheduler.first_sharer();
  if (is_leader) {
    uint32_t* counter = unit_counter<C>(scheduler, counters);
    wait_for_partials(counter, scheduler.cluster_idx - first);
    // Order what other CTAs have stored, which this thread has acquired, before the copies of the async proxy.
    ptx::fence_proxy_async();
  }
  __syncwarp();
#pragma unroll 1
  for (int cluster_idx = first; cluster_idx < scheduler.cluster_idx; ++cluster_idx) {
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < C::kWarpgroups; ++warpgroup) {
      pipeline.producer_acquire(state);
      if (is_leader) {
        const uint32_t full_barrier = pipeline.full_barrier(state.stage_idx);
        ptx::mbarrier_arrive_expect_tx(full_barrier, C::kXStageBytes);
        ptx::cp_async_bulk(shared.x(state.stage_idx), partials + partial_sums<C>(cluster_idx, warpgroup),
                           C::kXStageBytes, full_barrier);
      }
      state.advance();
    }
  }
}

// Adds the partial sums of the other clusters. Every warpgroup waits for and releases each stage, but adds its own.
template <class C, class Ring> __device__ __forceinline__ void add_partial_sums(
    typename C::Accumulators& accumulators, const typename C::Scheduler& scheduler, PipelineState<C::kStages>& state,
    const Ring& pipeline, const uint8_t* memory, uint32_t empty_barriers, int warpgroup, int lane) {
  const int sharers = scheduler.cluster_idx - scheduler.first_sharer();
#pragma unroll 1
  for (int i = 0; i < sharers * C::kWarpgroups; ++i) {
    pipeline.consumer_wait(state);
    if (i % C::kWarpgroups == warpgroup) {
      auto source =
          reinterpret_cast<const Vector<float, 4>*>(memory + state.stage_idx * C::kXStageBytes) + threadIdx.x % 128;
      add_partials<128>(accumulators[0], source);
    }
    pipeline.template release<C::kCluster>(empty_barriers + state.stage_idx * 8, lane);
    state.advance();
  }
}

// Prefetches the residual into L2, for the columns of a tile that the warpgroup stores.
template <class C> __device__ __forceinline__ void prefetch_residual(const Epilogue<typename C::T, C>& epilogue,
                                                                     const TileCoordinates& tile, int warpgroup, int m,
                                                                     int n) {
  constexpr int kLine = 128 / sizeof(typename C::T);
  for (int i = threadIdx.x % 128; i < C::kBlockM * (C::kStoreN / kLine); i += 128) {
    const int row = tile.m_block * C::kBlockM + i % C::kBlockM;
    const int column = (tile.n_block * C::kWarpgroups + warpgroup) * C::kStoreN + i / C::kBlockM * kLine;
    if (row >= m || column >= (C::kGated ? n / 2 : n)) continue;
    ptx::prefetch_global_l2(epilogue.residual + static_cast<int64_t>(row) * epilogue.ldr + column);
  }
}

// Stores a warpgroup's columns of a tile. Adjacent accumulators of a lane belong to different rows of y, but y is
// stored row by row. So stmatrix transposes the accumulators into `buffer`, shared memory of kStoreRows rows of
// kStoreRowBytes bytes.
template <class C>
__device__ __forceinline__ void store_tile(uint8_t* buffer, const typename C::Accumulators& accumulators,
                                           const TileCoordinates& tile, int warpgroup,
                                           const Epilogue<typename C::T, C>& epilogue, typename C::T* y, int m, int n,
                                           int ldy, float result_factor) {
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  using T = typename C::T;
  const int n_out = C::kGated ? n / 2 : n;
  const int column_begin = (tile.n_block * C::kWarpgroups + warpgroup) * C::kStoreN;
  const int row_begin = tile_row_begin<C::kBlockM>(tile.m_block, m);
  // accumulators[i][v] belongs to column my_column if v % 4 < 2, else to my_column + 8 (both plus 64 i).
  const int my_column = column_begin + thread / 32 * 16 + lane / 4;
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
  auto finish = [&](int i, int v) {
    const int upper = v / 2 % 2;
    float value = epilogue.activate(fmaf(accumulators[i][v], result_factor, biases[i][upper]));
    if constexpr (C::kGated) value *= fmaf(accumulators[1][v], result_factor, biases[1][upper]);
    return value;
  };
  // A chunk is kStoreRows rows of the tile, stored in kPasses passes; per pass a thread stores 8 columns of one row.
  // The last of several chunks of 16 rows may have 8 rows.
  constexpr int kChunks = ceil_div(C::kBlockM, C::kStoreRows);
  constexpr int kPasses = C::kStoreRows * C::kStoreN / 8 / 128;
  auto tile_row = [&](int chunk, int pass) { return chunk * C::kStoreRows + (pass * 128 + thread) / (C::kStoreN / 8); };
  auto row = [&](int chunk, int pass) { return row_begin + tile_row(chunk, pass); };
  auto column = [&](int pass) { return column_begin + (pass * 128 + thread) % (C::kStoreN / 8) * 8; };
  // The last tile begins early enough to end with the last row, so its first rows may belong to the preceding tile,
  // which stores them.
  auto is_stored = [&](int chunk, int pass) {
    return row(chunk, pass) >= tile.m_block * C::kBlockM && row(chunk, pass) < m && column(pass) < n_out &&
           (C::kBlockM % C::kStoreRows == 0 || tile_row(chunk, pass) < C::kBlockM);
  };
  auto buffered = [&](int pass) -> Vector<T, 8>& {
    const int offset = (pass * 128 + thread) / (C::kStoreN / 8) * C::kStoreRowBytes + (column(pass) - column_begin) * 2;
    return *reinterpret_cast<Vector<T, 8>*>(buffer + offset);
  };
  Vector<T, 8> residuals[kPasses] = {};
  auto load_residuals = [&](int chunk) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (is_stored(chunk, pass))
        residuals[pass] = epilogue.template residuals<C::kAligned>(row(chunk, pass), column(pass));
    }
  };
  if constexpr (C::kHasResidual) load_residuals(0);
  const uint32_t target = transposed_address<C::kStoreRowBytes>(buffer, thread / 32, lane);
  // No loop: with a residual and 16 rows per chunk the compiler does not unroll it, and accumulators that are indexed
  // at run time lie in local memory, where they are stored before the wait for wgmma.
  for_each_constant<kChunks>([&](int chunk) {
    ptx::barrier_sync(1 + warpgroup, 128);
    if constexpr (C::kHasResidual) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) buffered(pass) = residuals[pass];
      ptx::barrier_sync(1 + warpgroup, 128);
      if (chunk + 1 < kChunks) load_residuals(chunk + 1);
    }
#pragma unroll
    for (int i = 0; i < C::kStoreN / 64; ++i) {
#pragma unroll
      for (int rows = 0; rows < C::kStoreRows; rows += 16) {
        const uint32_t address = target + rows * C::kStoreRowBytes + i * 128;
        uint32_t values[4] = {};
        if constexpr (C::kHasResidual) ptx::ldmatrix_x4_trans(values, address);
#pragma unroll
        for (int matrix = 0; matrix < 4; ++matrix) {
          const int v = (chunk * C::kStoreRows + rows) / 2 + matrix * 2;
          if (v >= C::kAccumulators) continue;
          float low = finish(i, v), high = finish(i, v + 1);
          if constexpr (C::kHasResidual) {
            low += to_float(T{static_cast<uint16_t>(values[matrix])});
            high += to_float(T{static_cast<uint16_t>(values[matrix] >> 16)});
          }
          values[matrix] = from_float<T>(low).bits | uint32_t{from_float<T>(high).bits} << 16;
        }
        ptx::stmatrix_x4_trans(address, values);
      }
    }
    ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!is_stored(chunk, pass)) continue;
      store<C::kAligned>(y + static_cast<int64_t>(row(chunk, pass)) * ldy + column(pass), buffered(pass));
    }
  });
}
