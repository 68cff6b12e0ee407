// SPDX-License-Identifier: Apache-2.0
// What the kernels on repacked weights share for sm_90a: the copy engine, and wgmma by type.
#pragma once

#include "hopper/copied.cuh"
#include "dequant/int4.cuh"
#include "ptx/fence_proxy.cuh"
#include "ptx/wgmma.cuh"
#include "common/warp.cuh"

// The copy engine takes long for many rows outside of a tensor map: with 65 rows of 128 a product of 4096 x 4096 took
// 17.4 us on an H100, with all of them 10.2. So the last of several tiles of ROWS rows ends with x: it makes some of
// its neighbour's rows, too, but does not store them. And where a tile that is alone lacks 16 rows or more, no copy
// brings them.
template <int ROWS>
__device__ __forceinline__ int first_row(int tile, int m) {
  return min(tile * ROWS, max(m - ROWS, 0));
}

template <int ROWS>
__device__ __forceinline__ bool lacks_rows(int m) {
  return m <= ROWS - 16;
}

// Zeros, by THREADS threads, so that wgmma reads nothing that was never written, though no sum of such a row is stored.
// The threads then meet whoever asks for copies.
template <int BYTES, int THREADS>
__device__ __forceinline__ void clear(uint8_t* shared) {
  for (int i = threadIdx.x; i < BYTES / 16; i += THREADS) {
    reinterpret_cast<Vector<uint32_t, 4>*>(shared)[i] = {};
  }
  ptx::fence_proxy_async();
}

template <bool ACCUMULATE, int COUNT>
__device__ __forceinline__ void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (Codes<X>::kMagic == Codes<half_t>::kMagic) {
    ptx::wgmma_f16<ACCUMULATE>(d, a, b);
  } else {
    ptx::wgmma_bf16<ACCUMULATE>(d, a, b);
  }
}
