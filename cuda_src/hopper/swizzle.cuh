// SPDX-License-Identifier: Apache-2.0
// The 128-byte swizzle, as TMA applies it and wgmma undoes it (SWIZZLE_128B), for kernels that place data themselves.
//
// Eight rows of 128 bytes form an atom of 1024 bytes. The 16-byte chunk c of row r lies at chunk c ^ r % 8, so eight
// rows of one chunk, as ldmatrix reads them, lie in all 32 banks.
//
//   byte offset    ... | 9 8 7 | 6 5 4 | 3 2 1 0
//                        row     chunk   byte
//                        |       ^
//                        +--xor--+
#pragma once

#include "common/types.cuh"

// Returns the bits of a byte offset that the swizzle flips for a row.
__device__ constexpr int swizzle_mask(int row) { return row % 8 * 16; }

// Returns the place of a 16-byte chunk in its row.
__device__ constexpr int swizzle_chunk(int row, int chunk) { return chunk ^ row % 8; }
