// SPDX-License-Identifier: Apache-2.0
// wgmma for both types of 16-bit operands, float16 and bfloat16, selected by a template argument.
#pragma once

#include "common/types.cuh"
#include "ptx/wgmma.cuh"

// Computes d = a * b, or d += a * b if kAccumulate, where k = 16. A (64 rows) is in registers (ptx/wgmma.cuh), B in
// shared memory; `b` is the matrix descriptor of B. T is half_t or bfloat16_t.
template <class T, bool kAccumulate, int kCount>
__device__ __forceinline__ void wgmma(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kIsHalf<T>) {
    ptx::wgmma_f16<kAccumulate>(d, a, b);
  } else {
    ptx::wgmma_bf16<kAccumulate>(d, a, b);
  }
}
