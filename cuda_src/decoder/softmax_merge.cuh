// SPDX-License-Identifier: Apache-2.0
// Merges the online softmaxes of a CTA's warps. The state of an online softmax over some keys is:
//
//   row_max = max of score,  row_sum = sum of 2^(score - row_max),  acc[d] = sum of 2^(score - row_max) * v[d]
//
// Scores are premultiplied by log2(e), so that exp2 replaces exp. The result of attention is acc / row_sum.
#pragma once

#include "decoder/dependent_launch.cuh"

constexpr int kHeads = HEADS;
constexpr float kMinScore = -1e30f;  // the initial maximum: finite, so that kMinScore - kMinScore is 0 and not NaN

struct WarpSoftmaxes {
  static constexpr int kWarps = THREADS / 32;
  float row_max[kWarps][kHeads], row_sum[kWarps][kHeads];
  alignas(16) float acc[kWarps][kHeads][HEAD_DIM + 4];  // 16 bytes of padding avoid bank conflicts between heads

  // Returns acc[d] and acc[d + 1] of a head, merged over all warps; also computes the merged row_max and row_sum.
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
