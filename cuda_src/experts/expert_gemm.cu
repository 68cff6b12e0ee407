// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM of a mixture of experts on repacked weights, with mma m16n8k16. For each (token, slot) pair p:
//
//   y[p, n] = activation(sum over k of x[p / x_divisor, k] * W[e, k, n] + bias[e, n]) * row_weights[p]
//
// e is the expert of the pair. With ROWS = kTokens, y[token, n] is the sum of this over the token's slots instead, in
// which the activation is the identity.
//
//   weight       the repacked layout of repacked_layout.cuh of each expert: uint8 [experts][bytes of an expert]
//   bias         BIAS [experts, n] or null
//   row_weights  float32 [pairs], read if HAS_ROW_WEIGHTS
//   y            X [pairs, n] (gated: [pairs, n / 2]; kTokens: [tokens, n]), row stride ldy values
//   shared       with HAS_SHARED, X [tokens, n], row stride ld_shared values, which is added; kTokens only
//   x            X [rows, k], row stride ldx values; rows start at multiples of 16 bytes
//   kSorted:     sorted_pairs int32 [units * route_block]: pairs in the order of their experts, with values >= pairs in
//                the padding; experts int32 [units]: the expert of each block of route_block pairs; sorted_count
//                int32 [1]: the length of sorted_pairs that is used
//   otherwise:   experts int32 [tokens, top_k]: the expert of each pair
//
// A pair whose expert is not in [0, experts) has no row of y with kSorted, a row of zeros with kPairs, and adds nothing
// with kTokens. A unit is at most BLOCK_M rows of x that take the same expert. Limits: k % 64 == 0; n % 8 == 0 (gated:
// n % 32 == 0); top_k <= 32 with kTokens; sm_80 and newer.
//
// The kernel computes y^T = W^T x^T: the weight is operand A, x is operand B. A warp computes COLUMN_TILES * 16 columns
// for all rows of the unit, so no other warp of the CTA reads its weights: it loads codes and groups from global memory
// to registers, DEPTH k tiles ahead. WARPS_N warps are a slice, which shares a ring of STAGES stages of x, filled by
// cp.async; slice i computes the k tiles i, i + WARPS_K, ... Accumulators are added up in the order of the slices.
//
// Operand A is q - z (ExactCodes); the float32 sums of a group are multiplied by the group's scale, so no product is
// rounded. The number of CTAs does not depend on the routing, which only the GPU knows: CTAs are persistent.
#include "experts/expert_gemm_mainloop.cuh"
#include "experts/expert_unit.cuh"
#include "ptx/griddepcontrol.cuh"

static_assert(__CUDA_ARCH__ >= 800, "expert_gemm needs sm_80");

// Stores the accumulators of a warp to shared memory, where other warps sum them over the slices of K.
__device__ __forceinline__ void store_accumulators(float* target, const Accumulators& accumulators) {
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  float* mine = target + warp / kWarpsN * (kBlockM * kPitch) + lane % 4 * 2 * kPitch +
                warp % kWarpsN * kColumnTiles * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kM8Tiles; ++j) {
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        mine[(j * 8 + v % 2) * kPitch + i * 16 + v / 2 * 8] = accumulators[i][j][v] * ExactCodes<X>::kUnit;
      }
    }
  }
}

// Returns the sum of eight adjacent columns of a row over the CTA's slices of K.
__device__ __forceinline__ Vector<float, 8> add_slices(const float* source) {
  Vector<float, 8> sums = {};
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums.values[i] += source[slice * (kBlockM * kPitch) + i];
  }
  return sums;
}

