// SPDX-License-Identifier: Apache-2.0
// The residual add and the RMSNorm of a decoder layer, fused into the GEMMs before and after them. acc are the
// accumulators of a GEMM; width is the number of columns of the residual stream h: N with ADD_TO_STREAM, K with
// RMS_NORM_X.
//
//   ADD_TO_STREAM, the GEMM that ends an attention or MLP block:
//     h[m, i] += epilogue(acc[m, i])
//     square_sums[m, i / 32] = sum of h[m, i]^2 over 32 adjacent columns
//     y[m, i] = h[m, i] * norm_weight[i] * previous_inverse_rms[m] * kHeadroom         the x of the next GEMM
//     ORDER_OUT: y[m, positions[i]] in place of y[m, i], for a next GEMM that takes its x in an activation order
//
//   RMS_NORM_X, the GEMM that begins the next block:
//     inverse_rms[m] = 1 / sqrt(sum of square_sums[m, :] / width + eps)
//     y[m, :] = epilogue(acc[m, :] * inverse_rms[m] / (previous_inverse_rms[m] * kHeadroom))
//
//   h                     float32 [m, width]; null with RMS_NORM_X
//   norm_weight           float32 [width]; null with RMS_NORM_X
//   square_sums           float32 [m, ceil(width / 32)]
//   previous_inverse_rms  float32 [m]: the inverse_rms of the preceding RMSNorm
//   inverse_rms           float32 [m]; null with ADD_TO_STREAM
//   positions             int32 [width], with ORDER_OUT only: the inverse of the permutation order of the next GEMM,
//                         positions[order[i]] = i
//   next_weight           with ADD_TO_STREAM only: a weight of which a part is prefetched (next_weight.cuh), or null
//
// The RMS of a row is known only after all CTAs of the first GEMM have finished. So the first GEMM scales y by the
// inverse RMS of the preceding RMSNorm, and the second GEMM replaces this factor by the current inverse RMS. With
// norm_weight = 1, float16 y overflows where an element exceeds 4e6 times the previous RMS of its row, and becomes
// subnormal where the RMS of a row falls below 1/300 of the previous one. Both limits scale with 1 / norm_weight.
#pragma once

#include "ptx/prefetch.cuh"
#include "common/types.cuh"
#include "common/warp.cuh"

constexpr float kHeadroom = 0.015625f;    // 2^-6: y stays in float16's range if the RMS of a row grows up to 64x
constexpr int kSquareSumColumns = 4 * 8;  // columns per square sum: four lanes, eight columns each

// What a kernel fuses, as FusionOptions<ADD_TO_STREAM, RMS_NORM_X, ORDER_OUT> with the constants that the host defines.
template <bool kAdds, bool kNorms, bool kOrders> struct FusionOptions {
  static constexpr bool kAddsToStream = kAdds, kRmsNormsX = kNorms, kOrdersY = kOrders;
};

template <bool kOrdersY> struct ResidualStream {
  float* h;
  const float* norm_weight;
  float* square_sums;
  const float* previous_inverse_rms;
  float* inverse_rms;
  const int32_t* positions;
  float eps;

  // What the residual add reads for eight columns of a row, loaded before the accumulators are ready.
  struct Part {
    Vector<float, 8> h, norm_weight;
    float previous_inverse_rms;
    Vector<int32_t, 8> positions;
  };
  __device__ __forceinline__ Part part(int row, int column, int n) const {
    Part out;
    load<true>(out.h, h + static_cast<int64_t>(row) * n + column);
    load<true>(out.norm_weight, norm_weight + column);
    out.previous_inverse_rms = previous_inverse_rms[row];
    if constexpr (kOrdersY) load<true>(out.positions, positions + column);
    return out;
  }

  __device__ __forceinline__ void prefetch(int row, int column, int n) const {
    ptx::prefetch_global_l2(h + static_cast<int64_t>(row) * n + column);
    ptx::prefetch_global_l2(norm_weight + column);
  }

  // Adds y to h, replaces y by the next GEMM's x, and returns the sum of h^2 over the eight columns.
  __device__ __forceinline__ float add(float (&y)[8], const Part& part, int row, int column, int n) const {
    Vector<float, 8> sum;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum.values[i] = part.h.values[i] + y[i];
      total = fmaf(sum.values[i], sum.values[i], total);
      y[i] = sum.values[i] * part.norm_weight.values[i] * (part.previous_inverse_rms * kHeadroom);
    }
    store<true>(h + static_cast<int64_t>(row) * n + column, sum);
    return total;
  }

  // Stores one element of square_sums: the sum of `total` over four adjacent lanes, which call this function together.
  // `total` is the lane's sum over eight columns; `valid` is false if these columns lie past the end of the row.
  __device__ __forceinline__ void store_square_sum(float total, bool valid, int row, int column, int n) const {
    const uint32_t four = 15u << (threadIdx.x % 32 / 4 * 4);
    total += __shfl_xor_sync(four, total, 1);
    total += __shfl_xor_sync(four, total, 2);
    if (valid && threadIdx.x % 4 == 0) {
      square_sums[static_cast<int64_t>(row) * ceil_div(n, kSquareSumColumns) + column / kSquareSumColumns] = total;
    }
  }

  // Stores the factors of RMS_NORM_X for rows [row, row + ROWS) to `factors` in shared memory, with WARPS warps; if
  // `writes`, also stores inverse_rms. k is the width of the stream. A warp issues the loads of up to eight rows before
  // it reduces any of these rows: with one row at a time, each row takes 0.8 us on an H100.
  template <int ROWS, int WARPS>
  __device__ __forceinline__ void make_factors(float* factors, int warp, int row, int m, int k, bool writes) const {
    constexpr int kRowsAtOnce = ceil_div(ROWS, WARPS) < 8 ? ceil_div(ROWS, WARPS) : 8;
    constexpr int kLoads = 4;
    const int lane = threadIdx.x % 32;
    const int count = ceil_div(k, kSquareSumColumns);
    const int rows = min(ROWS, m - row);
    for (int first = warp; first < rows; first += kRowsAtOnce * WARPS) {
      float totals[kRowsAtOnce] = {};
      for (int begin = lane; begin < count; begin += 32 * kLoads) {
        float values[kRowsAtOnce][kLoads];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
          for (int i = 0; i < kLoads; ++i) {
            const int at = first + r * WARPS;
            const bool valid = at < rows && begin + i * 32 < count;
            values[r][i] = valid ? square_sums[static_cast<int64_t>(row + at) * count + begin + i * 32] : 0.0f;
          }
        }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
          for (int i = 0; i < kLoads; ++i) totals[r] += values[r][i];
        }
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int at = first + r * WARPS;
        if (at >= rows) break;
        const float now = 1.0f / sqrtf(warp_sum(totals[r]) / static_cast<float>(k) + eps);
        if (lane == 0) {
          factors[at] = now / (previous_inverse_rms[row + at] * kHeadroom);
          if (writes) inverse_rms[row + at] = now;
        }
      }
    }
  }
};
