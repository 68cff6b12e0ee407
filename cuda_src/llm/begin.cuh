// SPDX-License-Identifier: Apache-2.0
// What every kernel of the decoder begins with.
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "types.cuh"

// DEPENDENT (sm_90 and newer): the next kernel's blocks may take their places, and those before have written all.
__device__ __forceinline__ void begin() {
  if constexpr (DEPENDENT) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
}

constexpr uint32_t kFullWarp = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
}
