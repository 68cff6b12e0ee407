// SPDX-License-Identifier: Apache-2.0
// Quantization of x to int8 with a scale and an offset per block of block_size columns:
//
//   codes[m, k] = clamp(round((x[m, k] - offset[m, b]) / scale[m, b]), -128, 127),  b = k / block_size
//   sums[m, b] = sum of the codes of block b
//
// scale = (max - min) / 255 and offset = max - 127 * scale, where max and min are taken over the block; if this scale
// is at most 1e-5, scale = 1 and offset = max. SYMMETRIC: scale = max|x| / 127, without an offset. Every operation is
// rounded to float32, without FMA. A block with a NaN or an infinity has scale NaN and codes 0. If max - min overflows,
// scale = max / 255 - min / 255.
//
//   x        X [m, k], row stride ldx; not __restrict__, since the preceding kernel may write it while this kernel runs
//            (PDL), and ld.global.nc need not see that
//   codes    int8 [m, k]
//   scale, offset, sums  float32, float32 (null if SYMMETRIC), int32 [m, blocks]
//
// Any k, block_size and architecture. WIDE: k, block_size and the addresses of all rows allow aligned accesses of 8
// elements.
//
// FRAGMENTS: the codes of each 16 columns are in the order in which gemm_w4a8_mma.cu multiplies them: byte 4 t + b of
// 16 has the code of column 2 t + b / 2 + b % 2 * 8. k and block_size are multiples of 16.
//
// LANES adjacent threads quantize a block in ROUNDS rounds of 8 (or 1) elements per thread. CTA (i, j, l) of the grid
// quantizes the i-th THREADS / LANES blocks of row l * gridDim.y + j.
//
// DEPENDENT (sm_90 and newer): the GEMM that follows may start early, to copy its weight while x is quantized (PDL).
#include "common/types.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kLanes = LANES;
constexpr int kThreads = THREADS;
constexpr int kValues = WIDE ? 8 : 1;
constexpr bool kSymmetric = SYMMETRIC;
constexpr bool kHalfEven = HALF_EVEN;
constexpr bool kFragments = FRAGMENTS;
constexpr int kWarps = kLanes / 32;
constexpr int kStride = kLanes * kValues;
constexpr int kRounds = ROUNDS;  // number of rounds in which kLanes lanes cover a block
constexpr int kKept = kRounds <= 4 ? kRounds : 1;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: value + kMagic has the rounded value in its low mantissa bits

static_assert(!kFragments || WIDE, "a thread has eight codes that are adjacent in the fragments");
static_assert(kLanes <= 32 ? 32 % kLanes == 0 : kLanes == kThreads, "the lanes are part of a warp, or the whole CTA");

using int8_t = signed char;
using Values = Vector<X, kValues>;

// Returns the column of element v of the vector that begins at column i, or in the fragments at byte i.
__device__ __forceinline__ int column(int i, int v) {
  return kFragments ? i / 16 * 16 + i % 16 / 2 + v % 4 + v / 4 * 8 : i + v;
}

// Loads the vector that begins at column i, or in the fragments at byte i.
__device__ __forceinline__ void load_values(Values& values, const X* source, int i) {
  if constexpr (kFragments) {
    Vector<X, 4> parts[2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      load<true>(parts[part], source + column(i, part * 4));
#pragma unroll
      for (int v = 0; v < 4; ++v) values.values[part * 4 + v] = parts[part].values[v];
    }
  } else {
    load<true>(values, source + i);
  }
}

// Reduces a value over the lanes of a block of x; called by all threads of the CTA.
template <class T, class Op> __device__ __forceinline__ T reduce(T value, Op op, T* shared) {
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

// Returns `sum` plus the four int8 codes in a word.
__device__ __forceinline__ int32_t add_codes(uint32_t word, int32_t sum) {
#if __CUDA_ARCH__ >= 610
  return __dp4a(static_cast<int>(word), 0x01010101, sum);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(word >> (8 * i));
  return sum;
#endif
}

// Calls body(i, values) for each vector of 8 (or 1) elements of a lane; i is the column of the first element. The
// vectors come from registers (`kept`) if the block fits there, otherwise from memory.
template <class Body>
__device__ __forceinline__ void for_each(Values (&kept)[kKept], const X* source, int begin, int end, Body body) {
  if constexpr (kKept == kRounds) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (begin + round * kStride < end) body(begin + round * kStride, kept[round]);
    }
  } else {
    for (int i = begin; i < end; i += kStride) {
      load_values(kept[0], source, i);
      body(i, kept[0]);
    }
  }
}

// The number of threads per SM that can be resident with the registers per thread that the launch bound permits; with
// 1536, kernels for sm_100 and newer spill.
constexpr int kResidentThreads = __CUDA_ARCH__ >= 1000 ? 1024 : 1536;

