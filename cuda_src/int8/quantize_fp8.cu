// SPDX-License-Identifier: Apache-2.0
// Quantization of x to e4m3 with one scale per row:
//
//   scale[m] = max(max|x[m]|, 2^-100) / 448
//   codes[m, k] = x[m, k] * (448 / max(max|x[m]|, 2^-100)), rounded to the nearest e4m3, ties to even
//   sums[m, b] = sum of the values of the codes in block b of block_size columns
//
// Every operation is rounded to float32, without FMA. A row with a NaN or an infinity has scale NaN and codes 0.
//
//   x        X [m, k], row stride ldx, rows at multiples of 16 bytes
//   codes    e4m3 [m, k]
//   scale    float32 [m]
//   sums     float32 [m, ceil(k / block_size)]; sums below 2^15 are exact
//   half_sums  float16 [m, ld_half_sums], the sums rounded to float16; columns past the last block are not written
//
// Limits: sm_89 and newer; k % 8 == 0; block_size is 8, 16, 32, 64, 128 or 256.
//
// A CTA quantizes one row in ROUNDS rounds of 8 elements per thread, in two passes: maximum, then codes. Between the
// passes the row stays in registers if it fits there; otherwise it is read twice.
//
// DEPENDENT (sm_90 and newer): the GEMM that follows may start early, to copy its weight while x is quantized (PDL).
#include "ptx/cvt_e4m3.cuh"
#include "common/types.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kThreads = THREADS;
constexpr int kValues = 8;
constexpr int kStride = kThreads * kValues;
constexpr int kRounds = ROUNDS;
constexpr bool kFitsRegisters = kRounds <= (sizeof(X) == 2 ? 8 : 4);
constexpr int kKept = kFitsRegisters ? kRounds : 1;
constexpr float kSmallest = 7.888609052210118e-31f;  // 2^-100
constexpr float kLargestCode = 448.0f;

using Values = Vector<X, kValues>;

extern "C" __global__ void __launch_bounds__(kThreads)
    quantize_fp8(const X* __restrict__ x, uint8_t* __restrict__ codes, float* __restrict__ scale,
                 float* __restrict__ sums, half_t* __restrict__ half_sums, int k, int block_size, int ldx,
                 int ld_half_sums) {
  __shared__ uint32_t shared_largest[kThreads / 32];
  const int64_t row = blockIdx.x;
  const X* source = x + row * ldx;
  const int begin = threadIdx.x * kValues;

  if constexpr (DEPENDENT) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  Values kept[kKept];
  uint32_t largest = 0;  // bits of max |x|; as integers they are ordered like the floats, infinity and NaN last
#pragma unroll(kKept)
  for (int round = 0; round < kRounds; ++round) {
    const int i = begin + round * kStride;
    if (i >= k) break;
    Values& values = kept[kFitsRegisters ? round : 0];
    load<true>(values, source + i);
#pragma unroll
    for (int v = 0; v < kValues; ++v) largest = max(largest, __float_as_uint(fabsf(to_float(values.values[v]))));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  if (threadIdx.x % 32 == 0) shared_largest[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) largest = max(largest, shared_largest[warp]);

  const bool is_finite = largest < 0x7f800000u;
  const float size = fmaxf(__uint_as_float(largest), kSmallest);
  const float factor = __fdiv_rn(kLargestCode, size);
  if (threadIdx.x == 0) scale[row] = is_finite ? __fdiv_rn(size, kLargestCode) : __uint_as_float(0x7fffffffu);

#pragma unroll(kKept)
  for (int round = 0; round < kRounds; ++round) {
    const int i = begin + round * kStride;
    float sum = 0.0f;
    if (i < k) {
      Values& values = kept[kFitsRegisters ? round : 0];
      if constexpr (!kFitsRegisters) load<true>(values, source + i);
      Vector<uint16_t, kValues / 2> pairs;
#pragma unroll
      for (int p = 0; p < kValues / 2; ++p) {
        float scaled[2];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          scaled[v] = is_finite ? __fmul_rn(to_float(values.values[2 * p + v]), factor) : 0.0f;
        }
        pairs.values[p] = ptx::cvt_rn_satfinite_e4m3x2_f32(scaled[0], scaled[1]);
        const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(pairs.values[p]);
        sum += to_float(half_t{static_cast<uint16_t>(halves)});
        sum += to_float(half_t{static_cast<uint16_t>(halves >> 16)});
      }
      *reinterpret_cast<Vector<uint16_t, kValues / 2>*>(codes + row * k + i) = pairs;
    }
    for (int step = block_size / kValues / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (i < k && i % block_size == 0) {
      sums[row * ceil_div(k, block_size) + i / block_size] = sum;
      half_sums[row * ld_half_sums + i / block_size] = from_float<half_t>(sum);
    }
  }
}
