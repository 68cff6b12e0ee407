// SPDX-License-Identifier: Apache-2.0
// The constants that follow from those of the host, and the shared-memory layout of gemm_sm90_large.cu.
#pragma once

#include "common/epilogue.cuh"
#include "common/tile_scheduler.cuh"
#include "gemm/repacked_layout.cuh"
#include "hopper/cluster.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"

// The constants that follow from those of the host. Host is the Config of gemm_sm90_large.cu.
template <class Host> struct GemmSm90Large : Host {
  // Whether the partial sums of stream-K pass through the pipeline. With two m64 tiles per warpgroup, such sums would
  // slow down the main loop by up to 10%; with four warpgroups, registers would spill.
  static constexpr bool kRingReduction = Host::kStreamK && Host::kM64Tiles == 1 && Host::kWarpgroups == 2;

  static constexpr int kConsumerWarps = Host::kWarpgroups * 4;
  static constexpr int kThreads = (kConsumerWarps + 4) * 32;
  static constexpr int kConsumerRegisters = Host::kWarpgroups == 2 ? 232 : 112;
  static constexpr int kProducerRegisters = Host::kWarpgroups == 2 ? 40 : 24;
  static constexpr int kWeightTiles = Host::kWarpgroups * Host::kM64Tiles * 2;
  static constexpr int kBlockN = kWeightTiles * kWeightTileN;
  // Number of accumulators per thread and m64 tile (64 columns of W x BLOCK_M rows of x).
  static constexpr int kAccumulators = Host::kBlockM / 2;

  static_assert(Host::kM64Tiles * Host::kBlockM * (Host::kWarpgroups / 2) <= 288, "the accumulators fit in registers");
  static_assert(!Host::kGated || Host::kM64Tiles == 2, "a warpgroup computes both the gate and the up projection");
  static_assert(Host::kCluster == 1 || Host::kCluster == 2, "a stage of x has two halves to multicast");
  static_assert(sizeof(typename Host::T) == 2, "tensor cores take 16-bit x");
  static_assert(Host::kStoreRows == 16 || Host::kStoreRows == 32, "stmatrix stores 16 rows at a time");
  static_assert(Host::kBlockM % 8 == 0 && (Host::kStoreRows == 16 || Host::kBlockM % 32 == 0),
                "the last chunk has 8, 16 or 32 rows");

  // Number of columns of y per warpgroup; gate and up together give one.
  static constexpr int kStoreN = Host::kGated ? 64 : Host::kM64Tiles * 64;
  static constexpr int kXHalfBytes = Host::kBlockM * 128;  // bytes of half a stage of x: BLOCK_M rows x 64 columns
  static constexpr int kXStageBytes = 2 * kXHalfBytes;
  static constexpr int kWeightStageBytes = kWeightTiles * Host::kWeightTileBytes;
  static constexpr int kStoreRowBytes =
      Host::kM64Tiles * 64 * 2 + 16;  // with 16 bytes of padding, 8 rows start in different banks

  struct SharedStorage {
    using XStages = SharedArray<0, Host::kStages, kXStageBytes>;  // layout [stage][k64][row][64 k], swizzled
    using WeightStages = SharedArray<XStages::kEnd, Host::kStages, kWeightStageBytes>;  // layout [stage][weight tile]
    using StoreBuffers = SharedArray<WeightStages::kEnd, Host::kWarpgroups, Host::kStoreRows * kStoreRowBytes>;
    using Barriers = SharedArray<StoreBuffers::kEnd, 2 * Host::kStages, kBarrierBytes>;
    static constexpr int kBytes = Barriers::kEnd;

    uint32_t begin;  // shared address of the first byte, a multiple of 1024

    __device__ __forceinline__ uint32_t x(int stage_idx) const { return XStages::at(begin, stage_idx); }
    __device__ __forceinline__ uint32_t weight(int stage_idx) const { return WeightStages::at(begin, stage_idx); }
    __device__ __forceinline__ Pipeline<Host::kStages, Barriers::kBegin> pipeline() const { return {begin}; }
  };
  ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);

  // Number of partial sums of a warpgroup; as many bytes as a stage of x.
  static constexpr int kWarpgroupSums = kXStageBytes / 4;
  // Index of the named barrier at which the signaler waits for the consumers.
  static constexpr int kSignalBarrier = 1 + Host::kWarpgroups;
  static constexpr int kSignalThreads = (kConsumerWarps + 1) * 32;
  static_assert(kWarpgroupSums == kAccumulators * 128, "the accumulators of an m64 tile fit into a stage of x");

  using Accumulators = float[Host::kM64Tiles][kAccumulators];
  using Scheduler = StreamKTileScheduler<Host::kCluster, Host::kStreamK>;
};
