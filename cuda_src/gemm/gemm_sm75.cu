// SPDX-License-Identifier: Apache-2.0
// The GEMM of gemm_mma.cuh, y = epilogue(x @ W), for sm_75: with float16 x, and copies through registers.
// gemm_mma.cuh describes the arguments.
#include "common/copy_to_shared.cuh"
#include "gemm/gemm_mma.cuh"
#include "gemm/gemm_mma_config.cuh"

static_assert(__CUDA_ARCH__ >= 750, "gemm_sm75 needs sm_75 or newer");

using Kernel = GemmMma<Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads)
    gemm_sm75(const X* x, const uint32_t* qweight, const SCALE* scales, const void* zeros, const BIAS* bias,
              const X* residual, X* y, float* partials, uint32_t* counters, int m, int n, int k, int group_size,
              int ldx, int ldq, int lds, int ldz, int ldr, int ldy, float low, float high) {
  gemm_mma<Kernel>(x, qweight, scales, zeros, bias, residual, y, partials, counters, m, n, k, group_size, ldx, ldq, lds,
                   ldz, ldr, ldy, low, high, CopyDirect{});
}
