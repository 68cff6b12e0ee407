// SPDX-License-Identifier: Apache-2.0
// A decode step's attention: the new token's q and k are normed and turned (rope.cuh), its k and v join the cache, and
//   out[b, head, :] = sum over keys p of softmax(q[b, head, :] . k[b, p, :] * scale)[p] * v[b, p, :]
// over the keys 0 .. lengths[b] of sequence b. decode.cuh tells the arguments, the grid, and what is read ahead.
//
// HEAD_DIM a multiple of 8 up to 256, any architecture: where decode_attention_sm80 cannot go. Every key is read once
// for HEADS query heads that share it. Each group of LANES lanes keeps a softmax of its own.
#include "llm/decode.cuh"
#include "llm/softmax.cuh"

constexpr int kUnroll = UNROLL;

extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 128 ? 1
                                                      : kHeads > 4  ? 2
                                                                    : 3)
    decode_attention(const X* qkv, const float* q_norm, const float* k_norm, const float* cos, const float* sin,
                     const int32_t* lengths, X* k, X* v, X* out, float* partials, uint32_t* counters, int heads,
                     int kv_heads, int capacity, int64_t sequence_stride, float scale, float eps) {
  __shared__ BlockSoftmax block;
  __shared__ alignas(16) float queries[kHeads][kHeadDim];
  __shared__ alignas(16) X new_key[kHeadDim];
  __shared__ alignas(16) X new_value[kHeadDim];
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int split = blockIdx.x, part = blockIdx.y, row = blockIdx.z;
  const int unit = row * gridDim.y + part;
  const int position = lengths[row];
  const int keys = min(position, capacity);  // that are in the cache
  const int span = max(MIN_SPLIT_KEYS, ceil_div(ceil_div(keys, static_cast<int>(gridDim.x)), kGroups) * kGroups);
  const int splits = max(1, ceil_div(keys, span));
  if (split >= splits) return;
  const int key_begin = split * span, key_end = min(keys, key_begin + span);
  const int group = threadIdx.x / kLanes, d_begin = threadIdx.x % kLanes * 8;
  const bool has_values = d_begin < kHeadDim;
  const int kv_head = part * kHeads / (heads / kv_heads);
  const int64_t cache = row * sequence_stride + static_cast<int64_t>(kv_head) * capacity * kHeadDim;

  Values k_values[kUnroll], v_values[kUnroll];
  bool valid[kUnroll];
  auto fetch = [&](int base) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int key = base + u * kGroups + group;
      valid[u] = key < key_end;
      k_values[u] = {};
      v_values[u] = {};
      if (valid[u] && has_values) {
        load<true>(k_values[u], k + cache + static_cast<int64_t>(key) * kHeadDim + d_begin);
        load<true>(v_values[u], v + cache + static_cast<int64_t>(key) * kHeadDim + d_begin);
      }
    }
  };
  fetch(key_begin);
  const int64_t at = static_cast<int64_t>(min(position, capacity - 1)) * kHalf;
  const Token token(cos + at, sin + at, q_norm, k_norm);
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();

  const bool appends = split == splits - 1 && position < capacity;
  const int64_t joins = cache + static_cast<int64_t>(position) * kHeadDim;
  token.join(qkv + static_cast<int64_t>(row) * (heads + 2 * kv_heads) * kHeadDim, heads, kv_heads, part, kv_head, eps,
             appends, new_key, new_value, k + joins, v + joins, [&](int head, const Pairs& pairs) {
               pairs.store(queries[head], scale * 1.4426950408889634f);  // exp(x) = 2^(x log2(e))
             });
  __syncthreads();

  float query[kHeads][8];
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      Vector<float, 4> values = {};
      if (has_values) load<true>(values, &queries[head][d_begin + i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) query[head][i + j] = values.values[j];
    }
  }
  Softmax softmax;
  for (int base = key_begin; base < key_end; base += kGroups * kUnroll) {
    if (base != key_begin) fetch(base);
    softmax.add(query, k_values, v_values, valid);
  }
  if (appends) {
    Values key[1] = {}, value[1] = {};
    const bool is_mine[1] = {group == 0};
    if (has_values) {
      load<true>(key[0], new_key + d_begin);
      load<true>(value[0], new_value + d_begin);
    }
    softmax.add(query, key, value, is_mine);
  }
  softmax.merge_groups();
  softmax.put(block);
  __syncthreads();
  merge_splits(block, split, splits, out + (static_cast<int64_t>(row) * heads + part * kHeads) * kHeadDim,
               partials + static_cast<int64_t>(unit) * kMaxSplits * kHeads * kSplitFloats, counters + unit);
}
