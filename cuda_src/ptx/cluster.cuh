// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "barrier.cluster", "mapa", "Special Registers: %cluster_ctarank". Blocks of a cluster; sm_90 and newer.
#pragma once

namespace ptx {

// %cluster_ctarank: the number of this block in its cluster.
__device__ __forceinline__ unsigned cluster_ctarank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// barrier.cluster.arrive.release: what this thread wrote is there for who waits.
__device__ __forceinline__ void barrier_cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// barrier.cluster.arrive.relaxed: orders nothing but mbarriers that a fence_mbarrier_init follows.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

// barrier.cluster.wait.acquire: until all threads of the cluster have arrived.
__device__ __forceinline__ void barrier_cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// mapa: the address, in the cluster's shared memory, of the same variable of block `rank`.
__device__ __forceinline__ unsigned mapa(unsigned shared_address, unsigned rank) {
  unsigned out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(shared_address), "r"(rank));
  return out;
}

// st.shared::cluster.v4.f32: four values to a multiple of 16 in a block of the cluster.
__device__ __forceinline__ void st_shared_cluster(unsigned cluster_address, const float (&values)[4]) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cluster_address), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

// st.async: four values to a multiple of 16 in a block of the cluster, counted as 16 bytes by an mbarrier there.
__device__ __forceinline__ void st_async(unsigned cluster_address, const float (&values)[4], unsigned cluster_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cluster_address),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(cluster_barrier)
               : "memory");
}

}  // namespace ptx
