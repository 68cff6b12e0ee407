// SPDX-License-Identifier: Apache-2.0
// GEMM on the repacked weight for large M: persistent, warp-specialized CTAs, wgmma, and stream-K.
//
//   y[m, n] = epilogue(result_factor * sum over k of x[m, k] * w[k, n])
//   w[k, n] = (q[k, n] - z[k / group_size, n]) * s[k / group_size, n] * scale_factor, rounded once to the type of x
//
//   weight         the repacked layout of repacked_layout.cuh
//   bias           BIAS [n] or null
//   residual       X [m, n], row stride ldr values, or null
//   y              X [m, n] (gated: [m, n / 2]), row stride ldy values
//   partials       float32, accumulators of units that clusters share: see gemm_sm90_large_epilogue.cuh
//   counters       uint32, zero before and after the launch
//   x_map          tensor map of x as [k / 64][m][64], 128-byte swizzle; boxes are [2 / CLUSTER][BLOCK_M][64]
//   stream_k_units, stream_k_clusters   see StreamKTileScheduler
//   scale_factor   a power of two that moves the scales to the middle of X's range
//   result_factor  1 / scale_factor
//
// Limits: k % 64 == 0; n % 8 == 0 (gated: n % 64 == 0); sm_90a. ALIGNED = 1 requires that the rows of y and of the
// residual start at multiples of 16 bytes.
//
// The kernel computes y^T = W^T x^T: the weight is operand A, in registers because it is dequantized there; x is
// operand B, in shared memory. A CTA computes tiles of BLOCK_M rows and WARPGROUPS * M64_TILES * 64 columns; each
// warpgroup has its own columns. A warpgroup dequantizes a slice of 64 columns and 64 k while the tensor cores multiply
// the preceding slice. The producer fills stages for the next tile while the warpgroups store the current tile. The
// CTAs of a cluster compute adjacent columns of the same rows; each of two CTAs multicasts 64 of the 128 k of x per
// stage to both.
#include "common/warp.cuh"
#include "gemm/gemm_sm90_large.cuh"
#include "gemm/gemm_sm90_large_epilogue.cuh"
#include "hopper/cluster.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "ptx/elect.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"

static_assert(__CUDA_ARCH__ == 900, "gemm_sm90_large needs sm_90a");

