// SPDX-License-Identifier: Apache-2.0
//   h[m, i] += delta[m, i]                                            (HAS_DELTA)
//   x[m, i] = h[m, i] * weight[i] / sqrt(mean of h[m, :]^2 + eps)
//
//   h       float32 [m, width]: the residual stream, in which no sum of layers is rounded to 16 bits
//   delta   X [m, width], or null
//   weight  float32 [width]
//   x       X [m, width]
//
// width a multiple of 4, any architecture. One block a row; all arrays start at multiples of 16 bytes.
#include "llm/begin.cuh"

constexpr int kWarps = THREADS / 32;
constexpr bool kHasDelta = HAS_DELTA;

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(float* h, const X* delta, const float* weight, X* x, int width, float eps) {
  __shared__ float sums[kWarps];
  begin();
  const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
  float sum = 0.0f;
  for (int i = threadIdx.x * 4; i < width; i += THREADS * 4) {
    Vector<float, 4> values;
    load<true>(values, h + start + i);
    if constexpr (kHasDelta) {
      Vector<X, 4> added;
      load<true>(added, delta + start + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) values.values[j] += to_float(added.values[j]);
      store<true>(h + start + i, values);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += values.values[j] * values.values[j];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp];
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
  // A thread reads again what it read or wrote itself.
  for (int i = threadIdx.x * 4; i < width; i += THREADS * 4) {
    Vector<float, 4> values, weights;
    load<true>(values, h + start + i);
    load<true>(weights, weight + i);
    Vector<X, 4> normed;
#pragma unroll
    for (int j = 0; j < 4; ++j) normed.values[j] = from_float<X>(values.values[j] * scale * weights.values[j]);
    store<true>(x + start + i, normed);
  }
}
