// SPDX-License-Identifier: Apache-2.0
// The store of accumulators of y^T, of which adjacent ones in a lane belong to different rows of y, while a 16-byte
// store writes adjacent columns of one row: stmatrix transposes 16 rows of 64 columns at a time into a buffer in shared
// memory.
#pragma once

#include "common/types.cuh"
#include "ptx/stmatrix.cuh"

// The size in bytes of a row of kColumns values in the buffer: with 16 bytes of padding, 8 rows start in different
// banks.
template <class T, int kColumns> constexpr int kTransposedRowBytes = kColumns * sizeof(T) + 16;

// Returns the shared address that a lane of warp `warp` of a warpgroup passes to stmatrix; a row of `buffer` has
// kRowBytes bytes.
template <int kRowBytes>
__device__ __forceinline__ uint32_t transposed_address(const uint8_t* buffer, int warp, int lane) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(buffer)) + (lane / 16 * 8 + lane % 8) * kRowBytes +
         (warp * 16 + lane / 8 % 2 * 8) * 2;
}

// Stores the accumulators `first` .. `first` + 7 of a thread, of which only those below kCount exist; finish(index)
// returns the 16-bit value of y.
template <int kCount, class Finish>
__device__ __forceinline__ void store_transposed(uint32_t address, int first, const Finish& finish) {
  uint32_t values[4] = {};
#pragma unroll
  for (int matrix = 0; matrix < 4; ++matrix) {
    const int index = first + matrix * 2;
    if (index < kCount) values[matrix] = uint32_t{finish(index).bits} | uint32_t{finish(index + 1).bits} << 16;
  }
  ptx::stmatrix_x4_trans(address, values);
}
