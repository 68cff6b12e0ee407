// SPDX-License-Identifier: Apache-2.0
// The options of all 8-bit GEMM kernels, and the type of a product of 8-bit operands.
#pragma once

#include "common/types.cuh"

// The options with the host's constants as ProductOptions<FP8, X_OFFSET, WEIGHT_OFFSET>.
template <bool kIsFp8, bool kHasXOffset, bool kHasWeightOffset> struct ProductOptions {
  static constexpr bool kFp8 = kIsFp8, kXOffset = kHasXOffset, kWeightOffset = kHasWeightOffset;
  using Product = Select<kFp8, float, int32_t>;
};
