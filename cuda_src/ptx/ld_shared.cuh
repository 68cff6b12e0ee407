// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Data Movement and Conversion Instructions: ld" from shared memory, by 32-bit addresses: under register
// pressure the compiler recomputes generic pointers to shared memory, including the CTA's rank in its cluster.
#pragma once

namespace ptx {

// mov.u32: returns the value, opaque to the compiler, which keeps it in a register instead of recomputing it.
__device__ __forceinline__ unsigned opaque(unsigned value) {
  asm volatile("mov.u32 %0, %1;" : "=r"(value) : "r"(value));
  return value;
}

// ld.shared.u16 and ld.shared.u32: load 16 or 32 bits.
__device__ __forceinline__ unsigned ld_shared_u16(unsigned address) {
  unsigned short out;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(out) : "r"(address) : "memory");
  return out;
}

__device__ __forceinline__ unsigned ld_shared_u32(unsigned address) {
  unsigned out;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(address) : "memory");
  return out;
}

// ld.shared.u32, .v2.u32 and .v4.u32: load one, two or four adjacent words.
__device__ __forceinline__ void ld_shared(unsigned (&out)[1], unsigned address) { out[0] = ld_shared_u32(address); }

__device__ __forceinline__ void ld_shared(unsigned (&out)[2], unsigned address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ld_shared(unsigned (&out)[4], unsigned address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

}  // namespace ptx
