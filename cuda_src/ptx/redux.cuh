// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Parallel Synchronization and Communication Instructions: redux.sync"; sm_80 and newer.
#pragma once

namespace ptx {

// redux.sync.max.u32: returns the largest value of all lanes.
__device__ __forceinline__ unsigned redux_sync_max(unsigned value) {
  unsigned out;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(out) : "r"(value));
  return out;
}

}
