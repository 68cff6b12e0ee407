// SPDX-License-Identifier: Apache-2.0
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n])
// (q * s + o with offsets in place of zero points) on tensor cores, from AWQ's own layout of the weight.
//
//   x        X [m, k], row stride ldx values
//   qweight  uint32 [k, n / 8], row stride ldq words
//   scales   SCALE [groups, n], row stride lds values
//   zeros    uint32 [groups, n / 8], row stride ldz words; or SCALE [groups, n], row stride ldz values; or null
//   y        X [m, n] (gated: [m, n / 2]), row stride ldy values
//   partials, counters: see reduce.cuh; unused when the grid has one split
//
// group_size a multiple of 16 that divides k, n a multiple of 8 (gated: of 16). x starts at, and steps by, multiples of
// 16 bytes; ALIGNED: so do qweight, scales, offsets and y, and 16 bytes of qweight hold columns of one tile's half.
//
// The product is made transposed, y^T = W^T x^T: the weight is the first operand, which a warp takes from shared memory
// and dequantizes in registers ONCE for all rows of the tile; x is the second, by ldmatrix. Codes minus zero points are
// small integers, exact in 16 bits; the float32 sums over a group are multiplied by its scale. So nothing rounds but x
// (given) and the sums, whatever the range of the scales.
//
// A warp makes 32 columns. Lane 4g + t owns the adjacent columns 4g .. 4g + 3: bytes g % 2 and 2 + g % 2 of word g / 2.
// Of rows k = 2t, 2t + 1 (and 2t + 8, 2t + 9) of the weight one byte permutation takes that byte of both words, and a
// mask leaves two adjacent k of one column, as the operand wants them (layout: ptx/mma.cuh):
//   tile 0: row g -> column 4g, row g + 8 -> column 4g + 1;  tile 1: row g -> column 4g + 2, row g + 8 -> column 4g + 3
//
// Shared memory, a stage: x [BLOCK_M][64], where the 16-byte unit u of row r lies at u ^ (r % 8), so that neither the
// copies nor ldmatrix meet in a bank; the weight [warp][64] units of four words, where row k of a step of 16 lies at
// (k % 8) / 2 + 4 * (k % 2) + 8 * (k / 8), so that the four t of one load read adjacent units.
#pragma once

#include "common/epilogue.cuh"
#include "dequant/int4.cuh"
#include "ptx/ldmatrix.cuh"
#include "common/reduce.cuh"

// What an architecture's file provides:
//   struct Copy   start_16/start_4(shared_address, source, valid): bytes to shared memory, zeros if not valid;
//                 commit(): closes a stage; wait<PENDING>(): all but the last PENDING stages have landed
//   mma(c, a, b0, b1)   c += a * b for m16n8k16 in the layout of ptx/mma.cuh

constexpr bool kAligned = ALIGNED;
constexpr Zeros kZeros = Zeros::ZEROS;
constexpr int kBlockM = BLOCK_M;
constexpr int kWarps = WARPS;
constexpr int kStages = STAGES;
constexpr bool kGroupInTile = GROUP_IN_TILE;  // a group may end inside a tile of K, not only between two

constexpr int kThreads = kWarps * 32;
constexpr int kWarpN = 32;
constexpr int kBlockN = kWarps * kWarpN;
constexpr int kBlockK = 64;
constexpr int kStepK = 16;
constexpr int kTilesM = kBlockM / 8;  // of mma, along m
constexpr int kTilesN = 2;            // of mma, along n
constexpr int kXUnits = kBlockM * kBlockK / 8;
constexpr int kWeightUnits = kWarps * kBlockK;
constexpr int kXRowStep = kThreads / 8;
constexpr int kXCopies = kBlockM / kXRowStep;
constexpr int kStageBytes = (kXUnits + kWeightUnits) * 16;
constexpr int kSums = kTilesN * kTilesM * 4;

