// SPDX-License-Identifier: Apache-2.0
// The attention of a decode step without tensor cores, for problems that decode_attention_mma does not support:
//
//   out[b, head, :] = sum over p <= position[b] of softmax(scale * q[b, head, :] . k[b, p, :])[p] * v[b, p, :]
//
// The kernel first applies RoPE to q and k and appends k and v to the KV cache. decode_step.cuh describes arguments,
// grid and PDL.
//
// Limits: HEAD_DIM is a multiple of 8 up to 256. Architectures: all.
// A CTA loads each key once for the HEADS query heads that share the key. Each group of LANES lanes updates an online
// softmax over its share of the keys.
#include "decoder/decode_step.cuh"
#include "decoder/online_softmax.cuh"

constexpr int kUnroll = UNROLL;

extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 128 ? 1 : 2)
    decode_attention(const X* qkv, const float* q_norm, const float* k_norm, const float* cos, const float* sin,
                     const int32_t* lengths, const int32_t* slots, const int4* work, const int32_t* table, X* k, X* v,
                     X* out, float* partials, uint32_t* counters, POSITIONS_PARAMETER int capacity,
                     int64_t block_stride, float scale, float eps) {
  __shared__ WarpSoftmaxes warp_softmaxes;
  __shared__ alignas(16) float queries[kHeads][kHeadDim];
  __shared__ alignas(16) X new_key[kHeadDim];
  __shared__ alignas(16) X new_value[kHeadDim];
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  Items items(work, 0);
  if (!items.any()) return;
  do {
    const int head_block = items.head_block, row = items.row, split = items.split, splits = items.splits;
    const int item = items.index(), position = max(items.position, 0);
    const int keys = min(position + kAppended, capacity);  // number of keys in the cache before the launch
    const int key_begin = split * items.split_keys, key_end = min(keys, key_begin + items.split_keys);
    const int group = threadIdx.x / kLanes, d_begin = threadIdx.x % kLanes * 8;
    const bool has_dims = d_begin < kHeadDim;
    const HeadCache cache(table, items.slot, head_block / kGroupBlocks, capacity, block_stride);

    Chunk k_chunks[kUnroll], v_chunks[kUnroll];
    bool is_valid[kUnroll];
    auto fetch = [&](int base) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int key = base + u * kGroups + group;
        is_valid[u] = key < key_end;
        k_chunks[u] = {};
        v_chunks[u] = {};
        if (is_valid[u] && has_dims) {
          const int64_t offset = cache.offset(key) + d_begin;
          load<true>(k_chunks[u], k + offset);
          load<true>(v_chunks[u], v + offset);
        }
      }
    };
    fetch(key_begin);
    const int64_t factor_offset = static_cast<int64_t>(min(position, capacity - 1)) * kHalf;
    const TokenFactors token(cos + factor_offset, sin + factor_offset, q_norm, k_norm);
    if constexpr (DEPENDENT) ptx::griddepcontrol_wait();

    const bool appends = !kAppended && split == splits - 1 && position < capacity;
    const int64_t append_offset = cache.offset(position, items.new_place);
    // Scores are multiplied by log2(e) beforehand, so that exp2 replaces exp.
    token.rotate_and_append(
        qkv + static_cast<int64_t>(row) * kQkvWidth, head_block, eps, appends, items.position < 0, new_key, new_value,
        k + append_offset, v + append_offset,
        [&](int head, const Pairs& pairs) { pairs.store(queries[head], scale * 1.4426950408889634f); });
    __syncthreads();

    float query[kHeads][8];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        Vector<float, 4> values = {};
        if (has_dims) load<true>(values, &queries[head][d_begin + i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) query[head][i + j] = values.values[j];
      }
    }
    OnlineSoftmax softmax;
    for (int base = key_begin; base < key_end; base += kGroups * kUnroll) {
      if (base != key_begin) fetch(base);
      softmax.add(query, k_chunks, v_chunks, is_valid);
    }
    if (appends) {
      Chunk key[1] = {}, value[1] = {};
      const bool is_own_key[1] = {group == 0};
      if (has_dims) {
        load<true>(key[0], new_key + d_begin);
        load<true>(value[0], new_value + d_begin);
      }
      softmax.add(query, key, value, is_own_key);
    }
    softmax.merge_groups();
    softmax.store(warp_softmaxes);
    __syncthreads();
    merge_splits(warp_softmaxes, split, splits, Output(out, POSITIONS_ARGUMENT, row, head_block), partials, counters,
                 item);
  } while (items.next());
}
