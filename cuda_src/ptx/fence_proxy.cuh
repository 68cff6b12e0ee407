// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "membar / fence". sm_90 and newer.
#pragma once

namespace ptx {

// fence.proxy.async: what this thread stored in shared memory is there for wgmma and the copy engine.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace ptx
