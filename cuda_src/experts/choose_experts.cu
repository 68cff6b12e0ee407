// SPDX-License-Identifier: Apache-2.0
// The router of a mixture of experts: the experts of each token, and their weights.
//
//   score[e] = softmax(logits)[e], or sigmoid(logits[e]) with SIGMOID
//   ids      the top_k experts with the largest score[e] + bias[e], the largest first; the lowest index among equals
//   weights  score[id], divided by their sum if RENORMALIZE, times `scale`
//
// With GROUPS > 1, the experts stand in GROUPS groups of equal size, and only those in the `kept` groups with the
// largest sums of their two largest score + bias are considered.
//
//   logits   X [m, EXPERTS], row stride ld values
//   bias     float32 [EXPERTS], read if HAS_BIAS
//   ids      int32 [m, top_k]; weights  float32 [m, top_k]
//
// A logit that is NaN counts as -infinity. Architectures: all. A warp computes one token.
#include "common/warp.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kWarps = THREADS / 32;
constexpr int kExperts = EXPERTS;
constexpr int kGroups = GROUPS;
constexpr int kGroupExperts = kExperts / kGroups;
constexpr float kLeastSum = 1e-20f;
constexpr float kLowest = -3.402823466e38f;  // below every score, and above -infinity, which marks a chosen one

constexpr int kOwned = ceil_div(kExperts, 32);  // lane i owns the experts i * kOwned .. i * kOwned + kOwned - 1
constexpr uint32_t kTaken = 0;                  // below the key of every value

// Returns an integer with the order of the values: order_key(a) < order_key(b) if a < b.
__device__ __forceinline__ uint32_t order_key(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The largest of the keys that a warp holds in registers, kCount per lane, in the order of the lanes.
template <int kCount> struct Keys {
  uint32_t values[kCount];

  // Returns the index of the largest key, the lowest among equals, and takes this key away; the same for all lanes.
  __device__ __forceinline__ int take_largest() {
    uint32_t best = values[0];
    int index = 0;
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      if (values[i] > best) index = i;
      best = max(best, values[i]);
    }
    const uint32_t owners = __ballot_sync(kFullWarp, best == warp_max(best));
    const int owner = __ffs(owners) - 1;
    index = __shfl_sync(kFullWarp, index, owner);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (threadIdx.x % 32 == owner && i == index) values[i] = kTaken;
    }
    return owner * kCount + index;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    choose_experts(const X* logits, const float* bias, int32_t* ids, float* weights, int m, int top_k, int kept, int ld,
                   float scale) {
  const float infinity = __int_as_float(0x7f800000);
  __shared__ float all_scores[kWarps][kOwned * 32];
  __shared__ float all_choices[kWarps][kGroups > 1 ? kExperts : 1];
  __shared__ float all_chosen[kWarps][kExperts];
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t token = blockIdx.x * kWarps + warp;
  if (token >= m) return;
  float scores[kOwned];
  float largest = kLowest;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    const int e = lane * kOwned + i;
    const float logit = e < kExperts ? to_float(logits[token * ld + e]) : infinity;
    scores[i] = e < kExperts && logit == logit ? logit : -infinity;
    largest = fmaxf(largest, scores[i]);
  }
  largest = warp_max(largest);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    scores[i] = SIGMOID ? 1.0f / (1.0f + expf(-scores[i])) : expf(scores[i] - largest);
    sum += scores[i];
  }
  const float inverse = SIGMOID ? 1.0f : 1.0f / (warp_sum(sum) + kLeastSum);
  Keys<kOwned> keys;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    const int e = lane * kOwned + i;
    scores[i] *= inverse;
    all_scores[warp][e] = scores[i];
    keys.values[i] = kTaken;
    if (e >= kExperts) continue;
    const float choice = fmaxf(HAS_BIAS ? scores[i] + bias[e] : scores[i], kLowest);
    keys.values[i] = order_key(choice);
    if constexpr (kGroups > 1) all_choices[warp][e] = choice;
  }
  __syncwarp();
  if constexpr (kGroups > 1) {
    constexpr int kOwnedGroups = ceil_div(kGroups, 32);
    Keys<kOwnedGroups> groups;
#pragma unroll
    for (int i = 0; i < kOwnedGroups; ++i) {
      const int group = lane * kOwnedGroups + i;
      float first = -infinity, second = -infinity;
      for (int of_group = 0; group < kGroups && of_group < kGroupExperts; ++of_group) {
        const float value = all_choices[warp][group * kGroupExperts + of_group];
        second = fmaxf(second, fminf(first, value));
        first = fmaxf(first, value);
      }
      groups.values[i] = group < kGroups ? order_key(fmaxf(first + second, kLowest)) : kTaken;
    }
    uint32_t kept_experts = 0;  // bit i: expert i of this lane is in a kept group
    for (int i = 0; i < kept; ++i) {
      const int group = groups.take_largest();
#pragma unroll
      for (int j = 0; j < kOwned; ++j) {
        if ((lane * kOwned + j) / kGroupExperts == group) kept_experts |= 1u << j;
      }
    }
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      if (!(kept_experts >> i & 1)) keys.values[i] = kTaken;
    }
  }
  float total = 0.0f;
  for (int slot = 0; slot < top_k; ++slot) {
    const int expert = keys.take_largest();
    const float score = all_scores[warp][expert];
    if (lane == 0) {
      ids[token * top_k + slot] = expert;
      all_chosen[warp][slot] = score;
    }
    total += score;
  }
  const float factor = RENORMALIZE ? scale / (total + kLeastSum) : scale;
  __syncwarp();
  for (int slot = lane; slot < top_k; slot += 32) weights[token * top_k + slot] = all_chosen[warp][slot] * factor;
}
