// SPDX-License-Identifier: Apache-2.0
// The constants that the host gives to gemm_int8_sm75.cu and gemm_int8_sm80.cu (kernels/int8/gemm_int8_mma.py).
#pragma once

#include "common/epilogue.cuh"
#include "int8/products.cuh"

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>,
                ProductOptions<FP8, X_OFFSET, WEIGHT_OFFSET> {
  using T = Y;
  static constexpr int kBits = BITS, kWarpsM = WARPS_M, kWarpsN = WARPS_N, kWarpM = WARP_M, kStages = STAGES;
  static constexpr int kXBlocks = X_BLOCKS;
  // Whether x is int8 and a quantization block has at most 256 columns, so that sums stay below 2^22 (magic_to_float).
  static constexpr bool kShortBlocks = SHORT_BLOCKS;
  static constexpr bool kEven = EVEN;
};
