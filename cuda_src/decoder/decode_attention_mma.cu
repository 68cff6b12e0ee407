// SPDX-License-Identifier: Apache-2.0
// The attention of a decode step on tensor cores:
//
//   out[b, head, :] = sum over p <= position[b] of softmax(scale * q[b, head, :] . k[b, p, :])[p] * v[b, p, :]
//
// The kernel first applies RoPE to q and k and appends k and v to the KV cache. decode_step.cuh describes arguments,
// grid and PDL.
//
// Limits: HEAD_DIM is a multiple of 64 up to 256; HEADS <= 16 query heads share a KV head. Architectures: sm_75 and
// newer, for bfloat16 sm_80. q and the probabilities p are rounded to X, as in attention_mma.
//
// The warps of a CTA take turns at blocks of WARP_KEYS keys; a warp loads its next block while it computes. Operands
// are loaded from global memory straight to registers, 16 bytes per load, for mma.m16n8k16 with lane = 4 g + t:
//   scores [16 heads, 8 keys] = q k^T. The order of the dims within an mma is free if q and k agree. So the lane loads
//     the adjacent dims 8t .. 8t + 7 of 32. Two pairs of them are the lane's fragment of operand B of one mma, in
//     place of dims 2t, 2t + 1, 2t + 8 and 2t + 9. q is stored in shared memory in the same order.
//   acc^T [16 dims, 8 heads] = v^T p^T. The accumulators of the scores, rounded to X, are operand p^T. The product is
//     transposed because up to 8 heads then need half the registers of 16 heads. The lane loads dims 8g .. 8g + 7 of
//     64 for the keys 2t, 2t + 1, 2t + 8 and 2t + 9; row g of mma j is dim 8g + 2j, row g + 8 is dim 8g + 2j + 1.
#include "decoder/decode_step.cuh"
#include "common/mma.cuh"
#include "ptx/ld.cuh"
#include "ptx/prefetch.cuh"

constexpr int kWarpKeys = WARP_KEYS;
constexpr int kKeySteps = kWarpKeys / 16;        // number of mma steps along the keys, of 16 each, of p v
constexpr int kKeyChunks = kHeadDim / 32;        // number of 16-byte chunks of a key per lane; four lanes load a key
constexpr int kValueChunks = kHeadDim / 64;      // number of 16-byte chunks of a value per lane, loaded by 8 lanes
constexpr int kHeadTiles = ceil_div(kHeads, 8);  // number of tiles of 8 heads in acc^T (the output of v^T p^T)

static_assert(kWarpKeys % 16 == 0, "one mma sums over 16 keys");
static_assert(kBlockKeys % kWarpKeys == 0, "a warp's keys are in one block of the cache");
static_assert(kWarps * kWarpKeys <= kRangeBlocks * kBlockKeys, "an item has the places of the warps' first keys");
static_assert(kHeadDim % 64 == 0 && kHeads <= 16, "lanes load whole chunks, and one mma has rows for 16 heads");

