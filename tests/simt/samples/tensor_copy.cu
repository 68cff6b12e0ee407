// SPDX-License-Identifier: Apache-2.0
// y = x, uint16 [rows, columns], in boxes of ROWS x COLUMNS with their places in shared memory swizzled over SWIZZLE
// bytes; boxes may hang over the edge. raw[block] takes what a block sees in shared memory.
#include "hopper.cuh"

extern "C" __global__ void tensor_copy(uint16_t* raw, const __grid_constant__ TensorMap x,
                                       const __grid_constant__ TensorMap y) {
  __shared__ alignas(1024) uint16_t box[ROWS * COLUMNS];
  __shared__ alignas(8) uint64_t full;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    fence_barrier_init();
    mbarrier_arrive_expect_tx(&full, sizeof(box));
    tensor_load(box, &x, blockIdx.x * COLUMNS, blockIdx.y * ROWS, &full);
  }
  __syncthreads();
  mbarrier_wait(&full, 0);
  const int block = blockIdx.y * gridDim.x + blockIdx.x;
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) raw[block * ROWS * COLUMNS + i] = box[i];
  if (threadIdx.x == 0) {
    tensor_store(&y, box, blockIdx.x * COLUMNS, blockIdx.y * ROWS);
    bulk_commit();
    bulk_wait_read();
  }
}
