// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Control Flow Instructions: griddepcontrol". Programmatic dependent launch; sm_90 and newer, and without
// effect in a launch that is not dependent.
#pragma once

namespace ptx {

// griddepcontrol.launch_dependents: the next grid may start once all blocks have come here or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// griddepcontrol.wait: until the grids before have ended and what they wrote can be read.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace ptx
