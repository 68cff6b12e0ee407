// SPDX-License-Identifier: Apache-2.0
// The rank of a CTA in its cluster, and barriers over all threads of a cluster. In a cluster of one CTA the barriers
// are __syncthreads, but cluster_sync_before_exit does nothing.
#pragma once

#include "ptx/cluster.cuh"

// Returns the rank of this CTA in a cluster of kClusterSize CTAs.
template <int kClusterSize> __device__ __forceinline__ int cluster_rank() {
  return kClusterSize == 1 ? 0 : static_cast<int>(ptx::cluster_ctarank());
}

// Synchronizes all threads of the cluster and makes their writes to shared memory visible to each other.
template <int kClusterSize> __device__ __forceinline__ void cluster_sync() {
  if constexpr (kClusterSize == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive_release();
    ptx::barrier_cluster_wait_acquire();
  }
}

// Synchronizes the cluster after mbarrier.init and fence_mbarrier_init. The relaxed arrive
// orders only the initialization (by fence_mbarrier_init) and, unlike cluster_sync, does not wait for other writes.
template <int kClusterSize> __device__ __forceinline__ void cluster_sync_after_init() {
  if constexpr (kClusterSize == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait_acquire();
  }
}

// Keeps this CTA alive until all CTAs of the cluster have completed their accesses to its shared memory (DSMEM).
template <int kClusterSize> __device__ __forceinline__ void cluster_sync_before_exit() {
  if constexpr (kClusterSize > 1) cluster_sync<kClusterSize>();
}
