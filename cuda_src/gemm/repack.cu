// SPDX-License-Identifier: Apache-2.0
// Repacks a weight from the AWQ layout to the layout of repacked_layout.cuh, once per layer.
//
//   out[tile column, k tile] = codes, scales and zero points of 32 columns x 128 rows of W
//
//   qweight  uint32 [k, n / 8], row stride ldq words
//   scales   SCALE [groups, n], row stride lds values
//   zeros    uint32 [groups, n / 8]; or offsets, SCALE [groups, n]; or null; row stride ldz elements
//   out      weight tiles [ceil(n / BLOCK_N) * BLOCK_N / 32][ceil(k / 128)]
//
// Limits: k % 64 == 0; FragmentLayout.refusal in kernels/gemm/layouts.py has the others. sm_60 and newer. Grid: (k
// tiles, blocks of BLOCK_N columns). A CTA repacks 128 rows x BLOCK_N columns through shared memory. Lanes with
// different t = lane % 4 read the same word of different rows; an odd row pitch in words puts these words into
// different banks.
#include "gemm/repacked_layout.cuh"

using Layout = RepackedLayout<SCALE, Zeros::ZEROS, GROUPS>;
constexpr int kThreads = 256;
constexpr int kBlockN = BLOCK_N;
constexpr int kWords = kBlockN / 8;
constexpr int kRowWords = kWords + 1;
constexpr int kWeightTiles = kBlockN / kWeightTileN;
constexpr int kLanes = kWeightTileN * kWeightTileK / 32;  // number of 16-byte vectors of codes per weight tile

static_assert(kWords % 2 == 0, "a row's words plus one must be odd");

extern "C" __global__ void __launch_bounds__(kThreads)
    repack(const uint32_t* qweight, const SCALE* scales, const void* zeros, uint8_t* out, int n, int k, int group_size,
           int ldq, int lds, int ldz) {
  __shared__ uint32_t rows[kWeightTileK * kRowWords];
  const int k_begin = blockIdx.x * kWeightTileK;
  const int first_word = blockIdx.y * kWords;
  for (int index = threadIdx.x; index < kWeightTileK * kWords; index += kThreads) {
    const int row = index / kWords;
    const int word = index % kWords;
    const bool inside = k_begin + row < k && first_word + word < n / 8;
    rows[row * kRowWords + word] = inside ? qweight[static_cast<int64_t>(k_begin + row) * ldq + first_word + word] : 0u;
  }
  __syncthreads();

  auto weight_tile = [&](int index) {
    return out + (static_cast<int64_t>(blockIdx.y * kWeightTiles + index) * gridDim.x + blockIdx.x) *
                     Layout::kWeightTileBytes;
  };
#pragma unroll 1
  for (int index = threadIdx.x; index < kWeightTiles * kLanes; index += kThreads) {
    const int lane = index % 32;
    const int tile = index / 32 % 2;
    const int k64 = index / 64 % 2;
    const int g = lane / 4;
    const int t = lane % 4;
    const int shift = nibble_shift(g);
    Vector<uint32_t, 4> words;
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Bit 0 of i is set for the odd k, bit 1 for column g + 8, and bit 2 for k + 8.
        const int row = k64 * 64 + k16 * 16 + t * 2 + i % 2 + i / 4 * 8;
        const int source = row * kRowWords + index / kLanes * 4 + tile * 2 + i / 2 % 2;
        word |= ((rows[source] >> shift) & 15u) << (i % 2 * 16 + i / 2 * 4 % 8 + i / 4 * 8);
      }
      words.values[k16] = word;
    }
    store<true>(reinterpret_cast<uint32_t*>(weight_tile(index / kLanes)) + index % kLanes * 4, words);
  }

  for (int index = threadIdx.x; index < Layout::kGroups * kBlockN; index += kThreads) {
    const int column = index % kBlockN;
    const int group = k_begin / group_size + index / kBlockN;
    const int block_column = blockIdx.y * kBlockN + column;
    const bool inside = block_column < n && group < k / group_size;
    uint8_t* target = weight_tile(column / kWeightTileN) + kCodeBytes + index / kBlockN * Layout::kGroupBytes +
                      column / 16 % 2 * Layout::kHalfGroupBytes;
    const int slot = column % 8 * 2 + column / 8 % 2;
    SCALE scale = {};
    if (inside) scale = scales[static_cast<int64_t>(group) * lds + block_column];
    reinterpret_cast<SCALE*>(target)[slot] = scale;
    if constexpr (Layout::kZeros == Zeros::kPacked) {
      const auto* words = static_cast<const uint32_t*>(zeros);
      const uint32_t word = inside ? words[static_cast<int64_t>(group) * ldz + block_column / 8] : 0u;
      target[32 + slot] = static_cast<uint8_t>(code(word, block_column % 8));
    } else if constexpr (Layout::kZeros == Zeros::kOffset) {
      SCALE offset = {};
      if (inside) offset = static_cast<const SCALE*>(zeros)[static_cast<int64_t>(group) * ldz + block_column];
      reinterpret_cast<SCALE*>(target)[16 + slot] = offset;
    }
  }
}
