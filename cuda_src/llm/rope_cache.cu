// SPDX-License-Identifier: Apache-2.0
// Norm (QK_NORM) and RoPE of the heads of q and k; k and v join the cache, where each sequence goes on.
//   normed[i] = x[i] * weight[i] / sqrt(mean of x^2 + eps)
//   out[i] = normed[i] * cos - normed[i + half] * sin,  out[i + half] = normed[i + half] * cos + normed[i] * sin
//
//   qkv             X [m, heads + 2 * kv_heads, HEAD_DIM], row b * steps + s: token s of sequence b
//   q_norm, k_norm  float32 [HEAD_DIM], or null
//   cos, sin        float32 [capacity, HEAD_DIM / 2]
//   lengths         int32 [sequences]: position of a sequence's first token here
//   q               X [m, heads, HEAD_DIM]
//   k, v            X [sequences, kv_heads, capacity, HEAD_DIM], sequences sequence_stride values apart
//
// HEAD_DIM even, any architecture. A warp takes a head; what is beyond the capacity is not written.
#include "llm/begin.cuh"

constexpr int kHeadDim = HEAD_DIM;
constexpr int kHalf = kHeadDim / 2;
constexpr int kPairs = ceil_div(kHalf, 32);  // of a lane
constexpr bool kNorm = QK_NORM;

extern "C" __global__ void __launch_bounds__(THREADS)
    rope_cache(const X* qkv, const float* q_norm, const float* k_norm, const float* cos, const float* sin,
               const int32_t* lengths, X* q, X* k, X* v, int m, int steps, int heads, int kv_heads, int capacity,
               int64_t sequence_stride, float eps) {
  begin();
  const int all_heads = heads + 2 * kv_heads;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  const int row = static_cast<int>(index / all_heads), head = static_cast<int>(index % all_heads);
  if (row >= m) return;
  const int lane = threadIdx.x % 32;
  const int sequence = row / steps;
  const int position = lengths[sequence] + row % steps;
  if (position >= capacity) return;

  float first[kPairs], second[kPairs];
  const X* in = qkv + index * kHeadDim;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = lane + 32 * j;
    first[j] = i < kHalf ? to_float(in[i]) : 0.0f;
    second[j] = i < kHalf ? to_float(in[i + kHalf]) : 0.0f;
  }
  const bool is_q = head < heads, is_v = head >= heads + kv_heads;
  if (!is_v) {
    float scale = 1.0f;
    const float* weight = is_q ? q_norm : k_norm;
    if constexpr (kNorm) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) sum += first[j] * first[j] + second[j] * second[j];
      scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(kHeadDim) + eps);
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= kHalf) continue;
      float a = first[j], b = second[j];
      if constexpr (kNorm) {
        a *= scale * weight[i];
        b *= scale * weight[i + kHalf];
      }
      const float c = cos[static_cast<int64_t>(position) * kHalf + i];
      const float s = sin[static_cast<int64_t>(position) * kHalf + i];
      first[j] = a * c - b * s;
      second[j] = b * c + a * s;
    }
  }
  const int kv_head = (head - heads) % kv_heads;
  const int64_t place = sequence * sequence_stride + (static_cast<int64_t>(kv_head) * capacity + position) * kHeadDim;
  X* out = is_q ? q + (static_cast<int64_t>(row) * heads + head) * kHeadDim : (is_v ? v : k) + place;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= kHalf) continue;
    out[i] = from_float<X>(first[j]);
    out[i + kHalf] = from_float<X>(second[j]);
  }
}
