// SPDX-License-Identifier: Apache-2.0
// The fence between ordinary and TMA accesses to memory (PTX ISA, "membar / fence"). sm_90 and newer.
#pragma once

namespace ptx {

// fence.proxy.async: orders accesses to global and shared memory through the generic proxy, also writes of other
// threads that this thread has acquired, before later accesses through the async proxy (wgmma and TMA).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

}
