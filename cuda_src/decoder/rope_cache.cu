// SPDX-License-Identifier: Apache-2.0
// Applies RMSNorm (with QK_NORM) and RoPE to the heads of q and k in prefill (rope.cuh has the formulas), and appends k
// and v to the KV cache. In a decode step, decode_attention does this.
//
//   qkv             X [m, heads + 2 * kv_heads, HEAD_DIM]; a row is any token of any sequence
//   q_norm, k_norm  float32 [HEAD_DIM], or null
//   cos, sin        float32 [capacity, HEAD_DIM / 2], the RoPE factors of every position
//   lengths         int32 [m], the position of each row; negative for a padding row, which is not written
//   k, v            the KV cache (kv_cache.cuh), whose slots are those of the rows; work is not used
//   q               X [m, heads, HEAD_DIM]
//
// Limits: HEAD_DIM is even. Tokens at positions >= capacity are not written. Architectures: all.
// Each warp computes one head of one row.
#include "decoder/kv_cache.cuh"
#include "decoder/rope.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    rope_cache(const X* qkv, const float* q_norm, const float* k_norm, const float* cos, const float* sin,
               const int32_t* lengths, const int32_t* slots, const int4* work, const int32_t* table, X* q, X* k, X* v,
               int m, int heads, int kv_heads, int capacity, int64_t block_stride, float eps) {
  launch_dependents_and_wait();
  const int all_heads = heads + 2 * kv_heads;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  const int row = static_cast<int>(index / all_heads), head = static_cast<int>(index % all_heads);
  if (row >= m) return;
  const int position = lengths[row];
  if (position >= capacity || position < 0) return;

  const X* in = qkv + index * kHeadDim;
  Pairs pairs = Pairs::load(in, in + kHalf);
  const bool is_q = head < heads, is_v = head >= heads + kv_heads;
  if (!is_v) {
    const int64_t factor_offset = static_cast<int64_t>(position) * kHalf;
    const float* weight = is_q ? q_norm : k_norm;
    Pairs weights = {};
    if constexpr (kNorm) weights = Pairs::load(weight, weight + kHalf);
    pairs.norm_and_rotate(weights, Pairs::load(cos + factor_offset, sin + factor_offset), eps);
  }
  const int kv_head = (head - heads) % kv_heads;
  const HeadCache cache(table, slots[row], kv_head, capacity, block_stride);
  const int64_t cache_offset = cache.offset(position);
  pairs.store(is_q ? q + (static_cast<int64_t>(row) * heads + head) * kHeadDim : (is_v ? v : k) + cache_offset);
}
