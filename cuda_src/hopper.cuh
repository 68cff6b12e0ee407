// SPDX-License-Identifier: Apache-2.0
// What the kernels on repacked weights share for sm_90a: the copy engine, and wgmma by type.
#pragma once

#include "copied.cuh"
#include "int4.cuh"
#include "ptx/wgmma.cuh"
#include "warp.cuh"

template <bool ACCUMULATE, int COUNT>
__device__ __forceinline__ void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (Codes<X>::kMagic == Codes<half_t>::kMagic) {
    ptx::wgmma_f16<ACCUMULATE>(d, a, b);
  } else {
    ptx::wgmma_bf16<ACCUMULATE>(d, a, b);
  }
}
