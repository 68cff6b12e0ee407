// SPDX-License-Identifier: Apache-2.0
//   out[m, head, :] = sum over keys p of softmax(q[m, head, :] . k[p, :] * scale)[p] * v[p, :]
// where row m = b * steps + s sees the keys 0 .. lengths[b] + s of sequence b.
//
//   q, out   X [m, heads, HEAD_DIM]
//   k, v     X [sequences, kv_heads, capacity, HEAD_DIM], sequences sequence_stride values apart
//   lengths  int32 [sequences]
//
// HEAD_DIM a multiple of 16 up to 128; sm_80 and newer: for prompts. grid (tiles of BLOCK_M queries, heads, sequences).
//
// Four warps take 16 queries each. Tiles of BLOCK_N keys and values go through two stages of shared memory; scores stay
// in registers, and the accumulators of q . k are, rounded to X, the operand of the product with v.
#include "llm/begin.cuh"
#include "common/mma.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockM = 64;
constexpr int kBlockN = 64;
constexpr int kThreads = 128;
constexpr int kPitch = kHeadDim + 8;  // values of a shared row: 16 bytes more, so that 8 rows lie in different banks
constexpr int kTile = kBlockN * kPitch;
constexpr int kSteps = kHeadDim / 16;  // of the product q . k
constexpr int kKeyTiles = kBlockN / 8;
constexpr int kValueTiles = kHeadDim / 8;
constexpr float kLowest = -1e30f;

static_assert(kHeadDim % 16 == 0 && kHeadDim <= 128, "the accumulators of a wider head do not fit the registers");

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_sm80(const X* q, const X* k, const X* v, const int32_t* lengths, X* out, int steps, int heads,
                   int kv_heads, int capacity, int64_t sequence_stride, float scale) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  X* const shared = reinterpret_cast<X*>(dynamic);  // [stage][k, v][kBlockN][kPitch]
  const auto shared_address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  begin();
  // Later tiles see more keys: they start first.
  const int m_begin = (gridDim.x - 1 - blockIdx.x) * kBlockM;
  const int head = blockIdx.y, sequence = blockIdx.z;
  const int start = lengths[sequence];
  const int keys = min(start + min(m_begin + kBlockM, steps), capacity);
  const int64_t cache =
      sequence * sequence_stride + static_cast<int64_t>(head / (heads / kv_heads)) * capacity * kHeadDim;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t pitch = static_cast<int64_t>(heads) * kHeadDim;
  const X* const q_rows = q + static_cast<int64_t>(sequence) * steps * pitch + head * kHeadDim;

  auto fetch = [&](int tile) {
    constexpr int kChunks = kHeadDim / 8;  // of 16 bytes, in a row
    for (int i = threadIdx.x; i < kBlockN * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int key = tile * kBlockN + row;
      const uint32_t bytes = key < keys ? 16 : 0;  // the rest are zeros, which 0 * value needs
      const int64_t source = cache + static_cast<int64_t>(key < keys ? key : 0) * kHeadDim + chunk * 8;
      const uint32_t target = shared_address + 2 * ((tile & 1) * 2 * kTile + row * kPitch + chunk * 8);
      ptx::cp_async_16(target, k + source, bytes);
      ptx::cp_async_16(target + 2 * kTile, v + source, bytes);
    }
    ptx::cp_async_commit_group();
  };
  fetch(0);

  int rows[2];
  uint32_t queries[kSteps][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half] = m_begin + warp * 16 + half * 8 + g;
    const X* row = q_rows + rows[half] * pitch;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto* pair = reinterpret_cast<const uint32_t*>(row + step * 16 + i * 8 + 2 * t);
        queries[step][2 * i + half] = rows[half] < steps ? *pair : 0;
      }
    }
  }
  float sums[kValueTiles][4] = {};
  float top[2] = {kLowest, kLowest}, total[2] = {0.0f, 0.0f};
  const float factor = scale * 1.4426950408889634f;  // exp(x) = 2^(x log2(e))

  const int tiles = ceil_div(keys, kBlockN);
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // the tile is there, and all warps are through with the other stage
    if (tile + 1 < tiles) fetch(tile + 1);
    const uint32_t k_sh = shared_address + 2 * (tile & 1) * 2 * kTile;
    const uint32_t v_sh = k_sh + 2 * kTile;

    float scores[kKeyTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
        const int key = pair * 16 + lane / 16 * 8 + lane % 8;
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k_sh + 2 * (key * kPitch + step * 16 + lane / 8 % 2 * 8));
        mma<X>(scores[2 * pair], queries[step], b[0], b[1]);
        mma<X>(scores[2 * pair + 1], queries[step], b[2], b[3]);
      }
    }
    // Element i of a tile: row g + 8 (i / 2), column 2t + i % 2.
    float high[2] = {top[0], top[1]};
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = tile * kBlockN + j * 8 + 2 * t + i % 2;
        const float score = scores[j][i] * factor;
        scores[j][i] = key <= start + rows[i / 2] ? score : __int_as_float(0xff800000);
        high[i / 2] = fmaxf(high[i / 2], scores[j][i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      high[half] = fmaxf(high[half], __shfl_xor_sync(kFullWarp, high[half], 1));
      high[half] = fmaxf(high[half], __shfl_xor_sync(kFullWarp, high[half], 2));
      const float before = exp2f(top[half] - high[half]);
      top[half] = high[half];
      total[half] *= before;
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) {
        sums[j][2 * half] *= before;
        sums[j][2 * half + 1] *= before;
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
          score[e] = exp2f(score[e] - high[e / 2]);
          total[e / 2] += score[e];
        }
        weights[2 * i] = pack<X>(score[0], score[1]);
        weights[2 * i + 1] = pack<X>(score[2], score[3]);
      }
#pragma unroll
      for (int pair = 0; pair < kValueTiles / 2; ++pair) {
        const int key = step * 16 + lane / 8 % 2 * 8 + lane % 8;
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v_sh + 2 * (key * kPitch + pair * 16 + lane / 16 * 8));
        mma<X>(sums[2 * pair], weights, b[0], b[1]);
        mma<X>(sums[2 * pair + 1], weights, b[2], b[3]);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(kFullWarp, total[half], 1);
    total[half] += __shfl_xor_sync(kFullWarp, total[half], 2);
    if (rows[half] >= steps) continue;
    X* row = out + static_cast<int64_t>(sequence) * steps * pitch + head * kHeadDim + rows[half] * pitch;
#pragma unroll
    for (int j = 0; j < kValueTiles; ++j) {
      *reinterpret_cast<uint32_t*>(row + j * 8 + 2 * t) =
          pack<X>(sums[j][2 * half] / total[half], sums[j][2 * half + 1] / total[half]);
    }
  }
}
