// SPDX-License-Identifier: Apache-2.0
// Split-K over DSMEM: the CTAs of a cluster compute one tile, each over a part of K, and add their partial sums through
// each other's shared memory. Sums are added in the order of the CTA ranks, so results are the same from run to run.
//
//   PartialSumBarrier      writes are counted by an mbarrier of the CTA that receives them; it alone waits
//   reduce_scatter_groups  every CTA writes to every other one and all synchronize; simplest, for short tiles
#pragma once

#include "common/types.cuh"
#include "hopper/cluster.cuh"
#include "hopper/pipeline.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// The mbarrier that counts the bytes of partial sums which other CTAs write into this CTA's shared memory. It completes
// one phase, phase 0, in a launch.
struct PartialSumBarrier {
  uint32_t barrier;

  // One thread initializes the barrier, calls fence_mbarrier_init, then expects all bytes. The cluster must synchronize
  // before the first write.
  __device__ __forceinline__ void init() const { ptx::mbarrier_init(barrier, 1); }
  __device__ __forceinline__ void expect(int bytes) const { ptx::mbarrier_arrive_expect_tx(barrier, bytes); }
  // Writes four values to a shared address of the CTA `rank`, and signals its barrier.
  __device__ __forceinline__ void write(uint32_t rank, uint32_t shared_address, const float (&values)[4]) const {
    ptx::st_async(ptx::mapa(shared_address, rank), values, ptx::mapa(barrier, rank));
  }
  // Blocks until all bytes have landed. A CTA must not exit before: others still write to it.
  __device__ __forceinline__ void wait_for_all() const { wait(barrier, 0); }
};

// Adds up the accumulators of a cluster's kClusterSize CTAs and leaves each with the totals of kOwnedGroups groups,
// from rank * kOwnedGroups on. A thread has 4 accumulators of each of kNumGroups groups. `memory`, at the shared
// address `begin` in every CTA, is float4 [kClusterSize][kNumWarpgroups][kOwnedGroups][128].
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
