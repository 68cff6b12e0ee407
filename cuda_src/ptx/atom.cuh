// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Parallel Synchronization and Communication Instructions: atom". sm_70 and newer.
#pragma once

namespace ptx {

// atom.acq_rel.gpu.add: adds, and gives what was there before. All that threads of the block wrote before a barrier
// ahead of it can be read by whoever adds later, and by its block behind a barrier.
__device__ __forceinline__ uint32_t atom_add_acq_rel(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

}  // namespace ptx