using Chunk = Vector<uint32_t, 4>;  // 8 values of type X, the 16 bytes of one load

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    decode_attention_mma(const X* qkv, const float* q_norm, const float* k_norm, const float* cos, const float* sin,
                         const int32_t* lengths, const int32_t* slots, const int4* work, const int32_t* table, X* k,
                         X* v, X* out, float* partials, uint32_t* counters, POSITIONS_PARAMETER int capacity,
                         int64_t block_stride, float scale, float eps) {
  __shared__ WarpSoftmaxes warp_softmaxes;
  // Operand A of q k^T, in the order in which lanes read it: [k step][lane].
  __shared__ Chunk queries[2 * kKeyChunks][32];
  __shared__ alignas(16) X new_key[kHeadDim];
  __shared__ alignas(16) X new_value[kHeadDim];
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Items items(work, warp * kWarpKeys / kBlockKeys);
  if (!items.any()) return;
  do {
    const int head_block = items.head_block, row = items.row, split = items.split, splits = items.splits;
    const int item = items.index(), position = max(items.position, 0);
    const int keys = min(position + 1, capacity), cached = kAppended ? keys : min(position, capacity);
    const int key_begin = split * items.split_keys, key_end = min(keys, key_begin + items.split_keys);
    const HeadCache cache(table, items.slot, head_block / kGroupBlocks, capacity, block_stride);

    // Lanes whose keys lie past the last cached key of this split load the last key again. The repeated keys are masked
    // later, or replaced by the new key.
    const int last = min(cached, key_end) - 1;
    const X* const k_rows = k + cache.begin + 8 * t;
    const X* const v_rows = v + cache.begin + 8 * g;
    Chunk k_chunks[2 * kKeySteps][kKeyChunks], v_chunks[kKeySteps][4][kValueChunks];
    auto k_key = [&](int j) { return 8 * j + g; };
    auto v_key = [&](int s, int i) { return 16 * s + i / 2 * 8 + 2 * t + i % 2; };
    // The keys of a block of WARP_KEYS keys, of which one is cached, are in the block of the cache at `block`.
    auto fetch_keys = [&](int base, int64_t block) {
#pragma unroll
      for (int j = 0; j < 2 * kKeySteps; ++j) {
        const X* source = k_rows + block + (min(base + k_key(j), last) & (kBlockKeys - 1)) * kHeadDim;
#pragma unroll
        for (int c = 0; c < kKeyChunks; ++c) ptx::ld_global_no_allocate(k_chunks[j][c].values, source + 32 * c);
      }
    };
    auto fetch_values = [&](int base, int64_t block) {
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const X* source = v_rows + block + (min(base + v_key(s, i), last) & (kBlockKeys - 1)) * kHeadDim;
#pragma unroll
          for (int p = 0; p < kValueChunks; ++p) ptx::ld_global_no_allocate(v_chunks[s][i][p].values, source + 64 * p);
        }
      }
    };
    int base = key_begin + warp * kWarpKeys;
    if (base <= last) {
      const int64_t block = items.block_place * block_stride;
      fetch_keys(base, block);
      fetch_values(base, block);
    } else {
      for (auto& chunks : k_chunks)
        for (auto& chunk : chunks) chunk = {};
      for (auto& keys : v_chunks)
        for (auto& chunks : keys)
          for (auto& chunk : chunks) chunk = {};
    }
    if constexpr (DEPENDENT) {
      // Prefetch the second block of keys and values of each warp into L2 while the preceding kernel finishes.
      constexpr int kLine = 128 / sizeof(X), kBlockValues = kWarps * kWarpKeys * kHeadDim;
      const int count = min((last + 1 - key_begin) * kHeadDim, 2 * kBlockValues);
      for (int i = kBlockValues + threadIdx.x * kLine; i < count; i += THREADS * kLine) {
        const int64_t block_offset =
            cache.begin + cache.block_offset(key_begin + i / kHeadDim) + static_cast<int64_t>(key_begin) * kHeadDim;
        ptx::prefetch_global_l2(k + block_offset + i);
        ptx::prefetch_global_l2(v + block_offset + i);
      }
    }
    const int64_t factor_offset = static_cast<int64_t>(min(position, capacity - 1)) * kHalf;
    const TokenFactors token(cos + factor_offset, sin + factor_offset, q_norm, k_norm);
