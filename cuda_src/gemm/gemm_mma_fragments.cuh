// SPDX-License-Identifier: Apache-2.0
// The compile-time constants and the shared-memory layout of gemm_mma_fragments.cu.
#pragma once

#include "common/epilogue.cuh"
#include "gemm/repacked_layout.cuh"
#include "hopper/shared_storage.cuh"
#include "common/tile_scheduler.cuh"

// How a warp computes the products of a group:
//   kRaw      operand A is q plus a constant (RawCodes); the tensor cores also sum x, for the zero points
//   kExact    operand A is q - z (ExactCodes)
//   kScaled   operand A is (q - z) * s, rounded once (ScaledCodes)
// With kRaw and kExact, no product is rounded: the float32 sums of a group are multiplied by the group's scale.
//   kFused    operand A is q * s - z * s, where z * s and the difference are rounded; float16 only
enum class Math { kRaw, kExact, kScaled, kFused };

struct Config : RepackedLayout<SCALE, Zeros::ZEROS, GROUPS>,
                EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL> {};

constexpr bool kGated = Config::kGated, kHasResidual = Config::kHasResidual;
constexpr int kGroups = Config::kGroups, kGroupBytes = Config::kGroupBytes, kHalfGroupBytes = Config::kHalfGroupBytes;
constexpr int kWeightTileBytes = Config::kWeightTileBytes;
constexpr Zeros kZeros = Config::kZeros;
constexpr bool kAligned = ALIGNED;
constexpr Math kMath = Math::MATH;
constexpr int kBlockM = BLOCK_M;
constexpr int kXRows = X_ROWS;              // number of rows of x per stage
constexpr int kWarpColumns = WEIGHT_TILES;  // number of tile columns (32 columns of y each) per warp
constexpr int kWarpsN = WARPS_N;            // number of warps per slice of K, side by side along n
constexpr int kSlices = WARPS_K;            // number of slices of K per CTA
constexpr int kStageK = STAGE_K;            // the extent of a stage along K
constexpr int kStages = STAGES;             // number of stages per slice
constexpr int kPassRows = PASS_ROWS;        // number of rows of accumulators that shared memory holds
constexpr int kCtasPerSm = CTAS_PER_SM;
constexpr bool kStreamK = STREAM_K;  // whether CTAs share units (tile_scheduler.cuh)

constexpr int kSliceThreads = 32 * kWarpsN;
constexpr int kThreads = kSliceThreads * kSlices;
constexpr int kTileColumns = kWarpColumns * kWarpsN;
constexpr int kBlockN = kTileColumns * kWeightTileN;
constexpr int kM8Tiles = kBlockM / 8;
constexpr int kN16Tiles = kWarpColumns * 2;     // number of mma tiles of 16 columns per warp
constexpr int kSteps = kStageK / 16;            // number of mma steps along k per stage
constexpr int kK64Parts = kStageK / 64;         // number of parts of 64 k per stage
constexpr int kParts = kWeightTileK / kStageK;  // number of stages per weight tile

// The number of groups per stage. A group that spans both stages of a weight tile is stored in each.
constexpr int kStageGroups = kGroups > kParts ? kGroups / kParts : 1;
constexpr int kGroupSteps = kSteps / kStageGroups;

// Whether operand A is multiplied by the scales.
constexpr bool kScalesWeight = kMath == Math::kScaled || kMath == Math::kFused;

static_assert(kStageK == 64 || kStageK == 128, "a stage is a weight tile or half of one");
static_assert(kScalesWeight || kParts == 1 || kGroups > 1, "the sums of a group end with its stage");
static_assert(kM8Tiles == 1 || kBlockM % 16 == 0, "ldmatrix loads 16 rows of x at a time");
static_assert(kXRows == kBlockM || (kM8Tiles == 1 && kXRows < 8), "only few rows are fewer than those of a tile");
static_assert(!kGated || kTileColumns % 2 == 0, "half of the tile columns are the gate projection");
static_assert(kZeros != Zeros::kOffset, "offsets are not added");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");

// A stage of a slice holds
//   x        [k64 part][row][64], swizzled (hopper/swizzle.cuh)
//   weight   [tile column]: the stage's codes of a weight tile, then its groups (repacked_layout.cuh)
constexpr int kXStageBytes = kXRows * kStageK * 2;
constexpr int kStageCodeBytes = kCodeBytes / kParts;
constexpr int kPartBytes = kStageCodeBytes + kStageGroups * kGroupBytes;
constexpr int kStageBytes = ceil_div(kXStageBytes + kTileColumns * kPartBytes, 128) * 128;

// After the main loop, the accumulators of kPassRows rows of all slices overwrite the stages. The padding avoids bank
// conflicts.
constexpr int kPitch = kBlockN + 4;
constexpr int kPassBytes = kSlices * kPassRows * kPitch * 4;
constexpr int kRingBytes = kSlices * kStages * kStageBytes;

struct SharedStorage {
  static constexpr int kBytes = kRingBytes > kPassBytes ? kRingBytes : kPassBytes;
};
ASSERT_SHARED_BYTES(SharedStorage, SHARED_BYTES);

using Scheduler = StreamKTileScheduler<1, kStreamK>;
