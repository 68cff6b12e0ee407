// SPDX-License-Identifier: Apache-2.0
// The constants that the host gives to gemm_sm90.cu, gemm_sm90_mma.cu and gemm_sm90_mma_invariant.cu
// (kernels/gemm/gemm_sm90.py), and the parameters of the kernels that depend on them.
#pragma once

#define PREFETCHES_NEXT ADD_TO_STREAM

#include "common/epilogue.cuh"
#include "gemm/fusion_parameters.cuh"
#include "gemm/repacked_layout.cuh"
#include "hopper/residual_stream.cuh"

struct GemmSm90Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>,
                        RepackedLayout<SCALE, Zeros::ZEROS, GROUPS>,
                        FusionOptions<ADD_TO_STREAM, RMS_NORM_X, ORDER_OUT> {
  using T = X;  // type of x, the residual and y
  static constexpr bool kAligned = ALIGNED;
  static constexpr int kBlockM = BLOCK_M;
  static constexpr int kWeightTiles = WEIGHT_TILES;  // number of weight tiles along n per CTA tile
  static constexpr int kConsumers = CONSUMERS;  // number of consumers (groups of warps), which take turns at the stages
  static constexpr int kConsumerWarps = CONSUMER_WARPS;  // number of warps per consumer
  static constexpr int kStages = STAGES;
  // Number of k tiles (128 k) per stage; those of a tile column are copied together.
  static constexpr int kKTiles = K_TILES;
  static constexpr int kSplitK = SPLIT_K;  // number of CTAs per cluster, which divide K of one tile among each other
  // Whether the partial sums of all CTAs are added by rank, so that slices of K are added in order; else a CTA adds its
  // own first.
  static constexpr bool kRankOrder = RANK_ORDER;
  static constexpr int kCtasPerSm = CTAS_PER_SM;
  // Bytes of x that the producer copies per stage; 0 if consumers copy x themselves.
  static constexpr int kXStageBytes = X_STAGE_BYTES;
  static constexpr int kXRingBytes = X_RING_BYTES;  // bytes of shared memory for all stages of x
  // Whether the weights of all stages, or only those of the first stages (Tile::stages_ahead), are copied before
  // griddepcontrol.wait. TMA serves copies in order, so x arrives after all weights that were copied before it. Copying
  // the weights of all stages suits a CTA that starts long before the preceding kernel ends; a CTA that starts later
  // needs x earlier.
  static constexpr bool kPrefetchWeights = PREFETCH_WEIGHTS;
  // Whether the dependent kernel may start only after griddepcontrol.wait, when the preceding kernel has finished. With
  // an earlier start, CTAs of three kernels may be resident at once: two CTAs of one kernel may then share an SM, which
  // takes them up to twice as long, while other SMs have none.
  static constexpr bool kStartsNextLate = START_NEXT_LATE;
  // The largest number of stages in flight. The loads of the preceding kernel, which may still be running, and the
  // loads of x queue behind the copies in flight.
  static constexpr int kWindow = WINDOW;
  // The number of registers per consumer thread after setmaxnreg has moved registers from the producer's warpgroup, or
  // 0 if the kernel does not use setmaxnreg; the producer is then a single warp, not a warpgroup.
  static constexpr int kConsumerRegisters = CONSUMER_REGISTERS, kSharedBytes = SHARED_BYTES;
};
