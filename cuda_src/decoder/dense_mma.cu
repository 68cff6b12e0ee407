// SPDX-License-Identifier: Apache-2.0
// A GEMM with an unquantized weight, on tensor cores (dense_mma.cuh):
//
//   y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]
//
//   x     X [m, k]
//   w     X [n, k], the layout of embeddings and of unquantized linear layers
//   bias  float32 [n] (HAS_BIAS), or null
//   y     Y [m, n]
//
// Limits: k is a multiple of 32. Architectures: sm_75 and newer; bfloat16 sm_80 and newer.
#include "decoder/dense_mma.cuh"

struct Weight {
  static constexpr int kLaneK = 8;
  using Loaded = Chunk;

  __device__ __forceinline__ void load(Loaded& out, int column, int k_begin) const {
    ptx::ld_global_no_allocate(out.values, w + static_cast<int64_t>(column) * k + k_begin);
  }
  __device__ __forceinline__ void pairs(uint32_t (&out)[2], const Loaded& loaded, int i) const {
    out[0] = loaded.values[2 * i];
    out[1] = loaded.values[2 * i + 1];
  }

  const X* w;
  int k;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dense_mma(const X* x, const X* w, const float* bias, Y* y, int m, int n, int k) {
  multiply_dense(x, Weight{w, k}, bias, y, m, n, k);
}
