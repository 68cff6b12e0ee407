// SPDX-License-Identifier: Apache-2.0
// Sums the weighted results of a token's experts in the order of the slots:
//
//   y[m, n] = sum over slots s with an expert in [0, experts) of pairs[m * top_k + s, n], + shared[m, n]
//
//   pairs   X [m * top_k, n], contiguous; n % 8 == 0
//   ids     int32 [m, top_k]
//   shared  X [m, n], row stride ld_shared values, or null
//   y       X [m, n], row stride ldy values
//
// ALIGNED: rows of shared and y start at multiples of the size of eight values.
//
// Architectures: all. A thread sums eight columns.
#include "common/types.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kAhead = 8;  // number of slots whose results are loaded before they are added

extern "C" __global__ void __launch_bounds__(THREADS)
    sum_experts(const X* pairs, const int32_t* ids, const X* shared, X* y, int n, int top_k, int experts, int ld_shared,
                int ldy) {
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  const unsigned row_ctas = ceil_div(n, 8 * THREADS);  // number of CTAs per token
  const int column = (blockIdx.x % row_ctas * THREADS + threadIdx.x) * 8;
  if (column >= n) return;
  const int64_t token = blockIdx.x / row_ctas;
  Vector<X, 8> added = {};
  if constexpr (HAS_SHARED) load<ALIGNED>(added, shared + token * ld_shared + column);
  float sums[8] = {};
  for (int first = 0; first < top_k; first += kAhead) {
    const int64_t pair = token * top_k + first;
    int expert[kAhead];
    Vector<X, 8> values[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) expert[i] = first + i < top_k ? ids[pair + i] : -1;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (static_cast<unsigned>(expert[i]) >= static_cast<unsigned>(experts)) continue;
      load<true>(values[i], pairs + (pair + i) * n + column);
    }
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += to_float(values[slot].values[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) added.values[i] = from_float<X>(sums[i] + to_float(added.values[i]));
  store<ALIGNED>(y + token * ldy + column, added);
}
