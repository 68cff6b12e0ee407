// SPDX-License-Identifier: Apache-2.0
// The order in which conv2d_sm90 and conv2d_sm90_large traverse K, their two pipelines, and their biases.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

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

// Initializes the barriers of the pipelines of x and of the weight; called by all lanes of the producer warp.
template <int kXStages, int kWeightStages, class XPipeline, class WeightPipeline>
__device__ __forceinline__ void init_pipelines(const XPipeline& x, const WeightPipeline& weight, int consumer_warps,
                                               int lane) {
  for (int stage_idx = lane; stage_idx < kXStages + kWeightStages; stage_idx += 32) {
    const bool is_x = stage_idx < kXStages;
    const int weight_stage_idx = stage_idx - kXStages;
    ptx::mbarrier_init(is_x ? x.full_barrier(stage_idx) : weight.full_barrier(weight_stage_idx), 1);
    ptx::mbarrier_init(is_x ? x.empty_barrier(stage_idx) : weight.empty_barrier(weight_stage_idx), consumer_warps);
  }
}

// Returns the biases of a lane's outputs `output` and `output` + 8, or zeros.
template <class Epilogue>
__device__ __forceinline__ Vector<float, 2> output_biases(const Epilogue& epilogue, int output) {
  Vector<float, 2> biases = {};
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    if (output + upper * 8 < epilogue.n) biases.values[upper] = epilogue.biased(0.0f, output + upper * 8);
  }
  return biases;
}
