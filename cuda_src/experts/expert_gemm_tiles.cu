// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM of a mixture of experts on repacked weights, for many rows per expert: the main loop of
// gemm_mma_fragments.cu with gathered rows of x. For each sorted pair p:
//
//   y[p, n] = activation(sum over k of x[p / x_divisor, k] * W[e, k, n] + bias[e, n]) * row_weights[p]
//
//   weight         the repacked layout of repacked_layout.cuh of each expert: uint8 [experts][expert_bytes]
//   bias           BIAS [experts, n] or null
//   row_weights    float32 [pairs], read if HAS_ROW_WEIGHTS
//   y              X [pairs, n] (gated: [pairs, n / 2]), row stride ldy values
//   sorted_pairs, expert_ids, sorted_count   the arrays of sort_tokens.cu with blocks of route_block pairs
//   x              X [rows, k], row stride ldx values; rows start at multiples of 16 bytes and lie within 2^31 values
//   scale_factor, result_factor   see gemm_mma_fragments.cu
//
// Limits: k % 64 == 0; n % 8 == 0 (gated: n % 64 == 0); route_block % BLOCK_M == 0; sm_75 and newer, with ASYNC = 1 or
// bfloat16 sm_80 and newer. The number of CTAs does not depend on the routing, which only the GPU knows: CTAs are
// persistent.
#include "experts/expert_unit.cuh"
#include "gemm/gemm_mma_fragments_epilogue.cuh"
#include "gemm/gemm_mma_fragments_mainloop.cuh"
#include "ptx/griddepcontrol.cuh"

static_assert(__CUDA_ARCH__ >= (ASYNC ? 800 : 750), "expert_gemm_tiles needs sm_75, and sm_80 for cp.async");

struct Config : RepackedLayout<SCALE, Zeros::ZEROS, GROUPS>,
                EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, false>,
                FusionOptions<false, false, false> {
  using T = X;  // type of x and y
  static constexpr bool kAligned = true, kAsync = ASYNC, kStreamK = false;
  static constexpr bool kDependent = false;  // the kernel waits for the preceding one before it copies
  static constexpr Math kMath = Math::MATH;
  static constexpr int kBlockM = BLOCK_M, kXRows = BLOCK_M;
  static constexpr int kWarpColumns = WEIGHT_TILES;  // number of tile columns (32 columns of y each) per warp
  static constexpr int kWarpsN = WARPS_N;            // number of warps per slice of K, side by side along n
  static constexpr int kSlices = WARPS_K;            // number of slices of K per CTA
  static constexpr int kStageK = STAGE_K;            // the extent of a stage along K, 64 or 128
  static constexpr int kStages = STAGES;             // number of stages per slice
  static constexpr int kPassRows = PASS_ROWS;        // number of rows whose accumulators are in shared memory at a time
  static constexpr int kCtasPerSm = CTAS_PER_SM;
  static constexpr bool kHasRowWeights = HAS_ROW_WEIGHTS;
  // The size of all arrays but unit_pairs, int32 [BLOCK_M], which follow the others.
  static constexpr int kSharedBytes = SHARED_BYTES - BLOCK_M * 4;
};
using Kernel = GemmMmaFragments<Config>;

