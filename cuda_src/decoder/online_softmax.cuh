// SPDX-License-Identifier: Apache-2.0
// An online softmax (softmax_merge.cuh) for HEADS query heads, which a group of LANES lanes updates key by key. Lane l
// of the group holds dims 8 l .. 8 l + 7 of the HEAD_DIM dims of a head.
#pragma once

#include "decoder/softmax_merge.cuh"

constexpr int kLanes = LANES;
constexpr int kGroups = THREADS / kLanes;

static_assert(kLanes * 8 >= HEAD_DIM && kLanes <= 32 && 32 % kLanes == 0,
              "a group of lanes covers a head and divides a warp");

using Chunk = Vector<X, 8>;

struct OnlineSoftmax {
  float row_max[kHeads], row_sum[kHeads], acc[kHeads][8];

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      row_max[head] = kMinScore;
      row_sum[head] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[head][i] = 0.0f;
    }
  }

  // Adds COUNT keys and values to the softmax of each group; keys with is_valid = false are masked. `query` is
  // premultiplied by scale * log2(e). All lanes of a warp must call this function.
  template <int COUNT> __device__ __forceinline__ void add(const float (&query)[kHeads][8], const Chunk (&keys)[COUNT],
                                                           const Chunk (&values)[COUNT],
                                                           const bool (&is_valid)[COUNT]) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      float score[COUNT];
      float new_max = row_max[head];
#pragma unroll
      for (int u = 0; u < COUNT; ++u) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) dot += query[head][i] * to_float(keys[u].values[i]);
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(kFullWarp, dot, step);
        score[u] = is_valid[u] ? dot : __int_as_float(0xff800000);  // a masked key gets weight 0
        new_max = fmaxf(new_max, score[u]);
      }
      const float rescale = exp2f(row_max[head] - new_max);
      row_max[head] = new_max;
      row_sum[head] *= rescale;
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[head][i] *= rescale;
#pragma unroll
      for (int u = 0; u < COUNT; ++u) {
        const float weight = exp2f(score[u] - new_max);
        row_sum[head] += weight;
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[head][i] += weight * to_float(values[u].values[i]);
      }
    }
  }

  // Merges the softmaxes of all groups of a warp; every group gets the result.
  __device__ __forceinline__ void merge_groups() {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        const float other_max = __shfl_xor_sync(kFullWarp, row_max[head], step);
        const float new_max = fmaxf(row_max[head], other_max);
        const float rescale = exp2f(row_max[head] - new_max), other_rescale = exp2f(other_max - new_max);
        row_max[head] = new_max;
        row_sum[head] = row_sum[head] * rescale + __shfl_xor_sync(kFullWarp, row_sum[head], step) * other_rescale;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float other = __shfl_xor_sync(kFullWarp, acc[head][i], step);
          acc[head][i] = acc[head][i] * rescale + other * other_rescale;
        }
      }
    }
  }

  // Stores the softmax of the warp, which all its groups hold after merging, to shared memory; only the first group
  // stores.
  __device__ __forceinline__ void store(WarpSoftmaxes& out) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane >= kLanes) return;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (lane == 0) {
        out.row_max[warp][head] = row_max[head];
        out.row_sum[warp][head] = row_sum[head];
      }
      if (lane * 8 < HEAD_DIM) {
        ::store<true>(&out.acc[warp][head][lane * 8], reinterpret_cast<const Vector<float, 4>&>(acc[head][0]));
        ::store<true>(&out.acc[warp][head][lane * 8 + 4], reinterpret_cast<const Vector<float, 4>&>(acc[head][4]));
      }
    }
  }
};
