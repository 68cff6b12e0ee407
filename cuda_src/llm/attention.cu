// SPDX-License-Identifier: Apache-2.0
//   out[m, head, :] = sum over keys p of softmax(q[m, head, :] . k[p, :] * scale)[p] * v[p, :]
// where row m = b * steps + s sees the keys 0 .. lengths[b] + s of sequence b.
//
//   q, out    X [m, heads, HEAD_DIM]
//   k, v      X [sequences, kv_heads, capacity, HEAD_DIM], sequences sequence_stride values apart
//   lengths   int32 [sequences]
//   partials  float32 [m, heads / HEADS, splits, HEADS, HEAD_DIM + 2]; counters uint32 [m, heads / HEADS], zeros before
//             and after
//
// HEAD_DIM a multiple of 8 up to 256, any architecture: made for decoding, where it reads each key and value once for
// HEADS query heads that share them; also the way of longer inputs where attention_sm80 cannot go.
//
// grid (splits, heads / HEADS, m). LANES lanes take a key, 8 values each; each such group keeps a softmax of its own
// over its keys. The groups, and then the splits, are merged in a fixed order: the same bits at every run.
#include "llm/begin.cuh"

constexpr int kHeadDim = HEAD_DIM;
constexpr int kHeads = HEADS;
constexpr int kLanes = LANES;
constexpr int kGroups = THREADS / kLanes;
constexpr int kUnroll = UNROLL;
constexpr int kRecord = kHeadDim + 2;
constexpr float kLowest = -1e30f;  // finite, so that the difference of two is 0 and not NaN

static_assert(kLanes * 8 >= kHeadDim && kLanes <= 32 && 32 % kLanes == 0, "a key is a part of a warp");

using Values = Vector<X, 8>;

// Softmax-weighted sums that are relative to different maxima, brought to one.
struct Merge {
  float top = kLowest, total = 0.0f, value = 0.0f;

  __device__ __forceinline__ void add(float other_top, float other_total, float other_value) {
    const float high = fmaxf(top, other_top);
    const float mine = exp2f(top - high), others = exp2f(other_top - high);
    total = total * mine + other_total * others;
    value = value * mine + other_value * others;
    top = high;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    attention(const X* q, const X* k, const X* v, const int32_t* lengths, X* out, float* partials, uint32_t* counters,
              int steps, int heads, int kv_heads, int capacity, int64_t sequence_stride, float scale) {
  __shared__ float tops[kGroups][kHeads];
  __shared__ float totals[kGroups][kHeads];
  __shared__ float sums[kGroups][kHeads][kHeadDim];
  __shared__ bool is_last;
  begin();
  const int split = blockIdx.x, splits = gridDim.x;
  const int part = blockIdx.y, row = blockIdx.z;
  const int sequence = row / steps;
  const int keys = min(lengths[sequence] + row % steps + 1, capacity);
  const int span = ceil_div(ceil_div(keys, splits), kGroups) * kGroups;
  const int key_begin = split * span, key_end = min(keys, key_begin + span);
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const bool has_values = lane * 8 < kHeadDim;
  const int kv_head = part * kHeads / (heads / kv_heads);
  const int64_t cache = sequence * sequence_stride + static_cast<int64_t>(kv_head) * capacity * kHeadDim + lane * 8;

  float query[kHeads][8];
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    Values values = {};
    const int64_t at = (static_cast<int64_t>(row) * heads + part * kHeads + head) * kHeadDim + lane * 8;
    if (has_values) load<true>(values, q + at);
    // exp(x) = 2^(x log2(e)).
#pragma unroll
    for (int i = 0; i < 8; ++i) query[head][i] = to_float(values.values[i]) * scale * 1.4426950408889634f;
  }
  float top[kHeads], total[kHeads], sum[kHeads][8];
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    top[head] = kLowest;
    total[head] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[head][i] = 0.0f;
  }

  for (int base = key_begin; base < key_end; base += kGroups * kUnroll) {
    Values k_values[kUnroll] = {}, v_values[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int key = base + u * kGroups + group;
      if (key < key_end && has_values) {
        load<true>(k_values[u], k + cache + static_cast<int64_t>(key) * kHeadDim);
        load<true>(v_values[u], v + cache + static_cast<int64_t>(key) * kHeadDim);
      }
    }
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      float score[kUnroll];
      float high = top[head];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) dot += query[head][i] * to_float(k_values[u].values[i]);
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(kFullWarp, dot, step);
        score[u] = base + u * kGroups + group < key_end ? dot : __int_as_float(0xff800000);
        high = fmaxf(high, score[u]);
      }
      const float before = exp2f(top[head] - high);
      top[head] = high;
      total[head] *= before;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[head][i] *= before;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const float weight = exp2f(score[u] - high);
        total[head] += weight;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[head][i] += weight * to_float(v_values[u].values[i]);
      }
    }
  }

#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    if (lane == 0) {
      tops[group][head] = top[head];
      totals[group][head] = total[head];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (has_values) sums[group][head][lane * 8 + i] = sum[head][i];
    }
  }
  __syncthreads();

  const int64_t unit = static_cast<int64_t>(row) * gridDim.y + part;
  X* const target = out + (static_cast<int64_t>(row) * heads + part * kHeads) * kHeadDim;
  float* const records = partials + unit * splits * kHeads * kRecord;
  for (int i = threadIdx.x; i < kHeads * kHeadDim; i += THREADS) {
    const int head = i / kHeadDim, d = i % kHeadDim;
    Merge merged;
    for (int other = 0; other < kGroups; ++other) {
      merged.add(tops[other][head], totals[other][head], sums[other][head][d]);
    }
    if (splits == 1) {
      target[i] = from_float<X>(merged.value / merged.total);
      continue;
    }
    float* record = records + (split * kHeads + head) * kRecord;
    __stcg(record + d, merged.value);
    if (d == 0) {
      __stcg(record + kHeadDim, merged.top);
      __stcg(record + kHeadDim + 1, merged.total);
    }
  }
  if (splits == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counters + unit, 1u) == splits - 1;
    if (is_last) counters[unit] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < kHeads * kHeadDim; i += THREADS) {
    const int head = i / kHeadDim, d = i % kHeadDim;
    Merge merged;
    for (int other = 0; other < splits; ++other) {
      const float* record = records + (other * kHeads + head) * kRecord;
      merged.add(__ldcg(record + kHeadDim), __ldcg(record + kHeadDim + 1), __ldcg(record + d));
    }
    target[i] = from_float<X>(merged.value / merged.total);
  }
}
