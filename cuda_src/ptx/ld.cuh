// SPDX-License-Identifier: Apache-2.0
// A load that bypasses L1 (PTX ISA, "Data Movement and Conversion Instructions: ld"). sm_70 and newer.
#pragma once

namespace ptx {

// ld.global.nc.L1::no_allocate.L2::128B: loads 16 bytes of read-only memory without caching them in L1, and prefetches
// their 128-byte line into L2.
__device__ __forceinline__ void ld_global_no_allocate(unsigned (&out)[4], const void* source) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "l"(source));
}

}
