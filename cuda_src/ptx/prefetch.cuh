// SPDX-License-Identifier: Apache-2.0
// Prefetch instructions (PTX ISA, "Data Movement and Conversion Instructions: prefetch").
#pragma once

namespace ptx {

// prefetch.global.L2: prefetches the cache line that contains a global address into L2.
__device__ __forceinline__ void prefetch_global_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}