// Sums the accumulators, which are in shared memory, over the slices of K, and stores the unit's rows of y.
__device__ __forceinline__ void store_rows(const Arguments& arguments, const float* accumulators, const int32_t* pairs,
                                           int rows, int n_block, int expert, bool has_expert) {
  const int n_out = kGated ? arguments.n / 2 : arguments.n;
  constexpr int kVectors = kStoreN / 8;
  const Epilogue<X, Config> epilogue{kHasBias ? arguments.bias + static_cast<int64_t>(expert) * arguments.n : nullptr,
                                     arguments.shared,
                                     0,
                                     0,
                                     arguments.n,
                                     arguments.ld_shared};
#pragma unroll 1
  for (int index = threadIdx.x; index < rows * kVectors; index += kThreads) {
    const int row = index / kVectors;
    const int column = n_block * kStoreN + index % kVectors * 8;
    if (column >= n_out) continue;
    const float* source = accumulators + row * kPitch + index % kVectors * 8;
    const Vector<float, 8> sums = add_slices(source);
    Vector<float, 8> up = {};
    if constexpr (kGated) up = add_slices(source + kStoreN);
    const int pair = pairs[row];
    const int out_row = kRows == Rows::kTokens ? pair / arguments.top_k : pair;
    float row_weight = 1.0f;
    if constexpr (kHasRowWeights && kRows != Rows::kTokens) row_weight = arguments.row_weights[pair];
    Vector<X, 8> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float value = sums.values[i];
      if constexpr (kRows != Rows::kTokens) {
        value = kGated ? epilogue.product(value, up.values[i], column + i)
                       : epilogue.activate(epilogue.biased(value, column + i));
        value *= row_weight;
      } else {
        if constexpr (kHasBias) value += arguments.sum_biases(pair, column + i);
        value = epilogue.with_residual(value, out_row, column + i);
      }
      out.values[i] = from_float<X>(value);
    }
    X* target = arguments.y + static_cast<int64_t>(out_row) * arguments.ldy + column;
    store<true>(target, has_expert ? out : Vector<X, 8>{});
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    expert_gemm(const uint8_t* weight, const BIAS* bias, const float* row_weights, X* y, const X* shared,
                const int32_t* sorted_pairs, const int32_t* experts, const int32_t* sorted_count, const X* x,
                int64_t expert_bytes, int pairs, int capacity, int expert_count, int n, int k, int x_divisor, int top_k,
                int route_block, int ldx, int ldy, int ld_shared) {
  extern __shared__ __align__(128) uint8_t memory[];
  const Arguments arguments{weight,       bias,     row_weights,  y, shared, sorted_pairs, experts, sorted_count, x,
                            expert_bytes, pairs,    expert_count, n, k,      x_divisor,    top_k,   route_block,  ldx,
                            ldy,          ld_shared};
  const int lane = threadIdx.x % 32;
  const int slice = uniform_warp() / kWarpsN;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + slice * (kStages * kStageBytes);
  float* shared_accumulators = reinterpret_cast<float*>(memory);
  int32_t* unit_pairs = reinterpret_cast<int32_t*>(memory + SharedStorage::kPairs);

  bool has_waited = !kDependent;
  // The next kernel may prefetch results of the preceding kernel, so it starts after this wait.
  auto wait_for_preceding_kernel = [&] {
    if (!has_waited) {
      ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
      has_waited = true;
    }
  };
  if constexpr (!kReadsAhead) wait_for_preceding_kernel();

  ExpertTileScheduler scheduler{ceil_div(kGated ? n / 2 : n, kStoreN), 0};
  const int units = kRows == Rows::kSorted  ? min(*sorted_count, capacity) / kBlockM
                    : kRows == Rows::kPairs ? pairs
                                            : pairs / top_k;
  scheduler.tiles = units * scheduler.n_blocks;
  for (; scheduler.is_valid(); scheduler.advance()) {
    const int unit = scheduler.unit();
    int rows = 1;
    KPosition at{0, 0, 0, 0.0f};
    at.advance(arguments.k_tiles(), slice);
    int total = arguments.k_tiles();
    if constexpr (kRows == Rows::kTokens) {
      if (lane < top_k) {
        const int expert = experts[unit * top_k + lane];
        at.weight = !arguments.is_expert(expert) ? 0.0f : kHasRowWeights ? row_weights[unit * top_k + lane] : 1.0f;
        at.expert = arguments.is_expert(expert) ? expert : 0;
      }
      total *= top_k;
      if (threadIdx.x == 0) unit_pairs[0] = unit * top_k;
    } else if constexpr (kRows == Rows::kPairs) {
      at.expert = experts[unit];
      if (threadIdx.x == 0) unit_pairs[0] = unit;
    } else {
      at.expert = experts[static_cast<int64_t>(unit) * kBlockM / route_block];
      rows = collect_pairs<kBlockM>(unit_pairs, sorted_pairs + unit * kBlockM, pairs);
    }
    const bool has_expert = kRows == Rows::kTokens || arguments.is_expert(at.expert);
    if (kRows == Rows::kSorted && !has_expert || rows == 0) continue;
    // A pair without an expert stores a row of zeros, with the (unused) weight of expert 0.
    if (!has_expert) at.expert = 0;

    const Weight weights(arguments, scheduler.n_block());
    // The k tiles of this slice, every kSlices-th one; 0 or less if there are none for it.
    const int tiles = ceil_div(total - slice, kSlices);
    WeightPart parts[kDepth][kColumnTiles];
    KPosition next_weight = at;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (i < tiles) {
        weights.load(parts[i], next_weight);
        next_weight.advance(arguments.k_tiles());
      }
    }
    __syncthreads();  // unit_pairs are written, and all warps have read the preceding tile's accumulators
    wait_for_preceding_kernel();
    const Copies copies(arguments, unit_pairs, rows, ring);
    KPosition next_x = at;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < tiles) {
        copies.start(i, next_x);
        next_x.advance(arguments.k_tiles());
      }
      ptx::cp_async_commit_group();
    }
    Accumulators accumulators = {};
    MainLoop loop(ring, rows);
    int stage_idx = 0;
#pragma unroll 1
    for (int first = 0; first < tiles; first += kDepth) {
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (first + i >= tiles) break;
        ptx::cp_async_wait_group<kStages - 2>();
        sync_slice(slice);  // the copies of this stage have landed, and no warp reads the preceding stage
        if (first + i + kStages - 1 < tiles) {
          copies.start(stage_idx == 0 ? kStages - 1 : stage_idx - 1, next_x);
          next_x.advance(arguments.k_tiles());
        }
        ptx::cp_async_commit_group();
        float slot_weight = 1.0f;
        if constexpr (kRows == Rows::kTokens) slot_weight = __shfl_sync(kFullWarp, at.weight, at.slot);
        loop.multiply(accumulators, parts[i], stage_idx, slot_weight);
        if constexpr (kRows == Rows::kTokens) at.advance(arguments.k_tiles());
        if (first + i + kDepth < tiles) {
          weights.load(parts[i], next_weight);
          next_weight.advance(arguments.k_tiles());
        }
        stage_idx = stage_idx + 1 == kStages ? 0 : stage_idx + 1;
      }
    }
    __syncthreads();  // the stages are no longer read
    store_accumulators(shared_accumulators, accumulators);
    __syncthreads();
    store_rows(arguments, shared_accumulators, unit_pairs, rows, scheduler.n_block(), at.expert, has_expert);
    __syncthreads();  // unit_pairs are no longer read
  }
  wait_for_preceding_kernel();
}
