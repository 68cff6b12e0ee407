// SPDX-License-Identifier: Apache-2.0
// The weights of two columns of a lane, as operand A of an 8-bit mma or wgmma: q - z for int8.
#pragma once

#include "common/types.cuh"
#include "ptx/ld_shared.cuh"

template <class C> struct W4A8Columns {
  float scales[2];
  uint32_t biases[2];  // 128 - z in each byte, which is added to codes

  // Loads the scales and the zero points of the lane's two columns from shared memory.
  __device__ __forceinline__ void load_shared(uint32_t scales_address, uint32_t zeros_address) {
    if constexpr (sizeof(typename C::Scale) == 4) {
      uint32_t words[2];
      ptx::ld_shared(words, scales_address);
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[i] = __uint_as_float(words[i]);
    } else {
      const uint32_t word = ptx::ld_shared_u32(scales_address);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scales[i] = to_float(typename C::Scale{static_cast<uint16_t>(word >> (16 * i))});
      }
    }
    const uint32_t zeros = ptx::ld_shared_u16(zeros_address);
#pragma unroll
    for (int i = 0; i < 2; ++i) biases[i] = 0x80808080u - (zeros >> (8 * i) & 0xffu) * 0x01010101u;
  }

  // Converts the codes of 32 k: `words` holds column g, then column g + 8.
  __device__ __forceinline__ void convert(uint32_t (&a)[4], const uint32_t* words) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = (words[i % 2] >> (i / 2 * 4)) & 0x0f0f0f0fu;
      // q + 128 - z does not carry into the next byte; flipping the highest bit subtracts 128.
      a[i] = (codes + biases[i % 2]) ^ 0x80808080u;
    }
  }
};
