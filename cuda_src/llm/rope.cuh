// SPDX-License-Identifier: Apache-2.0
// Norm (QK_NORM) and RoPE of a head of HEAD_DIM values, which a warp holds in pairs.
//   normed[i] = x[i] * weight[i] / sqrt(mean of x^2 + eps)
//   out[i] = normed[i] * cos - normed[i + half] * sin,  out[i + half] = normed[i + half] * cos + normed[i] * sin
#pragma once

#include "llm/begin.cuh"

constexpr int kHeadDim = HEAD_DIM;
constexpr int kHalf = kHeadDim / 2;
constexpr int kPairs = ceil_div(kHalf, 32);  // of a lane
constexpr bool kNorm = QK_NORM;

static_assert(kHeadDim % 2 == 0, "RoPE turns pairs");

// (lane, j) -> i = lane + 32 j of each of two arrays of kHalf values.
struct Pairs {
  float first[kPairs], second[kPairs];

  template <class T>
  static __device__ __forceinline__ Pairs load(const T* a, const T* b) {
    Pairs pairs;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x % 32 + 32 * j;
      pairs.first[j] = i < kHalf ? to_float(a[i]) : 0.0f;
      pairs.second[j] = i < kHalf ? to_float(b[i]) : 0.0f;
    }
    return pairs;
  }
  // take(i, value) for each of this lane's values.
  template <class Take>
  __device__ __forceinline__ void each(Take take) const {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x % 32 + 32 * j;
      if (i >= kHalf) continue;
      take(i, first[j]);
      take(i + kHalf, second[j]);
    }
  }
  template <class T>
  __device__ __forceinline__ void store(T* head, float factor = 1.0f) const {
    each([&](int i, float value) { head[i] = from_float<T>(value * factor); });
  }
  // weight: of the norm; turn: cos and sin.
  __device__ __forceinline__ void norm_and_turn(const Pairs& weight, const Pairs& turn, float eps) {
    if constexpr (kNorm) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) sum += first[j] * first[j] + second[j] * second[j];
      const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(kHeadDim) + eps);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        first[j] *= scale * weight.first[j];
        second[j] *= scale * weight.second[j];
      }
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float a = first[j], b = second[j];
      first[j] = a * turn.first[j] - b * turn.second[j];
      second[j] = b * turn.first[j] + a * turn.second[j];
    }
  }
};
