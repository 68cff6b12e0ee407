// SPDX-License-Identifier: Apache-2.0
// Causal attention in prefill on tensor cores:
//
//   q = RoPE(RMSNorm(q))                                 rope.cuh; RMSNorm only with QK_NORM
//   out[m, head, :] = sum over p of softmax(scale * q[m, head, :] . k[p, :])[p] * v[p, :]
//
// Row m is any token of any sequence, and attends to the keys of the sequence up to its own position. Query head h
// reads KV head h / (heads / kv_heads).
//
//   qkv       X [m, heads + 2 * kv_heads, HEAD_DIM], of which q is read
//   q_norm    float32 [HEAD_DIM], or null
//   cos, sin  float32 [capacity, HEAD_DIM / 2], the RoPE factors of every position
//   out       X [m, heads, HEAD_DIM]
//   scale_log2  scale * log2(e), as exp(x) = 2^(x log2(e))
//   k, v      the KV cache (kv_cache.cuh), to which rope_cache has appended. work has {first row, number of rows,
//             position of the first row, slot} of each tile of up to 64 consecutive rows of one sequence, or of none;
//             the position -1, that of a padding row, means 0. lengths and slots are not used.
//
// Limits: HEAD_DIM is a multiple of 16 up to 128; HEADS, 1 or 2, query heads share a KV head. Architectures: sm_75 with
// ASYNC = 0, HEADS = 1 and float16; sm_80 and newer.
// Grid (heads / HEADS, tiles, 1): a CTA computes a tile of up to 64 queries of HEADS heads, and each of the four warps
// of a group 16 of the queries. A fragment of keys or values is loaded once for all heads; with one head, the reads of
// shared memory take longer than the mma. Blocks of 32 keys and values pass through a pipeline of STAGES stages by
// cp.async. With ASYNC = 0, they pass through registers, which are loaded during the mma of the preceding block; two
// groups of warps take turns at the blocks, and the results of the warps with the same queries are merged at the end.
// Scores stay in registers: the accumulators of q k^T, rounded to X, are operand A of the product with v
// (FlashAttention-2).
#include "decoder/dependent_launch.cuh"
#include "decoder/kv_cache.cuh"
#include "decoder/rope.cuh"
#include "common/mma.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ex2.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/thread_index.cuh"

constexpr int kHeads = HEADS;
constexpr int kStages = STAGES;
constexpr bool kAsync = ASYNC;
constexpr int kGroups = kAsync ? 1 : 2;
constexpr int kGroupThreads = THREADS / kGroups;
constexpr int kPitch = kHeadDim + 8;  // row pitch in shared memory; 16 bytes of padding avoid bank conflicts
constexpr int kBlockBytes = 2 * kBlockKeys * kPitch;
constexpr int kStageBytes = 2 * kBlockBytes;  // keys, then values
constexpr int kKSteps = kHeadDim / 16;        // number of mma steps along head_dim, of 16 each, of q k^T
constexpr int kScoreTiles = kBlockKeys / 8;   // number of tiles of 8 keys in the scores q k^T
constexpr int kOutTiles = kHeadDim / 8;       // number of tiles of 8 head dimensions in the product p v
constexpr float kMinScore = -1e30f;  // the initial maximum: finite, so that kMinScore - kMinScore is 0 and not NaN

static_assert(kHeadDim % 16 == 0 && kHeadDim <= 128 && kHeads <= 2, "the accumulators fit the registers");
static_assert(kGroupThreads == 128, "the four warps of a group compute a tile of 64 queries");
static_assert(kStages >= (kAsync ? 2 : 1), "a stage is filled while another one is read");
static_assert(kAsync || kHeads == 1, "the stages hold the results of a group");

