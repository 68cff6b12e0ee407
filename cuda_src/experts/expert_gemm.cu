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
// Loads do not stop at the end of a tile: in the last round of DEPTH k tiles, a warp loads the first weights of the
// CTA's next tile, and in the last STAGES - 1 k tiles, its x. So a slice has at least STAGES - 1 k tiles, or none.
// With ONE_TILE, CTAs have no next tile and the code is a third shorter, which SMs load anew in each decode step.
//
// Operand A is q - z (ExactCodes); the float32 sums of a group are multiplied by the group's scale, so no product is
// rounded. With one row per unit, operand A is q plus a constant (RawCodes), which takes fewer instructions, and the
// zero point times the sum of x is subtracted from the sum of a group. The number of CTAs does not depend on the
// routing, which only the GPU knows: CTAs are persistent.
#include "experts/expert_gemm_mainloop.cuh"
#include "ptx/griddepcontrol.cuh"

static_assert(__CUDA_ARCH__ >= 800, "expert_gemm needs sm_80");

// Stores the accumulators of a warp to shared memory, where other warps sum them over the slices of K.
__device__ __forceinline__ void store_accumulators(float* target, const Accumulators& accumulators) {
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  if (kHasOneRow && lane % 4 != 0) return;
  float* mine = target + warp / kWarpsN * (kBlockM * kPitch) + lane % 4 * 2 * kPitch +
                warp % kWarpsN * kColumnTiles * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kM8Tiles; ++j) {
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int v = 0; v < 4; v += 3 - kLaneRows) {
        const float unit = kHasOneRow ? RawCodes<X>::kUnits[v / 2] : ExactCodes<X>::kUnit;
        mine[(j * 8 + v % 2) * kPitch + i * 16 + v / 2 * 8] = accumulators[i][j][v] * unit;
      }
    }
  }
}

// Returns the sums of kStoreVector adjacent columns of a row over the CTA's slices of K.
__device__ __forceinline__ Vector<float, kStoreVector> add_slices(const float* source) {
  Vector<float, kStoreVector> sums = {};
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
    for (int i = 0; i < kStoreVector; ++i) sums.values[i] += source[slice * (kBlockM * kPitch) + i];
  }
  return sums;
}

// Sums the accumulators, which are in shared memory, over the slices of K, and stores the unit's rows of y.
__device__ __forceinline__ void store_rows(const Arguments& arguments, const float* accumulators, const int32_t* pairs,
                                           const Tile& tile) {
  const int n_out = kGated ? arguments.n / 2 : arguments.n;
  constexpr int kVectors = kStoreN / kStoreVector;
  const Epilogue<X, Config> epilogue{
      kHasBias ? arguments.bias + static_cast<int64_t>(tile.expert) * arguments.n : nullptr,
      arguments.shared,
      0,
      0,
      arguments.n,
      arguments.ld_shared};
#pragma unroll 1
  for (int index = threadIdx.x; index < tile.rows * kVectors; index += kThreads) {
    const int row = index / kVectors;
    const int column = tile.n_block * kStoreN + index % kVectors * kStoreVector;
    if (column >= n_out) continue;
    const float* source = accumulators + row * kPitch + index % kVectors * kStoreVector;
    const Vector<float, kStoreVector> sums = add_slices(source);
    Vector<float, kStoreVector> up = {};
    if constexpr (kGated) up = add_slices(source + kStoreN);
    const int pair = kRows == Rows::kSorted ? pairs[row] : tile.pair;
    const int out_row = kRows == Rows::kTokens ? pair / arguments.top_k : pair;
    float row_weight = 1.0f;
    if constexpr (kHasRowWeights && kRows != Rows::kTokens) row_weight = arguments.row_weights[pair];
    Vector<X, kStoreVector> out;
#pragma unroll
    for (int i = 0; i < kStoreVector; ++i) {
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
    // A pair without an expert has a row of zeros.
    store<true>(target, kRows == Rows::kPairs && tile.weight == 0.0f ? Vector<X, kStoreVector>{} : out);
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
  const int slice = uniform_warp() / kWarpsN;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + slice * (kStages * kStageBytes);
  float* shared_accumulators = reinterpret_cast<float*>(memory + SharedStorage::kAccumulators);
  int32_t* shared_pairs = reinterpret_cast<int32_t*>(memory + SharedStorage::kPairs);

  // The next kernel may prefetch results of the preceding kernel, so it starts after this wait.
  auto wait_for_preceding_kernel = [] {
    if constexpr (kDependent) ptx::griddepcontrol_wait();
    if constexpr (kDependent) ptx::griddepcontrol_launch_dependents();
  };
  if constexpr (!kReadsAhead) wait_for_preceding_kernel();
  TileQueue queue(arguments, capacity);
  Tile tile = queue.take();
  // The number of k tiles of this slice in each tile, every kSlices-th one; 0 or less if there are none for it.
  const int k_tiles = ceil_div(arguments.k_tiles() * (kRows == Rows::kTokens ? top_k : 1) - slice, kSlices);
  WeightPart parts[kDepth][kColumnTiles];
  Weight weight_ahead(arguments, tile, slice);
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    if (i < k_tiles && queue.has(tile)) weight_ahead.load(arguments, parts[i]);
  }
  if constexpr (kReadsAhead) wait_for_preceding_kernel();
  Copies x_ahead(arguments, tile, slice);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < k_tiles && queue.has(tile)) x_ahead.start(arguments, ring + i * kStageBytes);
    ptx::cp_async_commit_group();
  }
  MainLoop loop(ring);
  int stage_idx = 0;
