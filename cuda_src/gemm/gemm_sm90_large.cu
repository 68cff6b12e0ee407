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

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>,
                RepackedLayout<SCALE, Zeros::ZEROS, GROUPS> {
  using T = X;  // type of x, the residual and y
  static constexpr bool kAligned = ALIGNED;
  static constexpr int kBlockM = BLOCK_M, kStages = STAGES, kCluster = CLUSTER;
  // Whether clusters share the k tiles of a unit (stream-K, tile_scheduler.cuh).
  static constexpr bool kStreamK = STREAM_K;
  static constexpr int kWarpgroups = WARPGROUPS;  // number of consumer warpgroups
  static constexpr int kM64Tiles = M64_TILES;     // number of m64 tiles (64 columns of y each) per warpgroup
  // Number of rows of y that a warpgroup transposes in shared memory at a time.
  static constexpr int kStoreRows = STORE_ROWS;
  static constexpr int kSharedBytes = SHARED_BYTES;
};
using Kernel = GemmSm90Large<Config>;

// The role of the producer warp, of which one lane issues all copies.
template <class C> __device__ __forceinline__ void produce(const typename C::SharedStorage& shared,
                                                           typename C::Scheduler& scheduler, const uint8_t* weight,
                                                           const TensorMap* x_map, const float* partials,
                                                           uint32_t* counters, int m, int n, int k) {
  const bool is_leader = ptx::elect();
  const int rank = cluster_rank<C::kCluster>();
  const auto pipeline = shared.pipeline();
  if (is_leader) ptx::prefetch_tensormap(x_map);
  ptx::griddepcontrol_wait();
  auto state = PipelineState<C::kStages>::producer();
  while (scheduler.advance()) {
    const TileCoordinates tile = scheduler.tile(rank);
    const int row_begin = tile_row_begin<C::kBlockM>(tile.m_block, m);
    const TileColumns<C> columns(weight, tile.n_block * (C::kGated ? C::kWeightTiles / 2 : C::kWeightTiles), 0, n, k);
    for (int k_tile = scheduler.k_tile_begin; k_tile < scheduler.k_tile_end; ++k_tile) {
      pipeline.producer_acquire(state);
      if (is_leader) {
        const uint32_t full_barrier = pipeline.full_barrier(state.stage_idx);
        ptx::mbarrier_arrive_expect_tx(full_barrier, C::kXStageBytes + C::kWeightStageBytes);
#pragma unroll
        for (int i = 0; i < C::kWeightTiles; ++i) {
          // In a gated problem, a warpgroup computes 64 columns of the gate and the matching 64 of the up projection.
          const int column = C::kGated ? i / 2 % 2 * (n / 2 / kWeightTileN) + i / 4 * 2 + i % 2 : i;
          ptx::cp_async_bulk(shared.weight(state.stage_idx) + i * C::kWeightTileBytes, columns.tile(column, k_tile),
                             C::kWeightTileBytes, full_barrier);
        }
        tma_multicast_3d<C::kCluster>(shared.x(state.stage_idx) + rank * C::kXHalfBytes, x_map, 0, row_begin,
                                      k_tile * 2 + rank, full_barrier);
      }
      state.advance();
    }
    if constexpr (C::kRingReduction) {
      if (scheduler.adds_partial_sums()) copy_partial_sums<C>(shared, scheduler, state, partials, counters, is_leader);
    }
  }
  __syncwarp();
}

