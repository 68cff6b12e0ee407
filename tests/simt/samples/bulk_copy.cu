// SPDX-License-Identifier: Apache-2.0
// y[i] = 2 x[i] for float x[n], n a multiple of SIZE: each block brings tiles of SIZE floats in by bulk copies into two
// stages, and takes them out by a bulk copy.
#include "hopper.cuh"

extern "C" __global__ void bulk_copy(const float* x, float* y, int n) {
  __shared__ alignas(128) float tiles[2][SIZE];
  __shared__ alignas(8) uint64_t full[2];
  if (threadIdx.x == 0) {
    mbarrier_init(&full[0], 1);
    mbarrier_init(&full[1], 1);
    fence_barrier_init();
  }
  __syncthreads();
  auto fetch = [&](int tile) {
    const int stage = tile / gridDim.x & 1;
    mbarrier_arrive_expect_tx(&full[stage], sizeof(tiles[0]));
    bulk_load(tiles[stage], x + tile * SIZE, sizeof(tiles[0]), &full[stage]);
  };
  if (threadIdx.x == 0 && blockIdx.x * SIZE < n) fetch(blockIdx.x);
  int step = 0;
  for (int tile = blockIdx.x; tile * SIZE < n; tile += gridDim.x, ++step) {
    const int stage = step & 1;
    if (threadIdx.x == 0 && (tile + gridDim.x) * SIZE < n) {
      bulk_wait_read();  // the bulk copy out of the next stage has read it, so the stage can be overwritten
      fetch(tile + gridDim.x);
    }
    mbarrier_wait(&full[stage], step >> 1 & 1);
    for (int i = threadIdx.x; i < SIZE; i += blockDim.x) tiles[stage][i] *= 2.0f;
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_store(y + tile * SIZE, tiles[stage], sizeof(tiles[0]));
      bulk_commit();
    }
  }
  if (threadIdx.x == 0) bulk_wait_read();
}
