// SPDX-License-Identifier: Apache-2.0
// Gathers the columns of x in the order in which a weight's rows are sorted by group (activation order):
//
//   y[m, i] = x[m, order[i]]
//
//   x      X [m, k], row stride ldx values
//   order  int32 [k], a permutation of 0 .. k - 1, aligned to 32 bytes
//   y      X [m, k], contiguous, aligned to 32 bytes
//
// Limits: none. Architectures: all. WIDE: k is a multiple of 8, so a thread gathers and stores 8 values at once.
//
// CTA (i, j) computes rows j, j + gridDim.y, ... of y. With STAGED, the CTA copies each row of x to shared memory and
// gathers all columns from there, so that global memory is read once and in order; X_ALIGNED: the alignment of x
// permits loads of 8 values. Without STAGED, each thread gathers its columns from global memory, which has a lower
// latency for few rows.
// PDL: a thread's first indices are loaded before griddepcontrol.wait.
#include "ptx/griddepcontrol.cuh"
#include "common/types.cuh"

constexpr bool kStaged = STAGED;
constexpr bool kAligned = X_ALIGNED;
constexpr int kValues = WIDE ? 8 : 1;

using Values = Vector<X, kValues>;
using Indices = Vector<int32_t, kValues>;

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_columns(const X* x, const int32_t* order, X* y, int m, int k, int ldx) {
  extern __shared__ __align__(32) uint8_t memory[];
  X* staged = reinterpret_cast<X*>(memory);
  const int vectors = k / kValues;
  const int first = blockIdx.x * THREADS + threadIdx.x;
  const int step = gridDim.x * THREADS;
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  Indices first_indices = {};
  if (first < vectors) load<true>(first_indices, order + first * kValues);
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();

  for (int row = blockIdx.y; row < m; row += gridDim.y) {
    const X* source = x + static_cast<int64_t>(row) * ldx;
    if constexpr (kStaged) {
      for (int i = threadIdx.x; i < vectors; i += THREADS) {
        Values values;
        load<kAligned>(values, source + i * kValues);
        store<true>(staged + i * kValues, values);
      }
      __syncthreads();
      source = staged;
    }
    Indices indices = first_indices;
    for (int i = first; i < vectors; i += step) {
      if (i != first) load<true>(indices, order + i * kValues);
      Values values;
#pragma unroll
      for (int j = 0; j < kValues; ++j) values.values[j] = source[indices.values[j]];
      store<true>(y + static_cast<int64_t>(row) * k + i * kValues, values);
    }
    if constexpr (kStaged) __syncthreads();  // no thread may still read the row that the next one overwrites
  }
}
