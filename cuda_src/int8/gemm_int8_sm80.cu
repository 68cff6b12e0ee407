// SPDX-License-Identifier: Apache-2.0
// The integer GEMM of gemm_int8.cuh for sm_80 and newer (FP8: sm_89 and newer), with mma m16n8k32 and cp.async; see
// gemm_int8_mma.cuh.
#include "int8/gemm_int8_mma.cuh"
#include "int8/gemm_int8_mma_config.cuh"

static_assert(__CUDA_ARCH__ >= (Config::kFp8 ? 890 : 800), "gemm_int8_sm80 needs sm_80, and for FP8 sm_89, or newer");

using Kernel = GemmInt8Mma<Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads)
    gemm_int8_sm80(const int8_t* xq, const float* x_scale, const float* x_offset, const Config::Product* x_sums,
                   const uint8_t* codes, const float* parameters, const BIAS* bias, Y* y, float* partials,
                   uint32_t* counters, int m, int n, int k, int block_size, int n_padded, int ldy, float low,
                   float high) {
  gemm_int8_mma<Kernel>(xq, x_scale, x_offset, x_sums, codes, parameters, bias, y, partials, counters, m, n, k,
                        block_size, n_padded, ldy, low, high, CopyAsync{});
}
