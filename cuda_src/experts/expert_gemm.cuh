// SPDX-License-Identifier: Apache-2.0
// The compile-time constants and the shared-memory layout of expert_gemm.cu.
#pragma once

#include "common/epilogue.cuh"
#include "common/warp.cuh"
#include "gemm/repacked_layout.cuh"
#include "hopper/shared_storage.cuh"

// The source of the rows of a unit:
//   kSorted   rows of one expert, from the arrays that sort_tokens.cu writes
//   kPairs    one (token, slot) pair; experts are read from the ids of the router
//   kTokens   all slots of one token, whose weighted sum is the row of y; experts as in kPairs
enum class Rows { kSorted, kPairs, kTokens };

struct Config : RepackedLayout<SCALE, Zeros::ZEROS, GROUPS>,
                EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_SHARED> {};

constexpr bool kGated = Config::kGated, kHasBias = Config::kHasBias;
constexpr int kGroups = Config::kGroups, kGroupBytes = Config::kGroupBytes, kHalfGroupBytes = Config::kHalfGroupBytes;
constexpr int kWeightTileBytes = Config::kWeightTileBytes;
constexpr Zeros kZeros = Config::kZeros;
constexpr Rows kRows = Rows::ROWS;
constexpr bool kHasRowWeights = HAS_ROW_WEIGHTS;  // whether rows of y are multiplied by the weights of the router
constexpr bool kReadsAhead = READS_AHEAD;         // whether routing and weights may be read before the PDL wait
constexpr bool kOneTile = ONE_TILE;               // whether no CTA has more than one tile
constexpr bool kDependent = DEPENDENT;            // whether the launch has the PDL attribute
constexpr int kBlockM = BLOCK_M;                  // the largest number of rows per unit
constexpr int kColumnTiles = COLUMN_TILES;        // number of tiles of 16 columns of W per warp
constexpr int kWarpsN = WARPS_N;                  // number of warps per slice of K, side by side along n
constexpr int kSlices = WARPS_K;                  // number of slices of K per CTA
constexpr int kStages = STAGES;                   // number of stages of x per slice
constexpr int kDepth = DEPTH;                     // number of k tiles of the weight that a warp holds in registers
constexpr int kCtasPerSm = CTAS_PER_SM;

constexpr bool kHasOneRow = kRows != Rows::kSorted;
constexpr int kXRows = kHasOneRow ? 1 : kBlockM;  // number of rows of x per stage
constexpr int kSliceThreads = 32 * kWarpsN;
constexpr int kThreads = kSliceThreads * kSlices;
constexpr int kCtaColumnTiles = kColumnTiles * kWarpsN;
constexpr int kBlockN = kCtaColumnTiles * 16;
constexpr int kStoreN = kGated ? kBlockN / 2 : kBlockN;  // number of columns of y per CTA tile
constexpr int kM8Tiles = kBlockM / 8;
constexpr int kStoreVector = kHasOneRow ? 1 : 8;  // number of adjacent columns of y that a thread stores at once
constexpr int kLaneRows = kHasOneRow ? 1 : 2;     // number of rows of y per lane in each mma tile
constexpr int kGroupSteps = 8 / kGroups;          // number of mma steps of 16 k per group and weight tile
// Number of sums over a group to which consecutive steps add in turn, so that an mma need not wait for the one before
// it; with 16 rows or several groups, registers would spill.
constexpr int kChains = kBlockM == 8 && kGroups == 1 ? 2 : 1;

static_assert(kBlockM == 8 || kBlockM == 16, "ldmatrix loads 16 rows of x at a time");
static_assert(!kHasOneRow || kBlockM == 8, "one row takes the lowest tile");
static_assert(kHasOneRow || !kOneTile, "sorted blocks are too many, or have no rows");
static_assert(kRows != Rows::kTokens || !kGated, "a gated sum over slots has no meaning");
static_assert(kRows == Rows::kTokens || !Config::kHasResidual, "only the sum of a token includes a shared expert");
static_assert(!kGated || kCtaColumnTiles % 2 == 0, "half of the columns are the gate projection");
static_assert(kZeros != Zeros::kOffset, "offsets are not added");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");
static_assert(kGroups <= 8, "a group has at least 16 rows of W");

// Shared memory. A stage of x of a slice is [2 of k64][row][64], swizzled (hopper/swizzle.cuh). The padding of the rows
// of accumulators avoids bank conflicts.
constexpr int kStageBytes = kXRows * kWeightTileK * 2;
constexpr int kPitch = kBlockN + 4;

struct SharedStorage {
  static constexpr int kAccumulators = kSlices * kStages * kStageBytes;          // float [kSlices][kBlockM][kPitch]
  static constexpr int kPairs = kAccumulators + kSlices * kBlockM * kPitch * 4;  // the pairs of two tiles
  static constexpr int kBytes = kPairs + 2 * kBlockM * 4;
};
ASSERT_SHARED_BYTES(SharedStorage, SHARED_BYTES);
