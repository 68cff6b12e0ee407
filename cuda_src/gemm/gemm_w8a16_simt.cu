// SPDX-License-Identifier: Apache-2.0
// GEMM with 8-bit codes on CUDA cores, in float32; the fallback where gemm_mma_fragments cannot run:
//
//   y[m, n] = epilogue(sum over k of x[m, k] * ((codes[n, k] - 128) * scales[n, g] + offsets[n, g]))
//   with g = k / group_size
//
//   x         X [m, k], row stride ldx values
//   codes     uint8 [n, k]
//   scales    X [n, ceil(k / group_size)]
//   offsets   X [n, ceil(k / group_size)] (ZEROS = kOffset), or null
//   bias      BIAS [n] or null
//   residual  X like y, row stride ldr values, or null
//   y         X [m, n] (gated: [m, n / 2]), row stride ldy values
//
// ALIGNED = 1: k and group_size are multiples of the values in 16 bytes of X, and rows of x start at multiples of 16
// bytes. Any other limits: none; any architecture.
//
// A warp computes kRows rows of one column of y, its lanes along k. Grid: the row blocks of the first kWarps columns,
// then those of the next ones. The order of additions does not depend on m.
#include "common/epilogue.cuh"
#include "common/warp.cuh"
#include "dequantize/int4.cuh"

using Options = EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>;
constexpr bool kHasOffsets = Zeros::ZEROS == Zeros::kOffset;
constexpr int kWarps = THREADS / 32;
constexpr int kRows = ROWS;
constexpr int kHalves = Options::kGated + 1;          // number of columns of the weight per column of y
constexpr int kWidth = ALIGNED ? 16 / sizeof(X) : 1;  // number of values per load of a lane

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_w8a16_simt(const X* x, const uint8_t* codes, const X* scales, const X* offsets, const BIAS* bias,
                    const X* residual, X* y, int m, int n, int k, int group_size, int ldx, int ldr, int ldy, float low,
                    float high) {
  const int row_blocks = ceil_div(m, kRows);
  const int row_begin = blockIdx.x % row_blocks * kRows;
  const int column = blockIdx.x / row_blocks * kWarps + threadIdx.x / 32;
  if (column >= n / kHalves) return;
  const int groups = ceil_div(k, group_size);
  float sums[kHalves][kRows] = {};
  for (int begin = threadIdx.x % 32 * kWidth; begin < k; begin += 32 * kWidth) {
    Vector<X, kWidth> values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      load<true>(values[r], x + static_cast<int64_t>(min(row_begin + r, m - 1)) * ldx + begin);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int64_t weight_row = column + half * (n / 2);
      Vector<uint8_t, kWidth> bytes;
      load<true>(bytes, codes + weight_row * k + begin);
      const int64_t group = weight_row * groups + begin / group_size;
      const float scale = to_float(scales[group]);
      const float offset = kHasOffsets ? to_float(offsets[group]) : 0.0f;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float weight = fmaf(static_cast<float>(bytes.values[i]) - 128.0f, scale, offset);
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[half][r] = fmaf(to_float(values[r].values[i]), weight, sums[half][r]);
      }
    }
  }
  const Epilogue<X, Options> epilogue{bias, residual, low, high, n, ldr};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = row_begin + r;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) sums[half][r] = warp_sum(sums[half][r]);
    if (threadIdx.x % 32 != 0 || row >= m) continue;
    X* const target = y + static_cast<int64_t>(row) * ldy + column;
    if constexpr (Options::kGated) {
      *target = epilogue.finish_gated(sums[0][r], sums[1][r], row, column);
    } else {
      *target = epilogue.finish(sums[0][r], row, column);
    }
  }
}
