// SPDX-License-Identifier: Apache-2.0
// The choice of the experts of a token from the logits of a router, by one warp; choose_experts.cu has the formula.
// Constants: EXPERTS, GROUPS, SIGMOID, HAS_BIAS, RENORMALIZE.
#pragma once

#include "common/warp.cuh"

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

// The shared memory of a warp.
struct ChoiceStorage {
  float scores[kOwned * 32];
  float choices[kGroups > 1 ? kExperts : 1];
  float chosen[kExperts];
};

// Stores the `top_k` experts of a token to `ids`, and their weights to `weights`. `logits(e)` returns the logit of an
// expert. All lanes of a warp call this.
template <class Logits> __device__ __forceinline__ void choose_token_experts(const Logits& logits, const float* bias,
                                                                             int32_t* ids, float* weights, int top_k,
                                                                             int kept, float scale,
                                                                             ChoiceStorage& storage) {
  const float infinity = __int_as_float(0x7f800000);
  const int lane = threadIdx.x % 32;
  float scores[kOwned];
  float largest = kLowest;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    const int e = lane * kOwned + i;
    const float logit = e < kExperts ? logits(e) : infinity;
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
    storage.scores[e] = scores[i];
    keys.values[i] = kTaken;
    if (e >= kExperts) continue;
    const float choice = fmaxf(HAS_BIAS ? scores[i] + bias[e] : scores[i], kLowest);
    keys.values[i] = order_key(choice);
    if constexpr (kGroups > 1) storage.choices[e] = choice;
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
        const float value = storage.choices[group * kGroupExperts + of_group];
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
    const float score = storage.scores[expert];
    if (lane == 0) {
      ids[slot] = expert;
      storage.chosen[slot] = score;
    }
    total += score;
  }
  const float factor = RENORMALIZE ? scale / (total + kLeastSum) : scale;
  __syncwarp();
  for (int slot = lane; slot < top_k; slot += 32) weights[slot] = storage.chosen[slot] * factor;
}
