// SPDX-License-Identifier: Apache-2.0
// The merge of the online softmaxes of a CTA's warps. A softmax over some keys is (row_max, row_sum, acc), with
//   row_max = max score, row_sum = sum of 2^(score - row_max), acc[d] = sum of 2^(score - row_max) * v[d]
// and scores to the base 2: exp(x) = 2^(x log2(e)). Its result is acc / row_sum.
#pragma once

#include "llm/dependent_launch.cuh"

constexpr int kHeads = HEADS;
constexpr float kMinScore = -1e30f;  // finite, so that the difference of two is 0 and not NaN

struct WarpSoftmaxes {
  static constexpr int kWarps = THREADS / 32;
  float row_max[kWarps][kHeads], row_sum[kWarps][kHeads];
  alignas(16) float acc[kWarps][kHeads][HEAD_DIM + 4];  // a padding of 16 bytes avoids bank conflicts between heads

  // Return acc[d] and acc[d + 1] of a head over all warps, with the row_max and row_sum that belong to them.
  __device__ __forceinline__ Vector<float, 2> merge(int head, int d, float& merged_max, float& merged_sum) const {
    merged_max = kMinScore;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) merged_max = fmaxf(merged_max, row_max[warp][head]);
    merged_sum = 0.0f;
    Vector<float, 2> result = {};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float factor = exp2f(row_max[warp][head] - merged_max);
      merged_sum += factor * row_sum[warp][head];
      result.values[0] += factor * acc[warp][head][d];
      result.values[1] += factor * acc[warp][head][d + 1];
    }
    return result;
  }
};
