// SPDX-License-Identifier: Apache-2.0
// What every kernel of the decoder begins with.
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "common/warp.cuh"

// DEPENDENT (sm_90 and newer): the next kernel's blocks may take their places, and those before have written all.
__device__ __forceinline__ void begin() {
  if constexpr (DEPENDENT) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
}
