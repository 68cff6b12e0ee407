// SPDX-License-Identifier: Apache-2.0
// The prefetch into L2 of a part of the weight that a later GEMM of a decode step reads.
#pragma once

#include "ptx/bulk_copy.cuh"
#include "ptx/prefetch.cuh"
#include "common/types.cuh"

struct NextWeight {
  const uint8_t* begin;  // the repacked weight, whose columns have two halves, as the gate and up projections are
  int share_bytes;       // number of bytes of each half per CTA, a multiple of 16; may be 0
  int half_offset;       // distance in bytes from the first half to the second

  // Prefetches the share of CTA `cta` by bulk copies. All lanes of one warp call this function.
  __device__ __forceinline__ void prefetch(int cta) const {
    constexpr int kCopyBytes = 2048;
    const uint8_t* share = begin + static_cast<int64_t>(cta) * share_bytes;
    for (int i = threadIdx.x % 32 * kCopyBytes; i < share_bytes; i += 32 * kCopyBytes) {
      const int bytes = min(kCopyBytes, share_bytes - i);
      ptx::cp_async_bulk_prefetch_l2(share + i, bytes);
      ptx::cp_async_bulk_prefetch_l2(share + half_offset + i, bytes);
    }
  }
  // Prefetches the share of CTA `cta`, a cache line per thread at a time. All `threads` threads of the CTA call this
  // function.
  __device__ __forceinline__ void prefetch_lines(int cta, int threads) const {
    constexpr int kLineBytes = 128;
    const uint8_t* share = begin + static_cast<int64_t>(cta) * share_bytes;
    for (int i = threadIdx.x * kLineBytes; i < share_bytes; i += threads * kLineBytes) {
      ptx::prefetch_global_l2(share + i);
      ptx::prefetch_global_l2(share + half_offset + i);
    }
  }
};
