// SPDX-License-Identifier: Apache-2.0
// RMSNorm (with QK_NORM) and RoPE of one head of q or k, whose elements a warp holds as pairs (i, i + HEAD_DIM / 2):
//
//   n[i] = x[i] * weight[i] / sqrt(mean of x^2 + eps)
//   out[i]        = n[i] * cos[i] - n[i + half] * sin[i]
//   out[i + half] = n[i + half] * cos[i] + n[i] * sin[i],      i < half = HEAD_DIM / 2
#pragma once

#include "decoder/dependent_launch.cuh"

constexpr int kHeadDim = HEAD_DIM;
constexpr int kHalf = kHeadDim / 2;
constexpr int kPairs = ceil_div(kHalf, 32);  // number of pairs (i, i + HEAD_DIM / 2) per lane
constexpr bool kNorm = QK_NORM;

static_assert(kHeadDim % 2 == 0, "RoPE rotates pairs");

// Two arrays of kHalf values, distributed over a warp: element j of a lane is element i = lane + 32 j of the array.
struct Pairs {
  float first[kPairs], second[kPairs];

  template <class T> static __device__ __forceinline__ Pairs load(const T* a, const T* b) {
    Pairs pairs;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x % 32 + 32 * j;
      pairs.first[j] = i < kHalf ? to_float(a[i]) : 0.0f;
      pairs.second[j] = i < kHalf ? to_float(b[i]) : 0.0f;
    }
    return pairs;
  }
  // Calls take(i, value) for each value of this lane, where i is the dim of the head.
  template <class Take> __device__ __forceinline__ void for_each(Take take) const {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = threadIdx.x % 32 + 32 * j;
      if (i >= kHalf) continue;
      take(i, first[j]);
      take(i + kHalf, second[j]);
    }
  }
  template <class T> __device__ __forceinline__ void store(T* head, float factor = 1.0f) const {
    for_each([&](int i, float value) { head[i] = from_float<T>(value * factor); });
  }
  // Applies RMSNorm with `weight`, then RoPE, to a head; `rotation` has the cosines and sines of the position.
  __device__ __forceinline__ void norm_and_rotate(const Pairs& weight, const Pairs& rotation, float eps) {
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
      first[j] = a * rotation.first[j] - b * rotation.second[j];
      second[j] = b * rotation.first[j] + a * rotation.second[j];
    }
  }
};
