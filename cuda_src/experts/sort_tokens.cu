// SPDX-License-Identifier: Apache-2.0
// Sorts the rows of a grouped GEMM by expert, in blocks of `block` rows that never hold rows of two experts:
//
//   sorted_pairs   int32 [capacity]: the pairs of expert 0, padded by the value `pairs` to a multiple of `block`, then
//                  those of expert 1, ...; those of an expert ascend, so that results have the same bits from run to
//                  run where CTAs of the GEMM share the k tiles of some blocks
//   experts        int32 [capacity / block]: the expert of each block
//   sorted_count   int32 [1]: the length of sorted_pairs that is used
//
//   ids            FROM_OFFSETS = 0: int32 [pairs]: the expert of each (token, slot) pair
//                  FROM_OFFSETS = 1: int32 [expert_count + 1]: pair p belongs to e if ids[e] <= p < ids[e + 1]
//
// Pairs whose expert is not in [0, expert_count) are left out. Nothing is written past `capacity`, whatever ids are.
// Grid: one cluster of CLUSTER CTAs; each of their warps counts and places an adjacent part of the pairs.
// Architectures: all; CLUSTER > 1 needs sm_90.
#include "common/tile_scheduler.cuh"
#include "common/warp.cuh"
#include "hopper/cluster.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kThreads = THREADS;
constexpr int kExperts = EXPERTS;  // number of experts in the layer
constexpr bool kFromOffsets = FROM_OFFSETS;
constexpr int kCluster = CLUSTER;
static_assert(kCluster == 1 || !kFromOffsets, "rows in the order of their experts need no sort");
constexpr int kWarps = kThreads / 32;
constexpr int kOwned = ceil_div(kExperts, kThreads);  // number of adjacent experts per thread of the scan
constexpr int kFillers = 8;                           // number of threads that fill the blocks of an expert
constexpr int kKept = 4;  // number of a lane's pairs that are loaded at a time, and whose places stay in registers

