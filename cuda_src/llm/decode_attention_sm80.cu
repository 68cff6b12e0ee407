// SPDX-License-Identifier: Apache-2.0
// A decode step's attention: the new token's q and k are normed and turned (rope.cuh), its k and v join the cache, and
//   out[b, head, :] = sum over keys p of softmax(q[b, head, :] . k[b, p, :] * scale)[p] * v[b, p, :]
// over the keys 0 .. lengths[b] of sequence b. decode.cuh tells the arguments, the grid, and what is read ahead; up to
// UNSPLIT_KEYS keys are one split.
//
// HEAD_DIM a multiple of 64 up to 256, up to 16 HEADS that share a key; sm_80 and newer. q and probabilities are
// rounded to X, as in attention_sm80.
//
// A warp takes WARP_KEYS keys at a time, and the loads of its next ones are under way meanwhile; warps take turns. Operands
// come straight from global memory to registers, 16 bytes a load:
//   scores [16 heads, 8 keys] = q k^T: a sum over dims may be taken in any order, so lane t of a key loads the adjacent
//     dims 8t .. 8t + 7 of 32, whose four pairs serve as those that two instructions want at 2t and 2t + 8; q lies in
//     shared memory in the same order.
//   sums^T [16 dims, 8 heads] = v^T p^T: the accumulators of scores are, rounded, the operand p^T, and up to 8
//     heads take half the registers of 16. Lane (g, t) loads dims 8g .. 8g + 7 of 64 of the keys 2t, 2t + 1,
//     2t + 8, 2t + 9, and row g of instruction j stands for dim 8g + 2j, row g + 8 for dim 8g + 2j + 1.
#include "llm/decode.cuh"
#include "common/mma.cuh"
#include "ptx/ld.cuh"
#include "ptx/prefetch.cuh"

constexpr int kWarpKeys = WARP_KEYS;
constexpr int kSteps = kWarpKeys / 16;
constexpr int kChunks = kHeadDim / 32;
constexpr int kPieces = kHeadDim / 64;
constexpr int kTiles = ceil_div(kHeads, 8);

static_assert(kWarpKeys % 16 == 0 && MIN_SPLIT_KEYS % kWarpKeys == 0, "an instruction sums over 16 keys");
static_assert(kHeadDim % 64 == 0 && kHeads <= 16, "a lane's loads and the operands' rows");

using Words = Vector<uint32_t, 4>;

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    decode_attention_sm80(const X* qkv, const float* q_norm, const float* k_norm, const float* cos, const float* sin,
                          const int32_t* lengths, X* k, X* v, X* out, float* partials, uint32_t* counters, int heads,
                          int kv_heads, int capacity, int64_t sequence_stride, float scale, float eps) {
  __shared__ BlockSoftmax block;
  __shared__ Words queries[2 * kChunks][32];  // the operands of each lane
  __shared__ alignas(16) X new_key[kHeadDim];
  __shared__ alignas(16) X new_value[kHeadDim];
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int split = blockIdx.x, part = blockIdx.y, row = blockIdx.z;
  const int unit = row * gridDim.y + part;
  const int position = lengths[row];
  const int cached = min(position, capacity), keys = min(position + 1, capacity);
  const int part_of_all = ceil_div(ceil_div(keys, static_cast<int>(gridDim.x)), kWarpKeys) * kWarpKeys;
  const int span = keys <= UNSPLIT_KEYS ? UNSPLIT_KEYS : max(MIN_SPLIT_KEYS, part_of_all);
  const int splits = ceil_div(keys, span);
  const int key_begin = split * span, key_end = min(keys, key_begin + span);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kv_head = part * kHeads / (heads / kv_heads);
  const int64_t cache = row * sequence_stride + static_cast<int64_t>(kv_head) * capacity * kHeadDim;

  // In place of keys behind it, this split's last cached one is loaded: they are masked, or become the new token's.
  const int last = min(cached, key_end) - 1;
  const X* const k_rows = k + cache + 8 * t;
  const X* const v_rows = v + cache + 8 * g;
  Words k_words[2 * kSteps][kChunks] = {}, v_words[kSteps][4][kPieces] = {};
  auto k_key = [&](int j) { return 8 * j + g; };
  auto v_key = [&](int s, int i) { return 16 * s + i / 2 * 8 + 2 * t + i % 2; };
  auto fetch_keys = [&](int base) {
#pragma unroll
    for (int j = 0; j < 2 * kSteps; ++j) {
      const X* source = k_rows + static_cast<int64_t>(min(base + k_key(j), last)) * kHeadDim;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) ptx::ld_global_no_allocate(k_words[j][c].values, source + 32 * c);
    }
  };
  auto fetch_values = [&](int base) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const X* source = v_rows + static_cast<int64_t>(min(base + v_key(s, i), last)) * kHeadDim;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) ptx::ld_global_no_allocate(v_words[s][i][p].values, source + 64 * p);
      }
    }
  };
  int base = key_begin + warp * kWarpKeys;
  if (split < splits && base < key_end && cached > 0) {
    fetch_keys(base);
    fetch_values(base);
  }
  if constexpr (DEPENDENT) {
    // While the grid before ends, L2 gets the keys and values of all warps' second turn; a third one was slower.
    constexpr int kLine = 128 / sizeof(X), kTurn = kWarps * kWarpKeys * kHeadDim;
    const int64_t first = cache + static_cast<int64_t>(key_begin) * kHeadDim;
    const int count = min((last + 1 - key_begin) * kHeadDim, 2 * kTurn);
    for (int i = kTurn + threadIdx.x * kLine; i < count; i += THREADS * kLine) {
      ptx::prefetch_global_l2(k + first + i);
      ptx::prefetch_global_l2(v + first + i);
    }
  }
  if (split >= splits) return;
  const int64_t at = static_cast<int64_t>(min(position, capacity - 1)) * kHalf;
  const Token token(cos + at, sin + at, q_norm, k_norm);
  for (int i = threadIdx.x; i < 2 * kChunks * 32; i += THREADS) queries[i / 32][i % 32] = {};
  __syncthreads();
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();

  const bool appends = key_end > cached;
  const int64_t joins = cache + static_cast<int64_t>(position) * kHeadDim;
  token.join(qkv + static_cast<int64_t>(row) * (heads + 2 * kv_heads) * kHeadDim, heads, kv_heads, part, kv_head, eps,
             appends, new_key, new_value, k + joins, v + joins, [&](int head, const Pairs& pairs) {
               pairs.each([&](int d, float value) {
                 const int word = d % 8 / 2;
                 auto& operand = queries[d / 32 * 2 + word / 2][head % 8 * 4 + d % 32 / 8];
                 reinterpret_cast<X*>(&operand.values[word % 2 * 2 + head / 8])[d % 2] = from_float<X>(value);
               });
             });
  __syncthreads();

  float sums[kTiles][kHeadDim / 16][4] = {};
  float top[kTiles], total[kTiles];  // of head g of a tile; total: of this lane's keys
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    top[tile] = kLowest;
    total[tile] = 0.0f;
  }
  const float factor = scale * 1.4426950408889634f;  // exp(x) = 2^(x log2(e))
  for (; base < key_end; base += kWarps * kWarpKeys) {
    const int following = base + kWarps * kWarpKeys;
    if (appends && base + kWarpKeys > cached) {  // the new key, and finite values for those behind it
#pragma unroll
      for (int j = 0; j < 2 * kSteps; ++j) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (base + k_key(j) >= cached) k_words[j][c] = *reinterpret_cast<const Words*>(new_key + 32 * c + 8 * t);
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          auto& words = v_words[i / 4][i % 4][p];
          if (base + v_key(i / 4, i % 4) >= cached) words = *reinterpret_cast<const Words*>(new_value + 64 * p + 8 * g);
        }
      }
    }
    float scores[2 * kSteps][4] = {};
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
      const Words query = queries[i][lane];