// Where the rows of a unit go in y, and the epilogue with the bias of the unit's expert.
template <class C> struct ExpertOutput {
  using T = typename C::T;

  Epilogue<T, C> epilogue;
  const float* row_weights;
  T* y;
  int n_out, ldy;

  // Sums and stores `rows` rows of the columns of `n_block`, whose accumulators are in shared memory.
  __device__ __forceinline__ void store_pass(const float* accumulators, const int32_t* pairs, int rows,
                                             int n_block) const {
    constexpr int kVectors = C::kStoreN / 8;
#pragma unroll 1
    for (int index = threadIdx.x; index < min(rows, C::kPassRows) * kVectors; index += C::kThreads) {
      const int row = index / kVectors;
      const int local_column = index % kVectors * 8;
      const int column = n_block * C::kStoreN + local_column;
      if (column >= n_out) continue;
      Sums<C> sums[C::kGated + 1];
#pragma unroll
      for (int half = 0; half <= C::kGated; ++half) {
        sums[half].add_slices(accumulators + row * C::kPitch + half * C::kStoreN + local_column);
      }
      const int pair = pairs[row];
      const float row_weight = C::kHasRowWeights ? row_weights[pair] : 1.0f;
      Vector<T, 8> out;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float value = C::kGated ? epilogue.product(sums[0].values[i], sums[C::kGated].values[i], column + i)
                                      : epilogue.activate(epilogue.biased(sums[0].values[i], column + i));
        out.values[i] = from_float<T>(value * row_weight);
      }
      store<true>(y + static_cast<int64_t>(pair) * ldy + column, out);
    }
  }
};

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    expert_gemm_tiles(const uint8_t* weight, const BIAS* bias, const float* row_weights, X* y,
                      const int32_t* sorted_pairs, const int32_t* expert_ids, const int32_t* sorted_count, const X* x,
                      int64_t expert_bytes, int pairs, int capacity, int experts, int n, int k, int x_divisor,
                      int route_block, int ldx, int ldy, float scale_factor, float result_factor) {
  using C = Kernel;
  extern __shared__ __align__(128) uint8_t memory[];
  const int slice = uniform_warp() / C::kWarpsN;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + slice * (C::kStages * C::kStageBytes);
  float* shared_accumulators = reinterpret_cast<float*>(memory);
  int32_t* unit_pairs = reinterpret_cast<int32_t*>(memory + C::kSharedBytes);
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();

  const int n_out = C::kGated ? n / 2 : n;
  ExpertTileScheduler scheduler{ceil_div(n_out, C::kStoreN), 0};
  scheduler.tiles = min(*sorted_count, capacity) / C::kBlockM * scheduler.n_blocks;
  for (; scheduler.is_valid(); scheduler.advance()) {
    const int first_row = scheduler.unit() * C::kBlockM;
    const int expert = expert_ids[first_row / route_block];
    const int rows = collect_pairs<C::kBlockM>(unit_pairs, sorted_pairs + first_row, pairs);
    if (static_cast<unsigned>(expert) >= static_cast<unsigned>(experts) || rows == 0) continue;
    __syncthreads();  // unit_pairs are written, and all warps have read the preceding tile's accumulators
    // Rows past the last one are copies of it; the resulting rows of y are not stored.
    const auto row_of = [&](int row) { return unit_pairs[min(row, rows - 1)] / x_divisor; };
    Copies<C> copies(x, weight + expert * expert_bytes, row_of, scheduler.n_block(), slice, ring, n, k, ldx);
    MainLoop<C> loop(ring, slice, scale_factor);
    Accumulators<C> accumulators = {};
    const int weight_tiles = ceil_div(ceil_div(k, kWeightTileK) - slice, C::kSlices);
    loop.begin(copies, weight_tiles);
    loop.run(accumulators, copies, weight_tiles);
    const BIAS* expert_bias = C::kHasBias ? bias + static_cast<int64_t>(expert) * n : nullptr;
    const ExpertOutput<C> output{{expert_bias, nullptr, 0, 0, n, 0}, row_weights, y, n_out, ldy};
    for_each_constant<C::kBlockM / C::kPassRows>([&](int pass) {
      const int first = pass * C::kPassRows;
      __syncthreads();  // the stages, or the accumulators of the preceding pass, are no longer read
      store_accumulators<C>(shared_accumulators, accumulators, first, GroupOperands<C>::unit(result_factor));
      __syncthreads();
      output.store_pass(shared_accumulators, unit_pairs + first, rows - first, scheduler.n_block());
    });
    __syncthreads();  // unit_pairs are no longer read
  }
}
