// SPDX-License-Identifier: Apache-2.0
// A decode step's attention: the new token's q and k are normed and turned (rope.cuh), its k and v join the cache, and
//   out[b, head, :] = sum over keys p of softmax(q[b, head, :] . k[b, p, :] * scale)[p] * v[b, p, :]
// over the keys 0 .. lengths[b] of sequence b.
//
//   qkv             X [m, heads + 2 * kv_heads, HEAD_DIM]: a token of each of m sequences
//   q_norm, k_norm  float32 [HEAD_DIM], or null
//   cos, sin        float32 [capacity, HEAD_DIM / 2]
//   lengths         int32 [m]: positions of the new tokens; one beyond the capacity joins nothing
//   k, v            X [m, kv_heads, capacity, HEAD_DIM], sequences sequence_stride values apart
//   out             X [m, heads, HEAD_DIM]
//   partials        float32 [m, heads / HEADS, MAX_SPLITS, HEADS, HEAD_DIM + 2]
//   counters        uint32 [m, heads / HEADS], zeros before and after
//   next            what is asked for ahead (begin.cuh)
//
// HEAD_DIM a multiple of 8 up to 256, any architecture. Every key is read once for HEADS query heads that share it.
//
// grid (splits, heads / HEADS, m): as many of the splits as have SPAN keys or more are at work, whatever the length is
// when the launch is captured. Each group of LANES lanes keeps a softmax of its own. Groups, warps, and then splits,
// are merged in a fixed order: the same bits at every run.
//
// Programmatic dependent launch: `lengths` and what the cache holds already are read before griddepcontrol.wait. Steps
// begin with `embed`, which is launched only when all before it has ended.
#include "llm/rope.cuh"
#include "llm/softmax.cuh"

constexpr int kWarps = THREADS / 32;
constexpr int kUnroll = UNROLL;
constexpr int kMaxSplits = MAX_SPLITS;
constexpr int kRecord = kHeadDim + 2;

static_assert(kMaxSplits <= 32, "a lane weighs a split");

extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 128 ? 1
                                                      : kHeads > 4  ? 2
                                                                    : 3)
    decode_attention(const X* qkv, const float* q_norm, const float* k_norm, const float* cos, const float* sin,
                     const int32_t* lengths, X* k, X* v, X* out, float* partials, uint32_t* counters,
                     const uint8_t* next, int heads, int kv_heads, int capacity, int runs, int run_bytes,
                     int ahead_bytes, int64_t sequence_stride, float scale, float eps) {
  __shared__ BlockSoftmax block;
  __shared__ alignas(16) float queries[kHeads][kHeadDim];
  __shared__ alignas(16) X new_key[kHeadDim];
  __shared__ alignas(16) X new_value[kHeadDim];
  __shared__ float weights[kHeads][kMaxSplits];
  __shared__ bool is_last;
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int split = blockIdx.x, part = blockIdx.y, row = blockIdx.z;
  const int blocks = gridDim.x * gridDim.y * gridDim.z;
  ask_ahead(next, runs, run_bytes, ahead_bytes, (row * gridDim.y + part) * gridDim.x + split, blocks);
  const int position = lengths[row];
  const int keys = min(position, capacity);  // that are in the cache
  const int span = max(SPAN, ceil_div(ceil_div(keys, static_cast<int>(gridDim.x)), kGroups) * kGroups);
  const int splits = max(1, ceil_div(keys, span));
  if (split >= splits) return;
  const int key_begin = split * span, key_end = min(keys, key_begin + span);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
  const Pairs turn = Pairs::load(cos + at, sin + at);
  Pairs q_weight = {}, k_weight = {};
  if constexpr (kNorm) {
    q_weight = Pairs::load(q_norm, q_norm + kHalf);
    k_weight = Pairs::load(k_norm, k_norm + kHalf);
  }
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();

  // A warp takes a head of q, or the new key or value.
  const bool appends = split == splits - 1 && position < capacity;
  for (int unit = warp; unit < kHeads + (appends ? 2 : 0); unit += kWarps) {
    const bool is_q = unit < kHeads, is_v = unit == kHeads + 1;
    const int head = is_q ? part * kHeads + unit : heads + (is_v ? kv_heads : 0) + kv_head;
    const X* in = qkv + (static_cast<int64_t>(row) * (heads + 2 * kv_heads) + head) * kHeadDim;
    Pairs pairs = Pairs::load(in, in + kHalf);
    if (is_q) {
      pairs.norm_and_turn(q_weight, turn, eps);
      pairs.store(queries[unit], scale * 1.4426950408889634f);  // exp(x) = 2^(x log2(e))
    } else {
      if (!is_v) pairs.norm_and_turn(k_weight, turn, eps);
      pairs.store(is_v ? new_value : new_key);
      pairs.store((is_v ? v : k) + cache + static_cast<int64_t>(position) * kHeadDim);
    }
  }
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
  block.put(softmax);
  __syncthreads();

  const int64_t unit = static_cast<int64_t>(row) * gridDim.y + part;
  X* const target = out + (static_cast<int64_t>(row) * heads + part * kHeads) * kHeadDim;
  float* const records = partials + unit * kMaxSplits * kHeads * kRecord;
  auto finish = [&](int i, float first, float second) {
    store<true>(target + i, Vector<X, 2>{from_float<X>(first), from_float<X>(second)});
  };
  for (int i = 2 * threadIdx.x; i < kHeads * kHeadDim; i += 2 * THREADS) {
    const int head = i / kHeadDim, d = i % kHeadDim;
    float top, total;
    const Vector<float, 2> sums = block.get(head, d, top, total);
    if (splits == 1) {
      finish(i, sums.values[0] / total, sums.values[1] / total);
      continue;
    }
    float* record = records + (split * kHeads + head) * kRecord;
    __stcg(reinterpret_cast<float2*>(record + d), float2{sums.values[0], sums.values[1]});
    if (d == 0) __stcg(reinterpret_cast<float2*>(record + kHeadDim), float2{top, total});
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
  float2 sums[kMaxSplits];
  auto fetch_sums = [&](int i) {
#pragma unroll
    for (int other = 0; other < kMaxSplits; ++other) {
      const float* record = records + (other * kHeads + i / kHeadDim) * kRecord + i % kHeadDim;
      sums[other] = other < splits ? __ldcg(reinterpret_cast<const float2*>(record)) : float2{0.0f, 0.0f};
    }
  };
  const int first = 2 * threadIdx.x;
  if (first < kHeads * kHeadDim) fetch_sums(first);
  for (int head = warp; head < kHeads; head += kWarps) {
    float2 weight = {kLowest, 0.0f};  // top and total of a split
    if (lane < splits) {
      weight = __ldcg(reinterpret_cast<const float2*>(records + (lane * kHeads + head) * kRecord + kHeadDim));
    }
    const float factor = exp2f(weight.x - warp_max(weight.x));
    const float total = warp_sum(factor * weight.y);
    if (lane < kMaxSplits) weights[head][lane] = factor / total;
  }
  __syncthreads();
  for (int i = first; i < kHeads * kHeadDim; i += 2 * THREADS) {
    if (i != first) fetch_sums(i);
    float2 all = {0.0f, 0.0f};
#pragma unroll
    for (int other = 0; other < kMaxSplits; ++other) {
      const float weight = weights[i / kHeadDim][other];
      all.x += weight * sums[other].x;
      all.y += weight * sums[other].y;
    }
    finish(i, all.x, all.y);
  }
}
