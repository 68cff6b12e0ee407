// SPDX-License-Identifier: Apache-2.0
// The split-K reduction through global memory, in a fixed order, so that results are bit-identical from run to run.
#pragma once

#include "common/types.cuh"

// Sums COUNT accumulators per thread over the `split_k` CTAs of a tile; thread i of each of these CTAs holds the same
// elements. Every CTA writes its accumulators to `partials` (float32 [tiles, split_k, COUNT, THREADS_PER_CTA]); the
// last CTA to arrive adds all accumulators in the order of the splits. Returns whether this is the last CTA, which then
// has the totals in `values`. `counters` (uint32 [tiles]) is zero before and after the launch. All threads of the CTA
// must call this function.
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
