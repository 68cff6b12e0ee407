// SPDX-License-Identifier: Apache-2.0
// The 128-byte swizzle, as TMA applies it and wgmma undoes it (SWIZZLE_128B), for kernels that place data themselves.
//
// Eight rows of 128 bytes form an atom of 1024 bytes. The 16-byte chunk c of row r lies at chunk c ^ r % 8, so the
// eight rows of one chunk, as ldmatrix reads them, lie in all 32 banks.
//
//   byte offset    ... | 9 8 7 | 6 5 4 | 3 2 1 0
//                        row     chunk   byte
//                        |       ^
//                        +--xor--+
#pragma once

#include "common/types.cuh"

// Returns the bits that a row flips in the index of a 16-byte chunk: the chunk lies at chunk ^ swizzle_bits(row), and
// in a byte offset the bits are those of swizzle_bits(row) * 16.
__device__ __forceinline__ constexpr int swizzle_bits(int row) { return row % 8; }