#pragma unroll
      for (int j = 0; j < 2 * kSteps; ++j) {
        const auto& words = k_words[j][i / 2].values;
        mma<X>(scores[j], query.values, words[i % 2 * 2], words[i % 2 * 2 + 1]);
      }
    }
    if (following < key_end) fetch_keys(following);

    // Element 2 tile + e of scores: head 8 tile + g, key 2t + e.
    uint32_t weights[kTiles][2 * kSteps];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float high = top[tile];
#pragma unroll
      for (int j = 0; j < 2 * kSteps; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[j][2 * tile + e];
          score = base + 8 * j + 2 * t + e < key_end ? score * factor : __int_as_float(0xff800000);
          high = fmaxf(high, score);
        }
      }
      high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 1));
      high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, 2));
      if (__any_sync(kFullWarp, high > top[tile])) {
        const float before = exp2f(top[tile] - high);
        top[tile] = high;
        total[tile] *= before;
        const float even = __shfl_sync(kFullWarp, before, 8 * t), odd = __shfl_sync(kFullWarp, before, 8 * t + 4);
#pragma unroll
        for (auto& sum : sums[tile]) {
          sum[0] *= even;
          sum[1] *= odd;
          sum[2] *= even;
          sum[3] *= odd;
        }
      }
#pragma unroll
      for (int j = 0; j < 2 * kSteps; ++j) {
        const float first = exp2f(scores[j][2 * tile] - high), second = exp2f(scores[j][2 * tile + 1] - high);
        total[tile] += first + second;
        weights[tile][j] = pack<X>(first, second);
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i) {
        auto word = [&](int key) { return v_words[s][key][i / 4].values[i % 4]; };
        const uint32_t a[4] = {__byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
                               __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          mma<X>(sums[tile][i], a, weights[tile][2 * s], weights[tile][2 * s + 1]);
        }
      }
    }
    if (following < key_end) fetch_values(following);
  }

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    total[tile] += __shfl_xor_sync(kFullWarp, total[tile], 1);
    total[tile] += __shfl_xor_sync(kFullWarp, total[tile], 2);
    if (t == 0 && 8 * tile + g < kHeads) {
      block.tops[warp][8 * tile + g] = top[tile];
      block.totals[warp][8 * tile + g] = total[tile];
    }
    // Element 2 r + e of sums: dim 8g + 2 (i % 4) + r of 64, head 2t + e.
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int head = 8 * tile + 2 * t + e;
      if (head >= kHeads) continue;
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; i += 2) {
        const auto &low = sums[tile][i], &high = sums[tile][i + 1];
        store<true>(&block.sums[warp][head][i / 4 * 64 + 8 * g + i % 4 * 2],
                    Vector<float, 4>{low[e], low[2 + e], high[e], high[2 + e]});
      }
    }
  }
  __syncthreads();
  merge_splits(block, split, splits, out + (static_cast<int64_t>(row) * heads + part * kHeads) * kHeadDim,
               partials + static_cast<int64_t>(unit) * kMaxSplits * kHeads * kSplitFloats, counters + unit);
}
