// SPDX-License-Identifier: Apache-2.0
//   y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]
//
//   x     X [m, k]
//   w     X [n, k]: as linear modules that are not quantized, and embeddings, are stored
//   bias  float32 [n] (HAS_BIAS), or null
//   y     Y [m, n]
//
// k a multiple of 32; sm_80 and newer. grid (blocks, tiles of 16 rows): for up to 16 rows w is read once.
//
// A block walks over tiles of 8 * TILES columns; its warps share K, each with STEPS steps of 32 k at a time. So a block
// reads whole rows of w that follow each other: rows read in parts by many warps cost a third of the memory's
// bandwidth. Operands come straight from global memory. A sum over k may be taken in any order, so lane t of a row
// loads 16 adjacent bytes, k 8t .. 8t + 7 of 32, and its four pairs serve as the pairs that two instructions want at 2t
// and 2t + 8; x is loaded in the same order. w does not push x out of L1.
//
// Programmatic dependent launch: the first of w is read before griddepcontrol.wait.
#include "llm/begin.cuh"
#include "common/mma.cuh"
#include "ptx/ld.cuh"

constexpr int kTiles = TILES;
constexpr int kSteps = STEPS;
constexpr int kWarps = THREADS / 32;
constexpr int kColumns = 8 * kTiles;
constexpr int kWarpK = 32 * kSteps;
constexpr int kPassK = kWarps * kWarpK;

using Pairs = Vector<uint32_t, 4>;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dense_sm80(const X* x, const X* w, const float* bias, Y* y, int m, int n, int k) {
  __shared__ alignas(16) float parts[kWarps][16][kColumns];
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m_begin = blockIdx.y * 16;
  const int passes = ceil_div(k, kPassK);
  // Of the two rows of x that a lane has.
  const X* const x_low = x + static_cast<int64_t>(m_begin + g) * k;
  const X* const x_high = x_low + static_cast<int64_t>(8) * k;
  const bool has_low = m_begin + g < m, has_high = m_begin + 8 + g < m;

  Pairs b[kSteps][kTiles];
  auto fetch = [&](int tile, int pass) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = pass * kPassK + warp * kWarpK + s * 32 + t * 8;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int column = tile * kColumns + j * 8 + g;
        b[s][j] = {};
        if (column < n && at < k) ptx::ld_global_no_allocate(b[s][j].values, w + static_cast<int64_t>(column) * k + at);
      }
    }
  };
  int tile = blockIdx.x, pass = 0;
  fetch(tile, pass);
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  float sums[kTiles][4] = {};
  while (tile * kColumns < n) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = pass * kPassK + warp * kWarpK + s * 32 + t * 8;
      Pairs low = {}, high = {};
      if (has_low && at < k) low = *reinterpret_cast<const Pairs*>(x_low + at);
      if (has_high && at < k) high = *reinterpret_cast<const Pairs*>(x_high + at);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t a[4] = {low.values[i], high.values[i], low.values[i + 1], high.values[i + 1]};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) mma<X>(sums[j], a, b[s][j].values[i], b[s][j].values[i + 1]);
      }
    }
    // The next part is under way while the warps add up what they have.
    const int done = tile;
    const bool whole = ++pass == passes;
    if (whole) {
      pass = 0;
      tile += gridDim.x;
    }
    fetch(tile, pass);
    if (!whole) continue;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        parts[warp][i / 2 * 8 + g][j * 8 + 2 * t + i % 2] = sums[j][i];
        sums[j][i] = 0.0f;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * kColumns; i += THREADS) {
      const int row = m_begin + i / kColumns, column = done * kColumns + i % kColumns;
      if (row >= m || column >= n) continue;
      float value = 0.0f;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) value += parts[other][i / kColumns][i % kColumns];
      if (HAS_BIAS) value += bias[column];
      y[static_cast<int64_t>(row) * n + column] = from_float<Y>(value);
    }
    __syncthreads();
  }
}
