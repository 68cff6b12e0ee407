// SPDX-License-Identifier: Apache-2.0
// What all lanes of a warp make together, in the same order in each of them.
#pragma once

#include "common/types.cuh"

constexpr uint32_t kFullWarp = 0xffffffffu;

// A value that is the same in all lanes, known to be so: what follows from it stays in uniform registers, unless the
// compiler sees a branch before that lanes of a warp may take alone.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(kFullWarp, value, 0); }

// The number of this thread's warp.
__device__ __forceinline__ int uniform_warp() { return uniform(threadIdx.x / 32); }

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
