// SPDX-License-Identifier: Apache-2.0
// What both kernels of convolutions for sm_90a share: the walk over stages and over K, and the sums of split tiles.
#pragma once

#include "hopper/copied.cuh"

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

// Adds up the sums of a cluster's BLOCKS blocks, in a fixed order. A thread has 4 sums of each of COUNT groups of 8
// pixels, one after the other; a block gets the totals of OWNED groups, from `split`, its number, times OWNED on.
// `memory`, whose shared address is `begin` in each block: float4 [BLOCKS][TEAMS, the warpgroups][OWNED][128].
template <int BLOCKS, int TEAMS, int COUNT, int OWNED>
__device__ __forceinline__ void exchange_sums(float (&total)[OWNED * 4], const float* sums, uint8_t* memory,
                                              uint32_t begin, int split, int warpgroup) {
  auto slot = [&](int from, int group) {
    return ((from * TEAMS + warpgroup) * OWNED + group) * 2048 + threadIdx.x % 128 * 16;
  };
#pragma unroll
  for (int group = 0; group < COUNT; ++group) {
    const float* mine = sums + group * 4;
    const uint32_t to = ptx::mapa(begin + slot(split, group % OWNED), group / OWNED);
    ptx::st_shared_cluster(to, {mine[0], mine[1], mine[2], mine[3]});
  }
  synchronize_cluster<BLOCKS>();
#pragma unroll
  for (int group = 0; group < OWNED; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[group * 4 + i] = 0.0f;
    if (split * OWNED + group >= COUNT) continue;
#pragma unroll
    for (int from = 0; from < BLOCKS; ++from) {
      const auto some = *reinterpret_cast<const Vector<float, 4>*>(memory + slot(from, group));
#pragma unroll
      for (int i = 0; i < 4; ++i) total[group * 4 + i] += some.values[i];
    }
  }
}
