// SPDX-License-Identifier: Apache-2.0
// Sums the accumulators of a tile over slices of K in a fixed order, so results are bit-identical from run to run. With
// split-K (reduce_split_k), each slice is computed by a CTA of its own, and the accumulators pass through global
// memory. With SliceSums, a single CTA computes all slices, one after the other. Both give the same bits, so a
// batch-invariant GEMM uses split-K if it has few tiles, and SliceSums if it has many. With stream-K, the CTA that
// computes the last k tile of a tile waits for the others (store_partials and the functions after it).
#pragma once

#include "common/tile_scheduler.cuh"
#include "common/types.cuh"

// Running sums of a thread's COUNT accumulators over the completed slices: in registers, or, if the accumulators leave
// too few registers, in shared memory at `memory`, float4 [COUNT / 4][SHARED_THREADS]. With one slice (kSlices == 1),
// all functions of this struct do nothing.
template <int COUNT, int kSlices, int SHARED_THREADS = 0> struct SliceSums {
  static constexpr bool kIsShared = SHARED_THREADS != 0 && kSlices > 1;
  int tiles;  // number of k tiles in all slices together
  int next = 1;
  int next_begin;  // index of the k tile with which slice `next` begins
  uint8_t* memory;
  float sums[kSlices == 1 || kIsShared ? 1 : COUNT];

  explicit __device__ __forceinline__ SliceSums(int tiles, uint8_t* memory = nullptr)
      : tiles(tiles), next_begin(slice_begin<int64_t>(tiles, 1, kSlices)), memory(memory), sums{} {
    if constexpr (kIsShared) {
#pragma unroll
      for (int i = 0; i < COUNT / 4; ++i) store<true>(shared_sums(i), Vector<float, 4>{});
    }
  }

  // Returns whether k tile `tile` begins slice `next`, so that the sums of the preceding slice are complete.
  __device__ __forceinline__ bool begins_next(int tile) const { return kSlices > 1 && tile == next_begin; }
  // Adds the accumulators of the completed slice to the sums, and zeroes the accumulators for the next slice.
  __device__ __forceinline__ void end_slice(float (&accumulators)[COUNT]) {
    ++next;
    next_begin = slice_begin<int64_t>(tiles, next, kSlices);
    if constexpr (kIsShared) {
      add_to(accumulators);
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
        const float* mine = accumulators + i;
        store<true>(shared_sums(i / 4), Vector<float, 4>{mine[0], mine[1], mine[2], mine[3]});
      }
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if constexpr (!kIsShared) sums[i] += accumulators[i];
      accumulators[i] = 0.0f;
    }
  }
  // Adds the sums to the accumulators of the last slice, which then hold the totals.
  __device__ __forceinline__ void add_to(float (&accumulators)[COUNT]) const {
    if constexpr (kIsShared) {
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
        Vector<float, 4> values;
        load<true>(values, shared_sums(i / 4));
#pragma unroll
        for (int c = 0; c < 4; ++c) accumulators[i + c] = values.values[c] + accumulators[i + c];
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if constexpr (kSlices > 1) accumulators[i] = sums[i] + accumulators[i];
      }
    }
  }

 private:
  __device__ __forceinline__ float* shared_sums(int i) const {
    return reinterpret_cast<float*>(memory) + (i * SHARED_THREADS + threadIdx.x) * 4;
  }
};

// Sums COUNT accumulators per thread over the `split_k` CTAs of a tile, where thread i of each CTA holds the same
// elements. Every CTA writes its accumulators to `partials` (float32 [tiles, split_k, COUNT, THREADS_PER_CTA]); the
// last CTA to arrive adds the accumulators of all CTAs in the order of `split`. Returns whether this CTA is the last
// one, whose `values` then hold the totals. `counters` (uint32 [tiles]) is zero before and after the launch. All
// threads of the CTA must call this function.
template <int COUNT, int THREADS_PER_CTA>
__device__ __forceinline__ bool reduce_split_k(float (&values)[COUNT], float* partials, uint32_t* counters, int tile,
                                               int split, int split_k) {
  if (split_k == 1) return true;
  constexpr int kCtaValues = COUNT * THREADS_PER_CTA;
  float* mine = partials + static_cast<int64_t>(tile) * split_k * kCtaValues + threadIdx.x;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) __stcg(mine + split * kCtaValues + i * THREADS_PER_CTA, values[i]);

  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counters + tile, 1u) == split_k - 1;
    if (is_last) counters[tile] = 0;
  }
  __syncthreads();
  if (!is_last) return false;
  __threadfence();

#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = 0.0f;
  for (int other = 0; other < split_k; ++other) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] += __ldcg(mine + other * kCtaValues + i * THREADS_PER_CTA);
  }
  return true;
}

// Stores the accumulators of a thread as partial sums; `target` is the thread's first element of float4 [COUNT /
// 4][THREADS].
template <int THREADS, int COUNT>
__device__ __forceinline__ void store_partials(Vector<float, 4>* target, const float (&values)[COUNT]) {
#pragma unroll
  for (int v = 0; v < COUNT / 4; ++v) {
    target[v * THREADS] = {values[4 * v], values[4 * v + 1], values[4 * v + 2], values[4 * v + 3]};
  }
}

// Adds the partial sums that store_partials has stored at `source` to the accumulators.
template <int THREADS, int COUNT>
__device__ __forceinline__ void add_partials(float (&values)[COUNT], const Vector<float, 4>* source) {
#pragma unroll
  for (int v = 0; v < COUNT / 4; ++v) {
    const Vector<float, 4> partial = source[v * THREADS];
#pragma unroll
    for (int e = 0; e < 4; ++e) values[4 * v + e] += partial.values[e];
  }
}

// Announces that the CTA's partial sums are stored; one thread calls this after a barrier of all threads that store
// them.
__device__ __forceinline__ void signal_partials(uint32_t* counter) {
  __threadfence();
  atomicAdd(counter, 1u);
}

// Waits until `count` CTAs have announced their partial sums, and resets the counter to zero for the next launch.
__device__ __forceinline__ void wait_for_partials(uint32_t* counter, uint32_t count) {
  while (*const_cast<volatile uint32_t*>(counter) != count) {
  }
  *counter = 0;
  __threadfence();
}
