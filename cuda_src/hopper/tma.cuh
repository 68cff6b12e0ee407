// SPDX-License-Identifier: Apache-2.0
// TMA: tensor maps, multicast, and boxes that extend past the last row of x. The copy instructions are in
// ptx/bulk_copy.cuh: cp.async.bulk copies contiguous bytes, cp.async.bulk.tensor a box of a tensor map. Both complete
// their bytes on a full barrier (pipeline.cuh).
#pragma once

#include "common/types.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/fence_proxy.cuh"

// A CUtensorMap, encoded by the driver (runtime/launch.py). Kernels take it as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

// Copies a box to the same shared address in every CTA of a cluster (multicast) and completes its bytes on the barrier
// of each CTA.
template <int kClusterSize>
__device__ __forceinline__ void tma_multicast_3d(uint32_t shared_address, const TensorMap* map, int x, int y, int z,
                                                 uint32_t full_barrier) {
  if constexpr (kClusterSize == 1) {
    ptx::cp_async_bulk_tensor_3d(shared_address, map, x, y, z, full_barrier);
  } else {
    ptx::cp_async_bulk_tensor_3d_multicast(shared_address, map, x, y, z, full_barrier, (1 << kClusterSize) - 1);
  }
}

// The rows of x that a tile covers. TMA is slow if a box extends far past the tensor map (17.4 instead of 10.2 us for
// 65 rows in a box of 128, K = N = 4096, H100), so a box extends past the last row of x by at most 15 rows:
//   - The last of several tiles ends with the last row of x. This tile recomputes rows of the preceding tile and
//     does not store these rows.
//   - If a single tile covers x and has at least 16 rows past M (missing rows), the box has m rows, and the kernel
//     zeroes the missing rows once.

// Returns the first row of x in a tile.
template <int kTileM>
__device__ __forceinline__ int tile_row_begin(int m_block, int m) {
  return min(m_block * kTileM, max(m - kTileM, 0));
}

// Returns whether a single tile covers x and has at least 16 missing rows, which TMA does not fill.
template <int kTileM>
__device__ __forceinline__ bool has_missing_rows(int m) {
  return m <= kTileM - 16;
}

// Zeroes kBytes of shared memory with kNumThreads threads, and orders the stores before later accesses by wgmma and TMA
// (async proxy). The threads must synchronize with the producer before the first copy.
template <int kBytes, int kNumThreads>
__device__ __forceinline__ void zero_shared(uint8_t* shared) {
  for (int i = threadIdx.x; i < kBytes / 16; i += kNumThreads) {
    reinterpret_cast<Vector<uint32_t, 4>*>(shared)[i] = {};
  }
  ptx::fence_proxy_async();
}
