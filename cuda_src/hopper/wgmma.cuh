// SPDX-License-Identifier: Apache-2.0
// wgmma by the type of its operands.
#pragma once

#include "common/types.cuh"
#include "ptx/wgmma.cuh"

// d = a * b, plus d if kAccumulate: A of 64 rows and 16 k from registers (ptx/wgmma.cuh), B by its descriptor in shared
// memory. T is half_t or bfloat16_t.
template <class T, bool kAccumulate, int kCount>
__device__ __forceinline__ void wgmma(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kIsHalf<T>) {
    ptx::wgmma_f16<kAccumulate>(d, a, b);
  } else {
    ptx::wgmma_bf16<kAccumulate>(d, a, b);
  }
}