// Returns the lanes with the same expert.
__device__ __forceinline__ uint32_t same_expert(int expert) {
#if __CUDA_ARCH__ >= 700
  return __match_any_sync(kFullWarp, expert);
#else
  uint32_t same = 0;
  for (int lane = 0; lane < 32; ++lane) same |= uint32_t{__shfl_sync(kFullWarp, expert, lane) == expert} << lane;
  return same;
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads)
    sort_tokens(const int32_t* ids, int32_t* sorted_pairs, int32_t* experts, int32_t* sorted_count, int pairs,
                int block, int capacity) {
  __shared__ int counts[kExperts];
  __shared__ int own_counts[kExperts];  // those of this CTA's part of the pairs
  __shared__ int starts[kExperts + 1];
  __shared__ int places[kWarps][kExperts];  // the number of pairs of an expert before the next one of each warp
  __shared__ int cta_places[kExperts];      // the number of pairs of an expert in the CTAs before this one
  __shared__ int64_t warp_sums[32];
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int rank = cluster_rank<kCluster>();
  const int parts = kCluster * kWarps;
  const int begin_pair = slice_begin<int64_t>(pairs, rank * kWarps + warp, parts);
  const int end_pair = slice_begin<int64_t>(pairs, rank * kWarps + warp + 1, parts);
  int kept_experts[kKept], kept_places[kKept];  // of the last pairs that place_pairs has placed
#pragma unroll
  for (int i = 0; i < kKept; ++i) kept_experts[i] = -1;
  const auto store_pair = [&](int expert, int place, int pair) {
    sorted_pairs[starts[expert] + cta_places[expert] + place] = pair;
  };
  // Advances the places by the warp's pairs and, with `stores`, stores the pairs there.
  const auto place_pairs = [&](bool stores) {
    for (int first = begin_pair + lane; first - lane < end_pair; first += 32 * kKept) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) kept_experts[i] = first + i * 32 < end_pair ? ids[first + i * 32] : -1;
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int expert = kept_experts[i];
        const uint32_t same = same_expert(expert);
        const bool is_expert = static_cast<unsigned>(expert) < static_cast<unsigned>(kExperts);
        const int place = is_expert ? places[warp][expert] : 0;
        kept_places[i] = place + __popc(same & ((1u << lane) - 1));
        if (!is_expert) kept_experts[i] = -1;
        if (stores && is_expert) store_pair(expert, kept_places[i], first + i * 32);
        __syncwarp();
        if (is_expert && same >> lane == 1) places[warp][expert] = place + __popc(same);
        __syncwarp();
      }
    }
  };
  auto first_pair = [&](int expert) { return min(max(ids[expert], 0), pairs); };
  for (int expert = threadIdx.x; expert < kExperts; expert += kThreads) {
    if constexpr (kFromOffsets) own_counts[expert] = max(first_pair(expert + 1) - first_pair(expert), 0);
    cta_places[expert] = 0;
#pragma unroll 8
    for (int of_warp = 0; of_warp < kWarps; ++of_warp) places[of_warp][expert] = 0;
  }
  __syncthreads();
  if constexpr (!kFromOffsets) {
    place_pairs(false);
    __syncthreads();
    for (int expert = threadIdx.x; expert < kExperts; expert += kThreads) {
      int count = 0;
#pragma unroll 8
      for (int of_warp = 0; of_warp < kWarps; ++of_warp) {
        const int of_part = places[of_warp][expert];
        places[of_warp][expert] = count;
        count += of_part;
      }
      own_counts[expert] = count;
    }
    cluster_sync<kCluster>();
  }
  for (int expert = threadIdx.x; expert < kExperts; expert += kThreads) {
    int count = own_counts[expert];
    if constexpr (kCluster > 1) {
      const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(own_counts + expert));
      count = 0;
#pragma unroll
      for (int other = 0; other < kCluster; ++other) {
        if (other == rank) cta_places[expert] = count;
        count += ptx::ld_shared_cluster(ptx::mapa(address, other));
      }
    }
    counts[expert] = count;
  }
  __syncthreads();
  // Each expert's first position is the sum of the padded counts of the experts before it.
  const int first = threadIdx.x * kOwned;
  int64_t own = 0;
  for (int expert = first; expert < min(first + kOwned, kExperts); ++expert) {
    own += static_cast<int64_t>(ceil_div(counts[expert], block)) * block;
  }
  int64_t sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int64_t before = sum - own;
  for (int i = 0; i < warp; ++i) before += warp_sums[i];
  for (int expert = first; expert < min(first + kOwned, kExperts); ++expert) {
    starts[expert] = static_cast<int>(min(before, static_cast<int64_t>(capacity)));
    before += static_cast<int64_t>(ceil_div(counts[expert], block)) * block;
  }
  if (threadIdx.x == kThreads - 1) {
    starts[kExperts] = static_cast<int>(min(before, static_cast<int64_t>(capacity)));
    if (rank == 0) *sorted_count = starts[kExperts];
  }
  __syncthreads();
  for (int expert = rank + threadIdx.x / kFillers * kCluster; expert < kExperts;
       expert += kThreads / kFillers * kCluster) {
    const int begin = starts[expert];
    const int end = starts[expert + 1];
    const int filler = threadIdx.x % kFillers;
    for (int at = begin + filler * block; at < end; at += kFillers * block) experts[at / block] = expert;
    for (int at = begin + counts[expert] + filler; at < end; at += kFillers) sorted_pairs[at] = pairs;
    if constexpr (kFromOffsets) {
      const int pair = first_pair(expert);
      for (int at = begin + filler; at < min(begin + counts[expert], end); at += kFillers) {
        sorted_pairs[at] = pair + at - begin;
      }
    }
  }
  if constexpr (!kFromOffsets) {
    if (pairs <= static_cast<int64_t>(parts) * 32 * kKept) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        if (kept_experts[i] < 0) continue;
        store_pair(kept_experts[i], places[warp][kept_experts[i]] + kept_places[i], begin_pair + i * 32 + lane);
      }
    } else {
      place_pairs(true);
    }
  }
  cluster_sync_before_exit<kCluster>();
}
