// SPDX-License-Identifier: Apache-2.0
// A GEMM with an unquantized weight:
//
//   y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]
//
//   x     X [m, k]
//   w     X [n, k], the layout of embeddings and of unquantized linear layers
//   bias  float32 [n] (HAS_BIAS), or null
//   y     Y [m, n]
//
// Limits: k is a multiple of 8. Architectures: all; on sm_75 and newer, dense_mma is used if k is a multiple of 32.
// Each warp computes one element of y.
#include "decoder/dependent_launch.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    dense(const X* x, const X* w, const float* bias, Y* y, int n, int k) {
  launch_dependents_and_wait();
  const int column = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (column >= n) return;
  const X* x_row = x + static_cast<int64_t>(blockIdx.y) * k;
  const X* w_row = w + static_cast<int64_t>(column) * k;
  float sum = 0.0f;
  for (int i = threadIdx.x % 32 * 8; i < k; i += 256) {
    Vector<X, 8> a, b;
    load<true>(a, x_row + i);
    load<true>(b, w_row + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += to_float(a.values[j]) * to_float(b.values[j]);
  }
  sum = warp_sum(sum);
  if (HAS_BIAS) sum += bias[column];
  if (threadIdx.x % 32 == 0) y[static_cast<int64_t>(blockIdx.y) * n + column] = from_float<Y>(sum);
}
