// SPDX-License-Identifier: Apache-2.0
// The softmax-weighted sums of values that each warp of a block has for each of HEADS query heads, and their merging.
#pragma once

#include "llm/begin.cuh"

constexpr int kHeads = HEADS;
constexpr float kLowest = -1e30f;  // finite, so that the difference of two is 0 and not NaN

struct BlockSoftmax {
  static constexpr int kWarps = THREADS / 32;
  float tops[kWarps][kHeads], totals[kWarps][kHeads];
  alignas(16) float sums[kWarps][kHeads][HEAD_DIM + 4];  // 16 bytes more, so that fewer heads lie in the same banks

  // Of the values d and d + 1 of a head, and what they are relative to.
  __device__ __forceinline__ Vector<float, 2> get(int head, int d, float& top, float& total) const {
    top = kLowest;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) top = fmaxf(top, tops[warp][head]);
    total = 0.0f;
    Vector<float, 2> result = {};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float weight = exp2f(tops[warp][head] - top);
      total += weight * totals[warp][head];
      result.values[0] += weight * sums[warp][head][d];
      result.values[1] += weight * sums[warp][head][d + 1];
    }
    return result;
  }
};
