// SPDX-License-Identifier: Apache-2.0
// Loads and stores with an L2 cache policy (PTX ISA, "Data Movement and Conversion Instructions: createpolicy"). sm_80
// and newer.
#pragma once

namespace ptx {

// createpolicy.fractional.L2::evict_last: returns the policy of data that L2 evicts last.
__device__ __forceinline__ unsigned long long createpolicy_evict_last() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ld.global.L2::cache_hint: loads 4 bytes.
__device__ __forceinline__ unsigned ld_global_cache_hint(const void* source, unsigned long long policy) {
  unsigned out;
  asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(out) : "l"(source), "l"(policy));
  return out;
}

// ld.global.L2::cache_hint.v4: loads 16 bytes.
__device__ __forceinline__ void ld_global_cache_hint(unsigned (&out)[4], const void* source,
                                                     unsigned long long policy) {
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "l"(source), "l"(policy));
}

}
