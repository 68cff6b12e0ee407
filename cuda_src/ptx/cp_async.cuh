// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Asynchronous copy: cp.async". Copies from global to shared memory; sm_80 and newer. Only the first `bytes`
// bytes are read, and the rest is filled with zeros; with bytes = 0 nothing is read.
#pragma once

namespace ptx {

// cp.async.cg: copies 16 bytes, cached in L2 only.
__device__ __forceinline__ void cp_async_16(unsigned shared_address, const void* source, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(source), "r"(bytes)
               : "memory");
}

// cp.async.ca: copies 4 bytes, cached in L1 and L2.
__device__ __forceinline__ void cp_async_4(unsigned shared_address, const void* source, unsigned bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address), "l"(source), "r"(bytes)
               : "memory");
}

// cp.async.commit_group: commits this thread's copies since the last call as one group.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.mbarrier.arrive.noinc: arrives at a barrier once all preceding cp.async of this thread have completed.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// cp.async.wait_group: waits until at most the last PENDING groups of this thread are pending.
template <int PENDING> __device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}
