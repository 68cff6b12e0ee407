// SPDX-License-Identifier: Apache-2.0
// The additional parameters of a GEMM that is fused with the residual add or the RMSNorm of a decoder layer
// (hopper/residual_stream.cuh).
#pragma once

#include "common/positions.cuh"

#if ADD_TO_STREAM || RMS_NORM_X
#define FUSION_PARAMETERS                                                                                        \
  float *h, const float *norm_weight, float *square_sums, const float *previous_inverse_rms, float *inverse_rms, \
      POSITIONS_PARAMETER
#define FUSION_ARGUMENTS h, norm_weight, square_sums, previous_inverse_rms, inverse_rms, POSITIONS_ARGUMENT
#else
#define FUSION_PARAMETERS
#define FUSION_ARGUMENTS nullptr, nullptr, nullptr, nullptr, nullptr, nullptr
#endif

// The additional parameters of a GEMM that prefetches the weight of a later GEMM into L2 (hopper/next_weight.cuh).
#if PREFETCHES_NEXT
#define NEXT_WEIGHT_PARAMETER const uint8_t *next_weight,
#define NEXT_WEIGHT_SCALARS , int next_share_bytes, int next_half_offset
#define NEXT_WEIGHT_ARGUMENTS next_weight, next_share_bytes, next_half_offset
#else
#define NEXT_WEIGHT_PARAMETER
#define NEXT_WEIGHT_SCALARS
#define NEXT_WEIGHT_ARGUMENTS nullptr, 0, 0
#endif
