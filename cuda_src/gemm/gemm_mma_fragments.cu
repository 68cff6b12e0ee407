// SPDX-License-Identifier: Apache-2.0
// GEMM on the repacked weight with mma, for any M.
//
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n])
//   or, with BITS = 8,                         ((q[k, n] - 128) * s[k / group_size, n] + o[k / group_size, n])
//
//   weight         the repacked layout of repacked_layout.cuh
//   bias           BIAS [n] or null
//   residual       X [m, n], row stride ldr values, or null
//   y              X [m, n] (gated: [m, n / 2]), row stride ldy values
//   partials       float32 [CTA][BLOCK_M][columns of a CTA tile], the sums of units that CTAs share
//   counters       uint32 [stream-K units], zero before and after the launch
//   x              X [m, k], row stride ldx values; rows start at multiples of 16 bytes
//   stream_k_units, stream_k_ctas   see StreamKTileScheduler
//   scale_factor   with MATH = kScaled, a power of two that moves the scales to the middle of X's range
//   result_factor  1 / scale_factor
//   h ... eps      with ADD_TO_STREAM or RMS_NORM_X: see residual_stream.cuh
//   next_weight ...  with ADD_TO_STREAM or RMS_NORM_X: see next_weight.cuh
//
// PDL (DEPENDENT = 1, sm_90 and newer): CTAs copy the weight of their first stages before they wait for the preceding
// kernel.
//
// Limits: k % 64 == 0; n % 8 == 0 (gated: n % 64 == 0); sm_75 and newer, with ASYNC = 1 or bfloat16 sm_80 and newer.
// ALIGNED = 1 requires that the rows of y and of the residual start at multiples of 16 bytes.
//
// The kernel computes y^T = W^T x^T: the weight is operand A, which a warp converts in registers once for all BLOCK_M
// rows of x; x is operand B, loaded by ldmatrix. A warp computes WEIGHT_TILES * 32 columns of the CTA tile. WARPS_N
// warps are a slice: they share a ring of STAGES stages, which they fill, and compute every WARPS_K-th weight tile
// along K. With few rows of x, a slice is a single warp, which needs no barrier in the main loop.
//
// The main loop loads and converts the operands of a step of 16 k during the mma of the preceding step. Before the last
// step of a stage, all operands of the stage are in registers, so there
//   ASYNC = 1   cp.async refills the stage
//   ASYNC = 0   the next stage, which was loaded into registers at the first step, is stored to the other stage, whose
//               operands all warps had loaded before the preceding barrier; so a stage takes one barrier
#define PREFETCHES_NEXT (ADD_TO_STREAM || RMS_NORM_X)

#include "gemm/gemm_mma_fragments.cuh"
#include "gemm/fusion_parameters.cuh"
#include "gemm/gemm_mma_fragments_epilogue.cuh"
#include "gemm/gemm_mma_fragments_mainloop.cuh"
#include "hopper/next_weight.cuh"

static_assert(__CUDA_ARCH__ >= (ASYNC ? 800 : 750), "gemm_mma_fragments needs sm_75, and sm_80 for cp.async");

struct Config : RepackedLayout<SCALE, Zeros::ZEROS, GROUPS, BITS>,
                EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>,
                FusionOptions<ADD_TO_STREAM, RMS_NORM_X, ORDER_OUT> {
  using T = X;  // type of x, the residual and y
  static constexpr bool kAligned = ALIGNED;
  // Whether cp.async copies to shared memory; otherwise threads copy through registers.
  static constexpr bool kAsync = ASYNC;
  static constexpr bool kDependent = DEPENDENT;  // whether the launch is a dependent one (PDL)
  static constexpr Math kMath = Math::MATH;
  static constexpr int kBlockM = BLOCK_M;
  static constexpr int kXRows = X_ROWS;              // number of rows of x per stage, less than BLOCK_M for few rows
  static constexpr int kWarpColumns = WEIGHT_TILES;  // number of tile columns (32 columns of y each) per warp
  static constexpr int kWarpsN = WARPS_N;            // number of warps per slice of K, side by side along n
  static constexpr int kSlices = WARPS_K;            // number of slices of K per CTA
  static constexpr int kStageK = STAGE_K;            // the extent of a stage along K, 64 or 128
  static constexpr int kStages = STAGES;             // number of stages per slice
  static constexpr int kPassRows = PASS_ROWS;        // number of rows whose accumulators are in shared memory at a time
  static constexpr int kCtasPerSm = CTAS_PER_SM;
  static constexpr bool kStreamK = STREAM_K;  // whether CTAs share the k tiles of a tile (stream-K, tile_scheduler.cuh)
  static constexpr int kSharedBytes = SHARED_BYTES;
};

