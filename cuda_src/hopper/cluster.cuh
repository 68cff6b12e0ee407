// SPDX-License-Identifier: Apache-2.0
// Barriers over the CTAs of a cluster; for a cluster of one CTA they synchronize its threads.
#pragma once

#include "ptx/cluster.cuh"

// Synchronizes all threads of the cluster and orders their writes to shared memory.
template <int kClusterSize>
__device__ __forceinline__ void cluster_sync() {
  if constexpr (kClusterSize == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive_release();
    ptx::barrier_cluster_wait_acquire();
  }
}

// Synchronizes the cluster after mbarrier.init and fence_mbarrier_init. The arrival is relaxed: it orders no other
// writes, for which cluster_sync would have to wait.
template <int kClusterSize>
__device__ __forceinline__ void cluster_sync_after_init() {
  if constexpr (kClusterSize == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait_acquire();
  }
}

// Keeps this CTA alive until the DSMEM writes of all CTAs of the cluster have landed.
template <int kClusterSize>
__device__ __forceinline__ void cluster_sync_before_exit() {
  if constexpr (kClusterSize > 1) cluster_sync<kClusterSize>();
}
