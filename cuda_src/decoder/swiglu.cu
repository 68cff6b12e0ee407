// SPDX-License-Identifier: Apache-2.0
// SwiGLU, the gated activation of an MLP, for unquantized gate and up projections; the GEMM of quantized projections
// includes the activation:
//
//   y[m, i] = gate / (1 + exp(-gate)) * up,    gate = x[m, i], up = x[m, width + i]
//
//   x  X [m, 2 * width]
//   y  X [m, width]
//
// Limits: none. Architectures: all. Each thread computes one element.
#include "decoder/dependent_launch.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) swiglu(const X* x, X* y, int width) {
  launch_dependents_and_wait();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= width) return;
  const X* row = x + static_cast<int64_t>(blockIdx.y) * 2 * width;
  const float gate = to_float(row[i]);
  y[static_cast<int64_t>(blockIdx.y) * width + i] =
      from_float<X>(gate / (1.0f + __expf(-gate)) * to_float(row[width + i]));
}
