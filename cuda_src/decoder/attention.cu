// SPDX-License-Identifier: Apache-2.0
// Causal attention in prefill without tensor cores, for problems that attention_mma does not support:
//
//   q = RoPE(RMSNorm(q))                              rope.cuh; RMSNorm only with QK_NORM
//   out[m, head, :] = sum over p of softmax(scale * q[m, head, :] . k[p, :])[p] * v[p, :]
//
// Row m is any token of any sequence, and attends to the keys p = 0 .. lengths[m] of the sequence. Query head h reads
// KV head h / (heads / kv_heads).
//
//   qkv, q_norm, cos, sin, out: as in attention_mma.cu
//   lengths  int32 [m], the position of each row; -1, that of a padding row, means 0
//   k, v     the KV cache (kv_cache.cuh); work is not used
//
// Limits: HEAD_DIM is a multiple of 8 up to 256. Architectures: all.
// Grid (heads / HEADS, m): a CTA computes one row for HEADS query heads that share a KV head. Each group of LANES lanes
// updates an online softmax over its share of the keys. Groups, then warps, are merged in a fixed order, so results are
// bit-identical from run to run.
#include "decoder/kv_cache.cuh"
#include "decoder/online_softmax.cuh"
#include "decoder/rope.cuh"

constexpr int kUnroll = UNROLL;

extern "C" __global__ void __launch_bounds__(THREADS)
    attention(const X* qkv, const float* q_norm, const float* cos, const float* sin, const X* k, const X* v,
              const int32_t* lengths, const int32_t* slots, const int4* work, const int32_t* table, X* out, int heads,
              int kv_heads, int capacity, int64_t block_stride, float scale_log2, float eps) {
  __shared__ WarpSoftmaxes warp_softmaxes;
  __shared__ alignas(16) X queries[kHeads][kHeadDim];
  launch_dependents_and_wait();
  const int head_block = blockIdx.x, row = blockIdx.y;
  const int position = max(lengths[row], 0), keys = min(position + 1, capacity);
  const int group = threadIdx.x / kLanes, d_begin = threadIdx.x % kLanes * 8;
  const bool has_dims = d_begin < kHeadDim;
  const int kv_head = head_block * kHeads / (heads / kv_heads);
  const HeadCache cache(table, slots[row], kv_head, capacity, block_stride);
  const int64_t factors = static_cast<int64_t>(min(position, capacity - 1)) * kHalf;
  for (int head = threadIdx.x / 32; head < kHeads; head += THREADS / 32) {
    const int64_t index = static_cast<int64_t>(row) * (heads + 2 * kv_heads) + head_block * kHeads + head;
    Pairs pairs = Pairs::load(qkv + index * kHeadDim, qkv + index * kHeadDim + kHalf), weights = {};
    if constexpr (kNorm) weights = Pairs::load(q_norm, q_norm + kHalf);
    pairs.norm_and_rotate(weights, Pairs::load(cos + factors, sin + factors), eps);
    pairs.store(queries[head]);
  }
  __syncthreads();
  float query[kHeads][8];
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    Chunk values = {};
    if (has_dims) load<true>(values, &queries[head][d_begin]);
#pragma unroll
    // The factor log2(e) lets exp2 replace exp in the softmax.
    for (int i = 0; i < 8; ++i) query[head][i] = to_float(values.values[i]) * scale_log2;
  }
  OnlineSoftmax softmax;
  for (int base = 0; base < keys; base += kGroups * kUnroll) {
    Chunk k_chunks[kUnroll] = {}, v_chunks[kUnroll] = {};
    bool is_valid[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int key = base + u * kGroups + group;
      is_valid[u] = key < keys;
      if (is_valid[u] && has_dims) {
        const int64_t offset = cache.offset(key) + d_begin;
        load<true>(k_chunks[u], k + offset);
        load<true>(v_chunks[u], v + offset);
      }
    }
    softmax.add(query, k_chunks, v_chunks, is_valid);
  }
  softmax.merge_groups();
  softmax.store(warp_softmaxes);
  __syncthreads();
  for (int i = 2 * threadIdx.x; i < kHeads * kHeadDim; i += 2 * THREADS) {
    float row_max, row_sum;
    const Vector<float, 2> acc = warp_softmaxes.merge(i / kHeadDim, i % kHeadDim, row_max, row_sum);
    store<true>(out + (static_cast<int64_t>(row) * heads + head_block * kHeads) * kHeadDim + i,
                Vector<X, 2>{from_float<X>(acc.values[0] / row_sum), from_float<X>(acc.values[1] / row_sum)});
  }
}
