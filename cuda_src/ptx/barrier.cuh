// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Parallel Synchronization and Communication Instructions: barrier".
#pragma once

namespace ptx {

// barrier.sync: waits for `threads` threads of the block, whole warps, at barrier `index` of 16; 0 is __syncthreads'.
__device__ __forceinline__ void barrier_sync(int index, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

}  // namespace ptx
