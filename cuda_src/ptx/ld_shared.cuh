// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Data Movement and Conversion Instructions: ld" from shared memory. Addresses are 32-bit shared addresses
// instead of generic pointers, which the compiler recomputes under register pressure.
#pragma once

namespace ptx {

// mov.u32: returns `value` in a form that is opaque to the compiler, which then keeps the value in a register instead
// of recomputing it.
__device__ __forceinline__ unsigned opaque(unsigned value) {
  asm volatile("mov.u32 %0, %1;" : "=r"(value) : "r"(value));
  return value;
}

// ld.shared.u16 and ld.shared.u32: return the 16 or 32 bits at a shared address.
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

}
