// SPDX-License-Identifier: Apache-2.0
// A GEMM with a weight of 8-bit codes and 16-bit activations:
//
//   y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n],  w[n, k] = (codes[n, k] - 128) * code_scales[n, k / BLOCK]
//
//   x            X [m, k]
//   codes        uint8 [n, k]
//   code_scales  X [n, k / BLOCK]
//   bias         float32 [n] (HAS_BIAS), or null
//   y            Y [m, n]
//
// Each weight is rounded once to X, so y equals the result of dense with the dequantized weight.
// Limits: k a multiple of BLOCK, BLOCK a multiple of 8. Architectures: all; on sm_75 and newer dense_int8_mma runs.
// Each warp computes one element of y.
#include "decoder/dependent_launch.cuh"

static_assert(BLOCK % 8 == 0, "the values of a load have one scale");

extern "C" __global__ void __launch_bounds__(THREADS)
    dense_int8(const X* x, const uint8_t* codes, const X* code_scales, const float* bias, Y* y, int n, int k) {
  launch_dependents_and_wait();
  const int column = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (column >= n) return;
  const X* x_row = x + static_cast<int64_t>(blockIdx.y) * k;
  const uint8_t* code_row = codes + static_cast<int64_t>(column) * k;
  const X* scale_row = code_scales + static_cast<int64_t>(column) * (k / BLOCK);
  float sum = 0.0f;
  for (int i = threadIdx.x % 32 * 8; i < k; i += 256) {
    Vector<X, 8> a;
    Vector<uint8_t, 8> b;
    load<true>(a, x_row + i);
    load<true>(b, code_row + i);
    const float scale = to_float(scale_row[i / BLOCK]);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const X weight = from_float<X>(static_cast<float>(static_cast<int>(b.values[j]) - 128) * scale);
      sum += to_float(a.values[j]) * to_float(weight);
    }
  }
  sum = warp_sum(sum);
  if (HAS_BIAS) sum += bias[column];
  if (threadIdx.x % 32 == 0) y[static_cast<int64_t>(blockIdx.y) * n + column] = from_float<Y>(sum);
}