static_assert(kBlockM % 16 == 0, "ldmatrix takes 16 rows of x at a time");
static_assert(kBlockM % kXRowStep == 0, "the copies of x divide evenly");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");
static_assert(!kGated || kWarps % 2 == 0, "the gate takes half of the warps");

// A lane's four columns of one group: scales, and zero points in both forms that Codes wants.
struct Group {
  float scales[4];
  float offsets[4];
  uint32_t zeros[4];
};

// The raw values of the group to come, loaded while the present one is at work.
struct NextGroup {
  Vector<SCALE, 4> scales;
  Vector<SCALE, 4> offsets;
  uint32_t zeros;
};

template <class Copy, class Mma>
__device__ __forceinline__ void gemm_mma(const X* x, const uint32_t* qweight, const SCALE* scales, const void* zeros,
                                         const BIAS* bias, const X* residual, X* y, float* partials, uint32_t* counters,
                                         int m, int n, int k, int group_size, int ldx, int ldq, int lds, int ldz,
                                         int ldr, int ldy, float low, float high, Copy copy, Mma mma) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t shared_begin = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int m_begin = blockIdx.x * kBlockM;
  const int tiles = ceil_div(k, kBlockK);
  const int tile_begin = static_cast<int>(static_cast<int64_t>(tiles) * blockIdx.z / gridDim.z);
  const int tile_end = static_cast<int>(static_cast<int64_t>(tiles) * (blockIdx.z + 1) / gridDim.z);

  // A lane's columns of the weight; past n they are read as the last ones and not stored.
  const int column = weight_column<kBlockN>(blockIdx.y, warp * kWarpN + g * 4, n);
  const int column_read = min(column, n - 4);

  // What a thread copies in each stage: 16-byte unit x_unit of rows x_row, x_row + kXRowStep, ... of x, and unit w_unit
  // of rows w_row and w_row + 32 of the weight. Only the sources move from stage to stage.
  const int x_row = threadIdx.x / 8;
  const int x_unit = threadIdx.x % 8;
  const X* x_source = x + static_cast<int64_t>(m_begin + x_row) * ldx + tile_begin * kBlockK + x_unit * 8;
  const int64_t x_step = static_cast<int64_t>(kXRowStep) * ldx;
  const uint32_t x_target = (x_row * 8 + (x_unit ^ (x_row % 8))) * 16;
  const int w_row = threadIdx.x / kWarps;
  const int w_unit = threadIdx.x % kWarps;
  const int w_slot = w_row / 16 * 16 + w_row % 16 / 8 * 8 + w_row % 2 * 4 + w_row % 8 / 2;
  const uint32_t w_target = (kXUnits + w_unit * kBlockK + w_slot) * 16;
  const int w_first = weight_column<kBlockN>(blockIdx.y, w_unit * kWarpN, n);
  const bool w_whole = kAligned && w_first + 24 < n;
  const uint32_t* w_source = qweight + static_cast<int64_t>(tile_begin * kBlockK + w_row) * ldq;

  auto start_stage = [&](int tile, int stage) {
    const uint32_t begin = shared_begin + stage * kStageBytes;
    // Rows of K in this tile; less than kBlockK only at the end of K, which only such kernels can meet inside a tile.
    const int rows = kGroupInTile ? min(k - tile * kBlockK, kBlockK) : kBlockK;
#pragma unroll
    for (int i = 0; i < kXCopies; ++i) {
      const bool valid = m_begin + x_row + i * kXRowStep < m && x_unit * 8 < rows;
      copy.start_16(begin + x_target + i * kXRowStep * 128, valid ? x_source + i * x_step : x, valid);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool valid = w_row + i * 32 < rows;
      const uint32_t* source = valid ? w_source + i * 32 * static_cast<int64_t>(ldq) : qweight;
      const uint32_t target = begin + w_target + i * 32 * 16;
      if (w_whole) {
        copy.start_16(target, source + w_first / 8, valid);
      } else {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int word_column = weight_column<kBlockN>(blockIdx.y, w_unit * kWarpN + word * 8, n);
          copy.start_4(target + word * 4, source + min(word_column, n - 8) / 8, valid);
        }
      }
    }
    x_source += kBlockK;
    w_source += static_cast<int64_t>(kBlockK) * ldq;
  };

  NextGroup next;
  const int last_group = k / group_size - 1;
  auto fetch_group = [&](int index) {
    const int64_t row = min(index, last_group);
    load<kAligned>(next.scales, scales + row * lds + column_read);
    if constexpr (kZeros == Zeros::kOffset) {
      load<kAligned>(next.offsets, static_cast<const SCALE*>(zeros) + row * ldz + column_read);
      next.zeros = 0;
    } else if constexpr (kZeros == Zeros::kPacked) {
      next.zeros = static_cast<const uint32_t*>(zeros)[row * ldz + column_read / 8];
    } else {
      next.zeros = kSymmetricZeros;
    }
  };

  // Selectors for __byte_perm that put a byte of the first word at bit 0 and the same byte of the second at bit 16;
  // what lies between is masked away later. A lane's even columns are in byte 0 or 1 of its word, the odd ones in 2
  // or 3.
  const uint32_t even_bytes = 0x0400u + (column_read / 4 % 2) * 0x0101u;
  const uint32_t odd_bytes = even_bytes + 0x0202u;
  Group group;
  auto take_group = [&] {
    const uint32_t even = __byte_perm(next.zeros, next.zeros, even_bytes);
    const uint32_t odd = __byte_perm(next.zeros, next.zeros, odd_bytes);
    group.zeros[0] = Codes<X>::zero_low(even);
    group.zeros[1] = Codes<X>::zero_low(odd);
    group.zeros[2] = Codes<X>::zero_high(even);
    group.zeros[3] = Codes<X>::zero_high(odd);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      group.scales[c] = to_float(next.scales.values[c]);
      if constexpr (kZeros == Zeros::kOffset) group.offsets[c] = to_float(next.offsets.values[c]);
    }
  };

  // [tile along n][tile along m][value of the mma]
  float sums[kTilesN][kTilesM][4] = {};
  float parts[kTilesN][kTilesM][4] = {};
  float x_sums[kTilesM][4] = {};
  auto close_group = [&] {
#pragma unroll
    for (int j = 0; j < kTilesM; ++j) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
#pragma unroll
        for (int i = 0; i < kTilesN; ++i) {
          const int c = i * 2 + v / 2;
          sums[i][j][v] = fmaf(parts[i][j][v], group.scales[c], sums[i][j][v]);
          parts[i][j][v] = 0.0f;
          if constexpr (kZeros == Zeros::kOffset) {
            sums[i][j][v] = fmaf(x_sums[j][v], group.offsets[c], sums[i][j][v]);
          }
        }
        x_sums[j][v] = 0.0f;
      }
    }
  };

  int group_index = tile_begin * kBlockK / group_size;
  int group_end = (group_index + 1) * group_size;
  fetch_group(group_index);
  take_group();
  fetch_group(group_index + 1);
  auto change_group = [&] {
    close_group();
    take_group();
    ++group_index;
    group_end += group_size;
    fetch_group(group_index + 1);
  };

  auto matmul = [&](int stage, int step) {
    const uint32_t x_begin = shared_begin + stage * kStageBytes;
    const auto* words = reinterpret_cast<const uint32_t*>(shared + stage * kStageBytes + kXUnits * 16);
    uint32_t a[kTilesN][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int unit = warp * kBlockK + step * kStepK + half * 8 + t;
      const uint32_t word0 = words[unit * 4 + g / 2];
      const uint32_t word1 = words[(unit + 4) * 4 + g / 2];
      const uint32_t even = __byte_perm(word0, word1, even_bytes);
      const uint32_t odd = __byte_perm(word0, word1, odd_bytes);
      a[0][half * 2] = Codes<X>::low(even, group.zeros[0]);
      a[0][half * 2 + 1] = Codes<X>::low(odd, group.zeros[1]);
      a[1][half * 2] = Codes<X>::high(even, group.zeros[2]);
      a[1][half * 2 + 1] = Codes<X>::high(odd, group.zeros[3]);
    }
#pragma unroll
    for (int pair = 0; pair < kTilesM / 2; ++pair) {
      // Matrices 0, 1: rows 0 .. 7 of x, k below and above 8; matrices 2, 3: rows 8 .. 15.
      const int row = pair * 16 + lane / 16 * 8 + lane % 8;
      const int unit = step * 2 + lane / 8 % 2;
      uint32_t b[4];
      ptx::ldmatrix_x4(b, x_begin + (row * 8 + (unit ^ (row % 8))) * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < kTilesN; ++i) mma(parts[i][pair * 2 + j], a[i], b[j * 2], b[j * 2 + 1]);
        if constexpr (kZeros == Zeros::kOffset) {
          // The offset multiplies the sum of x, which a weight of ones gives in every row.
          constexpr uint32_t kOne = sizeof(X) == 2 && Codes<X>::kMagic == 0x64006400u ? 0x3c003c00u : 0x3f803f80u;
          const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
          mma(x_sums[pair * 2 + j], ones, b[j * 2], b[j * 2 + 1]);
        }
      }
    }
  };

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (tile_begin + stage < tile_end) start_stage(tile_begin + stage, stage);
    copy.commit();
  }
  int stage = 0;
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    copy.template wait<kStages - 2>();
    __syncthreads();
    // The stage that was read last is free now.
    const int tile_ahead = tile + kStages - 1;
    if (tile_ahead < tile_end) start_stage(tile_ahead, stage == 0 ? kStages - 1 : stage - 1);
    copy.commit();
    if (!kGroupInTile && tile * kBlockK >= group_end) change_group();
