// SPDX-License-Identifier: Apache-2.0
// The constants that the host gives to gemm_sm75.cu and gemm_sm80.cu (kernels/gemm/gemm_mma.py).
#pragma once

#include "common/epilogue.cuh"
#include "dequantize/int4.cuh"

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL> {
  using T = X;
  using Scale = SCALE;
  static constexpr bool kAligned = ALIGNED;
  static constexpr Zeros kZeros = Zeros::ZEROS;
  static constexpr int kBlockM = BLOCK_M, kWarps = WARPS, kStages = STAGES;
  static constexpr bool kGroupInTile = GROUP_IN_TILE;  // whether a group may end within a k tile
  // Number of slices of K that a CTA computes one after the other (reduce.cuh); 1 with split-K.
  static constexpr int kSlices = SLICES;
};