extern "C" __global__ void __launch_bounds__(THREADS, kResidentThreads / THREADS)
    quantize_rows(const X* x, int8_t* __restrict__ codes, float* scale, float* offset, int32_t* sums, int m, int k,
                  int block_size, int ldx) {
  // Each reduction has its own array, so that no warp overwrites values that another warp still reads.
  __shared__ float shared_high[32];
  __shared__ float shared_low[32];
  __shared__ uint32_t shared_largest[32];
  __shared__ int32_t shared_sum[32];
  const int blocks = ceil_div(k, block_size);
  const int row = blockIdx.z * gridDim.y + blockIdx.y;
  const int index = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const bool is_valid = row < m && index < blocks;
  const int begin = index * block_size + threadIdx.x % kLanes * kValues;
  const int end = is_valid ? min(index * block_size + block_size, k) : 0;
  const X* source = x + static_cast<int64_t>(row) * ldx;

  if constexpr (DEPENDENT) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  Values kept[kKept];
  if constexpr (kKept == kRounds) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (begin + round * kStride < end) load_values(kept[round], source, begin + round * kStride);
    }
  }
  const float infinity = __uint_as_float(0x7f800000u);
  float high = -infinity;
  float low = infinity;
  uint32_t largest = 0;  // bits of max |x|; as integers they are ordered like the floats, infinity and NaN last
  for_each(kept, source, begin, end, [&](int i, const Values& values) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const float value = to_float(values.values[v]);
      largest = max(largest, __float_as_uint(fabsf(value)));
      if constexpr (!kSymmetric) {
        high = fmaxf(high, value);
        low = fminf(low, value);
      }
    }
  });
  largest = reduce(largest, [](uint32_t a, uint32_t b) { return max(a, b); }, shared_largest);
  float step;
  float origin = 0.0f;
  if constexpr (kSymmetric) {
    step = __fdiv_rn(__uint_as_float(largest), 127.0f);
  } else {
    high = reduce(high, [](float a, float b) { return fmaxf(a, b); }, shared_high);
    low = reduce(low, [](float a, float b) { return fminf(a, b); }, shared_low);
    step = __fdiv_rn(__fsub_rn(high, low), 255.0f);
    if (step == infinity) step = __fsub_rn(__fdiv_rn(high, 255.0f), __fdiv_rn(low, 255.0f));  // if high - low overflows
    const bool is_wide = step > 1e-5f;
    origin = is_wide ? __fsub_rn(high, __fmul_rn(127.0f, step)) : high;
    if (!is_wide) step = 1.0f;
  }
  const bool is_finite = largest < 0x7f800000u && step < infinity;
  const bool has_codes = is_finite && step > 0.0f;

  // x * (1 / scale) differs from the rounded quotient by less than 1e-4, so the code is the same unless the quotient is
  // almost half-way between two codes. Only in this case the slower division is used.
  const float reciprocal = __fdiv_rn(1.0f, step);
  const bool has_normal_step = has_codes && step > 1e-30f && step < 1e30f;
  int8_t* target = codes + static_cast<int64_t>(row) * k;
  int32_t total = 0;
  for_each(kept, source, begin, end, [&](int i, const Values& values) {
    bool is_exact = false;
    if constexpr (kValues == 8) {
      uint32_t bits[8];
      is_exact = has_normal_step;
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        float ratio = __fsub_rn(to_float(values.values[v]), origin) * reciprocal;
        if constexpr (!kSymmetric) ratio = fminf(fmaxf(ratio, -128.0f), 127.0f);
        // The low bits of `shifted` are the rounded ratio in two's complement.
        const float shifted = ratio + kMagic;
        bits[v] = __float_as_uint(shifted);
        is_exact &= fabsf(ratio - (shifted - kMagic)) < 0.4999f;
      }
      if (is_exact) {
        Vector<uint32_t, 2> words;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const uint32_t first = __byte_perm(bits[4 * w], bits[4 * w + 1], 0x0040);
          const uint32_t second = __byte_perm(bits[4 * w + 2], bits[4 * w + 3], 0x0040);
          words.values[w] = __byte_perm(first, second, 0x5410);
          total = add_codes(words.values[w], total);
        }
        if constexpr (kFragments) {
          words = {__byte_perm(words.values[0], words.values[1], 0x5140),
                   __byte_perm(words.values[0], words.values[1], 0x7362)};
        }
        *reinterpret_cast<Vector<uint32_t, 2>*>(target + i) = words;
      }
    }
    if (!is_exact) {
#pragma unroll 1
      for (int v = 0; v < kValues; ++v) {
        const float ratio = __fdiv_rn(__fsub_rn(to_float(source[column(i, v)]), origin), step);
        const float rounded = fminf(fmaxf(round_code(ratio), -128.0f), 127.0f);
        const int code = has_codes ? static_cast<int>(rounded) : 0;
        target[kFragments ? i + v % 4 * 2 + v / 4 : i + v] = static_cast<int8_t>(code);
        total += code;
      }
    }
  });
  total = reduce(total, [](int32_t a, int32_t b) { return a + b; }, shared_sum);
  if (is_valid && threadIdx.x % kLanes == 0) {
    const int64_t at = static_cast<int64_t>(row) * blocks + index;
    const float nan = __uint_as_float(0x7fffffffu);
    scale[at] = is_finite ? step : nan;
    if constexpr (!kSymmetric) offset[at] = is_finite ? origin : nan;
    sums[at] = total;
  }
}
