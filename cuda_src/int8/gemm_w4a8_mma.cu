// SPDX-License-Identifier: Apache-2.0
// GEMM of 8-bit rows x and a 4-bit weight W with mma.sync, for tens of rows and more:
//
//   y[m, n] = activation(sum over k tiles t of x_t[m] . (q_t[n] - z_t[n]) * sW_t[n] * sX_t[m] + bias[n])
//
// A k tile is 128 k. x is int8, or e4m3 (FP8), of which the codes of W are multiplied without their zero points: those
// are multiplied by the sum of x_t[m].
//
//   weight      the repacked layout of repacked_layout.cuh, with one group per weight tile; SCALE may be float32. A
//               word has two registers of operand A, since the order of k within 16 is free
//   x_scale     float32 [m, ceil(k / block_size)], sX
//   x_sums      with FP8, float32 [m, ceil(k / 128)], the sums of xq over k tiles
//   xq          int8 or e4m3 [m, k], with each 16 k in the order of the weight's words (FRAGMENTS of quantize_rows.cu)
//   bias        BIAS [n] or null
//   y           Y [m, n], row stride ldy values
//   partials    float32 [CTA][BLOCK_M][columns of a CTA tile], the sums of units that CTAs share
//   counters    uint32 [stream-K units], zero before and after the launch
//   stream_k_units, stream_k_ctas   see StreamKTileScheduler
//
// Limits: k % 16 == 0; block_size is a multiple of 128, or k; n % 8 == 0; xq starts at a multiple of 16 bytes. Y has 16
// bits. sm_75 and newer, with ASYNC = 1 sm_80 and newer, with FP8 sm_89 and newer. ALIGNED = 1 requires that the rows
// of y start at multiples of 16 bytes.
//
// The kernel computes y^T = W^T x^T, as gemm_mma_fragments does: a warp computes 32 columns of the CTA tile and
// converts their weights (operand A, q - z) in registers once per k tile, for all BLOCK_M rows of x (operand B,
// ldmatrix). The int32 products of a k tile are accumulated for 16 rows at a time, then scaled and added to float32
// accumulators while the tensor cores compute those of the next 16 rows, whose x is loaded before. With ROW_SCALES, the
// one scale of a row of int8 x multiplies the accumulators at the end of a tile.
#include "int8/gemm_w4a8_mma.cuh"

static_assert(__CUDA_ARCH__ >= (ASYNC ? 800 : 750), "gemm_w4a8_mma needs sm_75, and sm_80 for cp.async");

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>,
                FusionOptions<false, false, false> {
  using T = Y;  // type of y
  using Scale = SCALE;
  static constexpr bool kFp8 = FP8;
  static constexpr bool kRowScales = ROW_SCALES;  // whether int8 x has one scale per row
  static constexpr Zeros kZeros = Zeros::ZEROS;
  using Copies = Select<ASYNC, CopyAsync, CopyDirect>;
  static constexpr bool kAligned = ALIGNED;
  static constexpr int kBlockM = BLOCK_M;
  static constexpr int kWarpsN = WARPS_N;  // number of warps, side by side along n
  static constexpr int kStages = STAGES;
  static constexpr int kPassRows = PASS_ROWS;  // number of rows whose accumulators are in shared memory at a time
  static constexpr int kCtasPerSm = CTAS_PER_SM;
  static constexpr bool kStreamK = STREAM_K;  // whether CTAs share the k tiles of a tile (stream-K, tile_scheduler.cuh)
  static constexpr int kSharedBytes = SHARED_BYTES;
};
using Kernel = GemmW4A8Mma<Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    gemm_w4a8_mma(const float* x_scale, const uint8_t* weight, const BIAS* bias, Y* y, float* partials,
                  uint32_t* counters, const int8_t* xq, const float* x_sums, int m, int n, int k, int block_size,
                  int ldy, int stream_k_units, int stream_k_ctas, float low, float high) {
  using C = Kernel;
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  float* const shared_accumulators = reinterpret_cast<float*>(memory);
  // kMagicBits in four registers, which ptxas would otherwise set again for each product: no size is negative.
  const int32_t magic[4] = {kMagicBits + (m >> 31), kMagicBits + (n >> 31), kMagicBits + (k >> 31),
                            kMagicBits + (block_size >> 31)};
  const Output<C> output{{bias, nullptr, low, high, n, 0}, {}, y, partials, nullptr, m, n, ldy};
  C::Scheduler scheduler(ceil_div(m, C::kBlockM), ceil_div(n, C::kBlockN), ceil_div(k, C::kBlockK), stream_k_units,
                         stream_k_ctas);
  while (scheduler.advance()) {
    // Offsets of the thread are computed again for each tile: the main loop needs all registers.
    const int thread = ptx::opaque(threadIdx.x);
    const TileCoordinates tile = scheduler.tile(0);
    Accumulators<C> accumulators = {};
    StageCopies<C> copies(thread, xq, weight, x_scale, x_sums, tile, scheduler.k_tile_begin, ring, ptx::opaque(m),
                          ptx::opaque(n), ptx::opaque(k), block_size);
    run_main_loop<C>(accumulators, copies, magic, thread, ptx::opaque(m) - tile.m_block * C::kBlockM, ring,
                     scheduler.k_tile_end - scheduler.k_tile_begin);
    if constexpr (C::kRowScales) scale_rows<C>(accumulators, x_scale, tile.m_block * C::kBlockM, m - 1);
    uint32_t* const counter = counters + scheduler.unit;
    if (C::kStreamK && scheduler.adds_partial_sums() && threadIdx.x == 0) {
      wait_for_partials(counter, scheduler.cluster_idx - scheduler.first_sharer());
    }
    for_each_constant<C::kBlockM / C::kPassRows>([&](int pass) {
      __syncthreads();  // the stages, or the accumulators of the preceding pass, are no longer read
      store_accumulators<C>(shared_accumulators, accumulators, pass * C::kPassRows, 1.0f);
      __syncthreads();
      output.store_pass(shared_accumulators, scheduler, tile, pass * C::kPassRows);
    });
    __syncthreads();  // the accumulators are no longer read, and all partial sums are written
    if (C::kStreamK && !scheduler.has_last_k_tile() && threadIdx.x == 0) signal_partials(counter);
  }
}
