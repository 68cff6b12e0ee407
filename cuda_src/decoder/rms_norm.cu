// SPDX-License-Identifier: Apache-2.0
// The residual add and the RMSNorm of a decoder:
//
//   h[m, i] += delta[m, i]                                    (HAS_DELTA)
//   inverse_rms[m] = 1 / sqrt(mean of h[m, :]^2 + eps)
//   x[m, i] = h[m, i] * inverse_rms[m] * weight[i]
//
//   h            float32 [m, width], the residual stream
//   delta        X [m, width], the output of an attention or MLP block, or null
//   weight       float32 [width]
//   x            X [m, width]
//   inverse_rms  float32 [m]
//
// Limits: width is a multiple of 4 up to THREADS * 4 * VECTORS; arrays are aligned to 16 bytes. Architectures: all.
// Each CTA computes one row. PDL: `weight` is loaded before griddepcontrol.wait.
#include "decoder/dependent_launch.cuh"

constexpr int kWarps = THREADS / 32;
constexpr int kVectors = VECTORS;
constexpr bool kHasDelta = HAS_DELTA;

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(float* h, const X* delta, const float* weight, X* x, float* inverse_rms, int width, float eps) {
  __shared__ float warp_sums[kWarps];
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int64_t start = static_cast<int64_t>(blockIdx.x) * width;
  Vector<float, 4> values[kVectors] = {}, weights[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int i = (j * THREADS + threadIdx.x) * 4;
    if (i < width) load<true>(weights[j], weight + i);
  }
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  Vector<X, 4> deltas[kVectors] = {};
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int i = (j * THREADS + threadIdx.x) * 4;
    if (i >= width) continue;
    load<true>(values[j], h + start + i);
    if constexpr (kHasDelta) load<true>(deltas[j], delta + start + i);
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kHasDelta) values[j].values[i] += to_float(deltas[j].values[i]);
      sum += values[j].values[i] * values[j].values[i];
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[warp];
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
  if (threadIdx.x == 0) inverse_rms[blockIdx.x] = scale;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int i = (j * THREADS + threadIdx.x) * 4;
    if (i >= width) continue;
    Vector<X, 4> normed;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      normed.values[e] = from_float<X>(values[j].values[e] * scale * weights[j].values[e]);
    }
    store<true>(x + start + i, normed);
    if constexpr (kHasDelta) store<true>(h + start + i, values[j]);
  }
}
