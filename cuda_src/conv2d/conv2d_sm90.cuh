// SPDX-License-Identifier: Apache-2.0
// The order in which conv2d_sm90 and conv2d_sm90_large traverse K.
#pragma once

// A K chunk: one filter tap (fy, fx) x 64 input channels, from channel 64 * channel_chunk. K chunks are ordered by
// channels first, so all taps of the same channels are adjacent.
template <bool kHalo>
struct KChunk {
  int channel_chunk, fy, fx;

  __device__ __forceinline__ void advance(int kernel_h, int kernel_w) {
    if (++fx < kernel_w) return;
    fx = 0;
    if (++fy < kernel_h) return;
    fy = 0;
    ++channel_chunk;
  }
  // Returns whether the K chunk needs a new TMA box of x: with HALO, one box serves all taps of 64 channels.
  __device__ __forceinline__ bool needs_box() const { return !kHalo || (fy | fx) == 0; }
};
