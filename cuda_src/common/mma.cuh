// SPDX-License-Identifier: Apache-2.0
// c += a * b for m16n8k16 and both operand types: float16, from sm_75 on, and bfloat16, from sm_80 on.
#pragma once

#include "ptx/mma.cuh"
#include "common/types.cuh"

template <class T> __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma<half_t>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  ptx::mma_m16n8k16_f16(c, a, b0, b1);
#else
  ptx::mma_m16n8k8_f16(c, a[0], a[1], b0);
  ptx::mma_m16n8k8_f16(c, a[2], a[3], b1);
#endif
}

template <>
__device__ __forceinline__ void mma<bfloat16_t>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ptx::mma_m16n8k16_bf16(c, a, b0, b1);
}

// Returns two float32 values, each rounded to T, in the low and the high half of one register.
template <class T> __device__ __forceinline__ uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
