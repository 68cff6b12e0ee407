// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Special Registers: %tid".
#pragma once

namespace ptx {

// %tid.x: reads the thread index again at each call, so that the compiler holds no value that depends on it.
__device__ __forceinline__ unsigned thread_index_now() {
  unsigned index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace ptx
