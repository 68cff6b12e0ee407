// SPDX-License-Identifier: Apache-2.0
// The order in which conv2d_sm90 and conv2d_sm90_large traverse K.
#pragma once

constexpr bool kHalo = HALO;

// A unit of K: one tap of the filter and a chunk of 64 channels. All taps of a chunk are adjacent.
struct KUnit {
  int chunk, fy, fx;

  __device__ __forceinline__ void advance(int kernel_h, int kernel_w) {
    if (++fx < kernel_w) return;
    fx = 0;
    if (++fy < kernel_h) return;
    fy = 0;
    ++chunk;
  }
  // Returns whether the unit needs a new box of x: with HALO one box serves all taps of a chunk.
  __device__ __forceinline__ bool begins_box() const { return !kHalo || (fy | fx) == 0; }
};
