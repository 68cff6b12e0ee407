// SPDX-License-Identifier: Apache-2.0
// The thread index, read from %tid (PTX ISA, "Special Registers: %tid").
#pragma once

namespace ptx {

// %tid.x: returns the thread index, read anew in each call, so that the compiler keeps no derived value in registers.
__device__ __forceinline__ unsigned thread_index_now() {
  unsigned index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}
