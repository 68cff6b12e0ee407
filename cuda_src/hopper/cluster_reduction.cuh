// SPDX-License-Identifier: Apache-2.0
// Split-K over DSMEM: the CTAs of a cluster compute one tile, each over a slice of K, and exchange partial sums through
// each other's shared memory. Partial sums are added in the order of the CTA ranks, so results are bit-identical from
// run to run.
//
//   PartialSumBarrier      an mbarrier in the receiving CTA counts the bytes; only the receiver waits
//   reduce_scatter_groups  every CTA writes to every other one and the cluster synchronizes; simplest, for short tiles
#pragma once

#include "common/types.cuh"
#include "hopper/cluster.cuh"
#include "hopper/pipeline.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// An mbarrier that counts the bytes of partial sums written by other CTAs to this CTA's shared memory. It completes one
// phase per launch, phase 0, so its phase never flips.
struct PartialSumBarrier {
  uint32_t barrier;

  // One thread initializes the barrier, calls fence_mbarrier_init and sets the expected byte count. The cluster must
  // synchronize before the first write.
  __device__ __forceinline__ void init() const { ptx::mbarrier_init(barrier, 1); }
  __device__ __forceinline__ void expect(int bytes) const { ptx::mbarrier_arrive_expect_tx(barrier, bytes); }
  // Writes four values to a shared address of CTA `rank` and completes their 16 bytes on its barrier.
  __device__ __forceinline__ void write(uint32_t rank, uint32_t shared_address, const float (&values)[4]) const {
    ptx::st_async(ptx::mapa(shared_address, rank), values, ptx::mapa(barrier, rank));
  }
  // Blocks until all expected bytes have landed. Call it before the CTA exits, because other CTAs write to
  // its shared memory.
  __device__ __forceinline__ void wait_for_all() const { wait(barrier, 0); }
};

// Sums the accumulators of a cluster's kClusterSize CTAs. CTA `rank` ends with the totals of kOwnedGroups groups,
// starting at group rank * kOwnedGroups; a thread has 4 accumulators in each of kNumGroups groups. `memory` is float4
// [kClusterSize][kNumWarpgroups][kOwnedGroups][128], at the shared address `begin` in every CTA.
template <int kClusterSize, int kNumWarpgroups, int kNumGroups, int kOwnedGroups>
__device__ __forceinline__ void reduce_scatter_groups(float (&totals)[kOwnedGroups * 4], const float* accumulators,
                                                      uint8_t* memory, uint32_t begin, int rank, int warpgroup) {
  auto slot = [&](int from, int group) {
    return ((from * kNumWarpgroups + warpgroup) * kOwnedGroups + group) * 2048 + threadIdx.x % 128 * 16;
  };
#pragma unroll
  for (int group = 0; group < kNumGroups; ++group) {
    const float* mine = accumulators + group * 4;
    const uint32_t target = ptx::mapa(begin + slot(rank, group % kOwnedGroups), group / kOwnedGroups);
    ptx::st_shared_cluster(target, {mine[0], mine[1], mine[2], mine[3]});
  }
  cluster_sync<kClusterSize>();
#pragma unroll
  for (int group = 0; group < kOwnedGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) totals[group * 4 + i] = 0.0f;
    if (rank * kOwnedGroups + group >= kNumGroups) continue;
#pragma unroll
    for (int from = 0; from < kClusterSize; ++from) {
      const auto partial = *reinterpret_cast<const Vector<float, 4>*>(memory + slot(from, group));
#pragma unroll
      for (int i = 0; i < 4; ++i) totals[group * 4 + i] += partial.values[i];
    }
  }
}
