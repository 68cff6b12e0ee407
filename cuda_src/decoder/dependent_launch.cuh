// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PDL) of the decoder's kernels. DEPENDENT is 1 on sm_90 and newer.
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "common/warp.cuh"

// Lets CTAs of the dependent kernel start as SMs become free, and waits until the writes of all preceding kernels are
// visible. Kernels that prefetch weights issue the two instructions themselves, with the prefetches in between.
__device__ __forceinline__ void launch_dependents_and_wait() {
  if constexpr (DEPENDENT) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
}
