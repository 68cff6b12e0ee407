// SPDX-License-Identifier: Apache-2.0
// GEMM on the repacked weight, for any M but fastest for up to a few hundred rows of x: the code shared by gemm_sm90.cu
// (wgmma), gemm_sm90_mma.cu and gemm_sm90_mma_invariant.cu (mma, M <= 16). cuda_src/README.md describes the warps and
// barriers of one tile.
//
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n])
//
//   weight    the repacked layout of repacked_layout.cuh
//   bias      BIAS [n] or null
//   residual  X [m, n], row stride ldr values, or null
//   y         X [m, n] (gated: [m, n / 2]), row stride ldy values
//
// ADD_TO_STREAM, RMS_NORM_X: the fused residual add and RMSNorm of a decoder layer, see hopper/residual_stream.cuh.
//
// Limits: k % 64 == 0; n % 8 == 0 (gated: n % 64 == 0). ALIGNED = 1 requires that the rows of y and of the residual
// start at multiples of 16 bytes.
//
// The kernel computes y^T = W^T x^T: the weight is operand A, which warps dequantize in registers once for all BLOCK_M
// rows of x; x is operand B. A cluster of SPLIT_K CTAs computes a tile of BLOCK_M rows and WEIGHT_TILES * 32 columns,
// each CTA over its slice of K. In a CTA a producer warp copies the weight, and for wgmma also x, to STAGES stages.
// CONSUMERS groups of warps take turns at the stages, each with accumulators of the whole tile.
//
// Programmatic dependent launch (PDL): before griddepcontrol.wait, a CTA reads only the weight and, with GATHER_X, the
// order, and prefetches x and the residual stream into L2. The next kernel starts before or after the wait
// (kStartsNextLate).
#pragma once

#include "common/warp.cuh"
#include "gemm/gemm_sm90_epilogue.cuh"
#include "gemm/gemm_sm90_tile.cuh"
#include "hopper/cluster.cuh"
#include "ptx/barrier.cuh"
#include "ptx/elect.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"

// CTAs with the same rows share x, so each of eight adjacent CTAs prefetches one eighth of x. With a residual stream no
// prefetch is needed: the preceding kernel has just written x, which is still in L2.
constexpr int kXParts = 8;
template <class C> constexpr bool kPrefetchesX = !C::kAddsToStream && !C::kRmsNormsX;

// Synchronizes all threads of the CTA. Unlike with __syncthreads, warps may call this in different branches.
template <class C> __device__ __forceinline__ void sync_cta() { ptx::barrier_sync(0, C::kThreads); }

// Waits until the barriers of all CTAs of the cluster are initialized.
template <class C> __device__ __forceinline__ void sync_setup() {
  if constexpr (C::kSplitK == 1) {
    sync_cta<C>();
  } else {
    cluster_sync_after_init<C::kSplitK>();
  }
}

// Lets the next kernel start as SMs become free (PDL), unless it is to start late.
template <class C> __device__ __forceinline__ void start_next() {
  if constexpr (!C::kStartsNextLate) ptx::griddepcontrol_launch_dependents();
}

// Waits for the preceding kernel (PDL); then lets the next kernel start if it is to start late.
template <class C> __device__ __forceinline__ void wait_for_x() {
  ptx::griddepcontrol_wait();
  if constexpr (C::kStartsNextLate) ptx::griddepcontrol_launch_dependents();
}

