// SPDX-License-Identifier: Apache-2.0
// Replaces the scale s and the zero point z of a group of a quantized weight by those with the smallest output error:
//
//   step[k, n] = a[n] * codes[k, n] - b[n],   a = s' - s,   b = s' * z' - s * z
//
// is what the new scale s' and zero point z' add to the dequantized weights. For each z' from 0 to 15 (SYMMETRIC: 8),
// s' is the least-squares scale, rounded to SCALE and valid from SMALLEST to LARGEST / 15.
//
//   codes     float32 [group_size, n]
//   curved    float32 [group_size, n], H_g @ codes for the diagonal block H_g of the group
//   gradient  float32 [group_size, n], half the gradient of the output error
//   total     float64, the sum of the elements of H_g
//   scale     SCALE [n], stride ldg; updated
//   zero      float64 [n], stride ldg, integers from 0 to 15; updated
//   step      float32 [group_size, n]
//
// Every operation is rounded separately, without FMA, and sums are added in the order of k, so the results equal
// NumPy's. Limits: none. Architectures: all. Each thread computes one column n.
#include "common/types.cuh"

constexpr int kFirstZero = SYMMETRIC ? 8 : 0;
constexpr int kLastZero = SYMMETRIC ? 8 : 15;

// A double whose operations the compiler does not contract to FMA, so that they round like NumPy's.
struct Double {
  double value;
};

__device__ __forceinline__ Double operator+(Double a, Double b) { return {__dadd_rn(a.value, b.value)}; }
__device__ __forceinline__ Double operator-(Double a, Double b) { return {__dsub_rn(a.value, b.value)}; }
__device__ __forceinline__ Double operator*(Double a, Double b) { return {__dmul_rn(a.value, b.value)}; }
__device__ __forceinline__ Double operator/(Double a, Double b) { return {__ddiv_rn(a.value, b.value)}; }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    refine_group(const float* codes, const float* curved, const float* gradient, const double* total, SCALE* scale,
                 double* zero, float* step, int n, int group_size, int ldg) {
  const int column = blockIdx.x * THREADS + threadIdx.x;
  if (column >= n) return;
  // The quadratic forms q H q and q H 1 of the codes q, and the products of the gradient with q and with ones.
  Double qq = {0.0};
  Double q1 = {0.0};
  Double rq = {0.0};
  Double r1 = {0.0};
  for (int k = 0; k < group_size; ++k) {
    const int64_t at = static_cast<int64_t>(k) * n + column;
    const float code = codes[at];
    qq = qq + Double{__fmul_rn(curved[at], code)};
    q1 = q1 + Double{curved[at]};
    rq = rq + Double{__fmul_rn(gradient[at], code)};
    r1 = r1 + Double{gradient[at]};
  }

  const Double ones = {*total};
  const Double two = {2.0};
  SCALE* scale_at = scale + static_cast<int64_t>(column) * ldg;
  double* zero_at = zero + static_cast<int64_t>(column) * ldg;
  const Double s = {to_float(*scale_at)};
  const Double z = {*zero_at};
  SCALE best_scale = *scale_at;
  Double best_zero = z;
  Double best_a = {0.0};
  Double best_b = {0.0};
  double best_change = 0.0;
#pragma unroll 1
  for (int candidate = kFirstZero; candidate <= kLastZero; ++candidate) {
    const Double c = {static_cast<double>(candidate)};
    // For y = q - z', the best scale is s' = (s * (q - z) H y - gradient y) / (y H y).
    const Double curvature = qq - two * c * q1 + c * c * ones;
    const Double mixed = qq - (c + z) * q1 + c * z * ones;
    const Double ideal = (s * mixed - (rq - c * r1)) / Double{fmax(curvature.value, 1e-300)};
    const bool is_valid = ideal.value >= SMALLEST && __dmul_rn(ideal.value, 15.0) <= LARGEST && curvature.value > 0.0;
    if (!is_valid) continue;
    const SCALE stored = from_float<SCALE>(__double2float_rn(ideal.value));
    const Double rounded = {to_float(stored)};
    const Double a = rounded - s;
    const Double b = rounded * c - s * z;
    const Double change = a * a * qq - two * a * b * q1 + b * b * ones + two * a * rq - two * b * r1;
    if (change.value < best_change) {
      best_change = change.value;
      best_scale = stored;
      best_zero = c;
      best_a = a;
      best_b = b;
    }
  }
  *scale_at = best_scale;
  *zero_at = best_zero.value;
  const float factor = __double2float_rn(best_a.value);
  const float offset = __double2float_rn(best_b.value);
  for (int k = 0; k < group_size; ++k) {
    const int64_t at = static_cast<int64_t>(k) * n + column;
    step[at] = __fsub_rn(__fmul_rn(factor, codes[at]), offset);
  }
}
