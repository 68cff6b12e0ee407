// SPDX-License-Identifier: Apache-2.0
//   y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]
//
//   x     X [m, k]
//   w     X [n, k]: as linear modules that are not quantized, and embeddings, are stored
//   bias  float32 [n] (HAS_BIAS), or null
//   y     Y [m, n]
//
// k a multiple of 32; sm_80 and newer. grid (tiles of columns, tiles of 16 rows): for up to 16 rows w is read once.
//
// A warp makes 16 rows of 8 * TILES columns with operands straight from global memory. A sum over k may be taken in any
// order, so lane t of a row loads 16 adjacent bytes, k 8t .. 8t + 7 of 32, and its four pairs serve as the pairs that
// two instructions want at 2t and 2t + 8; x is loaded in the same order.
#include "llm/begin.cuh"
#include "llm/mma.cuh"

constexpr int kTiles = TILES;
constexpr int kUnroll = 4;

using Pairs = Vector<uint32_t, 4>;

extern "C" __global__ void __launch_bounds__(THREADS)
    dense_sm80(const X* x, const X* w, const float* bias, Y* y, int m, int n, int k) {
  begin();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n_begin = (blockIdx.x * (THREADS / 32) + threadIdx.x / 32) * 8 * kTiles;
  if (n_begin >= n) return;
  const int m_begin = blockIdx.y * 16;
  auto pairs = [&](const X* matrix, int row, int rows, int at) {
    Pairs values = {};
    if (row < rows && at < k) {
      values = *reinterpret_cast<const Pairs*>(matrix + static_cast<int64_t>(row) * k + at);
    }
    return values;
  };
  float sums[kTiles][4] = {};
  for (int begin_k = 0; begin_k < k; begin_k += 32 * kUnroll) {
    Pairs b[kUnroll][kTiles], low[kUnroll], high[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = begin_k + u * 32 + t * 8;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) b[u][j] = pairs(w, n_begin + j * 8 + g, n, at);
      low[u] = pairs(x, m_begin + g, m, at);
      high[u] = pairs(x, m_begin + 8 + g, m, at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t a[4] = {low[u].values[i], high[u].values[i], low[u].values[i + 1], high[u].values[i + 1]};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) mma<X>(sums[j], a, b[u][j].values[i], b[u][j].values[i + 1]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = m_begin + i / 2 * 8 + g, column = n_begin + j * 8 + 2 * t + i % 2;
      if (row >= m || column >= n) continue;
      float value = sums[j][i];
      if (HAS_BIAS) value += bias[column];
      y[static_cast<int64_t>(row) * n + column] = from_float<Y>(value);
    }
  }
}
