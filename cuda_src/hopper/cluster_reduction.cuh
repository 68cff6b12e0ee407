// SPDX-License-Identifier: Apache-2.0
// Split-K over DSMEM: the CTAs of a cluster compute one tile, each over a slice of K, and exchange partial sums through
// each other's shared memory. Each kernel adds partial sums in a fixed order, so results are bit-identical from run to
// run. There are two ways to wait for the partial sums:
//
//   PartialSumBarrier      an mbarrier of the receiving CTA counts the bytes, and only this CTA waits
//   reduce_scatter_groups  the whole cluster synchronizes after all writes, which is simpler
#pragma once

#include "common/types.cuh"
#include "hopper/cluster.cuh"
#include "hopper/pipeline.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// An mbarrier that counts the bytes of partial sums that CTAs of the cluster write to this CTA's shared memory. It
// completes one phase per launch, phase 0, so waits always expect parity 0.
struct PartialSumBarrier {
  uint32_t barrier;  // shared address of the mbarrier

  // Initialization by one thread: init, fence_mbarrier_init, then expect with the number of bytes that will be written
  // to this CTA. The cluster must synchronize before the first write.
  __device__ __forceinline__ void init() const { ptx::mbarrier_init(barrier, 1); }
  __device__ __forceinline__ void expect(int bytes) const { ptx::mbarrier_arrive_expect_tx(barrier, bytes); }
  // Writes four values to the shared memory of CTA `rank`, at the address that corresponds to `shared_address` in this
  // CTA, and completes their 16 bytes on the barrier of CTA `rank`.
  __device__ __forceinline__ void write(uint32_t rank, uint32_t shared_address, const float (&values)[4]) const {
    ptx::st_async(ptx::mapa(shared_address, rank), values, ptx::mapa(barrier, rank));
  }
  // Blocks until all expected bytes have landed. A CTA must not exit before this wait, because other CTAs still write
  // to its shared memory.
  __device__ __forceinline__ void wait_for_all() const {
    while (!ptx::mbarrier_try_wait_parity_cluster(barrier, 0)) {
    }
  }
};

// Sums the accumulators of the kClusterSize CTAs of a cluster. Each thread has kNumGroups groups of 4 accumulators.
// Afterwards CTA `rank` has the totals of kOwnedGroups groups, from group rank * kOwnedGroups. `memory` is shared
// memory float4 [kClusterSize][kNumWarpgroups][kOwnedGroups][128], at the shared address `begin` in every CTA.
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
