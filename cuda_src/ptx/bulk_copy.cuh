// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Data Movement and Conversion Instructions: Bulk copy", "Tensor copy". TMA copies from global to shared
// memory; an mbarrier counts the bytes that have landed. sm_90 and newer.
#pragma once

namespace ptx {

// cp.async.bulk: copies `bytes` contiguous bytes; `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_bulk(unsigned shared_address, const void* source, unsigned bytes,
                                              unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// cp.async.bulk.tensor.3d: copies the box at (x, y, z) of a tensor map, where x is the innermost coordinate;
// out-of-bounds elements are filled with zeros.
__device__ __forceinline__ void cp_async_bulk_tensor_3d(unsigned shared_address, const void* map, int x, int y, int z,
                                                        unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared_address),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// cp.async.bulk.tensor.4d: copies the box at (x, y, z, w) of a tensor map.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(unsigned shared_address, const void* map, int x, int y, int z,
                                                        int w, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// cp.async.bulk.tensor.3d with .multicast::cluster: copies the box to the same shared address, and signals the same
// mbarrier, of every CTA of the cluster that has its bit set in `ranks`.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_multicast(unsigned shared_address, const void* map, int x,
                                                                  int y, int z, unsigned barrier,
                                                                  unsigned short ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(ranks)
      : "memory");
}

// cp.async.bulk.prefetch.tensor.3d: prefetches the box at (x, y, z) of a tensor map into L2.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_3d(const void* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// cp.async.bulk.prefetch.L2: prefetches `bytes` contiguous bytes into L2; `bytes` and the address are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void* source, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// prefetch.tensormap: prefetches a tensor map, which is a kernel parameter, into the descriptor cache.
__device__ __forceinline__ void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}
