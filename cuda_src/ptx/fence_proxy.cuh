// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "membar / fence". sm_90 and newer.
#pragma once

namespace ptx {

// fence.proxy.async: makes this thread's writes to shared memory visible to the async proxy (wgmma and TMA).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace ptx