// The role of the producer warp.
//   prologue   initializes the barriers and fills each stage once. Before griddepcontrol.wait, the warp copies the
//              weights of all stages (kPrefetchWeights, all lanes) or of the first ones (one lane). After
//              griddepcontrol.wait, one lane copies x and the remaining weights.
//   main loop  one lane refills each stage that the consumers have released.
//   end        all lanes prefetch this CTA's share of the next weight into L2.
// With kWindow < kStages, the warp waits until the copies of iteration i - kWindow have landed before it issues the
// copies of iteration i. The wait cannot miss a phase, because only this warp starts the next phase of a stage.
template <class C> __device__ __forceinline__ void produce(const Tile<C>& tile, const GemmArguments<C>& args) {
  const bool is_leader = ptx::elect();
  const typename C::SharedStorage& shared = tile.shared;
  const auto pipeline = shared.pipeline();
  // In a gated tile, the first half of the weight tiles belongs to the gate projection, the second half to the up
  // projection.
  constexpr int kAdjacent = C::kGated ? C::kWeightTiles / 2 : C::kWeightTiles;
  const TileColumns<C> columns(args.weight, tile.n_block * kAdjacent, tile.k_tile_begin, args.n, args.k);
  auto expect = [&](int iteration, int stage_idx) {
    ptx::mbarrier_arrive_expect_tx(pipeline.full_barrier(stage_idx),
                                   C::kWeightTiles * tile.k_tiles(iteration) * C::kWeightTileBytes + C::kXStageBytes);
  };
  auto copy_tile_column = [&](int i, int iteration, int stage_idx) {
    const int column = i < kAdjacent ? i : args.n / 2 / kWeightTileN + i - kAdjacent;
    ptx::cp_async_bulk(shared.weight(stage_idx) + i * C::kKTiles * C::kWeightTileBytes,
                       columns.tile(column, iteration * C::kKTiles), tile.k_tiles(iteration) * C::kWeightTileBytes,
                       pipeline.full_barrier(stage_idx));
  };
  auto copy_weight = [&](int iteration, int stage_idx) {
#pragma unroll
    for (int i = 0; i < C::kWeightTiles; ++i) copy_tile_column(i, iteration, stage_idx);
  };
  auto copy_x = [&](int iteration, int stage_idx) {
    if constexpr (C::kXStageBytes != 0) {
      ptx::cp_async_bulk_tensor_3d(shared.x(stage_idx), args.x_map, 0, tile.m_begin,
                                   (tile.k_tile_begin + iteration * C::kKTiles) * 2, pipeline.full_barrier(stage_idx));
    }
  };

  const int prologue = tile.prologue_iterations();
  if (is_leader) {
    if constexpr (C::kXStageBytes != 0) ptx::prefetch_tensormap(args.x_map);
    pipeline.init(1, C::kConsumerWarps);
    if constexpr (C::kSplitK > 1) shared.received_barrier().init();
    ptx::fence_mbarrier_init();
    if constexpr (C::kSplitK > 1) {
      shared.received_barrier().expect((C::kSplitK - 1) * Tile<C>::owned_rows(tile.split) * C::kBlockN * 4);
    }
    for (int i = 0; i < prologue; ++i) {
      expect(i, i);
      if (!C::kPrefetchWeights && i < tile.stages_ahead()) copy_weight(i, i);
    }
  }
  __syncwarp();
  // All 32 lanes issue these copies, although a single lane would issue them four times faster: faster copies slow down
  // the preceding kernel, which is still running, and increase the total time by 12% at K = N = 4096, M = 8 on an H100.
  if constexpr (C::kPrefetchWeights) {
    const int first = C::kWindow < C::kStages ? min(C::kWindow, prologue) : prologue;
    for (int i = threadIdx.x % 32; i < first * C::kWeightTiles; i += 32) {
      copy_tile_column(i % C::kWeightTiles, i / C::kWeightTiles, i / C::kWeightTiles);
    }
  }
  sync_setup<C>();
  start_next<C>();
  if constexpr (C::kXStageBytes != 0) {
    wait_for_x<C>();
    if (is_leader) {
      for (int i = 0; i < prologue; ++i) {
        if (!C::kPrefetchWeights && i >= tile.stages_ahead()) copy_weight(i, i);
        copy_x(i, i);
      }
    }
  }
  auto landed = PipelineState<C::kStages>::consumer();  // the oldest stage whose copies may still be in flight
  if constexpr (C::kWindow < C::kStages) {
    for (int i = C::kWindow; i < prologue; ++i) {
      pipeline.consumer_wait(landed);
      landed.advance_by(1);
      if (threadIdx.x % 32 < C::kWeightTiles) copy_tile_column(threadIdx.x % 32, i, i);
    }
    __syncwarp();
  }
  // The prologue has filled each stage once without waiting, so the state starts one pass over the ring later.
  auto state = PipelineState<C::kStages>::producer();
  state.advance_by(C::kStages);
  for (int i = prologue; i < tile.iterations(); ++i) {
    if constexpr (C::kWindow < C::kStages) {
      pipeline.consumer_wait(landed);
      landed.advance_by(1);
    }
    pipeline.producer_acquire(state);
    if (is_leader) {
      expect(i, state.stage_idx);
      copy_weight(i, state.stage_idx);
      copy_x(i, state.stage_idx);
    }
    state.advance_by(1);
  }
  __syncwarp();
  if constexpr (C::kAddsToStream) args.next_weight.prefetch(blockIdx.x);
}

