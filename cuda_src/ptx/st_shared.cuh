// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Data Movement and Conversion Instructions: st" to shared memory. Addresses are 32-bit shared addresses.
#pragma once

namespace ptx {

// st.shared.u32, .v2.u32 and .v4.u32: store one, two or four adjacent words.
__device__ __forceinline__ void st_shared(unsigned address, const unsigned (&words)[1]) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(words[0]) : "memory");
}

__device__ __forceinline__ void st_shared(unsigned address, const unsigned (&words)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(words[0]), "r"(words[1]) : "memory");
}

__device__ __forceinline__ void st_shared(unsigned address, const unsigned (&words)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

}
