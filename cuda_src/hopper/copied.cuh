// SPDX-License-Identifier: Apache-2.0
// What kernels share that the copy engine feeds: its argument, waiting for it, and meeting the blocks that it serves.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "common/types.cuh"

// 128 bytes that the driver encodes.
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// All threads of a cluster of BLOCKS blocks.
template <int BLOCKS>
__device__ __forceinline__ void synchronize_cluster() {
  if constexpr (BLOCKS == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive_release();
    ptx::barrier_cluster_wait_acquire();
  }
}

// The same where all that they share is barriers behind a fence_mbarrier_init: to order more would wait for memory.
template <int BLOCKS>
__device__ __forceinline__ void begin_cluster() {
  if constexpr (BLOCKS == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait_acquire();
  }
}

// Blocks of a cluster write to each other's shared memory: none may end before the other.
template <int BLOCKS>
__device__ __forceinline__ void end_cluster() {
  if constexpr (BLOCKS > 1) synchronize_cluster<BLOCKS>();
}
