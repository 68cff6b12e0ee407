// SPDX-License-Identifier: Apache-2.0
// Sums over blocks that share a tile of the result (split-K), in a fixed order: the same bits at every run.
#pragma once

#include "common/types.cuh"

// Adds up COUNT values a thread over the `splits` blocks of a tile; thread i of each block holds the same elements.
// Every block leaves its values in `partials` (float32 [tiles, splits, COUNT, THREADS]); the last one to arrive adds
// them in order of the splits, whichever order they came in, and gets true and the sums. `counters` (uint32 [tiles])
// holds zeros before and after. All threads of the block must call it.
template <int COUNT, int THREADS_PER_BLOCK>
__device__ __forceinline__ bool sum_over_splits(float (&values)[COUNT], float* partials, uint32_t* counters, int tile,
                                                int split, int splits) {
  if (splits == 1) return true;
  constexpr int kBlockValues = COUNT * THREADS_PER_BLOCK;
  float* mine = partials + static_cast<int64_t>(tile) * splits * kBlockValues + threadIdx.x;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) __stcg(mine + split * kBlockValues + i * THREADS_PER_BLOCK, values[i]);

  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counters + tile, 1u) == splits - 1;
    if (is_last) counters[tile] = 0;
  }
  __syncthreads();
  if (!is_last) return false;
  __threadfence();

#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = 0.0f;
  for (int other = 0; other < splits; ++other) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] += __ldcg(mine + other * kBlockValues + i * THREADS_PER_BLOCK);
  }
  return true;
}
