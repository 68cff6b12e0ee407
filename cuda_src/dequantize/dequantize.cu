// SPDX-License-Identifier: Apache-2.0
// Dequantization of a weight in the AWQ layout, with one rounding to the type of out:
//
//   out[k, n] = (q[k, n] - z[k / group_size, n]) * s[k / group_size, n]
//   or, with ZEROS = kOffset, q[k, n] * s[k / group_size, n] + o[k / group_size, n]
//
//   qweight  uint32 [k, n / 8] in AWQ order (int4.cuh), row stride ldq words
//   scales   SCALE [groups, n], row stride lds values
//   zeros    kPacked: uint32 [groups, n / 8], row stride ldz words; kOffset: SCALE [groups, n], row stride ldz values;
//            kSymmetric: null
//   out      OUT [k, n], row stride ldo values
//
// Limits: n % 8 == 0. Any k, any group_size, any architecture. ALIGNED: rows of scales, offsets and out start at
// multiples of 16 bytes. PTX_PATH: pairs of 16-bit values are converted and multiplied together (SCALE and OUT are the
// same type; bfloat16 needs sm_80); otherwise each value is converted in float32, with the same result.
//
// A thread converts one word (8 columns) of each of ROWS rows. It issues all loads before the first conversion and
// reads the parameters of a group once; a warp writes 512 adjacent bytes per row. Consecutive CTAs are adjacent along a
// row, so that DRAM is written in long contiguous ranges, which is 6% faster on an H100 than CTAs adjacent along k.
#include "gemm/group.cuh"

constexpr bool kAligned = ALIGNED;
constexpr bool kPtxPath = PTX_PATH;
constexpr int kRows = ROWS;
constexpr Zeros kZeros = Zeros::ZEROS;

using Row = Vector<OUT, 8>;

struct Group : WordGroup<SCALE, kZeros, kAligned> {
  __device__ __forceinline__ Row dequantize(uint32_t word) const {
    Row row;
    if constexpr (kPtxPath) {
      const auto* scale_pairs = reinterpret_cast<const uint32_t*>(&scales);
      const auto* offset_pairs = reinterpret_cast<const uint32_t*>(&offsets);
      auto* pairs = reinterpret_cast<uint32_t*>(&row);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int shift = (i >> 1) * 8;
        const uint32_t codes = i & 1 ? Codes<SCALE>::high(word >> shift, Codes<SCALE>::zero_high(zeros >> shift))
                                     : Codes<SCALE>::low(word >> shift, Codes<SCALE>::zero_low(zeros >> shift));
        pairs[i] = kZeros == Zeros::kOffset ? Codes<SCALE>::multiply_add(codes, scale_pairs[i], offset_pairs[i])
                                            : Codes<SCALE>::multiply(codes, scale_pairs[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float scale = to_float(scales.values[i]);
        const float difference = static_cast<float>(static_cast<int32_t>(code(word, i) - code(zeros, i)));
        // The product of a 4-bit integer and a 16-bit float is exact in float32, so only the conversion to OUT rounds.
        // The sum with an offset may need more bits than float32 has, so round_sum avoids a second rounding.
        if constexpr (kZeros == Zeros::kOffset) {
          row.values[i] = round_sum<OUT>(difference * scale, to_float(offsets.values[i]));
        } else {
          row.values[i] = from_float<OUT>(difference * scale);
        }
      }
    }
    return row;
  }

  // Returns a + b, rounded once to T. The float32 sum is rounded to odd, so that the second rounding, to T, gives the
  // correctly rounded result.
  template <class T> static __device__ __forceinline__ T round_sum(float a, float b) {
    const float sum = a + b;
    if constexpr (sizeof(T) == 4) return from_float<T>(sum);
    const float b_part = sum - a;
    const float error = (a - (sum - b_part)) + (b - b_part);
    const uint32_t bits = __float_as_uint(sum);
    // False for an infinite sum, whose `error` is NaN: infinity is not rounded again.
    const bool inexact = error > 0.0f || error < 0.0f;
    if (!inexact || bits & 1u) return from_float<T>(sum);
    // If the rounded sum is inexact and even, take its odd neighbour in the direction of the exact sum.
    const bool away = (error > 0.0f) == (sum > 0.0f);
    return from_float<T>(__uint_as_float(away ? bits + 1u : bits - 1u));
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize(const uint32_t* qweight, const SCALE* scales, const void* zeros, OUT* out, int k, int n, int group_size,
               int ldq, int lds, int ldz, int ldo) {
  const int ctas_per_row = ceil_div(n / 8, THREADS);
  const int column = blockIdx.x % ctas_per_row * THREADS + threadIdx.x;
  const int k_begin = blockIdx.x / ctas_per_row * kRows;
  if (column >= n / 8) return;

  uint32_t words[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    words[i] = k_begin + i < k ? qweight[static_cast<int64_t>(k_begin + i) * ldq + column] : 0;
  }

  int group = k_begin / group_size;
  int group_end = group * group_size;
  --group;
  Group parameters;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = k_begin + i;
    if (row >= k) return;
    if (i == 0 || row == group_end) {
      ++group;
      group_end += group_size;
      parameters.fetch(scales, zeros, group, lds, ldz, column * 8);
    }
    store<kAligned>(out + static_cast<int64_t>(row) * ldo + column * 8, parameters.dequantize(words[i]));
  }
}