#pragma unroll
    for (int step = 0; step < kBlockK / kStepK; ++step) {
      if constexpr (kGroupInTile) {
        // Only then can k end inside a tile, too.
        if (tile * kBlockK + step * kStepK >= k) break;
        if (tile * kBlockK + step * kStepK >= group_end) change_group();
      }
      matmul(stage, step);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  close_group();

  const int tile = blockIdx.y * gridDim.x + blockIdx.x;
  auto& flat = reinterpret_cast<float (&)[kSums]>(sums);
  if (!reduce_split_k<kSums, kThreads>(flat, partials, counters, tile, blockIdx.z, gridDim.z)) return;

  const Epilogue<X> epilogue{bias, residual, low, high, n, ldr};
  float* exchange = reinterpret_cast<float*>(shared);
  if constexpr (kGated) {
    // The warps of the second half hold the up columns of those of the first.
    copy.template wait<0>();
    __syncthreads();
    if (warp >= kWarps / 2) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) exchange[i * (kThreads / 2) + threadIdx.x - kThreads / 2] = flat[i];
    }
    __syncthreads();
    if (warp >= kWarps / 2 || column >= n / 2) return;
  }
  if (column >= n) return;
#pragma unroll
  for (int j = 0; j < kTilesM; ++j) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int row = m_begin + j * 8 + t * 2 + odd;
      if (row >= m) continue;
      Vector<X, 4> out;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int v = c % 2 * 2 + odd;
        if constexpr (kGated) {
          const int index = (c / 2 * kTilesM + j) * 4 + v;
          const float up = exchange[index * (kThreads / 2) + threadIdx.x];
          out.values[c] = epilogue.finish_gated(sums[c / 2][j][v], up, row, column + c);
        } else {
          out.values[c] = epilogue.finish(sums[c / 2][j][v], row, column + c);
        }
      }
      store<kAligned>(y + static_cast<int64_t>(row) * ldy + column, out);
    }
  }
}
