// SPDX-License-Identifier: Apache-2.0
// Conversion of 8-bit codes to pairs of half_t or bfloat16_t.
#pragma once

#include "dequantize/int4.cuh"

// Converts the four bytes of a word to two pairs of T, exactly. A byte is a signed code + 128; the bytes are the
// elements 0, 2, 1, 3.
template <class T> __device__ __forceinline__ void unpack_bytes(uint32_t (&pairs)[2], uint32_t word) {
  if constexpr (Codes<T>::kMagic == Codes<half_t>::kMagic) {
    // The bytes 0x64, b form the float16 1024 + b; 0x6480 is 1024 + 128.
    pairs[0] = ptx::sub_f16x2(__byte_perm(word, 0x64646464u, 0x5250), 0x64806480u);
    pairs[1] = ptx::sub_f16x2(__byte_perm(word, 0x64646464u, 0x5351), 0x64806480u);
  } else {
    // The bytes 0x4b, 0, 0, b form the float32 2^23 + b. Subtracting 2^23 + 128 leaves an integer from -128 to 127,
    // which needs only the upper 16 bits of a float32.
    uint32_t values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540 + i)) - 8388736.0f;
      values[i] = __float_as_uint(value);
    }
    pairs[0] = __byte_perm(values[0], values[2], 0x7632);
    pairs[1] = __byte_perm(values[1], values[3], 0x7632);
  }
}
