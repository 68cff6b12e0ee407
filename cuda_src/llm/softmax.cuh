// SPDX-License-Identifier: Apache-2.0
// The softmax-weighted sum of values that a group of LANES lanes keeps for each of HEADS query heads, key by key; lane
// l has the values 8 l to 8 l + 7 of a head of HEAD_DIM.
#pragma once

#include "llm/block_softmax.cuh"

constexpr int kLanes = LANES;
constexpr int kGroups = THREADS / kLanes;

static_assert(kLanes * 8 >= HEAD_DIM && kLanes <= 32 && 32 % kLanes == 0, "a key is a part of a warp");

using Values = Vector<X, 8>;

struct Softmax {
  float top[kHeads], total[kHeads], sum[kHeads][8];

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      top[head] = kLowest;
      total[head] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[head][i] = 0.0f;
    }
  }

  // COUNT keys of each group, of which those count that are valid; scores are to the base 2. All lanes of a warp call.
  template <int COUNT>
  __device__ __forceinline__ void add(const float (&query)[kHeads][8], const Values (&keys)[COUNT],
                                      const Values (&values)[COUNT], const bool (&valid)[COUNT]) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      float score[COUNT];
      float high = top[head];
#pragma unroll
      for (int u = 0; u < COUNT; ++u) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) dot += query[head][i] * to_float(keys[u].values[i]);
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(kFullWarp, dot, step);
        score[u] = valid[u] ? dot : __int_as_float(0xff800000);
        high = fmaxf(high, score[u]);
      }
      const float before = exp2f(top[head] - high);
      top[head] = high;
      total[head] *= before;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[head][i] *= before;
#pragma unroll
      for (int u = 0; u < COUNT; ++u) {
        const float weight = exp2f(score[u] - high);
        total[head] += weight;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[head][i] += weight * to_float(values[u].values[i]);
      }
    }
  }

  // Every group of the warp gets the sums of all of them.
  __device__ __forceinline__ void merge_groups() {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        const float other = __shfl_xor_sync(kFullWarp, top[head], step);
        const float high = fmaxf(top[head], other);
        const float mine = exp2f(top[head] - high), others = exp2f(other - high);
        top[head] = high;
        total[head] = total[head] * mine + __shfl_xor_sync(kFullWarp, total[head], step) * others;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[head][i] = sum[head][i] * mine + __shfl_xor_sync(kFullWarp, sum[head][i], step) * others;
        }
      }
    }
  }

  // The first group of each warp writes what the warp has.
  __device__ __forceinline__ void put(BlockSoftmax& block) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane >= kLanes) return;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (lane == 0) {
        block.tops[warp][head] = top[head];
        block.totals[warp][head] = total[head];
      }
      if (lane * 8 < HEAD_DIM) {
        store<true>(&block.sums[warp][head][lane * 8], reinterpret_cast<const Vector<float, 4>&>(sum[head][0]));
        store<true>(&block.sums[warp][head][lane * 8 + 4], reinterpret_cast<const Vector<float, 4>&>(sum[head][4]));
      }
    }
  }
};
