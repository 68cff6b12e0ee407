// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PDL) of the decoder's kernels. DEPENDENT is 1 on sm_90 and newer.
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "common/warp.cuh"

// Lets the dependent kernel's CTAs start as SMs become free, and waits until the writes of all preceding kernels are
// visible. A kernel that prefetches constant data issues the two instructions itself, with its loads in between.
__device__ __forceinline__ void launch_dependents_and_wait() {
  if constexpr (DEPENDENT) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
}
