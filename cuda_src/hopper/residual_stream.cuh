// SPDX-License-Identifier: Apache-2.0
// The residual stream of a decoder at both ends of a product, so that its RMSNorm takes no kernel:
//
//   STREAM_ADDS, where one ends:     h[m, i] += result[m, i], and of that sum
//                                    squares[m, i / 32] = sum of h^2 over 32 columns
//                                    y[m, i] = h[m, i] * norm[i] * before[m] * kHeadroom, the x of the next product
//   STREAM_NORMS, where one begins:  inverse[m] = 1 / sqrt(mean of h[m, :]^2 + eps), from `squares`
//                                    y[m, :] = epilogue(sums of x[m, :] * inverse[m] / (before[m] * kHeadroom))
//
// with the width of the stream, which is the n of what adds and the k of what norms:
//
//   h        float32 [m, width]; null for NORMS
//   norm     float32 [width]; null for NORMS
//   squares  float32 [m, ceil(width / 32)]
//   before   float32 [m]: what `inverse` was at the norm before
//   inverse  float32 [m]; null for ADDS
//
// Nobody has all of a row before the product ends, so that x takes the range of the row before. With a norm of ones,
// float16 x overflows where an element is 4e6 times the root mean square of its row at the norm before, and has fewer
// digits where that of the row itself has fallen to less than a 300th; a smaller norm moves both.
#pragma once

#include "ptx/prefetch.cuh"
#include "common/types.cuh"
#include "common/warp.cuh"

// A kernel's parameters, which a plain product lacks: null.
#if STREAM_ADDS || STREAM_NORMS
#define STREAM_PARAMETERS float *h, const float *norm, float *squares, const float *before, float *inverse,
#define STREAM_ARGUMENTS h, norm, squares, before, inverse
#else
#define STREAM_PARAMETERS
#define STREAM_ARGUMENTS nullptr, nullptr, nullptr, nullptr, nullptr
#endif

constexpr bool kAdds = STREAM_ADDS;
constexpr bool kNorms = STREAM_NORMS;
constexpr float kHeadroom = 0.015625f;  // of float16's range, above; a power of two, which rounds nothing
constexpr int kSquaresColumns = 4 * 8;  // those of four lanes

struct ResidualStream {
  float* h;
  const float* norm;
  float* squares;
  const float* before;
  float* inverse;
  float eps;

  // Eight columns of a row, before y is there.
  struct Part {
    Vector<float, 8> h, norm;
    float before;
  };
  __device__ __forceinline__ Part part(int row, int column, int n) const {
    Part out;
    load<true>(out.h, h + static_cast<int64_t>(row) * n + column);
    load<true>(out.norm, norm + column);
    out.before = before[row];
    return out;
  }

  __device__ __forceinline__ void prefetch(int row, int column, int n) const {
    ptx::prefetch_global_l2(h + static_cast<int64_t>(row) * n + column);
    ptx::prefetch_global_l2(norm + column);
  }

  // y becomes x; the sum of h^2.
  __device__ __forceinline__ float add(float (&y)[8], const Part& part, int row, int column, int n) const {
    Vector<float, 8> sum;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum.values[i] = part.h.values[i] + y[i];
      total = fmaf(sum.values[i], sum.values[i], total);
      y[i] = sum.values[i] * part.norm.values[i] * (part.before * kHeadroom);
    }
    store<true>(h + static_cast<int64_t>(row) * n + column, sum);
    return total;
  }

  // `total` is of eight columns, those beside are in the lanes beside: all four of kSquaresColumns come here, and
  // `valid` is whether this lane's lie in the stream.
  __device__ __forceinline__ void put_squares(float total, bool valid, int row, int column, int n) const {
    const uint32_t four = 15u << (threadIdx.x % 32 / 4 * 4);
    total += __shfl_xor_sync(four, total, 1);
    total += __shfl_xor_sync(four, total, 2);
    if (valid && threadIdx.x % 4 == 0) {
      squares[static_cast<int64_t>(row) * ceil_div(n, kSquaresColumns) + column / kSquaresColumns] = total;
    }
  }

  // What the sums of ROWS rows from `row` on are multiplied by, to `factors`, and, from one block of the grid,
  // `inverse`. k is the width of the stream. By WARPS warps, each of which has all that it reads under way at once: one
  // row after the other took 0.8 microseconds each on an H100.
  template <int ROWS, int WARPS>
  __device__ __forceinline__ void make_factors(float* factors, int warp, int row, int m, int k, bool writes) const {
    constexpr int kAtOnce = ceil_div(ROWS, WARPS) < 8 ? ceil_div(ROWS, WARPS) : 8;
    constexpr int kLoads = 4;
    const int lane = threadIdx.x % 32;
    const int count = ceil_div(k, kSquaresColumns);
    const int rows = min(ROWS, m - row);
    for (int first = warp; first < rows; first += kAtOnce * WARPS) {
      float totals[kAtOnce] = {};
      for (int begin = lane; begin < count; begin += 32 * kLoads) {
        float values[kAtOnce][kLoads];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
          for (int i = 0; i < kLoads; ++i) {
            const int at = first + r * WARPS;
            const bool valid = at < rows && begin + i * 32 < count;
            values[r][i] = valid ? squares[static_cast<int64_t>(row + at) * count + begin + i * 32] : 0.0f;
          }
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
          for (int i = 0; i < kLoads; ++i) totals[r] += values[r][i];
        }
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int at = first + r * WARPS;
        if (at >= rows) break;
        const float now = 1.0f / sqrtf(warp_sum(totals[r]) / static_cast<float>(k) + eps);
        if (lane == 0) {
          factors[at] = now / (before[row + at] * kHeadroom);
          if (writes) inverse[row + at] = now;
        }
      }
    }
  }
};
