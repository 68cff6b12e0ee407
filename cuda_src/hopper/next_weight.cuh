// SPDX-License-Identifier: Apache-2.0
// The prefetch into L2 of a part of the gate and up projections, whose GEMM is the next kernel of a decode step.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "common/types.cuh"

struct NextWeight {
  const uint8_t* begin;  // the repacked weight, in which the gate projection comes first
  int share_bytes;       // number of bytes of the gate and of the up projection per CTA, a multiple of 16; may be 0
  int up_offset;         // distance in bytes from the gate projection to the up projection

  // Prefetches the share of CTA `cta`. All lanes of one warp call this function.
  __device__ __forceinline__ void prefetch(int cta) const {
    constexpr int kCopyBytes = 2048;
    const uint8_t* share = begin + static_cast<int64_t>(cta) * share_bytes;
    for (int i = threadIdx.x % 32 * kCopyBytes; i < share_bytes; i += 32 * kCopyBytes) {
      const int bytes = min(kCopyBytes, share_bytes - i);
      ptx::cp_async_bulk_prefetch_l2(share + i, bytes);
      ptx::cp_async_bulk_prefetch_l2(share + up_offset + i, bytes);
    }
  }
};
