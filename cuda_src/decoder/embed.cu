// SPDX-License-Identifier: Apache-2.0
// The embedding of tokens, which starts the residual stream:
//
//   h[m, i] = table[tokens[m], i]
//
//   tokens  int32 [m]; a token outside the table reads row 0
//   table   TABLE [vocab, width]
//   h       float32 [m, width]
//
// Limits: width is a multiple of 4. Architectures: all. Each CTA copies one row.
// PDL: this kernel starts only after all preceding kernels have finished. So later kernels may read the results of the
// preceding decode step before griddepcontrol.wait.
#include "decoder/dependent_launch.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    embed(const int32_t* tokens, const TABLE* __restrict__ table, float* __restrict__ h, int vocab, int width) {
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int token = tokens[blockIdx.x];
  const TABLE* row = table + static_cast<int64_t>(token >= 0 && token < vocab ? token : 0) * width;
  float* out = h + static_cast<int64_t>(blockIdx.x) * width;
  for (int i = 4 * threadIdx.x; i < width; i += 4 * THREADS) {
    Vector<TABLE, 4> part;
    load<true>(part, row + i);
    Vector<float, 4> values;
#pragma unroll
    for (int e = 0; e < 4; ++e) values.values[e] = to_float(part.values[e]);
    store<true>(out + i, values);
  }
}
