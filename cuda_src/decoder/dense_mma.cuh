// SPDX-License-Identifier: Apache-2.0
// A GEMM with a weight [n, k] of 16-bit values or of 8-bit codes, on tensor cores.
//
//   y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]
//
// Grid (CTAs that share columns, CTAs, groups): a CTA computes BLOCKS blocks of 16 rows of x. CTAs of a group with the
// same blockIdx.y read the same columns of w at the same time, so all but one of these CTAs find the columns in L2.
// With one block, CTAs do not share columns.
//
// A persistent CTA iterates over tiles of 8 * TILES columns. Each warp computes a slice of K, STEPS steps at a time, so
// that a CTA reads whole, adjacent rows of w; reading pieces of many rows would lose a third of the bandwidth. Operands
// are loaded from global memory straight to registers. The order of k within an mma is free if w and x agree. So lane 4
// g + t loads 16 adjacent bytes of row g of w: the Weight::kLaneK values from k = kLaneK * t on. Two pairs of them
// (four values) are the lane's fragment of operand B of one mma, in place of the values at k = 2t, 2t + 1, 2t + 8 and
// 2t + 9; operand A is loaded from x at the same k. Loads of w bypass L1, so that x stays there.
//
// PDL: the elements of w of the first pass are loaded before griddepcontrol.wait.
#pragma once

#include "decoder/dependent_launch.cuh"
#include "common/mma.cuh"
#include "ptx/ld.cuh"

constexpr int kTiles = TILES;
constexpr int kSteps = STEPS;
constexpr int kBlocks = BLOCKS;  // number of blocks of 16 rows of x per CTA, 1 to 3
constexpr int kWarps = THREADS / 32;
constexpr int kColumns = 8 * kTiles;

using Chunk = Vector<uint32_t, 4>;  // the 16 bytes of one load

// The class Weight defines kLaneK, the number of values per lane and step; Loaded, a lane's part of w; load(out,
// column, k_begin), which loads this part; and pairs(out, loaded, i), which converts values 4i .. 4i + 3 of `loaded` to
// two pairs of X.
template <class Weight> __device__ __forceinline__ void multiply_dense(const X* x, const Weight& weight,
                                                                       const float* bias, Y* y, int m, int n, int k) {
  constexpr int kStepK = 4 * Weight::kLaneK;
  constexpr int kWarpK = kStepK * kSteps;
  // Extent along k of a pass, in which each warp of the CTA computes kSteps steps.
  constexpr int kPassK = kWarps * kWarpK;
  __shared__ alignas(16) float partial_sums[kWarps][16 * kBlocks][kColumns];
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m_begin = (kBlocks == 1 ? blockIdx.z : blockIdx.z * gridDim.x + blockIdx.x) * 16 * kBlocks;
  if (kBlocks > 1 && m_begin >= m) return;
  const int passes = ceil_div(k, kPassK);
  // A lane loads rows g and g + 8 of each block of x. With several blocks, a lane past the last row loads the last row
  // again, so that CTAs which share w advance at the same speed.
  const X* const x_low = x + static_cast<int64_t>(m_begin + g) * k;
  const X* const x_high = x_low + static_cast<int64_t>(8) * k;
  const bool has_low = m_begin + g < m, has_high = m_begin + 8 + g < m;
  const X* const rows = x + static_cast<int64_t>(m_begin) * k;
  const int last_row = m - 1 - m_begin;
  auto chunk = [&](int row, int column) {
    return *reinterpret_cast<const Chunk*>(rows + static_cast<uint32_t>(min(row, last_row) * k + column));
  };

  typename Weight::Loaded b[kSteps][kTiles];
  auto fetch = [&](int tile, int pass) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int k_begin = pass * kPassK + warp * kWarpK + s * kStepK + t * Weight::kLaneK;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int column = tile * kColumns + j * 8 + g;
        b[s][j] = {};
        if (column >= n || k_begin >= k) continue;
        weight.load(b[s][j], column, k_begin);
      }
    }
  };
  int tile = blockIdx.y, pass = 0;
  fetch(tile, pass);
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  float acc[kBlocks][kTiles][4] = {};
  while (tile * kColumns < n) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int part = 0; part < Weight::kLaneK / 8; ++part) {
        const int k_begin = pass * kPassK + warp * kWarpK + s * kStepK + t * Weight::kLaneK + part * 8;
        Chunk low[kBlocks] = {}, high[kBlocks] = {};
        if constexpr (kBlocks == 1) {
          if (has_low && k_begin < k) low[0] = *reinterpret_cast<const Chunk*>(x_low + k_begin);
          if (has_high && k_begin < k) high[0] = *reinterpret_cast<const Chunk*>(x_high + k_begin);
        } else if (k_begin < k) {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            low[block] = chunk(block * 16 + g, k_begin);
            high[block] = chunk(block * 16 + g + 8, k_begin);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            uint32_t pairs[2];
            weight.pairs(pairs, b[s][j], part * 2 + i / 2);
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
              const uint32_t a[4] = {low[block].values[i], high[block].values[i], low[block].values[i + 1],
                                     high[block].values[i + 1]};
              mma<X>(acc[block][j], a, pairs[0], pairs[1]);
            }
          }
        }
      }
    }
    // Start the loads of the next pass or tile before the reduction of this tile.
    const int finished_tile = tile;
    const bool is_complete = ++pass == passes;
    if (is_complete) {
      pass = 0;
      tile += gridDim.y;
    }
    fetch(tile, pass);
    if (!is_complete) continue;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          partial_sums[warp][block * 16 + i / 2 * 8 + g][j * 8 + 2 * t + i % 2] = acc[block][j][i];
          acc[block][j][i] = 0.0f;
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * kBlocks * kColumns; i += THREADS) {
      const int row = m_begin + i / kColumns, column = finished_tile * kColumns + i % kColumns;
      if (row >= m || column >= n) continue;
      float value = 0.0f;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) value += partial_sums[other][i / kColumns][i % kColumns];
      if (HAS_BIAS) value += bias[column];
      y[static_cast<int64_t>(row) * n + column] = from_float<Y>(value);
    }
    __syncthreads();
  }
}
