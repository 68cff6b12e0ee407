// SPDX-License-Identifier: Apache-2.0
// Units: blocks of rows of x that take the same expert, and the order in which CTAs compute them.
#pragma once

#include "common/warp.cuh"

// The tiles of a persistent CTA. Units are in the order of the routing arrays; the tiles of one unit, one per block of
// columns, follow each other.
struct ExpertTileScheduler {
  int n_blocks, tiles;
  int tile = blockIdx.x;

  __device__ __forceinline__ bool is_valid() const { return tile < tiles; }
  __device__ __forceinline__ void advance() { tile += gridDim.x; }
  __device__ __forceinline__ int unit() const { return tile / n_blocks; }
  __device__ __forceinline__ int n_block() const { return tile % n_blocks; }
};

// Collects the pairs of a unit: writes those of its kUnitRows entries of `sorted_pairs` that are pairs, not padding, to
// `unit_pairs`, and returns their number. All warps call this; warp 0 writes.
template <int kUnitRows>
__device__ __forceinline__ int collect_pairs(int32_t* unit_pairs, const int32_t* sorted_pairs, int pairs) {
  const int lane = threadIdx.x % 32;
  int rows = 0;
#pragma unroll
  for (int first = 0; first < kUnitRows; first += 32) {
    int pair = pairs;
    if (first + lane < kUnitRows) pair = sorted_pairs[first + lane];
    const bool exists = static_cast<unsigned>(pair) < static_cast<unsigned>(pairs);
    const uint32_t present = __ballot_sync(kFullWarp, exists);
    if (threadIdx.x < 32 && exists) unit_pairs[rows + __popc(present & ((1u << lane) - 1))] = pair;
    rows += __popc(present);
  }
  return rows;
}
