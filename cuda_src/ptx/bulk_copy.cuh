// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Data Movement and Conversion Instructions: Bulk copy", "Tensor copy". Global to shared memory by the copy
// engine, which counts the bytes down on an mbarrier; sm_90 and newer.
#pragma once

namespace ptx {

// cp.async.bulk: `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_bulk(unsigned shared_address, const void* source, unsigned bytes,
                                              unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// cp.async.bulk.tensor.3d: the box of a tensor map at (x, y, z), x innermost; what lies outside is zero.
__device__ __forceinline__ void cp_async_bulk_tensor_3d(unsigned shared_address, const void* map, int x, int y, int z,
                                                        unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared_address),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// cp.async.bulk.tensor.4d
__device__ __forceinline__ void cp_async_bulk_tensor_4d(unsigned shared_address, const void* map, int x, int y, int z,
                                                        int w, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// cp.async.bulk.tensor.3d to the same place, and the same barrier, of each block of the cluster whose bit is set in
// `ranks`.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_multicast(unsigned shared_address, const void* map, int x,
                                                                  int y, int z, unsigned barrier,
                                                                  unsigned short ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(ranks)
      : "memory");
}

// cp.async.bulk.prefetch.tensor.3d: asks L2 for the box.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_3d(const void* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// prefetch.tensormap: brings a map in parameter space near the copy engine.
__device__ __forceinline__ void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace ptx