// The body of the kernel, for one configuration; `gemm_sm90_large` below passes its arguments on.
template <class C>
__device__ __forceinline__ void gemm_sm90_large_units(const uint8_t* weight, const typename C::Bias* bias,
                                                      const typename C::T* residual, typename C::T* y, float* partials,
                                                      uint32_t* counters, const TensorMap* x_map, int m, int n, int k,
                                                      int ldr, int ldy, int stream_k_units, int stream_k_clusters,
                                                      float low, float high, float scale_factor, float result_factor) {
  using T = typename C::T;
  extern __shared__ __align__(1024) uint8_t memory[];
  const typename C::SharedStorage shared{ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(memory)))};
  const auto pipeline = shared.pipeline();
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  if (warp == C::kConsumerWarps && ptx::elect()) {
    pipeline.init(1, C::kConsumerWarps * C::kCluster);
    ptx::fence_mbarrier_init();
  }
  cluster_sync_after_init<C::kCluster>();
  ptx::griddepcontrol_launch_dependents();
  // Each warp role constructs its own scheduler after setmaxnreg: one scheduler before setmaxnreg would spill
  // registers.
  auto make_scheduler = [&] {
    return typename C::Scheduler(ceil_div(m, C::kBlockM), ceil_div(n, C::kBlockN * C::kCluster),
                                 ceil_div(k, kWeightTileK), stream_k_units, stream_k_clusters);
  };
  if (warp < C::kConsumerWarps) {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    const int warpgroup = warp / 4;
    typename C::Scheduler scheduler = make_scheduler();
    const Epilogue<T, C> epilogue{bias, residual, low, high, n, ldr};
    if constexpr (C::kHasResidual) ptx::griddepcontrol_wait();

    // A slice is 64 columns x 64 k: slice b of a stage is m64 tile b / 2 and half b % 2 of the 128 k. A slice has
    // kSliceGroups groups, or shares a group with the other half.
    constexpr int kSlices = 2 * C::kM64Tiles;
    constexpr int kSliceGroups = C::kGroups > 1 ? C::kGroups / 2 : 1;
    const typename ScaledCodes<T, C>::Factor factor(scale_factor);
    // The shared addresses of this lane's codes, scales and zero points in stage 0.
    const uint32_t weight_tile = shared.weight(0) + (warpgroup * C::kM64Tiles * 2 + warp % 4 / 2) * C::kWeightTileBytes;
    const uint32_t my_codes = ptx::opaque(weight_tile + warp % 2 * 512 + lane * 16);
    const uint32_t my_scales = ptx::opaque(weight_tile + kCodeBytes + warp % 2 * C::kHalfGroupBytes + lane / 4 * 4);
    const uint32_t my_zeros = ptx::opaque(my_scales + 32 - lane / 4 * 2);
    const uint32_t my_empty_barriers = pipeline.template cluster_empty_barriers<C::kCluster>(lane);
    Vector<uint32_t, 4> words;
    ScaledCodes<T, C> codes[kSliceGroups];
    auto load_slice = [&](int stage_idx, int b) {
      const uint32_t offset = uniform(stage_idx * C::kWeightStageBytes) + b / 2 * 2 * C::kWeightTileBytes;
      ptx::ld_shared(words.values, my_codes + offset + b % 2 * 1024);
      if (C::kGroups > 1 || b % 2 == 0) {
#pragma unroll
        for (int i = 0; i < kSliceGroups; ++i) {
          const int group = C::kGroups > 1 ? b % 2 * kSliceGroups + i : 0;
          codes[i] = ScaledCodes<T, C>(Group<C>::load_shared(my_scales + offset, my_zeros + offset, group), factor);
        }
      }
    };
    auto dequantize = [&](uint32_t (&a)[4][4]) {
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) codes[k16 * kSliceGroups / 4].convert(a[k16], words.values[k16]);
    };

    auto state = PipelineState<C::kStages>::consumer();
    while (scheduler.advance()) {
      if constexpr (C::kHasResidual)
        prefetch_residual<C>(epilogue, scheduler.tile(cluster_rank<C::kCluster>()), warpgroup, m, n);
      typename C::Accumulators accumulators = {};
      uint32_t a[2][4][4];
      uint32_t preceding = 0;  // address of the preceding stage's empty barrier; 0 in the first k tile
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
            wgmma<T, true>(accumulators[b / 2], a[b % 2][k16], x + b % 2 * (C::kXHalfBytes / 16) + k16 * 2);
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
          if (b == 0 && k_tile > scheduler.k_tile_begin) pipeline.template release<C::kCluster>(preceding, lane);
          dequantize(a[(b + 1) % 2]);
        }
        preceding = my_empty_barriers + stage_idx * 8;
      }
      ptx::wgmma_wait_group<0>();
      pipeline.template release<C::kCluster>(preceding, lane);
      bool has_total = true;
      if constexpr (C::kRingReduction) {
        if (!scheduler.has_last_k_tile()) {
          write_partial_sums<C>(accumulators, scheduler, warpgroup, partials);
          has_total = false;
        } else if (scheduler.adds_partial_sums()) {
          add_partial_sums<C>(accumulators, scheduler, state, pipeline, memory, my_empty_barriers, warpgroup, lane);
        }
      } else if constexpr (C::kStreamK) {
        has_total = reduce_shared_unit<C>(accumulators, scheduler, warpgroup, partials, counters);
      }
      if (has_total) {
        uint8_t* buffer =
            memory + C::SharedStorage::StoreBuffers::kBegin + warpgroup * C::kStoreRows * C::kStoreRowBytes;
        store_tile<C>(buffer, accumulators, scheduler.tile(cluster_rank<C::kCluster>()), warpgroup, epilogue, y, m, n,
                      ldy, result_factor);
      }
    }
    cluster_sync_before_exit<C::kCluster>();
  } else {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (warp == C::kConsumerWarps) {
      typename C::Scheduler scheduler = make_scheduler();
      produce<C>(shared, scheduler, weight, x_map, partials, counters, m, n, k);
    } else if (C::kRingReduction && warp == C::kConsumerWarps + 1) {
      typename C::Scheduler scheduler = make_scheduler();
      signal_partial_sums<C>(scheduler, counters);
    }
    cluster_sync_before_exit<C::kCluster>();
  }
}

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_sm90_large(const uint8_t* weight, const BIAS* bias, const X* residual, X* y, float* partials,
                    uint32_t* counters, const __grid_constant__ TensorMap x_map, int m, int n, int k, int ldr, int ldy,
                    int stream_k_units, int stream_k_clusters, float low, float high, float scale_factor,
                    float result_factor) {
  gemm_sm90_large_units<Kernel>(weight, bias, residual, y, partials, counters, &x_map, m, n, k, ldr, ldy,
                                stream_k_units, stream_k_clusters, low, high, scale_factor, result_factor);
}