#pragma unroll
    for (int i = 0; i < 2 * kKeyChunks; i += kWarps) {
      if (i + warp < 2 * kKeyChunks) queries[i + warp][lane] = {};
    }
    __syncthreads();
    if constexpr (DEPENDENT) ptx::griddepcontrol_wait();

    const bool appends = !kAppended && key_end > cached;
    const int64_t append_offset = cache.offset(position, items.new_place);
    token.rotate_and_append(
        qkv + static_cast<int64_t>(row) * kQkvWidth, head_block, eps, appends, items.position < 0, new_key, new_value,
        k + append_offset, v + append_offset, [&](int head, const Pairs& pairs) {
          pairs.for_each([&](int d, float value) {
            const int word = d % 8 / 2;
            auto& operand = queries[d / 32 * 2 + word / 2][head % 8 * 4 + d % 32 / 8];
            reinterpret_cast<X*>(&operand.values[word % 2 * 2 + head / 8])[d % 2] = from_float<X>(value);
          });
        });
    __syncthreads();

    float acc[kHeadTiles][kHeadDim / 16][4] = {};
    // The softmax of head g (lane 4 g + t) in each tile of 8 heads; row_sum covers only this lane's keys.
    float row_max[kHeadTiles], row_sum[kHeadTiles];
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      row_max[tile] = kMinScore;
      row_sum[tile] = 0.0f;
    }
    const float scale_log2 = scale * 1.4426950408889634f;  // exp(x) = 2^(x log2(e))
    for (; base < key_end; base += kWarps * kWarpKeys) {
      const int next_base = base + kWarps * kWarpKeys;
      const int64_t next_block = next_base <= last ? cache.blocks[next_base / kBlockKeys] * block_stride : 0;
      if constexpr (DEPENDENT && KEYS_AHEAD) {
        // Prefetch the block after the warp's next one into L2, so that its loads later take only the latency of L2.
        constexpr int kLine = 128 / sizeof(X);
        const int64_t block_offset = cache.begin + cache.block_offset(min(next_base + kWarps * kWarpKeys, last)) +
                                     static_cast<int64_t>(next_base + kWarps * kWarpKeys) * kHeadDim;
        const int count = (last + 1 - next_base - kWarps * kWarpKeys) * kHeadDim;
#pragma unroll
        for (int i = lane * kLine; i < kWarpKeys * kHeadDim; i += 32 * kLine) {
          if (i < count) {
            ptx::prefetch_global_l2(k + block_offset + i);
            ptx::prefetch_global_l2(v + block_offset + i);
          }
        }
      }
      // Insert the new key and value, also in place of all later, masked keys, because masked values must be finite.
      if (appends && base + kWarpKeys > cached) {
#pragma unroll
        for (int j = 0; j < 2 * kKeySteps; ++j) {
#pragma unroll
          for (int c = 0; c < kKeyChunks; ++c) {
            if (base + k_key(j) >= cached) k_chunks[j][c] = *reinterpret_cast<const Chunk*>(new_key + 32 * c + 8 * t);
          }
        }
#pragma unroll
        for (int i = 0; i < 4 * kKeySteps; ++i) {
#pragma unroll
          for (int p = 0; p < kValueChunks; ++p) {
            auto& chunk = v_chunks[i / 4][i % 4][p];
            if (base + v_key(i / 4, i % 4) >= cached)
              chunk = *reinterpret_cast<const Chunk*>(new_value + 64 * p + 8 * g);
          }
        }
      }
      float scores[2 * kKeySteps][4] = {};
#pragma unroll
      for (int i = 0; i < 2 * kKeyChunks; ++i) {
        const Chunk query = queries[i][lane];
#pragma unroll
        for (int j = 0; j < 2 * kKeySteps; ++j) {
          const auto& words = k_chunks[j][i / 2].values;
          mma<X>(scores[j], query.values, words[i % 2 * 2], words[i % 2 * 2 + 1]);
        }
      }
      if (next_base <= last) fetch_keys(next_base, next_block);

      // The score fragment maps (lane, 2 tile + e) to (head 8 tile + g, key 2t + e).
      uint32_t weights[kHeadTiles][2 * kKeySteps];
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        float new_max = row_max[tile];
#pragma unroll
        for (int j = 0; j < 2 * kKeySteps; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = scores[j][2 * tile + e];
            // Places past the last key get the score minus infinity, and so the probability 0.
            score = base + 8 * j + 2 * t + e < key_end ? score * scale_log2 : __int_as_float(0xff800000);
            new_max = fmaxf(new_max, score);
          }
        }
        new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, 1));
        new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, 2));
        if (__any_sync(kFullWarp, new_max > row_max[tile])) {
          const float rescale = exp2f(row_max[tile] - new_max);
          row_max[tile] = new_max;
          row_sum[tile] *= rescale;
          const float even = __shfl_sync(kFullWarp, rescale, 8 * t), odd = __shfl_sync(kFullWarp, rescale, 8 * t + 4);
#pragma unroll
          for (auto& sum : acc[tile]) {
            sum[0] *= even;
            sum[1] *= odd;
            sum[2] *= even;
            sum[3] *= odd;
          }
        }
#pragma unroll
        for (int j = 0; j < 2 * kKeySteps; ++j) {
          const float first = exp2f(scores[j][2 * tile] - new_max), second = exp2f(scores[j][2 * tile + 1] - new_max);
          row_sum[tile] += first + second;
          weights[tile][j] = pack<X>(first, second);
        }
      }
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 16; ++i) {
          auto word = [&](int key) { return v_chunks[s][key][i / 4].values[i % 4]; };
          const uint32_t a[4] = {__byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
                                 __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)};
#pragma unroll
          for (int tile = 0; tile < kHeadTiles; ++tile) {
            mma<X>(acc[tile][i], a, weights[tile][2 * s], weights[tile][2 * s + 1]);
          }
        }
      }
      if (next_base <= last) fetch_values(next_base, next_block);
    }

#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      row_sum[tile] += __shfl_xor_sync(kFullWarp, row_sum[tile], 1);
      row_sum[tile] += __shfl_xor_sync(kFullWarp, row_sum[tile], 2);
      if (t == 0 && 8 * tile + g < kHeads) {
        warp_softmaxes.row_max[warp][8 * tile + g] = row_max[tile];
        warp_softmaxes.row_sum[warp][8 * tile + g] = row_sum[tile];
      }
      // The accumulator fragment maps (lane, 2 r + e) to (dim 8g + 2 (i % 4) + r of 64, head 2t + e).
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int head = 8 * tile + 2 * t + e;
        if (head >= kHeads) continue;
#pragma unroll
        for (int i = 0; i < kHeadDim / 16; i += 2) {
          const auto &low = acc[tile][i], &high = acc[tile][i + 1];
          store<true>(&warp_softmaxes.acc[warp][head][i / 4 * 64 + 8 * g + i % 4 * 2],
                      Vector<float, 4>{low[e], low[2 + e], high[e], high[2 + e]});
        }
      }
    }
    __syncthreads();
    merge_splits(warp_softmaxes, split, splits, Output(out, POSITIONS_ARGUMENT, row, head_block), partials, counters,
                 item);
  } while (items.next());
}
