// SPDX-License-Identifier: Apache-2.0
//   codes[m, k] = clamp(round((x[m, k] - offset[m, b]) / scale[m, b]), -128, 127),  b = k / block
//   sums[m, b] = sum of the block's codes
// with scale = (max - min) / 255 and offset = max - 127 * scale, or scale = 1 and offset = max where that scale is 1e-5
// or less; SYMMETRIC: scale = max|x| / 127 and no offset. Every operation is rounded to float32, none is fused. A block
// that holds a NaN or an infinity has scale NaN and codes 0.
//
//   x        X [m, k], row stride ldx values
//   codes    int8 [m, k]
//   scale, offset, sums  float32, float32 (null if SYMMETRIC), int32 [m, blocks]
//
// Any k and block, any architecture. WIDE: k and block are multiples of 8, and so moves of 16 bytes are aligned.
//
// LANES adjacent threads take a block, 8 (or 1) values each at a time; they read x twice, the second time from L1.
#include "types.cuh"

constexpr int kLanes = LANES;
constexpr int kThreads = THREADS;
constexpr int kValues = WIDE ? 8 : 1;
constexpr bool kSymmetric = SYMMETRIC;
constexpr bool kHalfEven = HALF_EVEN;
constexpr int kWarps = kLanes / 32;

static_assert(kLanes <= 32 ? 32 % kLanes == 0 : kLanes == kThreads, "lanes are a part of a warp, or the whole block");

using int8_t = signed char;

// op over all lanes of a block of x. Every thread calls it.
template <class T, class Op>
__device__ __forceinline__ T reduce(T value, Op op, T* shared) {
#pragma unroll
  for (int step = min(kLanes, 32) / 2; step > 0; step /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  if constexpr (kLanes > 32) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) value = op(value, shared[warp]);
  }
  return value;
}

__device__ __forceinline__ float round_code(float ratio) {
  if constexpr (kHalfEven) return rintf(ratio);
  const float whole = truncf(ratio);
  return fabsf(ratio - whole) >= 0.5f ? whole + copysignf(1.0f, ratio) : whole;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_rows(const X* x, int8_t* codes, float* scale, float* offset, int32_t* sums, int m, int k, int block,
                  int ldx) {
  // One for each value that is reduced, so that no warp overwrites what another has yet to read.
  __shared__ float shared_high[32];
  __shared__ float shared_low[32];
  __shared__ float shared_poison[32];
  __shared__ int32_t shared_sum[32];
  const int blocks = ceil_div(k, block);
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const bool is_there = index < static_cast<int64_t>(m) * blocks;
  const int row = is_there ? static_cast<int>(index / blocks) : 0;
  const int begin = static_cast<int>(index % blocks) * block + threadIdx.x % kLanes * kValues;
  const int end = is_there ? min(static_cast<int>(index % blocks) * block + block, k) : 0;
  const X* source = x + static_cast<int64_t>(row) * ldx;

  const float infinity = __uint_as_float(0x7f800000u);
  float high = -infinity;
  float low = infinity;
  float poison = 0.0f;  // NaN once a value was not finite: maximum and minimum ignore NaN
  for (int i = begin; i < end; i += kLanes * kValues) {
    Vector<X, kValues> values;
    load<true>(values, source + i);
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const float value = to_float(values.values[v]);
      poison += value * 0.0f;
      high = fmaxf(high, kSymmetric ? fabsf(value) : value);
      if constexpr (!kSymmetric) low = fminf(low, value);
    }
  }
  auto maximum = [](float a, float b) { return fmaxf(a, b); };
  auto minimum = [](float a, float b) { return fminf(a, b); };
  auto add = [](float a, float b) { return a + b; };
  auto count = [](int32_t a, int32_t b) { return a + b; };
  high = reduce(high, maximum, shared_high);
  if constexpr (!kSymmetric) low = reduce(low, minimum, shared_low);
  poison = reduce(poison, add, shared_poison);

  float step;
  float origin = 0.0f;
  if constexpr (kSymmetric) {
    step = __fdiv_rn(high, 127.0f);
  } else {
    step = __fdiv_rn(__fsub_rn(high, low), 255.0f);
    const bool is_wide = step > 1e-5f;
    origin = is_wide ? __fsub_rn(high, __fmul_rn(127.0f, step)) : high;
    if (!is_wide) step = 1.0f;
  }
  const bool is_finite = poison == 0.0f && step < infinity;
  const bool has_codes = is_finite && step > 0.0f;

  int32_t total = 0;
  for (int i = begin; i < end; i += kLanes * kValues) {
    Vector<X, kValues> values;
    load<true>(values, source + i);
    Vector<int8_t, kValues> out;
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const float ratio = __fdiv_rn(__fsub_rn(to_float(values.values[v]), origin), step);
      const float rounded = fminf(fmaxf(round_code(ratio), -128.0f), 127.0f);
      const int code = has_codes ? static_cast<int>(rounded) : 0;
      out.values[v] = static_cast<int8_t>(code);
      total += code;
    }
    store<true>(codes + static_cast<int64_t>(row) * k + i, out);
  }
  total = reduce(total, count, shared_sum);
  const float nan = __uint_as_float(0x7fffffffu);
  if (is_there && threadIdx.x % kLanes == 0) {
    scale[index] = is_finite ? step : nan;
    if constexpr (!kSymmetric) offset[index] = is_finite ? origin : nan;
    sums[index] = total;
  }
}
