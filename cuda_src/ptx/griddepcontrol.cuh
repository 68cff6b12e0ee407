// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Parallel Synchronization and Communication Instructions: griddepcontrol". Programmatic dependent launch
// (PDL); sm_90 and newer. Both instructions have no effect in a launch without the PDL attribute.
#pragma once

namespace ptx {

// griddepcontrol.launch_dependents: lets the dependent grid start once every CTA has executed this instruction or has
// exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// griddepcontrol.wait: waits until the preceding grids have completed and their writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}