using Chunk = Vector<uint32_t, 4>;  // 8 values of type X

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    attention_mma(const X* qkv, const float* q_norm, const float* cos, const float* sin, const X* k, const X* v,
                  const int32_t* lengths, const int32_t* slots, const int4* work, const int32_t* table, X* out,
                  int heads, int kv_heads, int capacity, int64_t block_stride, float scale_log2, float eps) {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  // The item of the work list, and where the KV head is in a block of the cache. What is read again where it is used
  // takes no registers in between.
  __shared__ int4 tile;
  __shared__ int head, head_begin;
  const auto group_now = [] { return kGroups == 1 ? 0 : static_cast<int>(ptx::thread_index_now() / kGroupThreads); };
  const uint32_t ring =
      static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared)) + group_now() * (kStages * kStageBytes);
  launch_dependents_and_wait();
  // The host sorts tiles so that those with many keys come first, and so do their CTAs, of all heads.
  if (threadIdx.x == 0) {
    tile = work[blockIdx.y];
    head = blockIdx.x * kHeads;
    head_begin = head / (heads / kv_heads) * (kBlockKeys * kHeadDim);
  }
  __syncthreads();
  if (tile.y == 0) return;
  const auto count_keys = [&] { return min(max(tile.z, 0) + tile.y, capacity); };
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  // Step i of a group is the block kGroups * i + group of the keys.
  const auto block_of = [&](int step) { return kGroups * step + group_now(); };
  const int steps = (ceil_div(count_keys(), kBlockKeys) + kGroups - 1 - group_now()) / kGroups;
  constexpr int kChunks = kHeadDim / 8;                                   // number of 16-byte chunks per key or value
  constexpr int kCopies = ceil_div(kBlockKeys * kChunks, kGroupThreads);  // number of them per thread and block
  // Returns the shared address of chunk i of a thread in the stage of a step.
  auto target_of = [&](int step, int thread, int i) {
    const auto place = [](uint32_t i) { return 2 * (i / kChunks * kPitch + i % kChunks * 8); };
    constexpr bool kWholeRows = kGroupThreads % kChunks == 0;
    const int first = i * kGroupThreads;
    return ring + step % kStages * kStageBytes + (kWholeRows ? place(thread) + place(first) : place(first + thread));
  };
  Chunk copied[kAsync ? 1 : kCopies][2];  // keys and values on their way to shared memory, without cp.async
  auto fetch = [&](int step) {
    if (step < steps) {
      const int thread = ptx::thread_index_now() % kGroupThreads, block = block_of(step);
      const HeadCache cache(table, tile.w, 0, capacity, block_stride);
      const int64_t begin = cache.blocks[block] * block_stride + head_begin + thread * 8;
      const X *const k_source = k + begin, *const v_source = v + begin;
      const int valid = (count_keys() - block * kBlockKeys) * kChunks - thread;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int first = i * kGroupThreads;
        if (kBlockKeys * kChunks % kGroupThreads && first + thread >= kBlockKeys * kChunks) break;
        // Rows past the last key are filled with zeros: a masked probability of 0 times a NaN would be NaN.
        if constexpr (kAsync) {
          const uint32_t target = target_of(step, thread, i), bytes = first < valid ? 16 : 0;
          ptx::cp_async_16(target, k_source + first * 8, bytes);
          ptx::cp_async_16(target + kBlockBytes, v_source + first * 8, bytes);
        } else {
          const auto *keys = reinterpret_cast<const Chunk*>(k_source + first * 8),
                     *values = reinterpret_cast<const Chunk*>(v_source + first * 8);
          copied[i][0] = first < valid ? *keys : Chunk{};
          copied[i][1] = first < valid ? *values : Chunk{};
        }
      }
    }
    if constexpr (kAsync) ptx::cp_async_commit_group();
  };
  auto store_copied = [&](int step) {
    const int thread = ptx::thread_index_now() % kGroupThreads;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (kBlockKeys * kChunks % kGroupThreads && i * kGroupThreads + thread >= kBlockKeys * kChunks) break;
      auto* target = static_cast<unsigned char*>(__cvta_shared_to_generic(target_of(step, thread, i)));
      *reinterpret_cast<Chunk*>(target) = copied[i][0];
      *reinterpret_cast<Chunk*>(target + kBlockBytes) = copied[i][1];
    }
  };
  const auto wait_for_group = [&] {
    if constexpr (kGroups == 1) {
      __syncthreads();
    } else if (group_now() == 0) {
      ptx::barrier_sync(1, kGroupThreads);
    } else {
      ptx::barrier_sync(2, kGroupThreads);
    }
  };
