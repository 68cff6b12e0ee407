// SPDX-License-Identifier: Apache-2.0
// Clusters of four blocks. y[block] = the sum over the cluster of x[block], each block writing its part into the shared
// memory of all others; z[block] = what block 0 of the cluster brought in for all by a multicast copy; and
// next[block] = the x of the following block of the cluster, read from there, plus 1 sent by st.async.
#include "hopper.cuh"

extern "C" __global__ void __cluster_dims__(4, 1, 1)
    cluster(const int* x, int* y, int* z, int* next, const __grid_constant__ TensorMap tile) {
  __shared__ alignas(128) int box[32];
  __shared__ int parts[4];
  __shared__ int sent;
  __shared__ alignas(8) uint64_t full, arrived;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&arrived, 1);
    fence_barrier_init();
    mbarrier_arrive_expect_tx(&full, sizeof(box));
    mbarrier_arrive_expect_tx(&arrived, 4);
  }
  cluster_arrive();
  cluster_wait();
  const uint32_t following = (rank + 1) % 4;
  if (threadIdx.x == 0) {
    if (rank == 0) tensor_load_multicast(box, &tile, 0, blockIdx.x / 4, &full, 0xf);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     map_to_rank(shared_address(&sent), following)),
                 "r"(1), "r"(map_to_rank(shared_address(&arrived), following))
                 : "memory");
  }
  if (threadIdx.x < 4) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(map_to_rank(shared_address(&parts[rank]), threadIdx.x)),
                 "r"(x[blockIdx.x])
                 : "memory");
  }
  cluster_arrive();
  cluster_wait();
  mbarrier_wait(&full, 0);
  mbarrier_wait(&arrived, 0);
  z[blockIdx.x * 32 + threadIdx.x] = box[threadIdx.x];
  if (threadIdx.x == 0) {
    y[blockIdx.x] = parts[0] + parts[1] + parts[2] + parts[3];
    int other;
    asm volatile("ld.shared::cluster.u32 %0, [%1];"
                 : "=r"(other)
                 : "r"(map_to_rank(shared_address(&parts[following]), following))
                 : "memory");
    next[blockIdx.x] = other + sent;
  }
  cluster_arrive();
  cluster_wait();
}
