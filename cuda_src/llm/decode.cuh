// SPDX-License-Identifier: Apache-2.0
// What the kernels of a decode step's attention share. Of their arguments:
//
//   qkv             X [m, heads + 2 * kv_heads, HEAD_DIM]: a token of each of m sequences
//   q_norm, k_norm  float32 [HEAD_DIM], or null
//   cos, sin        float32 [capacity, HEAD_DIM / 2]
//   lengths         int32 [m]: positions of the new tokens; one beyond the capacity joins nothing
//   k, v            X [m, kv_heads, capacity, HEAD_DIM], sequences sequence_stride values apart
//   out             X [m, heads, HEAD_DIM]
//   partials        float32 [m, heads / HEADS, MAX_SPLITS, HEADS, HEAD_DIM + 2]
//   counters        uint32 [m, heads / HEADS], zeros before and after
//
// grid (splits, heads / HEADS, m): as many of the splits as have MIN_SPLIT_KEYS keys or more are at work, whatever the length is
// when the launch is captured. Warps, and then splits, are merged in a fixed order: the same bits at every run.
//
// Programmatic dependent launch: `lengths` and what the cache holds already are read before griddepcontrol.wait. Steps
// begin with `embed`, which is launched only when all before it has ended.
#pragma once

#include "llm/block_softmax.cuh"
#include "llm/rope.cuh"
#include "ptx/atom.cuh"

constexpr int kWarps = THREADS / 32;
constexpr int kMaxSplits = MAX_SPLITS;
constexpr int kSplitFloats = kHeadDim + 2;

static_assert(kMaxSplits <= 32, "a lane weighs a split");

// What the new token's heads are normed and turned by; read before griddepcontrol.wait.
struct Token {
  Pairs turn, q_weight = {}, k_weight = {};

  __device__ __forceinline__ Token(const float* cos, const float* sin, const float* q_norm, const float* k_norm)
      : turn(Pairs::load(cos, sin)) {
    if constexpr (kNorm) {
      q_weight = Pairs::load(q_norm, q_norm + kHalf);
      k_weight = Pairs::load(k_norm, k_norm + kHalf);
    }
  }

  // A warp takes a query head of the block, or, if the token `appends`, its key or value. Queries go to take(head,
  // pairs), the key and the value to shared memory and to the cache.
  template <class Take>
  __device__ __forceinline__ void join(const X* qkv, int heads, int kv_heads, int part, int kv_head, float eps,
                                       bool appends, X* new_key, X* new_value, X* k, X* v, Take take) const {
    for (int unit = threadIdx.x / 32; unit < kHeads + (appends ? 2 : 0); unit += kWarps) {
      const bool is_q = unit < kHeads, is_v = unit == kHeads + 1;
      const X* in = qkv + (is_q ? part * kHeads + unit : heads + (is_v ? kv_heads : 0) + kv_head) * kHeadDim;
      Pairs pairs = Pairs::load(in, in + kHalf);
      if (is_q) {
        pairs.norm_and_turn(q_weight, turn, eps);
        take(unit, pairs);
      } else {
        if (!is_v) pairs.norm_and_turn(k_weight, turn, eps);
        pairs.store(is_v ? new_value : new_key);
        pairs.store(is_v ? v : k);
      }
    }
  }
};

// By one thread behind a barrier: how many blocks have come before. The block has written for those that come later,
// and behind another barrier it can read what those before have.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter) {
#if __CUDA_ARCH__ >= 750
  return ptx::atom_add_acq_rel(counter, 1u);
#else
  __threadfence();
  const uint32_t before = atomicAdd(counter, 1u);
  __threadfence();
  return before;
#endif
}

// Writes the result of a block's heads if it is their only split; else a record of its sums, and the last of the splits
// to come here merges all records.
__device__ __forceinline__ void merge_splits(const BlockSoftmax& block, int split, int splits, X* out, float* records,
                                             uint32_t* counter) {
  __shared__ float weights[kHeads][kMaxSplits];
  __shared__ bool is_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto finish = [&](int i, float first, float second) {
    store<true>(out + i, Vector<X, 2>{from_float<X>(first), from_float<X>(second)});
  };
  for (int i = 2 * threadIdx.x; i < kHeads * kHeadDim; i += 2 * THREADS) {
    const int head = i / kHeadDim, d = i % kHeadDim;
    float top, total;
    const Vector<float, 2> sums = block.get(head, d, top, total);
    if (splits == 1) {
      finish(i, sums.values[0] / total, sums.values[1] / total);
      continue;
    }
    float* record = records + (split * kHeads + head) * kSplitFloats;
    __stcg(reinterpret_cast<float2*>(record + d), float2{sums.values[0], sums.values[1]});
    if (d == 0) __stcg(reinterpret_cast<float2*>(record + kHeadDim), float2{top, total});
  }
  if (splits == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = arrive(counter) == splits - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  if (!is_last) return;
  float2 sums[kMaxSplits];
  auto fetch_sums = [&](int i) {
#pragma unroll
    for (int other = 0; other < kMaxSplits; ++other) {
      const float* record = records + (other * kHeads + i / kHeadDim) * kSplitFloats + i % kHeadDim;
      sums[other] = other < splits ? __ldcg(reinterpret_cast<const float2*>(record)) : float2{0.0f, 0.0f};
    }
  };
  const int first = 2 * threadIdx.x;
  if (first < kHeads * kHeadDim) fetch_sums(first);
  for (int head = warp; head < kHeads; head += kWarps) {
    float2 weight = {kLowest, 0.0f};  // top and total of a split
    if (lane < splits) {
      weight = __ldcg(reinterpret_cast<const float2*>(records + (lane * kHeads + head) * kSplitFloats + kHeadDim));
    }
    const float factor = exp2f(weight.x - warp_max(weight.x));
    const float total = warp_sum(factor * weight.y);
    if (lane < kMaxSplits) weights[head][lane] = factor / total;
  }
  __syncthreads();
  for (int i = first; i < kHeads * kHeadDim; i += 2 * THREADS) {
    if (i != first) fetch_sums(i);
    float2 all = {0.0f, 0.0f};
#pragma unroll
    for (int other = 0; other < kMaxSplits; ++other) {
      const float weight = weights[i / kHeadDim][other];
      all.x += weight * sums[other].x;
      all.y += weight * sums[other].y;
    }
    finish(i, all.x, all.y);
  }
}
