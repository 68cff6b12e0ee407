// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PDL) of the decoder's kernels. DEPENDENT is 1 from sm_90 on.
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "common/warp.cuh"

// Let the dependent kernel's CTAs start as SMs become free, and wait until the memory of all preceding kernels is
// visible. A kernel that prefetches constant data calls the two instructions itself, with its loads between them.
__device__ __forceinline__ void launch_dependents_and_wait() {
  if constexpr (DEPENDENT) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
}
