// SPDX-License-Identifier: Apache-2.0
// Causal attention in prefill on tensor cores:
//
//   out[m, head, :] = sum over p of softmax(scale * q[m, head, :] . k[p, :])[p] * v[p, :]
//
// Row m is any token of any sequence, and attends to the keys of the sequence up to its own position. Query head h
// reads KV head h / (heads / kv_heads).
//
//   q, out   X [m, heads, HEAD_DIM]
//   k, v     the KV cache (kv_cache.cuh). work has {first row, number of rows, position of the first row, slot} of each
//            tile of up to 64 consecutive rows of one sequence, or of none; the position -1, that of a padding row,
//            means 0. lengths and slots are not used.
//
// Limits: HEAD_DIM is a multiple of 16 up to 128. Architectures: sm_80 and newer.
// Grid (heads, tiles, 1): a CTA computes a tile of up to 64 queries,
// and each of its four warps 16 of them. Tiles of 64 keys and values pass through a two-stage cp.async pipeline. Scores
// stay in registers: the accumulators of q k^T, rounded to X, are operand A of the product with v (FlashAttention-2).
#include "decoder/dependent_launch.cuh"
#include "decoder/kv_cache.cuh"
#include "common/mma.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockM = 64;
constexpr int kBlockN = 64;
constexpr int kThreads = 128;
constexpr int kPitch = kHeadDim + 8;  // row pitch in shared memory; 16 bytes of padding avoid bank conflicts
constexpr int kTileValues = kBlockN * kPitch;
constexpr int kKSteps = kHeadDim / 16;    // number of mma steps along head_dim, of 16 each, of q k^T
constexpr int kScoreTiles = kBlockN / 8;  // number of tiles of 8 keys in the scores q k^T
constexpr int kOutTiles = kHeadDim / 8;   // number of tiles of 8 head dimensions in the product p v
constexpr float kMinScore = -1e30f;       // the initial maximum: finite, so that kMinScore - kMinScore is 0 and not NaN

