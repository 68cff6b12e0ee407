// SPDX-License-Identifier: Apache-2.0
// The compile-time constants and the shared-memory layout of gemm_sm90_large.cu.
#pragma once

#include "common/epilogue.cuh"
#include "gemm/repacked_layout.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"
#include "hopper/tile_scheduler.cuh"

constexpr bool kAligned = ALIGNED;
constexpr int kBlockM = BLOCK_M;
constexpr int kStages = STAGES;
constexpr int kCluster = CLUSTER;
constexpr bool kStreamK = STREAM_K;      // whether clusters share units (tile_scheduler.cuh)
constexpr int kWarpgroups = WARPGROUPS;  // number of consumer warpgroups
constexpr int kM64Tiles = M64_TILES;     // number of m64 tiles (64 columns of y each) per warpgroup
constexpr int kStoreRows = STORE_ROWS;   // number of rows of y per store buffer

// Whether the partial sums of stream-K pass through the pipeline. With two m64 tiles per warpgroup, such sums would slow
// down the main loop by up to 10%; with four warpgroups, registers would spill.
constexpr bool kRingReduction = kStreamK && kM64Tiles == 1 && kWarpgroups == 2;

constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kThreads = (kConsumerWarps + 4) * 32;
constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 112;
constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 24;
constexpr int kWeightTiles = kWarpgroups * kM64Tiles * 2;
constexpr int kBlockN = kWeightTiles * kWeightTileN;
constexpr int kAccumulators = kBlockM / 2;  // number of accumulators per thread and m64 tile

static_assert(kM64Tiles * kBlockM * (kWarpgroups / 2) <= 256, "the accumulators fit in registers");
static_assert(!kGated || kM64Tiles == 2, "a warpgroup computes both the gate and the up projection");
static_assert(kCluster == 1 || kCluster == 2, "a stage of x has two halves to multicast");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");
static_assert(kStoreRows == 16 || kStoreRows == 32, "stmatrix stores 16 rows at a time");
static_assert(kBlockM % 8 == 0 && (kStoreRows == 16 || kBlockM % 32 == 0), "the last chunk has 8, 16 or 32 rows");

constexpr int kXHalfBytes = kBlockM * 128;  // bytes of half a stage of x: BLOCK_M rows x 64 columns
constexpr int kXStageBytes = 2 * kXHalfBytes;
constexpr int kWeightStageBytes = kWeightTiles * kWeightTileBytes;
constexpr int kStoreRowBytes = kM64Tiles * 64 * 2 + 16;  // with 16 bytes of padding, 8 rows start in different banks

struct SharedStorage {
  using XStages = SharedArray<0, kStages, kXStageBytes>;                        // [stage][k64][row][64 k], swizzled
  using WeightStages = SharedArray<XStages::kEnd, kStages, kWeightStageBytes>;  // [stage][weight tile]
  using StoreBuffers = SharedArray<WeightStages::kEnd, kWarpgroups, kStoreRows * kStoreRowBytes>;
  using Barriers = SharedArray<StoreBuffers::kEnd, 2 * kStages, kBarrierBytes>;
  static constexpr int kBytes = Barriers::kEnd;

  uint32_t begin;  // shared address of the first byte, a multiple of 1024

  __device__ __forceinline__ uint32_t x(int stage_idx) const { return XStages::at(begin, stage_idx); }
  __device__ __forceinline__ uint32_t weight(int stage_idx) const { return WeightStages::at(begin, stage_idx); }
  __device__ __forceinline__ Pipeline<kStages, Barriers::kBegin> pipeline() const { return {begin}; }
};
ASSERT_SHARED_BYTES(SharedStorage);

using Accumulators = float[kM64Tiles][kAccumulators];
using Scheduler = StreamKTileScheduler<kCluster, kStreamK>;
