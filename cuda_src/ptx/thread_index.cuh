// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Special Registers: %tid".
#pragma once

namespace ptx {

// %tid.x, read anew at each call: what depends on it cannot be computed ahead and held in registers meanwhile.
__device__ __forceinline__ unsigned thread_index_now() {
  unsigned index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace ptx
