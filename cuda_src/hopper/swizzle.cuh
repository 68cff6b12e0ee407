// SPDX-License-Identifier: Apache-2.0
// The 128-byte swizzle of TMA and wgmma (SWIZZLE_128B), for data that a kernel stores to shared memory itself.
//
// Eight rows of 128 bytes form an atom of 1024 bytes. The 16-byte chunk c of row r is stored as chunk c ^ (r % 8) of
// the row, so that ldmatrix, which reads the same chunk of eight rows, has no bank conflicts.
//
//   byte offset    ... | 9 8 7 | 6 5 4 | 3 2 1 0
//                        row     chunk   byte
//                        |       ^
//                        +--xor--+
#pragma once

#include "common/types.cuh"

// Returns the bits that the swizzle flips in a chunk index: chunk c of `row` is stored as chunk c ^ swizzle_bits(row).
// In a byte offset, the swizzle flips the bits swizzle_bits(row) * 16.
__device__ __forceinline__ constexpr int swizzle_bits(int row) { return row % 8; }
