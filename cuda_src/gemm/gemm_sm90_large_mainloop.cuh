// SPDX-License-Identifier: Apache-2.0
// The main loop of a consumer warpgroup of experts/expert_gemm_sm90.cu, with the instructions of gemm_sm90_large.cu: it
// dequantizes a slice of 64 columns and 64 k to operand A while the tensor cores multiply the preceding slice.
#pragma once

#include "common/warp.cuh"
#include "gemm/gemm_sm90_large.cuh"
#include "hopper/wgmma.cuh"

template <class C> struct WgmmaMainLoop {
  using T = typename C::T;
  // A slice is 64 columns x 64 k: slice b of a stage is m64 tile b / 2 and half b % 2 of the 128 k. A slice has
  // kSliceGroups groups, or shares a group with the other half.
  static constexpr int kSlices = 2 * C::kM64Tiles;
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

  __device__ __forceinline__ void load_slice(int stage_idx, int b) {
    const uint32_t offset = uniform(stage_idx * C::kWeightStageBytes) + b / 2 * 2 * C::kWeightTileBytes;
    ptx::ld_shared(words.values, my_codes + offset + b % 2 * 1024);
    if (C::kGroups > 1 || b % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kSliceGroups; ++i) {
        const int group = C::kGroups > 1 ? b % 2 * kSliceGroups + i : 0;
        codes[i] = ScaledCodes<T, C>(Group<C>::load_shared(my_scales + offset, my_zeros + offset, group), factor);
      }
    }
  }

  __device__ __forceinline__ void dequantize(uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) codes[k16 * kSliceGroups / 4].convert(a[k16], words.values[k16]);
  }

  // Adds the products of the k tiles [k_tile_begin, k_tile_end), which are in the stages from `state` on, and releases
  // the stages. Only the first kRows rows of x are multiplied.
  template <int kRows> __device__ __forceinline__ void run(typename C::Accumulators& accumulators,
                                                           PipelineState<C::kStages>& state, int k_tile_begin,
                                                           int k_tile_end, int lane) {
    const auto pipeline = shared.pipeline();
    uint32_t a[2][4][4];
    uint32_t preceding = 0;  // address of the preceding stage's empty barrier; 0 in the first k tile
    pipeline.consumer_wait(state);
    load_slice(state.stage_idx, 0);
    dequantize(a[0]);
    for (int k_tile = k_tile_begin; k_tile < k_tile_end; ++k_tile) {
      const int stage_idx = state.stage_idx;
      state.advance();
      // With stream-K the compiler cannot prove that the stage index is warp-uniform.
      const uint64_t x = ptx::wgmma_descriptor(uniform(shared.x(stage_idx)));
#pragma unroll
      for (int b = 0; b < kSlices; ++b) {
        ptx::wgmma_fence();
#pragma unroll
        for (int k16 = 0; k16 < 4; ++k16) {
          wgmma<T, true>(reinterpret_cast<float (&)[kRows / 2]>(accumulators[b / 2]), a[b % 2][k16],
                         x + b % 2 * (C::kXHalfBytes / 16) + k16 * 2);
        }
        ptx::wgmma_commit_group();
        // Dequantize the next slice while the tensor cores multiply this one. After the last slice of the unit's last k
        // tile, the same slice is dequantized again and the result is not used.
        if (b < kSlices - 1) {
          load_slice(stage_idx, b + 1);
        } else if (k_tile + 1 < k_tile_end) {
          pipeline.consumer_wait(state);
          load_slice(state.stage_idx, 0);
        }
        ptx::wgmma_wait_group<1>();
        // All wgmmas on the preceding stage have completed, so the preceding stage can be released.
        if (b == 0 && k_tile > k_tile_begin) pipeline.template release<C::kCluster>(preceding, lane);
        dequantize(a[(b + 1) % 2]);
      }
      preceding = my_empty_barriers + stage_idx * 8;
    }
    ptx::wgmma_wait_group<0>();
    pipeline.template release<C::kCluster>(preceding, lane);
  }
};
