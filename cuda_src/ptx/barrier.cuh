// SPDX-License-Identifier: Apache-2.0
// Named barriers of a CTA (PTX ISA, "Parallel Synchronization and Communication Instructions: barrier").
#pragma once

namespace ptx {

// barrier.sync: waits until `threads` threads of the CTA, in whole warps, have arrived at barrier `index` (0 .. 15).
// __syncthreads uses barrier 0.
__device__ __forceinline__ void barrier_sync(int index, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

// barrier.arrive: arrives at named barrier `index`, which completes with `threads` threads, without waiting.
__device__ __forceinline__ void barrier_arrive(int index, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

}
