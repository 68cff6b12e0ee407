// SPDX-License-Identifier: Apache-2.0
// What kernels for sm_90a share: arguments that the copy engine takes, waiting for it, and wgmma by type.
#pragma once

#include "int4.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

// 128 bytes that the driver encodes.
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

template <bool ACCUMULATE, int COUNT>
__device__ __forceinline__ void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint32_t b) {
  if constexpr (Codes<X>::kMagic == Codes<half_t>::kMagic) {
    ptx::wgmma_f16<ACCUMULATE>(d, a, b);
  } else {
    ptx::wgmma_bf16<ACCUMULATE>(d, a, b);
  }
}
