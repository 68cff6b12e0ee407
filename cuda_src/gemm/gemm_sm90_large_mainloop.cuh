// SPDX-License-Identifier: Apache-2.0
// The main loop of a consumer warpgroup of experts/expert_gemm_sm90.cu: it dequantizes steps of 64 columns and 16 k to
// operand A while the tensor cores multiply preceding ones.
#pragma once

#include "common/warp.cuh"
#include "gemm/gemm_sm90_large.cuh"
#include "hopper/wgmma.cuh"

template <class C> struct WgmmaMainLoop {
  using T = typename C::T;
  // A slice is 64 columns x 64 k: slice b of a stage is m64 tile b / 2 and half b % 2 of the 128 k. A slice has four
  // steps. It has kSliceGroups groups, or shares a group with the other half.
  static constexpr int kSlices = 2 * C::kM64Tiles, kSteps = 4 * kSlices;
  static constexpr int kSliceGroups = C::kGroups > 1 ? C::kGroups / 2 : 1;

  typename C::SharedStorage shared;
  typename ScaledCodes<T, C>::Factor factor;
  // The shared addresses of this lane's codes, scales and zero points in stage 0.
  uint32_t my_codes, my_scales, my_zeros;
  uint32_t my_empty_barriers;
  Vector<uint32_t, 4> words;
  ScaledCodes<T, C> codes[kSliceGroups];

  __device__ __forceinline__ WgmmaMainLoop(const typename C::SharedStorage& shared, int warp, int lane,
                                           float scale_factor)
      : shared(shared), factor(scale_factor) {
    const uint32_t weight_tile = shared.weight(0) + (warp / 4 * C::kM64Tiles * 2 + warp % 4 / 2) * C::kWeightTileBytes;
    my_codes = ptx::opaque(weight_tile + warp % 2 * 512 + lane * 16);
    my_scales = ptx::opaque(weight_tile + kCodeBytes + warp % 2 * C::kHalfGroupBytes + lane / 4 * 4);
    my_zeros = ptx::opaque(my_scales + 32 - lane / 4 * 2);
    my_empty_barriers = shared.pipeline().template cluster_empty_barriers<C::kCluster>(lane);
  }

  // Loads the slice that begins with a step of a stage, if one does.
  __device__ __forceinline__ void load_slice_at(int stage_idx, int step) {
    if (step % 4 != 0) return;
    const int b = step / 4;
    const uint32_t offset = stage_idx * C::kWeightStageBytes + b / 2 * 2 * C::kWeightTileBytes;
    ptx::ld_shared(words.values, my_codes + offset + b % 2 * 1024);
    if (C::kGroups > 1 || b % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kSliceGroups; ++i) {
        const int group = C::kGroups > 1 ? b % 2 * kSliceGroups + i : 0;
        codes[i] = ScaledCodes<T, C>(Group<C>::load_shared(my_scales + offset, my_zeros + offset, group), factor);
      }
    }
  }
  // Dequantizes two steps.
  __device__ __forceinline__ void dequantize(uint32_t (&a)[4][4], int step) const {
#pragma unroll
    for (int i = step; i < step + 2; ++i) codes[i % 4 * kSliceGroups / 4].convert(a[i % 4], words.values[i % 4]);
  }

  // Adds the products of `k_tiles` k tiles, which are in the stages from `state` on, and releases the stages. Only the
  // first kRows rows of x are multiplied. Two steps are multiplied at a time, while the next two are dequantized: with
  // more, registers would not suffice for several heights, and with fewer, warps would wait for each other more often.
  template <int kRows> __device__ __forceinline__ void run(typename C::Accumulators& accumulators,
                                                           PipelineState<C::kStages>& state, int k_tiles, int lane) {
    const auto pipeline = shared.pipeline();
    uint32_t a[4][4];        // the operands of step i are a[i % 4]
    uint32_t preceding = 0;  // address of the preceding stage's empty barrier; 0 in the first k tile
    pipeline.consumer_wait(state);
    load_slice_at(state.stage_idx, 0);
    dequantize(a, 0);
    for (; k_tiles > 0; --k_tiles) {
      const int stage_idx = state.stage_idx;
      state.advance();
      // With stream-K the compiler cannot prove that the stage index is warp-uniform.
      const uint64_t x = ptx::wgmma_descriptor(0) + uniform(shared.x(stage_idx) / 16);
#pragma unroll
      for (int first = 0; first < kSteps; first += 2) {
        const int next = (first + 2) % kSteps;
        if (next != 0) load_slice_at(stage_idx, next);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = first; step < first + 2; ++step) {
          wgmma<T, true>(reinterpret_cast<float (&)[kRows / 2]>(accumulators[step / 8]), a[step % 4],
                         x + step / 4 % 2 * (C::kXHalfBytes / 16) + step % 4 * 2);
        }
        ptx::wgmma_commit_group();
        if (next == 0 && k_tiles > 1) {
          pipeline.consumer_wait(state);
          load_slice_at(state.stage_idx, 0);
        }
        ptx::wgmma_wait_group<1>();
        // All wgmmas on the preceding stage have completed, so the preceding stage can be released.
        if (first == 0 && preceding != 0) pipeline.template release<C::kCluster>(preceding, lane);
        // After the unit's last k tile, the same steps are dequantized again and the result is not used.
        dequantize(a, next);
      }
      preceding = my_empty_barriers + stage_idx * 8;
    }
    ptx::wgmma_wait_group<0>();
    pipeline.template release<C::kCluster>(preceding, lane);
  }
};
