// SPDX-License-Identifier: Apache-2.0
// What every kernel of the decoder begins with.
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "ptx/prefetch.cuh"
#include "types.cuh"

// DEPENDENT (sm_90 and newer): the next kernel's blocks may take their places, and those before have written all.
__device__ __forceinline__ void begin() {
  if constexpr (DEPENDENT) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
}

// Asks the L2 cache for the beginning of the weight that the next product reads, while memory has little else to do:
// `ahead_bytes` of each of `runs` runs, which the product reads side by side. The grid's blocks share the work.
__device__ __forceinline__ void ask_ahead(const uint8_t* next, int runs, int run_bytes, int ahead_bytes, int block,
                                          int blocks) {
  if constexpr (DEPENDENT) {
    constexpr int kLine = 128;
    const int lines = ceil_div(ahead_bytes, kLine);
    for (int i = block * THREADS + threadIdx.x; i < runs * lines; i += blocks * THREADS) {
      ptx::prefetch_global_l2(next + static_cast<int64_t>(i / lines) * run_bytes + i % lines * kLine);
    }
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
