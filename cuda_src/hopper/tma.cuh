// SPDX-License-Identifier: Apache-2.0
// TMA: tensor maps, and boxes of x that reach beyond its rows. The copy instructions are in ptx/bulk_copy.cuh: copies
// of a run of bytes (cp.async.bulk) and of a box of a tensor map (cp.async.bulk.tensor), which signal a full barrier of
// pipeline.cuh with the bytes that have landed.
#pragma once

#include "common/types.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/fence_proxy.cuh"

// A CUtensorMap, encoded by the driver (runtime/launch.py). Kernels take it as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

// Copies a box to the same address of every CTA of a cluster of kClusterSize CTAs and signals the barrier of each.
template <int kClusterSize>
__device__ __forceinline__ void tma_multicast_3d(uint32_t shared_address, const TensorMap* map, int x, int y, int z,
                                                 uint32_t full_barrier) {
  if constexpr (kClusterSize == 1) {
    ptx::cp_async_bulk_tensor_3d(shared_address, map, x, y, z, full_barrier);
  } else {
    ptx::cp_async_bulk_tensor_3d_multicast(shared_address, map, x, y, z, full_barrier, (1 << kClusterSize) - 1);
  }
}

// The rows of a tile of x. TMA is slow on boxes that reach beyond the tensor map (17.4 in place of 10.2 us for 65 rows
// of 128, 4096 x 4096, H100), so boxes reach at most 15 rows beyond it:
//   - The last of several tiles ends with x. It computes rows of the preceding tile again, but does not store them.
//   - If the only tile lacks 16 rows or more, its boxes have m rows; the rows below are zeroed once.

// Returns the first row of x in a tile.
template <int kTileM>
__device__ __forceinline__ int tile_row_begin(int m_block, int m) {
  return min(m_block * kTileM, max(m - kTileM, 0));
}

// Returns whether the only tile has rows that no copy fills.
template <int kTileM>
__device__ __forceinline__ bool has_missing_rows(int m) {
  return m <= kTileM - 16;
}

// Zeroes kBytes of shared memory, from kNumThreads threads, and makes the zeros visible to wgmma and TMA. Synchronize
// the threads with the producer afterwards.
template <int kBytes, int kNumThreads>
__device__ __forceinline__ void zero_shared(uint8_t* shared) {
  for (int i = threadIdx.x; i < kBytes / 16; i += kNumThreads) {
    reinterpret_cast<Vector<uint32_t, 4>*>(shared)[i] = {};
  }
  ptx::fence_proxy_async();
}
