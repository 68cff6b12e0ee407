// SPDX-License-Identifier: Apache-2.0
// What both kernels of convolutions for sm_90a share: the walk over stages and over K.
#pragma once

#include "copied.cuh"

constexpr bool kHalo = HALO;

// The walk over the stages of a ring.
template <int STAGES>
struct Position {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1u;
    }
  }
  __device__ __forceinline__ int before() const { return stage == 0 ? STAGES - 1 : stage - 1; }
};

// A unit of K: a tap of the kernel and a chunk of channels.
struct Unit {
  int chunk, fy, fx;

  __device__ __forceinline__ void advance(int kernel_h, int kernel_w) {
    if (++fx < kernel_w) return;
    fx = 0;
    if (++fy < kernel_h) return;
    fy = 0;
    ++chunk;
  }
  // Whether x comes with it.
  __device__ __forceinline__ bool begins_box() const { return !kHalo || (fy | fx) == 0; }
};
