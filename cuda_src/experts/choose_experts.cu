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

// Returns the index of the largest of `count` values, the lowest among equals; the same for all lanes.
__device__ __forceinline__ int find_largest(const float* values, int count) {
  float best = -__int_as_float(0x7f800000);
  int index = count;
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    if (values[i] > best) {
      best = values[i];
      index = i;
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kFullWarp, best, step);
    const int other_index = __shfl_xor_sync(kFullWarp, index, step);
    if (other > best || (other == best && other_index < index)) {
      best = other;
      index = other_index;
    }
  }
  return index;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    choose_experts(const X* logits, const float* bias, int32_t* ids, float* weights, int m, int top_k, int kept, int ld,
                   float scale) {
  const float infinity = __int_as_float(0x7f800000);
  __shared__ float all_scores[kWarps][kExperts];
  __shared__ float all_choices[kWarps][kExperts];
  __shared__ float all_groups[kWarps][kGroups];
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int lane = threadIdx.x % 32;
  const int token = blockIdx.x * kWarps + threadIdx.x / 32;
  if (token >= m) return;
  float* scores = all_scores[threadIdx.x / 32];
  float* choices = all_choices[threadIdx.x / 32];
  float* groups = all_groups[threadIdx.x / 32];
  float largest = kLowest;
  for (int e = lane; e < kExperts; e += 32) {
    const float logit = to_float(logits[static_cast<int64_t>(token) * ld + e]);
    scores[e] = logit == logit ? logit : -infinity;
    largest = fmaxf(largest, scores[e]);
  }
  largest = warp_max(largest);
  float sum = 0.0f;
  for (int e = lane; e < kExperts; e += 32) {
    scores[e] = SIGMOID ? 1.0f / (1.0f + expf(-scores[e])) : expf(scores[e] - largest);
    sum += scores[e];
  }
  const float inverse = SIGMOID ? 1.0f : 1.0f / (warp_sum(sum) + kLeastSum);
  for (int e = lane; e < kExperts; e += 32) {
    scores[e] *= inverse;
    choices[e] = fmaxf(HAS_BIAS ? scores[e] + bias[e] : scores[e], kLowest);
  }
  __syncwarp();
  if constexpr (kGroups > 1) {
    for (int group = lane; group < kGroups; group += 32) {
      float first = -infinity, second = -infinity;
      for (int i = 0; i < kGroupExperts; ++i) {
        const float value = choices[group * kGroupExperts + i];
        second = fmaxf(second, fminf(first, value));
        first = fmaxf(first, value);
      }
      groups[group] = fmaxf(first + second, kLowest);
    }
    __syncwarp();
    for (int i = 0; i < kept; ++i) {
      const int group = find_largest(groups, kGroups);
      __syncwarp();
      if (lane == 0) groups[group] = -infinity;
      __syncwarp();
    }
    // Chosen groups are marked by -infinity; the experts of all others are dropped, by the same value.
    for (int e = lane; e < kExperts; e += 32) {
      if (groups[e / kGroupExperts] != -infinity) choices[e] = -infinity;
    }
    __syncwarp();
  }
  float total = 0.0f;
  for (int slot = 0; slot < top_k; ++slot) {
    const int expert = find_largest(choices, kExperts);
    __syncwarp();
    if (lane == 0) {
      choices[expert] = -infinity;
      ids[static_cast<int64_t>(token) * top_k + slot] = expert;
      weights[static_cast<int64_t>(token) * top_k + slot] = scores[expert];
    }
    total += scores[expert];
    __syncwarp();
  }
  const float factor = RENORMALIZE ? scale / (total + kLeastSum) : scale;
  __syncwarp();
  for (int slot = lane; slot < top_k; slot += 32) weights[static_cast<int64_t>(token) * top_k + slot] *= factor;
}