// Computes the RMSNorm factors of the rows that this CTA stores. WARPS warps call this, each with its index `warp`.
template <int WARPS, class C> __device__ __forceinline__ void make_factors(const Tile<C>& tile,
                                                                           const GemmArguments<C>& args,
                                                                           uint8_t* memory, int warp) {
  ptx::griddepcontrol_wait();
  args.stream.template make_factors<C::kOwnedRows, WARPS>(
      reinterpret_cast<float*>(memory + C::SharedStorage::Factors::kBegin), warp,
      tile.m_begin + tile.split * C::kOwnedRows, args.m, args.k, tile.n_block == 0);
}

// Runs all of the kernel but the math, which the caller passes as functions: `prefetch_x(tile)` prefetches this CTA's
// share of x into L2, `accumulate(tile)` is the main loop of a consumer, and `store_all(accumulators)` stores the
// consumer's accumulators to shared memory. With LOADS_STREAM_EARLY, a thread loads the operands of its first residual
// add before the main loop, which keeps 17 registers occupied.
template <class C, bool LOADS_STREAM_EARLY, class PrefetchX, class Accumulate, class StoreAll>
__device__ __forceinline__ void run_tile(const GemmArguments<C>& args, PrefetchX prefetch_x, Accumulate accumulate,
                                         StoreAll store_all) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Tile<C> tile = make_tile<C>(memory, args.m, args.k);
  const int warp = uniform_warp();
  // With setmaxnreg, each warp role must be one branch that lasts to the end of the kernel.
  if (warp < C::kProducerWarp) {
    if constexpr (C::kConsumerRegisters != 0) ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    if constexpr (kPrefetchesX<C>) prefetch_x(tile);
    sync_setup<C>();
    start_next<C>();
    float* accumulators = reinterpret_cast<float*>(memory);
    const OutputVector<C> first(tile, threadIdx.x, args.m,
                                args.n);  // position of the first vector (8 columns) of this thread
    // The residual stream is no longer in L2: weights that were read later have evicted the stream.
    if (C::kAddsToStream && first.is_valid) args.stream.prefetch(first.row, first.column, args.n);
    if constexpr (C::kRmsNormsX && !C::kHasFactorWarp) make_factors<C::kProducerWarp>(tile, args, memory, warp);
    typename ResidualStream<C::kOrdersY>::Part part = {};
    auto load_part = [&]() {
      ptx::griddepcontrol_wait();
      // After the main loop, recompute the position of the vector: keeping it would occupy registers.
      const OutputVector<C> at =
          LOADS_STREAM_EARLY ? first : OutputVector<C>(tile, ptx::opaque(threadIdx.x), args.m, args.n);
      if (at.is_valid) part = args.stream.part(at.row, at.column, args.n);
    };
    if constexpr (C::kAddsToStream && LOADS_STREAM_EARLY) load_part();
    accumulate(tile);
    if constexpr (C::kAddsToStream && !LOADS_STREAM_EARLY) load_part();
    sync_cta<C>();  // All stages have been read, so the accumulators can overwrite them.
    store_all(accumulators);
    sync_cta<C>();
    if constexpr (C::kSplitK > 1) {
      send_partial_sums<typename C::Sums>(tile.shared, accumulators, tile.split);
    }
    if constexpr (C::kHasResidual) ptx::griddepcontrol_wait();
    store_tile(tile, memory, args, part);
    // Do not exit while other CTAs write to this CTA's shared memory.
    if constexpr (C::kSplitK > 1) tile.shared.received_barrier().wait_for_all();
  } else {
    if constexpr (C::kConsumerRegisters != 0) ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (warp == C::kProducerWarp) {
      produce(tile, args);
    } else {
      sync_setup<C>();
      start_next<C>();
      if (C::kHasFactorWarp && warp == C::kProducerWarp + 1) make_factors<1>(tile, args, memory, 0);
    }
    sync_cta<C>();
    sync_cta<C>();
  }
}