// The role of the producer warp, of which one lane issues all copies.
__device__ __forceinline__ void produce(const SharedStorage& shared, Scheduler& scheduler, const uint8_t* weight,
                                        const TensorMap* x_map, const float* partials, uint32_t* counters, int m, int n,
                                        int k) {
  const bool is_leader = ptx::elect();
  const int rank = cluster_rank<kCluster>();
  const auto pipeline = shared.pipeline();
  if (is_leader) ptx::prefetch_tensormap(x_map);
  ptx::griddepcontrol_wait();
  auto state = PipelineState<kStages>::producer();
  while (scheduler.advance()) {
    const TileCoordinates tile = scheduler.tile();
    const int row_begin = tile_row_begin<kBlockM>(tile.m_block, m);
    const TileColumns columns(weight, tile.n_block * (kGated ? kWeightTiles / 2 : kWeightTiles), 0, n, k);
    for (int k_tile = scheduler.k_tile_begin; k_tile < scheduler.k_tile_end; ++k_tile) {
      pipeline.producer_acquire(state);
      if (is_leader) {
        const uint32_t full_barrier = pipeline.full_barrier(state.stage_idx);
        ptx::mbarrier_arrive_expect_tx(full_barrier, kXStageBytes + kWeightStageBytes);
#pragma unroll
        for (int i = 0; i < kWeightTiles; ++i) {
          // In a gated problem, a warpgroup computes 64 columns of the gate and the matching 64 of the up projection.
          const int column = kGated ? i / 2 % 2 * (n / 2 / kWeightTileN) + i / 4 * 2 + i % 2 : i;
          ptx::cp_async_bulk(shared.weight(state.stage_idx) + i * kWeightTileBytes, columns.tile(column, k_tile),
                             kWeightTileBytes, full_barrier);
        }
        tma_multicast_3d<kCluster>(shared.x(state.stage_idx) + rank * kXHalfBytes, x_map, 0, row_begin,
                                   k_tile * 2 + rank, full_barrier);
      }
      state.advance();
    }
    if constexpr (kRingReduction) {
      if (scheduler.adds_partial_sums()) copy_partial_sums(shared, scheduler, state, partials, counters, is_leader);
    }
  }
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm_sm90_large(const uint8_t* weight, const BIAS* bias, const X* residual, X* y, float* partials,
                    uint32_t* counters, const __grid_constant__ TensorMap x_map, int m, int n, int k, int ldr, int ldy,
                    int stream_k_units, int stream_k_clusters, float low, float high, float scale_factor,
                    float result_factor) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const SharedStorage shared{ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(memory)))};
  const auto pipeline = shared.pipeline();
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  if (warp == kConsumerWarps && ptx::elect()) {
    pipeline.init(1, kConsumerWarps * kCluster);
    ptx::fence_mbarrier_init();
  }
  cluster_sync_after_init<kCluster>();
  ptx::griddepcontrol_launch_dependents();
  // Each warp role constructs its own scheduler after setmaxnreg: one scheduler before setmaxnreg would spill
  // registers.
  auto make_scheduler = [&] {
    return Scheduler(ceil_div(m, kBlockM), ceil_div(n, kBlockN * kCluster), ceil_div(k, kWeightTileK), stream_k_units,
                     stream_k_clusters);
  };
  if (warp < kConsumerWarps) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int warpgroup = warp / 4;
    Scheduler scheduler = make_scheduler();
    const Epilogue<X> epilogue{bias, residual, low, high, n, ldr};
    if constexpr (kHasResidual) ptx::griddepcontrol_wait();

    // A slice is 64 columns x 64 k: slice b of a stage is m64 tile b / 2 and half b % 2 of the 128 k. A slice has
    // kSliceGroups groups, or shares a group with the other half.
    constexpr int kSlices = 2 * kM64Tiles;
    constexpr int kSliceGroups = kGroups > 1 ? kGroups / 2 : 1;
    const typename ScaledCodes<X>::Factor factor(scale_factor);
    // The shared addresses of this lane's codes, scales and zero points in stage 0.
    const uint32_t weight_tile = shared.weight(0) + (warpgroup * kM64Tiles * 2 + warp % 4 / 2) * kWeightTileBytes;
    const uint32_t my_codes = ptx::opaque(weight_tile + warp % 2 * 512 + lane * 16);
    const uint32_t my_scales = ptx::opaque(weight_tile + kCodeBytes + warp % 2 * kHalfGroupBytes + lane / 4 * 4);
    const uint32_t my_zeros = ptx::opaque(my_scales + 32 - lane / 4 * 2);
    const uint32_t my_empty_barriers = pipeline.cluster_empty_barriers<kCluster>(lane);
    Vector<uint32_t, 4> words;
    ScaledCodes<X> codes[kSliceGroups];
    auto load_slice = [&](int stage_idx, int b) {
      const uint32_t offset = uniform(stage_idx * kWeightStageBytes) + b / 2 * 2 * kWeightTileBytes;
      ptx::ld_shared(words.values, my_codes + offset + b % 2 * 1024);
      if (kGroups > 1 || b % 2 == 0) {
#pragma unroll
        for (int i = 0; i < kSliceGroups; ++i) {
          const int group = kGroups > 1 ? b % 2 * kSliceGroups + i : 0;
          codes[i] = ScaledCodes<X>(Group::load_shared(my_scales + offset, my_zeros + offset, group), factor);
        }
      }
    };
    auto dequantize = [&](uint32_t (&a)[4][4]) {
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) codes[k16 * kSliceGroups / 4].convert(a[k16], words.values[k16]);
    };

    auto state = PipelineState<kStages>::consumer();
    while (scheduler.advance()) {
      if constexpr (kHasResidual) prefetch_residual(epilogue, scheduler.tile(), warpgroup, m, n);
      Accumulators accumulators = {};
      uint32_t a[2][4][4];
      uint32_t preceding = 0;  // shared address of the preceding stage's empty barrier; 0 in the first k tile
      pipeline.consumer_wait(state);
      load_slice(state.stage_idx, 0);
      dequantize(a[0]);
      for (int k_tile = scheduler.k_tile_begin; k_tile < scheduler.k_tile_end; ++k_tile) {
        const int stage_idx = state.stage_idx;
        state.advance();
        // With stream-K the compiler cannot prove that the stage index is warp-uniform.
        const uint64_t x = ptx::wgmma_descriptor(uniform(shared.x(stage_idx)));
#pragma unroll
        for (int b = 0; b < kSlices; ++b) {
          ptx::wgmma_fence();
#pragma unroll
          for (int k16 = 0; k16 < 4; ++k16) {
            wgmma<X, true>(accumulators[b / 2], a[b % 2][k16], x + b % 2 * (kXHalfBytes / 16) + k16 * 2);
          }
          ptx::wgmma_commit_group();
          // Dequantize the next slice while the tensor cores multiply this one. After the last slice of the unit's last
          // k tile, the same slice is dequantized again and the result is not used.
          if (b < kSlices - 1) {
            load_slice(stage_idx, b + 1);
          } else if (k_tile + 1 < scheduler.k_tile_end) {
            pipeline.consumer_wait(state);
            load_slice(state.stage_idx, 0);
          }
          ptx::wgmma_wait_group<1>();
          // All wgmmas on the preceding stage have completed, so the preceding stage can be released.
          if (b == 0 && k_tile > scheduler.k_tile_begin) pipeline.release<kCluster>(preceding, lane);
          dequantize(a[(b + 1) % 2]);
        }
        preceding = my_empty_barriers + stage_idx * 8;
      }
      ptx::wgmma_wait_group<0>();
      pipeline.release<kCluster>(preceding, lane);
      bool has_total = true;
      if constexpr (kRingReduction) {
        if (!scheduler.has_last_k_tile()) {
          write_partial_sums(accumulators, scheduler, warpgroup, partials);
          has_total = false;
        } else if (scheduler.adds_partial_sums()) {
          add_partial_sums(accumulators, scheduler, state, pipeline, memory, my_empty_barriers, warpgroup, lane);
        }
      } else if constexpr (kStreamK) {
        has_total = reduce_shared_unit(accumulators, scheduler, warpgroup, partials, counters);
      }
      if (has_total) {
        uint8_t* buffer = memory + SharedStorage::StoreBuffers::kBegin + warpgroup * kStoreRows * kStoreRowBytes;
        store_tile(buffer, accumulators, scheduler.tile(), warpgroup, epilogue, y, m, n, ldy, result_factor);
      }
    }
    cluster_sync_before_exit<kCluster>();
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == kConsumerWarps) {
      Scheduler scheduler = make_scheduler();
      produce(shared, scheduler, weight, &x_map, partials, counters, m, n, k);
    } else if (kRingReduction && warp == kConsumerWarps + 1) {
      Scheduler scheduler = make_scheduler();
      signal_partial_sums(scheduler, counters);
    }
    cluster_sync_before_exit<kCluster>();
  }
}
