// SPDX-License-Identifier: Apache-2.0
// The integer GEMM of gemm_int8.cuh for sm_75, with mma m8n8k16 and copies through registers; see gemm_int8_mma.cuh.
#include "int8/gemm_int8_mma.cuh"
#include "int8/gemm_int8_mma_config.cuh"

static_assert(__CUDA_ARCH__ >= 750, "gemm_int8_sm75 needs sm_75 or newer");

using Kernel = GemmInt8Mma<Config>;

// The 1 lets the compiler take more than 128 registers, into which the kernel does not fit.
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_int8_sm75(const int8_t* xq, const float* x_scale, const float* x_offset, const int32_t* x_sums,
                   const uint8_t* codes, const float* parameters, const BIAS* bias, Y* y, float* partials,
                   uint32_t* counters, int m, int n, int k, int block_size, int n_padded, int ldy, float low,
                   float high) {
  gemm_int8_mma<Kernel>(xq, x_scale, x_offset, x_sums, codes, parameters, bias, y, partials, counters, m, n, k,
                        block_size, n_padded, ldy, low, high, CopyDirect{});
}
