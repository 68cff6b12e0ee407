// SPDX-License-Identifier: Apache-2.0
// The residual stream of a decoder at both ends of a product, so that its RMSNorm takes no kernel:
//
//   STREAM_ADDS, where one ends:     h[m, i] += y[m, i]
//                                    x[m, i] = h[m, i] * norm[i] * known[m] * kHeadroom
//                                    squares[m, i / 32] = sum of h^2 over 32 columns
//   STREAM_NORMS, where one begins:  inverse[m] = 1 / sqrt(mean of h[m, :]^2 + eps), from `squares`
//                                    y[m, :] = epilogue(sums of x[m, :] * inverse[m] / (known[m] * kHeadroom))
//
//   h               float32 [m, n], n being the width of the stream
//   norm            float32 [n]
//   squares         float32 [m, ceil(n / 32)]
//   known, inverse  float32 [m]: 1 / root mean square of the stream, as it was at the norm before, and as it is
//
// Nobody has all of a row before the product ends, so that x takes the range of the row before: with float16 and a norm
// of ones it overflows where an element is 4e6 times the root mean square at the norm before, and loses digits where
// that of all has fallen to a hundredth.
#pragma once

#include "ptx/prefetch.cuh"
#include "types.cuh"
#include "warp.cuh"

// A kernel's parameters, which a plain product lacks: null.
#if STREAM_ADDS || STREAM_NORMS
#define STREAM_PARAMETERS float *h, const float *norm, float *squares, const float *known, float *inverse,
#define STREAM_ARGUMENTS h, norm, squares, known, inverse
#else
#define STREAM_PARAMETERS
#define STREAM_ARGUMENTS nullptr, nullptr, nullptr, nullptr, nullptr
#endif

constexpr bool kAdds = STREAM_ADDS;
constexpr bool kNorms = STREAM_NORMS;
constexpr float kHeadroom = 0.015625f;
constexpr int kSquaresColumns = 32;

struct ResidualStream {
  float* h;
  const float* norm;
  float* squares;
  const float* known;
  float* inverse;
  float eps;

  // Eight columns of a row, before y is there.
  struct Part {
    Vector<float, 8> h, norm;
    float known;
  };
  __device__ __forceinline__ Part part(int row, int column, int n) const {
    Part out;
    load<true>(out.h, h + static_cast<int64_t>(row) * n + column);
    load<true>(out.norm, norm + column);
    out.known = known[row];
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
      y[i] = sum.values[i] * part.norm.values[i] * (part.known * kHeadroom);
    }
    store<true>(h + static_cast<int64_t>(row) * n + column, sum);
    return total;
  }

  // `total` is of a quarter of 32 columns, the others are in the lanes beside; all four lanes come here, `any` is
  // whether the first one lies in the stream.
  __device__ __forceinline__ void put_squares(float total, bool any, int row, int column, int n) const {
    const uint32_t quarters = 15u << (threadIdx.x % 32 / 4 * 4);
    total += __shfl_xor_sync(quarters, total, 1);
    total += __shfl_xor_sync(quarters, total, 2);
    if (any && threadIdx.x % 4 == 0) {
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
          factors[at] = now / (known[row + at] * kHeadroom);
          if (writes) inverse[row + at] = now;
        }
      }
    }
  }
};
