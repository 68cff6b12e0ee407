// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "barrier.cluster", "mapa", "ld", "st", "st.async", "Special Registers: %cluster_ctarank". Synchronization of
// a cluster and access to its distributed shared memory (DSMEM); sm_90 and newer.
#pragma once

namespace ptx {

// %cluster_ctarank: returns the rank of this CTA in its cluster.
__device__ __forceinline__ unsigned cluster_ctarank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// barrier.cluster.arrive.release: arrives at the cluster barrier and releases this thread's writes to waiting threads.
__device__ __forceinline__ void barrier_cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// barrier.cluster.arrive.relaxed: arrives at the cluster barrier without releasing writes; only mbarrier.init followed
// by fence.mbarrier_init is ordered before it.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

// barrier.cluster.wait.acquire: waits until all threads of the cluster have arrived, and acquires their writes.
__device__ __forceinline__ void barrier_cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// mapa: returns the shared::cluster address, in CTA `rank` of the cluster, that corresponds to `shared_address`.
__device__ __forceinline__ unsigned mapa(unsigned shared_address, unsigned rank) {
  unsigned out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(shared_address), "r"(rank));
  return out;
}

// ld.shared::cluster.u32: loads a word from the shared memory of a CTA.
__device__ __forceinline__ unsigned ld_shared_cluster(unsigned cluster_address) {
  unsigned value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(cluster_address) : "memory");
  return value;
}

// st.shared::cluster.v4.f32: stores four values to the shared memory of a CTA; the address is a multiple of 16.
__device__ __forceinline__ void st_shared_cluster(unsigned cluster_address, const float (&values)[4]) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cluster_address), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

// st.shared::cluster.f32: stores a value to the shared memory of a CTA.
__device__ __forceinline__ void st_shared_cluster(unsigned cluster_address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_address), "f"(value) : "memory");
}

// st.async: stores four values to the shared memory of a CTA and completes 16 bytes on an mbarrier of that CTA.
__device__ __forceinline__ void st_async(unsigned cluster_address, const float (&values)[4], unsigned cluster_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cluster_address),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(cluster_barrier)
               : "memory");
}

}