template <class C>
__device__ __forceinline__ void gemm_mma_fragments_tiles(const uint8_t* weight, const typename C::T* x, int ldx, int k,
                                                         uint32_t* counters, int stream_k_units, int stream_k_ctas,
                                                         float scale_factor, float result_factor, NextWeight next,
                                                         Output<C> output) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int slice = uniform_warp() / C::kWarpsN;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + slice * (C::kStages * C::kStageBytes);
  float* shared_accumulators = reinterpret_cast<float*>(memory);
  float* factors = reinterpret_cast<float*>(memory + C::SharedStorage::Factors::kBegin);
  output.factors = factors;
  typename C::Scheduler scheduler(ceil_div(output.m, C::kBlockM), ceil_div(output.n_out(), C::kStoreN),
                                  ceil_div(k, kWeightTileK), stream_k_units, stream_k_ctas);
  while (scheduler.advance()) {
    const TileCoordinates tile = scheduler.tile(0);
    Accumulators<C> accumulators = {};
    const int row_begin = tile.m_block * C::kBlockM;
    // Rows past m are copies of the last row; the resulting rows of y are not stored.
    const auto row_of = [&](int row) { return min(row, output.m - 1 - row_begin); };
    Copies<C> copies(x + static_cast<int64_t>(row_begin) * ldx, weight, row_of, tile.n_block,
                     scheduler.k_tile_begin + slice, ring, output.n, k, ldx);
    MainLoop<C> loop(ring, slice, scale_factor);
    const int weight_tiles = ceil_div(scheduler.k_tile_end - scheduler.k_tile_begin - slice, C::kSlices);
    loop.begin(copies, weight_tiles);
    if constexpr (C::kAddsToStream) output.prefetch(tile);
    if constexpr (C::kRmsNormsX) {
      const bool writes = tile.n_block == 0 && scheduler.has_last_k_tile();
      output.stream.template make_factors<C::kBlockM, C::kThreads / 32>(factors, uniform_warp(), row_begin, output.m, k,
                                                                        writes);
    }
    loop.run(accumulators, copies, weight_tiles);
    if constexpr (C::kAddsToStream || C::kRmsNormsX) {
      next.prefetch_lines(blockIdx.x, C::kThreads);
      next.share_bytes = 0;
    }
    uint32_t* counter = counters + scheduler.unit;
    if (C::kStreamK && scheduler.adds_partial_sums() && threadIdx.x == 0) {
      wait_for_partials(counter, scheduler.cluster_idx - scheduler.first_sharer());
    }
    for_each_constant<C::kBlockM / C::kPassRows>([&](int pass) {
      __syncthreads();  // the stages, or the accumulators of the preceding pass, are no longer read
      store_accumulators<C>(shared_accumulators, accumulators, pass * C::kPassRows,
                            GroupOperands<C>::unit(result_factor));
      __syncthreads();
      output.store_pass(shared_accumulators, scheduler, tile, pass * C::kPassRows);
    });
    __syncthreads();  // the accumulators are no longer read, and all partial sums are written
    if (C::kStreamK && !scheduler.has_last_k_tile() && threadIdx.x == 0) signal_partials(counter);
  }
}

using Kernel = GemmMmaFragments<Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    gemm_mma_fragments(const uint8_t* weight, const BIAS* bias, const X* residual, X* y, float* partials,
                       uint32_t* counters, FUSION_PARAMETERS NEXT_WEIGHT_PARAMETER const X* x, int m, int n, int k,
                       int ldr, int ldy, int ldx, int stream_k_units, int stream_k_ctas, float low, float high,
                       float scale_factor, float result_factor, float eps NEXT_WEIGHT_SCALARS) {
  if constexpr (Kernel::kDependent) ptx::griddepcontrol_launch_dependents();
  const Output<Kernel> output{
      {bias, residual, low, high, n, ldr}, {FUSION_ARGUMENTS, eps}, y, partials, nullptr, m, n, ldy};
  gemm_mma_fragments_tiles(weight, x, ldx, k, counters, stream_k_units, stream_k_ctas, scale_factor, result_factor,
                           NextWeight{NEXT_WEIGHT_ARGUMENTS}, output);
}
