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
