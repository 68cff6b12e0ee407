// SPDX-License-Identifier: Apache-2.0
// Warp-wide functions; every lane gets the same, bit-identical result.
#pragma once

#include "common/types.cuh"
#include "ptx/redux.cuh"

constexpr uint32_t kFullWarp = 0xffffffffu;

// Returns `value`, which must be the same in all lanes, in a form that the compiler knows to be warp-uniform, so that
// derived values can stay in uniform registers. Warps must not call this function inside a divergent branch.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(kFullWarp, value, 0); }

// Returns the index of this thread's warp in the CTA, as a warp-uniform value.
__device__ __forceinline__ int uniform_warp() { return uniform(threadIdx.x / 32); }

// Returns the sum of `value` over all lanes.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

// Returns the maximum of `value` over all lanes.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
}

// Returns the maximum of `value` over all lanes.
__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return ptx::redux_sync_max(value);
#else
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
#endif
}