#pragma unroll 1
  for (int parity = 0; queue.has(tile); parity ^= 1) {
    int32_t* pairs_of_tile = shared_pairs + parity * kBlockM;
    const Tile next = kOneTile ? tile : queue.take();
    const bool has_next = !kOneTile && queue.has(next);
    loop.set_rows(tile.rows);
    if (kRows == Rows::kSorted && threadIdx.x < kBlockM) pairs_of_tile[threadIdx.x] = tile.pair;
    KPosition at(slice, arguments.k_tiles());
    Accumulators accumulators = {};
#pragma unroll 1
    for (int first = 0; first < k_tiles; first += kDepth) {
      const bool is_last = first + kDepth >= k_tiles;
      if (!kOneTile && is_last) weight_ahead = Weight(arguments, next, slice);
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (first + i < k_tiles) {
          ptx::cp_async_wait_group<kStages - 2>();
          sync_slice(slice);  // the copies of this stage have landed, and no warp reads the preceding stage
          if (!kOneTile && first + i + kStages - 1 == k_tiles) x_ahead = Copies(arguments, next, slice);
          if (first + i + kStages - 1 < k_tiles || has_next) {
            x_ahead.start(arguments, ring + (stage_idx == 0 ? kStages - 1 : stage_idx - 1) * kStageBytes);
          }
          ptx::cp_async_commit_group();
          float slot_weight = 1.0f;
          if constexpr (kRows == Rows::kTokens) slot_weight = __shfl_sync(kFullWarp, tile.weight, at.slot);
          loop.multiply(accumulators, parts[i], stage_idx, slot_weight);
          if constexpr (kRows == Rows::kTokens) at.advance(arguments.k_tiles());
          stage_idx = stage_idx + 1 == kStages ? 0 : stage_idx + 1;
        }
        if (is_last ? i < k_tiles && has_next : first + i + kDepth < k_tiles) weight_ahead.load(arguments, parts[i]);
      }
    }
    __syncthreads();  // the accumulators of the preceding tile are no longer read, and pairs_of_tile are written
    store_accumulators(shared_accumulators, accumulators);
    __syncthreads();
    store_rows(arguments, shared_accumulators, pairs_of_tile, tile);
    if constexpr (kOneTile) return;
    tile = next;
  }
}
