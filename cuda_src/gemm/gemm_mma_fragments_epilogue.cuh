// SPDX-License-Identifier: Apache-2.0
// The epilogue of gemm_mma_fragments.cu: sums the accumulators of a unit over the slices of a CTA and over the CTAs
// that share the unit (stream-K), and stores y. The order of additions is fixed: the CTA's slices, then the other CTAs
// from the first to the last.
#pragma once

#include "gemm/gemm_mma_fragments.cuh"

constexpr int kStoreN = kGated ? kBlockN / 2 : kBlockN;  // number of columns of y per CTA tile
constexpr int kCtaSums = kBlockM * kBlockN;              // number of partial sums of a CTA

// Signals that this CTA has written its partial sums of a unit.
__device__ __forceinline__ void signal_partial_sums(uint32_t* counter) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(counter, 1u);
}

// Waits until `sharers` other CTAs have written their partial sums of a unit, and resets the counter.
__device__ __forceinline__ void wait_for_partial_sums(uint32_t* counter, uint32_t sharers) {
  if (threadIdx.x == 0) {
    while (*const_cast<volatile uint32_t*>(counter) != sharers) {
    }
    *counter = 0;
    __threadfence();
  }
  __syncthreads();
}

// Eight adjacent columns of one row of float32 sums.
struct Sums {
  float values[8] = {};

  // Adds eight sums, in memory that the compiler must not cache.
  __device__ __forceinline__ void add_partial(const float* source) {
    const float4 low = __ldcg(reinterpret_cast<const float4*>(source));
    const float4 high = __ldcg(reinterpret_cast<const float4*>(source) + 1);
    const float others[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += others[i];
  }
  // Adds the accumulators of all slices, whose first one is at `source`.
  __device__ __forceinline__ void add_slices(const float* source) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vector<float, 4> four;
        load<true>(four, source + slice * (kPassRows * kPitch) + half * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[half * 4 + i] += four.values[i];
      }
    }
  }
  __device__ __forceinline__ void write(float* target) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* mine = values + half * 4;
      __stcg(reinterpret_cast<float4*>(target) + half, make_float4(mine[0], mine[1], mine[2], mine[3]));
    }
  }
};

// Where a CTA stores a unit.
struct Output {
  Epilogue<X, Config> epilogue;
  X* y;
  float* partials;  // float32 [CTA][kBlockM][kBlockN]
  int m, n, ldy;

  // Sums and stores rows `first` .. `first` + kPassRows - 1 of the tile, whose accumulators are in shared memory.
  __device__ __forceinline__ void store_pass(const float* accumulators, const Scheduler& scheduler,
                                             const TileCoordinates& tile, int first) const {
    const int n_out = kGated ? n / 2 : n;
    const int rows = min(kPassRows, m - tile.m_block * kBlockM - first);
    const bool is_complete = !kStreamK || scheduler.has_last_k_tile();
    const int first_sharer =
        kStreamK && scheduler.adds_partial_sums() ? scheduler.first_sharer() : scheduler.cluster_idx;
    constexpr int kVectors = kStoreN / 8;
#pragma unroll 1
    for (int index = threadIdx.x; index < rows * kVectors; index += kThreads) {
      const int row = index / kVectors;
      const int column = index % kVectors * 8;
      if (tile.n_block * kStoreN + column >= n_out) continue;
      Sums sums[kGated + 1];
#pragma unroll
      for (int half = 0; half <= kGated; ++half) {
        const int local_column = half * kStoreN + column;
        const int offset = (first + row) * kBlockN + local_column;
        sums[half].add_slices(accumulators + row * kPitch + local_column);
        for (int other = first_sharer; other < scheduler.cluster_idx; ++other) {
          sums[half].add_partial(partials + static_cast<int64_t>(other) * kCtaSums + offset);
        }
        if (!is_complete) {
          sums[half].write(partials + static_cast<int64_t>(scheduler.cluster_idx) * kCtaSums + offset);
        }
      }
      if (is_complete) {
        store_vector(sums, tile.m_block * kBlockM + first + row, tile.n_block * kStoreN + column);
      }
    }
  }

 private:
  __device__ __forceinline__ void store_vector(const Sums (&sums)[kGated + 1], int row, int column) const {
    const Vector<X, 8> residuals = epilogue.template residuals<kAligned>(row, column);
    Vector<X, 8> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float value;
      if constexpr (kGated) {
        value = epilogue.product(sums[0].values[i], sums[1].values[i], column + i);
      } else {
        value = epilogue.activate(epilogue.biased(sums[0].values[i], column + i));
      }
      if constexpr (kHasResidual) value += to_float(residuals.values[i]);
      out.values[i] = from_float<X>(value);
    }
    store<kAligned>(y + static_cast<int64_t>(row) * ldy + column, out);
  }
};
