// SPDX-License-Identifier: Apache-2.0
// The kernel parameter `positions` of kernels that can store the columns of their output in the activation order of the
// next GEMM: int32, column i is stored at positions[i]. Only kernels compiled with ORDER_OUT = 1 have the parameter.
#pragma once

#if ORDER_OUT
#define POSITIONS_PARAMETER const int32_t *positions,
#define POSITIONS_ARGUMENT positions
#else
#define POSITIONS_PARAMETER
#define POSITIONS_ARGUMENT nullptr
#endif