#pragma unroll
  for (int step = 0; step < (kAsync ? kStages - 1 : 1); ++step) fetch(step);

  // A lane holds two queries: that of half 0, and that of half 1, which is 8 further.
  const auto query_of = [](int thread, int half) {
    return thread % kGroupThreads / 32 * 16 + half * 8 + thread % 32 / 4;
  };
  // RMSNorm and RoPE of q. A lane holds both values of each pair that RoPE rotates: kHalf is a multiple of 8.
  uint32_t queries[kHeads][kKSteps][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = min(query_of(threadIdx.x, i), tile.y - 1);
    const int64_t factors = static_cast<int64_t>(min(max(tile.z, 0) + query, capacity - 1)) * kHalf + 2 * t;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const X* row = qkv + (static_cast<int64_t>(tile.x + query) * (heads + 2 * kv_heads) + head + h) * kHeadDim;
      Vector<X, 2> pairs[kOutTiles];
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kOutTiles; ++j) {
        load<true>(pairs[j], row + j * 8 + 2 * t);
#pragma unroll
        for (int e = 0; e < 2; ++e) sum += to_float(pairs[j].values[e]) * to_float(pairs[j].values[e]);
      }
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      const float inverse_rms = 1.0f / sqrtf(sum / static_cast<float>(kHeadDim) + eps);
#pragma unroll
      for (int j = 0; j < kOutTiles / 2; ++j) {
        float rotated[2][2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int d = j * 8 + 2 * t + e;
          float a = to_float(pairs[j].values[e]), b = to_float(pairs[j + kOutTiles / 2].values[e]);
          if constexpr (kNorm) {
            a *= inverse_rms * q_norm[d];
            b *= inverse_rms * q_norm[d + kHalf];
          }
          const float c = cos[factors + j * 8 + e], s = sin[factors + j * 8 + e];
          rotated[0][e] = a * c - b * s;
          rotated[1][e] = b * c + a * s;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int chunk = j + half * (kOutTiles / 2);
          queries[h][chunk / 2][chunk % 2 * 2 + i] = pack<X>(rotated[half][0], rotated[half][1]);
        }
      }
    }
  }
  float acc[kHeads][kOutTiles][4] = {};
  float row_max[kHeads][2], row_sum[kHeads][2] = {};
#pragma unroll
  for (int i = 0; i < 2 * kHeads; ++i) row_max[i / 2][i % 2] = kMinScore;
  // The matrices of ldmatrix are keys 0 .. 7 at dims 0 .. 7 and dims 8 .. 15, then keys 8 .. 15 at these dims; those of
  // values are keys 0 .. 7 and keys 8 .. 15 at dims 0 .. 7, then at dims 8 .. 15.
  const uint32_t k_lane = ring + 2 * ((lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8);
  const uint32_t v_lane = ring + 2 * (lane % 16 * kPitch + lane / 16 * 8) + kBlockBytes;

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if constexpr (kAsync) {
      ptx::cp_async_wait_group<kStages - 2>();
      wait_for_group();  // The block has landed, and all warps have finished reading the stage that is filled next.
      fetch(step + kStages - 1);
    } else {
      if (step > 0) wait_for_group();  // All warps have finished reading the stage.
      store_copied(step);
      wait_for_group();
      fetch(step + 1);
    }
    const int first_key = block_of(step) * kBlockKeys;
    const int first_query = ptx::thread_index_now() % kGroupThreads / 32 * 16;  // that of the warp
    const int position = max(tile.z, 0) + first_query;
    if (first_key > position + 15 || first_query >= tile.y) continue;  // no query of the warp sees the keys
    const uint32_t stage = step % kStages * kStageBytes;
    float scores[kHeads][kScoreTiles][4] = {};
#pragma unroll
    for (int i = 0; i < kKSteps; ++i) {
#pragma unroll
      for (int pair = 0; pair < kScoreTiles / 2; ++pair) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k_lane + stage + 2 * (pair * 16 * kPitch + i * 16));
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          mma<X>(scores[h][2 * pair], queries[h][i], b[0], b[1]);
          mma<X>(scores[h][2 * pair + 1], queries[h][i], b[2], b[3]);
        }
      }
    }
    // The accumulator fragment maps (lane, i) to (query g + 8 (i / 2), key 2t + i % 2).
    if (first_key + kBlockKeys - 1 > position) {
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Keys after the query's position get the score minus infinity, and so the probability 0.
          if (first_key + j * 8 + 2 * t + i % 2 <= position + g + i / 2 * 8) continue;
#pragma unroll
          for (int h = 0; h < kHeads; ++h) scores[h][j][i] = __int_as_float(0xff800000);
        }
      }
    }
    uint32_t weights[kHeads][kBlockKeys / 16][4];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float new_max[2] = {kMinScore, kMinScore};
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) new_max[i / 2] = fmaxf(new_max[i / 2], scores[h][j][i]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(kFullWarp, new_max[i], 1));
        new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(kFullWarp, new_max[i], 2));
        new_max[i] = fmaxf(row_max[h][i], new_max[i] * scale_log2);
      }
      if (__any_sync(kFullWarp, new_max[0] > row_max[h][0] || new_max[1] > row_max[h][1])) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float rescale = ptx::ex2(row_max[h][i] - new_max[i]);
          row_max[h][i] = new_max[i];
          row_sum[h][i] *= rescale;
