// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Parallel Synchronization and Communication Instructions: mbarrier". Addresses are shared::cta.
// sm_90 and newer.
//
// A phase of a barrier completes after `count` arrivals and after all expected bytes. The parity of the phases
// alternates, starting with 0. A wait for parity p returns if the current phase does not have parity p; so on a fresh
// barrier, a wait for parity 1 returns at once.
#pragma once

namespace ptx {

// mbarrier.init: initializes a barrier whose phases complete after `count` arrivals.
__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// fence.mbarrier_init: makes the initialization of barriers visible to TMA and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive: arrives at a barrier of this CTA.
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.shared::cluster: arrives at a barrier of any CTA of the cluster; the address is from ptx::mapa.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx: arrives and increases the number of bytes that the current phase expects by `bytes`.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity: waits for a limited time for the phase with this parity; returns whether it has completed.
__device__ __forceinline__ bool mbarrier_try_wait_parity(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// mbarrier.try_wait.parity.acquire.cluster: the same for a phase that other CTAs of the cluster complete; after
// it, their writes to shared memory are visible.
__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

}
