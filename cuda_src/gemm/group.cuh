// SPDX-License-Identifier: Apache-2.0
// The scales, zero points and offsets of one group for the eight columns of an AWQ word.
#pragma once

#include "dequantize/int4.cuh"

// The scales, zero points and offsets of a group for eight columns. WHOLE: rows of scales and offsets start at
// multiples of 16 bytes, so one instruction loads them.
template <class S, Zeros FORM, bool WHOLE> struct WordGroup {
  Vector<S, 8> scales;
  Vector<S, 8> offsets;
  uint32_t zeros;

  // Loads the scales and the zero points (or offsets) of group `index` for columns `column` .. `column` + 7. The other
  // arguments are the kernel's arguments scales, zeros, lds and ldz.
  __device__ __forceinline__ void fetch(const S* all_scales, const void* all_zeros, int index, int lds, int ldz,
                                        int column) {
    load<WHOLE>(scales, all_scales + static_cast<int64_t>(index) * lds + column);
    const int64_t zero_row = static_cast<int64_t>(index) * ldz;
    if constexpr (FORM == Zeros::kOffset) {
      load<WHOLE>(offsets, static_cast<const S*>(all_zeros) + zero_row + column);
      zeros = 0;
    } else if constexpr (FORM == Zeros::kPacked) {
      zeros = static_cast<const uint32_t*>(all_zeros)[zero_row + column / 8];
    } else {
      zeros = kSymmetricZeros;
    }
  }
};
