// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Parallel Synchronization and Communication Instructions: atom". sm_70 and newer.
#pragma once

namespace ptx {

// atom.acq_rel.gpu.add: adds a value and returns the previous value. Releases, at GPU scope, the writes of this thread
// and the writes that a barrier has ordered before them; acquires the writes of all threads that added earlier.
__device__ __forceinline__ uint32_t atom_add_acq_rel(uint32_t* address, uint32_t value) {
  uint32_t previous;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(previous) : "l"(address), "r"(value) : "memory");
  return previous;
}

}
