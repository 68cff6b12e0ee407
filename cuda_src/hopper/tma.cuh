// SPDX-License-Identifier: Apache-2.0
// TMA: tensor maps, multicast, and the rows of x that a tile covers. The copy instructions are in
// ptx/bulk_copy.cuh: cp.async.bulk copies contiguous bytes, cp.async.bulk.tensor a box of a tensor map. Both complete
// their bytes on a full barrier (pipeline.cuh).
#pragma once

#include "common/types.cuh"
#include "ptx/bulk_copy.cuh"

// A CUtensorMap, encoded by the driver (runtime/launcher.py). Kernels take it as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

// Copies a box to the same shared address in the CTAs first_rank .. first_rank + kClusterSize - 1 of a cluster
// (multicast) and completes its bytes on the barrier of each CTA.
template <int kClusterSize>
__device__ __forceinline__ void tma_multicast_3d(uint32_t shared_address, const TensorMap* map, int x, int y, int z,
                                                 uint32_t full_barrier, int first_rank = 0) {
  if constexpr (kClusterSize == 1) {
    ptx::cp_async_bulk_tensor_3d(shared_address, map, x, y, z, full_barrier);
  } else {
    ptx::cp_async_bulk_tensor_3d_multicast(shared_address, map, x, y, z, full_barrier,
                                           ((1 << kClusterSize) - 1) << first_rank);
  }
}

// Returns the first row of x in a tile of gemm_sm90 and gemm_sm90_large. The last of several tiles ends with the last
// row of x: it recomputes rows of the preceding tile and does not store them. A single tile is higher than x by at most
// 7 rows, which TMA fills with zeros. TMA is slow if a box extends far past the tensor map (17.4 instead of 10.2 us for
// 65 rows in a box of 128, K = N = 4096, H100).
template <int kTileM> __device__ __forceinline__ int tile_row_begin(int m_block, int m) {
  return min(m_block * kTileM, max(m - kTileM, 0));
}
