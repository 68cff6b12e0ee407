// SPDX-License-Identifier: Apache-2.0
//   y[m, i] = gate / (1 + exp(-gate)) * up,  gate = x[m, i], up = x[m, width + i]
//
//   x  X [m, 2 * width]
//   y  X [m, width]
//
// Any width, any architecture: for weights that are not quantized; a quantized layer does this itself.
#include "llm/begin.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) swiglu(const X* x, X* y, int width) {
  begin();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= width) return;
  const X* row = x + static_cast<int64_t>(blockIdx.y) * 2 * width;
  const float gate = to_float(row[i]);
  y[static_cast<int64_t>(blockIdx.y) * width + i] =
      from_float<X>(gate / (1.0f + __expf(-gate)) * to_float(row[width + i]));
}