static_assert(kHeadDim % 16 == 0 && kHeadDim <= 128, "the accumulators of a wider head do not fit the registers");

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_sm80(const X* q, const X* k, const X* v, const int32_t* lengths, const int32_t* slots, const int4* work,
                   const int32_t* table, X* out, int heads, int kv_heads, int capacity, int64_t block_stride,
                   float scale) {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  // Two stages of keys and values, X [stage][k, v][kBlockN][kPitch].
  X* const shared = reinterpret_cast<X*>(dynamic_shared);
  const auto shared_address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  launch_dependents_and_wait();
  // Later queries attend to more keys, so the CTAs of later tiles, of all heads, start first.
  const int head = blockIdx.x;
  const int4 item = work[gridDim.y - 1 - blockIdx.y];
  if (item.y == 0) return;
  const int first_row = item.x, steps = item.y, cached = max(item.z, 0);
  const int keys = min(cached + steps, capacity);
  const HeadCache cache(table, item.w, head / (heads / kv_heads), capacity, block_stride);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t pitch = static_cast<int64_t>(heads) * kHeadDim;
  const int64_t row_offset = first_row * pitch + head * kHeadDim;
  const X* const q_rows = q + row_offset;

  auto fetch = [&](int tile) {
    constexpr int kChunks = kHeadDim / 8;  // number of 16-byte chunks per row of q, k or v
    for (int i = threadIdx.x; i < kBlockN * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int key = tile * kBlockN + row;
      // Rows past the last key are filled with zeros: a masked probability of 0 times a NaN would be NaN.
      const uint32_t bytes = key < keys ? 16 : 0;
      const int valid = key < keys ? key : 0;
      const int64_t source = cache.offset(valid) + chunk * 8;
      const uint32_t target = shared_address + 2 * ((tile & 1) * 2 * kTileValues + row * kPitch + chunk * 8);
      ptx::cp_async_16(target, k + source, bytes);
      ptx::cp_async_16(target + 2 * kTileValues, v + source, bytes);
    }
    ptx::cp_async_commit_group();
  };
  fetch(0);

  int rows[2];
  uint32_t queries[kKSteps][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half] = warp * 16 + half * 8 + g;
    const X* row = q_rows + rows[half] * pitch;
#pragma unroll
    for (int step = 0; step < kKSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto* pair = reinterpret_cast<const uint32_t*>(row + step * 16 + i * 8 + 2 * t);
        queries[step][2 * i + half] = rows[half] < steps ? *pair : 0;
      }
    }
  }
  float acc[kOutTiles][4] = {};
  float row_max[2] = {kMinScore, kMinScore}, row_sum[2] = {0.0f, 0.0f};
  const float scale_log2 = scale * 1.4426950408889634f;  // exp(x) = 2^(x log2(e))

  const int key_tiles = ceil_div(keys, kBlockN);
  for (int tile = 0; tile < key_tiles; ++tile) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // The tile has landed, and all warps have finished reading the other stage.
    if (tile + 1 < key_tiles) fetch(tile + 1);
    const uint32_t k_sh = shared_address + 2 * (tile & 1) * 2 * kTileValues;
    const uint32_t v_sh = k_sh + 2 * kTileValues;

    float scores[kScoreTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kKSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kScoreTiles / 2; ++pair) {
        const int key = pair * 16 + lane / 16 * 8 + lane % 8;
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k_sh + 2 * (key * kPitch + step * 16 + lane / 8 % 2 * 8));
        mma<X>(scores[2 * pair], queries[step], b[0], b[1]);
        mma<X>(scores[2 * pair + 1], queries[step], b[2], b[3]);
      }
    }
    // The accumulator fragment maps (lane, i) to (row g + 8 (i / 2), key 2t + i % 2).
    float new_max[2] = {row_max[0], row_max[1]};
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = tile * kBlockN + j * 8 + 2 * t + i % 2;
        const float score = scores[j][i] * scale_log2;
        // Keys after the query's position get the score minus infinity, and so the probability 0.
        scores[j][i] = key <= cached + rows[i / 2] ? score : __int_as_float(0xff800000);
        new_max[i / 2] = fmaxf(new_max[i / 2], scores[j][i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(kFullWarp, new_max[half], 1));
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(kFullWarp, new_max[half], 2));
      const float rescale = exp2f(row_max[half] - new_max[half]);
      row_max[half] = new_max[half];
      row_sum[half] *= rescale;
#pragma unroll
      for (int j = 0; j < kOutTiles; ++j) {
        acc[j][2 * half] *= rescale;
        acc[j][2 * half + 1] *= rescale;
      }
    }
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      uint32_t weights[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        auto& score = scores[2 * step + i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          score[e] = exp2f(score[e] - new_max[e / 2]);
          row_sum[e / 2] += score[e];
        }
        weights[2 * i] = pack<X>(score[0], score[1]);
        weights[2 * i + 1] = pack<X>(score[2], score[3]);
      }
#pragma unroll
      for (int pair = 0; pair < kOutTiles / 2; ++pair) {
        const int key = step * 16 + lane / 8 % 2 * 8 + lane % 8;
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v_sh + 2 * (key * kPitch + pair * 16 + lane / 16 * 8));
        mma<X>(acc[2 * pair], weights, b[0], b[1]);
        mma<X>(acc[2 * pair + 1], weights, b[2], b[3]);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_sum[half] += __shfl_xor_sync(kFullWarp, row_sum[half], 1);
    row_sum[half] += __shfl_xor_sync(kFullWarp, row_sum[half], 2);
    if (rows[half] >= steps) continue;
    X* row = out + row_offset + rows[half] * pitch;
#pragma unroll
    for (int j = 0; j < kOutTiles; ++j) {
      *reinterpret_cast<uint32_t*>(row + j * 8 + 2 * t) =
          pack<X>(acc[j][2 * half] / row_sum[half], acc[j][2 * half + 1] / row_sum[half]);
    }
  }
}
