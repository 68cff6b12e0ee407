// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Asynchronous copy: cp.async". Global to shared memory, sm_80 and newer. Of BYTES the first `bytes` are read
// and the rest is filled with zeros, so that 0 reads nothing.
#pragma once

namespace ptx {

// cp.async.cg: 16 bytes, past L1.
__device__ __forceinline__ void cp_async_16(unsigned shared_address, const void* source, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(source), "r"(bytes)
               : "memory");
}

// cp.async.ca: 4 bytes, through L1.
__device__ __forceinline__ void cp_async_4(unsigned shared_address, const void* source, unsigned bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address), "l"(source), "r"(bytes)
               : "memory");
}

// cp.async.commit_group: closes the group of this thread's copies since the last call.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: waits until at most PENDING of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace ptx