#pragma unroll
          for (int j = 0; j < kOutTiles; ++j) {
            acc[h][j][2 * i] *= rescale;
            acc[h][j][2 * i + 1] *= rescale;
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float low = ptx::ex2(scores[h][j][2 * i] * scale_log2 - row_max[h][i]);
          const float high = ptx::ex2(scores[h][j][2 * i + 1] * scale_log2 - row_max[h][i]);
          row_sum[h][i] += low + high;
          weights[h][j / 2][j % 2 * 2 + i] = pack<X>(low, high);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i) {
#pragma unroll
      for (int pair = 0; pair < kOutTiles / 2; ++pair) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v_lane + stage + 2 * (i * 16 * kPitch + pair * 16));
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          mma<X>(acc[h][2 * pair], weights[h][i], b[0], b[1]);
          mma<X>(acc[h][2 * pair + 1], weights[h][i], b[2], b[3]);
        }
      }
    }
  }

  const int thread = ptx::thread_index_now();
  // The second group passes its results through the rings; the same thread of both groups has the same place.
  float* const passed = reinterpret_cast<float*>(dynamic_shared) + thread % kGroupThreads;
  const auto passed_at = [&](int i) -> float& { return passed[i * kGroupThreads]; };
  if constexpr (kGroups > 1) {
    __syncthreads();  // all stages have been read
    if (group_now() == 1) {
#pragma unroll
      for (int i = 0; i < 4 * kOutTiles; ++i) passed_at(i) = acc[0][i / 4][i % 4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        passed_at(4 * kOutTiles + i) = row_max[0][i];
        passed_at(4 * kOutTiles + 2 + i) = row_sum[0][i];
      }
    }
    __syncthreads();
    if (group_now() == 1) return;
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float own = 1.0f, other = 0.0f, sum = row_sum[h][i];
      if constexpr (kGroups > 1) {
        const float other_max = passed_at(4 * kOutTiles + i), new_max = fmaxf(row_max[h][i], other_max);
        own = ptx::ex2(row_max[h][i] - new_max);
        other = ptx::ex2(other_max - new_max);
        sum = own * sum + other * passed_at(4 * kOutTiles + 2 + i);
      }
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      const float inverse = 1.0f / sum;
      own *= inverse;
      other *= inverse;
      if (query_of(thread, i) >= tile.y) continue;
      X* row = out + (static_cast<int64_t>(tile.x + query_of(thread, i)) * heads + head + h) * kHeadDim;
#pragma unroll
      for (int j = 0; j < kOutTiles; ++j) {
        float results[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          results[e] = acc[h][j][2 * i + e] * own;
          if constexpr (kGroups > 1) results[e] += passed_at(4 * j + 2 * i + e) * other;
        }
        *reinterpret_cast<uint32_t*>(row + j * 8 + thread % 4 * 2) = pack<X>(results[0], results[1]);
      }
    }
  }
}
