// SPDX-License-Identifier: Apache-2.0
// A GEMM with an unquantized weight, such as an LM head, with wgmma on sm_90a, for tens of rows and more:
//
//   y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]
//
//   bias   float32 [n] (HAS_BIAS), or null
//   y      Y [m, n]
//   w_map  tensor map of w, X [1][n][k], the layout of embeddings: boxes of [1][128][64], 128-byte swizzle
//   x_map  tensor map of x, X [1][m][k], boxes of [1][min(m, BLOCK_M)][64], 128-byte swizzle
//
// Limits: k is a multiple of 8.
//
// W is operand A of wgmma and x is operand B, so the accumulators hold y^T. A CTA computes tiles of BLOCK_M rows and
// 128 columns of y, 64 columns per consumer warpgroup. CTAs are persistent: the producer fills stages for the next
// tile while the warpgroups store the current one. Tiles of the same columns have adjacent numbers, so that all but one
// of the CTAs that compute them find the columns of w in L2.
//
// PDL: before griddepcontrol.wait, a CTA copies only w.
#include "common/tile_scheduler.cuh"
#include "common/warp.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"
#include "hopper/tma.cuh"
#include "ptx/fence_proxy.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/wgmma_shared.cuh"

static_assert(__CUDA_ARCH__ == 900, "dense_sm90 needs sm_90a");

constexpr int kBlockM = BLOCK_M, kStages = STAGES;
constexpr int kBlockN = 128, kBlockK = 64;  // kBlockK values are the 128 bytes of the swizzle
constexpr int kConsumerWarps = kBlockN / 16;
constexpr int kRowBytes = kBlockK * 2;
static_assert(THREADS == (kConsumerWarps + 1) * 32, "a CTA has a producer warp");
static_assert(kBlockM % 8 == 0, "a stage of x ends with a whole swizzle pattern");

struct SharedStorage {
  using W = SharedArray<0, kStages, kBlockN * kRowBytes>;
  using X_ = SharedArray<W::kEnd, kStages, kBlockM * kRowBytes>;
  using Barriers = SharedArray<X_::kEnd, 2 * kStages, kBarrierBytes>;
  static constexpr int kBytes = Barriers::kEnd;

  uint32_t begin;

  __device__ __forceinline__ uint32_t w(int stage_idx) const { return W::at(begin, stage_idx); }
  __device__ __forceinline__ uint32_t x(int stage_idx) const { return X_::at(begin, stage_idx); }
  __device__ __forceinline__ Pipeline<kStages, Barriers::kBegin> pipeline() const { return {begin}; }
};
ASSERT_SHARED_BYTES(SharedStorage, SHARED_BYTES);
using State = PipelineState<kStages>;

// The role of one lane of the producer warp: copies the k tiles of all tiles of the CTA.
__device__ __forceinline__ void produce(const SharedStorage& shared, const TensorMap* w_map, const TensorMap* x_map,
                                        int m, int m_blocks, int tiles, int k_tiles) {
  const auto pipeline = shared.pipeline();
  ptx::prefetch_tensormap(w_map);
  ptx::prefetch_tensormap(x_map);
  auto copy_w = [&](int tile, int k_tile, int stage_idx) {
    const uint32_t full_barrier = pipeline.full_barrier(stage_idx);
    ptx::mbarrier_arrive_expect_tx(full_barrier, (kBlockN + min(m, kBlockM)) * kRowBytes);
    ptx::cp_async_bulk_tensor_3d(shared.w(stage_idx), w_map, k_tile * kBlockK, tile / m_blocks * kBlockN, 0,
                                 full_barrier);
  };
  PersistentTileScheduler<1> scheduler(tiles);
  int copied = min(kStages, k_tiles);  // number of k tiles, from the current one on, whose part of w is copied already
  for (int k_tile = 0; k_tile < copied; ++k_tile) copy_w(scheduler.unit, k_tile, k_tile);
  ptx::griddepcontrol_wait();
  auto state = State::producer();
  for (; scheduler.is_valid(); scheduler.advance()) {
    const int row_begin = tile_row_begin<kBlockM>(scheduler.unit % m_blocks, m);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      pipeline.producer_acquire(state);
      if (copied > 0) {
        --copied;
      } else {
        copy_w(scheduler.unit, k_tile, state.stage_idx);
      }
      ptx::cp_async_bulk_tensor_3d(shared.x(state.stage_idx), x_map, k_tile * kBlockK, row_begin, 0,
                                   pipeline.full_barrier(state.stage_idx));
      state.advance();
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dense_sm90(const float* bias, Y* y, const __grid_constant__ TensorMap w_map,
               const __grid_constant__ TensorMap x_map, int m, int n, int m_blocks, int tiles, int k_tiles) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const SharedStorage shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  const auto pipeline = shared.pipeline();
  const int warp = uniform_warp();
  const int lane = threadIdx.x % 32;
  if (warp == kConsumerWarps && lane < kStages) {
    pipeline.init_stage(lane, 1, kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
  // Zero the rows of x past m: TMA does not write them, but wgmma reads them.
  const int left = max(kBlockM - m, 0) * (kRowBytes / 16);
  for (int i = threadIdx.x; i < kStages * left; i += THREADS) {
    const int at = SharedStorage::X_::kBegin + (i / left * kBlockM + m) * kRowBytes + i % left * 16;
    *reinterpret_cast<Vector<uint32_t, 4>*>(memory + at) = {};
  }
  ptx::fence_proxy_async();
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  if (warp == kConsumerWarps) {
    if (lane == 0) produce(shared, &w_map, &x_map, m, m_blocks, tiles, k_tiles);
    return;
  }
  auto state = State::consumer();
  for (PersistentTileScheduler<1> scheduler(tiles); scheduler.is_valid(); scheduler.advance()) {
    float accumulators[kBlockM / 2] = {};
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      pipeline.consumer_wait(state);
      const uint64_t a = ptx::wgmma_descriptor(shared.w(state.stage_idx) + warp / 4 * (64 * kRowBytes));
      const uint64_t b = ptx::wgmma_descriptor(shared.x(state.stage_idx));
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step) {
        if constexpr (kIsHalf<X>) {
          ptx::wgmma_f16(accumulators, a + step * 2, b + step * 2);
        } else {
          ptx::wgmma_bf16(accumulators, a + step * 2, b + step * 2);
        }
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (k_tile > 0) pipeline.consumer_release(state.previous_stage(), lane);
      state.advance();
    }
    ptx::wgmma_wait_group<0>();
    pipeline.consumer_release(state.previous_stage(), lane);
    const int m_block = scheduler.unit % m_blocks;
    const int row_begin = tile_row_begin<kBlockM>(m_block, m) + lane % 4 * 2;
    const int column_begin = scheduler.unit / m_blocks * kBlockN + warp * 16 + lane / 4;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int column = column_begin + upper * 8;
      if (column >= n) continue;
      const float added = HAS_BIAS ? bias[column] : 0.0f;
#pragma unroll
      for (int i = 0; i < kBlockM / 4; ++i) {
        const int row = row_begin + i / 2 * 8 + i % 2;
        // The last tile along m begins early, so its first rows belong to the preceding tile (hopper/tma.cuh).
        if (row < m_block * kBlockM || row >= m) continue;
        y[static_cast<int64_t>(row) * n + column] = from_float<Y>(accumulators[i / 2 * 4 + upper * 2 + i % 2] + added);
      }
    }
  }
}
