// SPDX-License-Identifier: Apache-2.0
// The compile-time switches of all 8-bit GEMM kernels, and the type of a product of 8-bit operands.
#pragma once

#include "common/types.cuh"

constexpr bool kFp8 = FP8;
constexpr bool kXOffset = X_OFFSET;
constexpr bool kWeightOffset = WEIGHT_OFFSET;

#if FP8
using Product = float;
#else
using Product = int32_t;
#endif
