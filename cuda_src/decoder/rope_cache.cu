// SPDX-License-Identifier: Apache-2.0
// Applies RMSNorm (with QK_NORM) and RoPE to the heads of k in prefill (rope.cuh has the formulas), and appends k and v
// to the KV cache. Attention does this to q, and decode_attention, in a decode step, to k.
//
//   qkv             X [m, heads + 2 * kv_heads, HEAD_DIM]; a row is any token of any sequence
//   k_norm          float32 [HEAD_DIM], or null
//   cos, sin        float32 [capacity, HEAD_DIM / 2], the RoPE factors of every position
//   lengths         int32 [m], the position of each row; negative for a padding row, which is not written
//   k, v            the KV cache (kv_cache.cuh), whose slots are those of the rows; work is not used
//
// Limits: HEAD_DIM is even. Tokens at positions >= capacity are not written. Architectures: all.
// Each warp computes one KV head of one row.
#include "decoder/kv_cache.cuh"
#include "decoder/rope.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    rope_cache(const X* qkv, const float* k_norm, const float* cos, const float* sin, const int32_t* lengths,
               const int32_t* slots, const int4* work, const int32_t* table, X* k, X* v, int m, int heads, int kv_heads,
               int capacity, int64_t block_stride, float eps) {
  launch_dependents_and_wait();
  const int index = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  const int row = index / kv_heads, kv_head = index % kv_heads;
  if (row >= m) return;
  const int position = lengths[row];
  if (position >= capacity || position < 0) return;

  const int64_t first = static_cast<int64_t>(row) * (heads + 2 * kv_heads) + heads + kv_head;
  const X *const key = qkv + first * kHeadDim, *const value = key + kv_heads * kHeadDim;
  Pairs keys = Pairs::load(key, key + kHalf), values = Pairs::load(value, value + kHalf), weights = {};
  if constexpr (kNorm) weights = Pairs::load(k_norm, k_norm + kHalf);
  const int64_t factors = static_cast<int64_t>(position) * kHalf;
  keys.norm_and_rotate(weights, Pairs::load(cos + factors, sin + factors), eps);
  const int64_t offset = HeadCache(table, slots[row], kv_head, capacity, block_stride).offset(position);
  keys.store(k + offset);
  values.store(v + offset);
}
