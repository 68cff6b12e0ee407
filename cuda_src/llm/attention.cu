// SPDX-License-Identifier: Apache-2.0
//   out[m, head, :] = sum over keys p of softmax(q[m, head, :] . k[p, :] * scale)[p] * v[p, :]
// where row m = b * steps + s sees the keys 0 .. lengths[b] + s of sequence b.
//
//   q, out    X [m, heads, HEAD_DIM]
//   k, v      X [sequences, kv_heads, capacity, HEAD_DIM], sequences sequence_stride values apart
//   lengths   int32 [sequences]
//
// HEAD_DIM a multiple of 8 up to 256, any architecture: prompts where attention_sm80 cannot go.
//
// grid (heads / HEADS, m). Each group of LANES lanes keeps a softmax of its own over its keys. Groups, and then warps,
// are merged in a fixed order: the same bits at every run.
#include "llm/softmax.cuh"

constexpr int kHeadDim = HEAD_DIM;
constexpr int kUnroll = UNROLL;

extern "C" __global__ void __launch_bounds__(THREADS)
    attention(const X* q, const X* k, const X* v, const int32_t* lengths, X* out, int steps, int heads, int kv_heads,
              int capacity, int64_t sequence_stride, float scale) {
  __shared__ BlockSoftmax block;
  begin();
  const int part = blockIdx.x, row = blockIdx.y;
  const int sequence = row / steps;
  const int keys = min(lengths[sequence] + row % steps + 1, capacity);
  const int group = threadIdx.x / kLanes, d_begin = threadIdx.x % kLanes * 8;
  const bool has_values = d_begin < kHeadDim;
  const int kv_head = part * kHeads / (heads / kv_heads);
  const int64_t cache = sequence * sequence_stride + static_cast<int64_t>(kv_head) * capacity * kHeadDim + d_begin;
  const int64_t target = (static_cast<int64_t>(row) * heads + part * kHeads) * kHeadDim;

  float query[kHeads][8];
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    Values values = {};
    if (has_values) load<true>(values, q + target + head * kHeadDim + d_begin);
    // exp(x) = 2^(x log2(e)).
#pragma unroll
    for (int i = 0; i < 8; ++i) query[head][i] = to_float(values.values[i]) * scale * 1.4426950408889634f;
  }
  Softmax softmax;
  for (int base = 0; base < keys; base += kGroups * kUnroll) {
    Values k_values[kUnroll] = {}, v_values[kUnroll] = {};
    bool valid[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int key = base + u * kGroups + group;
      valid[u] = key < keys;
      if (valid[u] && has_values) {
        load<true>(k_values[u], k + cache + static_cast<int64_t>(key) * kHeadDim);
        load<true>(v_values[u], v + cache + static_cast<int64_t>(key) * kHeadDim);
      }
    }
    softmax.add(query, k_values, v_values, valid);
  }
  softmax.merge_groups();
  softmax.put(block);
  __syncthreads();
  for (int i = 2 * threadIdx.x; i < kHeads * kHeadDim; i += 2 * THREADS) {
    float top, total;
    const Vector<float, 2> sums = block.get(i / kHeadDim, i % kHeadDim, top, total);
    store<true>(out + target + i,
                Vector<X, 2>{from_float<X>(sums.values[0] / total), from_float<X>(sums.values[1] / total)});
  }
}
