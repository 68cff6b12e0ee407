// SPDX-License-Identifier: Apache-2.0
// Sorts the rows of a grouped GEMM by expert, in blocks of `block` rows that never hold rows of two experts:
//
//   sorted_pairs   int32 [capacity]: the pairs of expert 0, padded by the value `pairs` to a multiple of `block`, then
//                  those of expert 1, ...; the order within an expert is not defined
//   experts        int32 [capacity / block]: the expert of each block
//   sorted_count   int32 [1]: the length of sorted_pairs that is used
//
//   ids            FROM_OFFSETS = 0: int32 [pairs]: the expert of each (token, slot) pair
//                  FROM_OFFSETS = 1: int32 [expert_count + 1]: pair p belongs to e if ids[e] <= p < ids[e + 1]
//
// Pairs whose expert is not in [0, expert_count) are left out. Nothing is written past `capacity`, whatever ids are.
// Grid: one CTA. Architectures: all. Counts and positions are integers, so results of the GEMM do not depend on the
// order of the atomic additions.
#include "common/warp.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kThreads = THREADS;
constexpr int kExperts = EXPERTS;  // number of experts in the layer
constexpr bool kFromOffsets = FROM_OFFSETS;

extern "C" __global__ void __launch_bounds__(kThreads)
    sort_tokens(const int32_t* ids, int32_t* sorted_pairs, int32_t* experts, int32_t* sorted_count, int pairs,
                int block, int capacity) {
  __shared__ int counts[kExperts];
  __shared__ int starts[kExperts + 1];
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  auto first_pair = [&](int expert) { return min(max(ids[expert], 0), pairs); };
  for (int expert = threadIdx.x; expert < kExperts; expert += kThreads) {
    counts[expert] = kFromOffsets ? max(first_pair(expert + 1) - first_pair(expert), 0) : 0;
  }
  __syncthreads();
  if constexpr (!kFromOffsets) {
    for (int pair = threadIdx.x; pair < pairs; pair += kThreads) {
      const int expert = ids[pair];
      if (static_cast<unsigned>(expert) < static_cast<unsigned>(kExperts)) atomicAdd(counts + expert, 1);
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    // Each expert's first position: the sum of the padded counts of the experts before it.
    int64_t before = 0;
    for (int first = 0; first < kExperts; first += 32) {
      const int expert = first + threadIdx.x;
      const int own = expert < kExperts ? ceil_div(counts[expert], block) * block : 0;
      int sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kFullWarp, sum, step);
        if (threadIdx.x >= step) sum += other;
      }
      if (expert < kExperts) starts[expert] = static_cast<int>(min(before + sum - own, static_cast<int64_t>(capacity)));
      before += __shfl_sync(kFullWarp, sum, 31);
    }
    if (threadIdx.x == 0) {
      starts[kExperts] = static_cast<int>(min(before, static_cast<int64_t>(capacity)));
      *sorted_count = starts[kExperts];
    }
  }
  __syncthreads();
  for (int expert = threadIdx.x / 32; expert < kExperts; expert += kThreads / 32) {
    const int begin = starts[expert];
    const int end = starts[expert + 1];
    for (int at = begin + threadIdx.x % 32; at < end; at += 32) {
      const int row = at - begin;
      if (at % block == 0) experts[at / block] = expert;
      if (row >= counts[expert]) {
        sorted_pairs[at] = pairs;
      } else if constexpr (kFromOffsets) {
        sorted_pairs[at] = first_pair(expert) + row;
      }
    }
  }
  if constexpr (!kFromOffsets) {
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += kThreads) {
      const int expert = ids[pair];
      if (static_cast<unsigned>(expert) < static_cast<unsigned>(kExperts)) {
        sorted_pairs[atomicAdd(starts + expert, 1)] = pair;
      }
    }
  }
}
