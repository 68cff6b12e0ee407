// SPDX-License-Identifier: Apache-2.0
// The constants that follow from those of the host, and the shared-memory layout of gemm_mma_fragments.cu.
#pragma once

#include "common/epilogue.cuh"
#include "common/tile_scheduler.cuh"
#include "gemm/repacked_layout.cuh"
#include "hopper/residual_stream.cuh"
#include "hopper/shared_storage.cuh"

// How a warp computes the products of a group:
//   kExact    operand A is q - z (ExactCodes); the float32 sums of a group, or of a stage if this is shorter, are
//             multiplied by the group's scale, so that no product is rounded
//   kScaled   operand A is (q - z) * s, rounded once (ScaledCodes); the only choice for 8-bit codes and for offsets
// Operand A is normal in both. Tensor cores align products by the exponents of their operands, that of a
// subnormal q * 2^-24 as if it were 2^-14, and cut off the same number of bits below: up to 10 bits of precision less.
enum class Math { kExact, kScaled };

// The constants that follow from those of the host. Host is the Config of gemm_mma_fragments.cu.
template <class Host> struct GemmMmaFragments : Host {
  static constexpr int kSliceThreads = 32 * Host::kWarpsN;
  static constexpr int kThreads = kSliceThreads * Host::kSlices;
  static constexpr int kTileColumns = Host::kWarpColumns * Host::kWarpsN;
  static constexpr int kBlockN = kTileColumns * kWeightTileN;
  // Number of columns of y per CTA tile; gate and up together give one.
  static constexpr int kStoreN = Host::kGated ? kBlockN / 2 : kBlockN;
  static constexpr int kCtaSums = Host::kBlockM * kBlockN;  // number of partial sums of a CTA
  static constexpr int kM8Tiles = Host::kBlockM / 8;
  static constexpr int kN16Tiles = Host::kWarpColumns * 2;     // number of mma tiles of 16 columns per warp
  static constexpr int kSteps = Host::kStageK / 16;            // number of mma steps along k per stage
  static constexpr int kK64Parts = Host::kStageK / 64;         // number of parts of 64 k per stage
  static constexpr int kParts = kWeightTileK / Host::kStageK;  // number of stages per weight tile

  // The number of groups per stage. A group that spans both stages of a weight tile is stored in each.
  static constexpr int kStageGroups = Host::kGroups > kParts ? Host::kGroups / kParts : 1;
  static constexpr int kGroupSteps = kSteps / kStageGroups;

  // Whether operand A is multiplied by the scales, rounded, before the product.
  static constexpr bool kScalesWeight = Host::kMath != Math::kExact;
  // Number of 16-byte vectors that hold a lane's codes of 16 columns x 64 k.
  static constexpr int kCodeVectors = Host::kBits / 4;

  static_assert(Host::kStageK == 64 || Host::kStageK == 128, "a stage is a weight tile or half of one");
  static_assert(Host::kBlockM % (Host::kBlockM > 64 ? 16 : 8) == 0, "a step takes two turns of whole mma tiles");
  static_assert(Host::kXRows == Host::kBlockM || (kM8Tiles == 1 && Host::kXRows < 8),
                "only few rows are fewer than those of a tile");
  static_assert(!Host::kGated || kTileColumns % 2 == 0, "half of the tile columns are the gate projection");
  static_assert(kScalesWeight || (Host::kBits == 4 && Host::kZeros != Zeros::kOffset),
                "8-bit codes are scaled, and offsets added, before the product");
  static_assert(sizeof(typename Host::T) == 2, "tensor cores take 16-bit x");
  static_assert(Host::kAsync || !Host::kDependent, "a dependent launch copies by cp.async");
  static_assert(Host::kAsync || Host::kStages == 2, "copies through registers fill the other one of two stages");
  static_assert(!Host::kAddsToStream || (!Host::kGated && !Host::kHasResidual && Host::kAligned),
                "only a plain, aligned y can be added to the residual stream");

  // A stage of a slice holds
  //   x        [k64 part][row][64], swizzled (hopper/swizzle.cuh)
  //   weight   [tile column]: the stage's codes of a weight tile, then its groups (repacked_layout.cuh)
  static constexpr int kXStageBytes = Host::kXRows * Host::kStageK * 2;
  static constexpr int kStageCodeBytes = Host::kTileCodeBytes / kParts;
  static constexpr int kPartBytes = kStageCodeBytes + kStageGroups * Host::kGroupBytes;
  static constexpr int kStageBytes = ceil_div(kXStageBytes + kTileColumns * kPartBytes, 128) * 128;

  // After the main loop, the accumulators of kPassRows rows of all slices overwrite the stages. The padding avoids bank
  // conflicts.
  static constexpr int kPitch = kBlockN + 4;

  struct SharedStorage {
    using Ring = SharedArray<0, Host::kSlices * Host::kStages, kStageBytes>;
    using Pass = SharedArray<0, Host::kSlices * Host::kPassRows, kPitch * 4>;
    static constexpr int kOverlaidEnd = Ring::kEnd > Pass::kEnd ? Ring::kEnd : Pass::kEnd;
    // Float32 factors by which RMSNorm multiplies the rows of y.
    using Factors = SharedArray<kOverlaidEnd, Host::kRmsNormsX ? Host::kBlockM : 0, 4>;
    static constexpr int kBytes = Factors::kEnd;
  };
  ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);

  using Scheduler = StreamKTileScheduler<1, Host::kStreamK>;
};
