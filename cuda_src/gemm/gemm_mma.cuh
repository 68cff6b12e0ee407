// SPDX-License-Identifier: Apache-2.0
// GEMM on tensor cores (mma.sync) for a weight in the AWQ layout; the code shared by gemm_sm75.cu and gemm_sm80.cu:
//
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n])
//   or, with ZEROS = kOffset,                   (q[k, n] * s[k / group_size, n] + o[k / group_size, n])
//
//   x         X [m, k], row stride ldx values
//   qweight   uint32 [k, n / 8] in AWQ order (dequantize/int4.cuh), row stride ldq words
//   scales    SCALE [groups, n], row stride lds values
//   zeros     kPacked: uint32 [groups, n / 8], row stride ldz words; kOffset: SCALE [groups, n], row stride ldz values;
//             kSymmetric: null
//   bias      BIAS [n] or null
//   residual  X like y, row stride ldr values, or null
//   y         X [m, n] (gated: [m, n / 2]), row stride ldy values
//   partials, counters    the split-K workspace (common/reduce.cuh), unused with one split
//
// Limits: group_size is a multiple of 16 and divides k; n % 8 == 0 (gated: n % 16 == 0); rows of x start at multiples
// of 16 bytes. ALIGNED: rows of qweight, scales, offsets and y also start at multiples of 16 bytes, and no 16-byte
// chunk of qweight holds both gate and up columns.
//
// Grid: (tiles of BLOCK_M rows, tiles of WARPS * 32 columns, split_k). The kernel computes y^T = W^T x^T: the weight is
// operand A, which a warp loads from shared memory and dequantizes in registers once for all rows of the tile; x is
// operand B, loaded by ldmatrix. Operand A is q - z, a small integer that 16 bits represent exactly, and the float32
// accumulators of a group are multiplied by the group's scale. So only the accumulation rounds, for any scales.
//
// A warp computes 32 columns. Lane 4 g + t has columns 4 g .. 4 g + 3: bytes g % 2 and 2 + g % 2 of word g / 2. From
// the words of rows k = 2 t and 2 t + 1 (and 2 t + 8 and 2 t + 9), __byte_perm takes the same byte, and a mask leaves
// two adjacent k of one column, which are a register of the fragment of A (ptx/mma.cuh):
//   mma tile 0: rows (g, g + 8) -> columns (4 g, 4 g + 1);   mma tile 1: -> columns (4 g + 2, 4 g + 3)
//
// The shared memory of a pipeline stage holds:
//   x        [BLOCK_M][64] 16-bit values, swizzled (hopper/swizzle.cuh): the 16-byte chunk c of row r is stored as
//            chunk c ^ (r % 8), so that neither the copies nor ldmatrix have bank conflicts
//   weight   [warp][64] chunks of four words; within a step of 16 rows, row k is stored as chunk
//            k % 8 / 2 + 4 * (k % 2) + 8 * (k / 8), so that the lanes t of one load read adjacent chunks
#pragma once

#include "common/epilogue.cuh"
#include "common/mma.cuh"
#include "dequantize/int4.cuh"
#include "hopper/swizzle.cuh"
#include "ptx/ldmatrix.cuh"
#include "common/reduce.cuh"

// The kernel of each architecture passes a function object to gemm_mma:
//   copy   CopyDirect or CopyAsync of common/copy_to_shared.cuh: start_16 and start_4 start a copy, commit() ends the
//          group of a stage, and wait<PENDING>() waits until all but the last PENDING groups have landed

// The constants of the host (gemm_mma_config.cuh), and those that follow from them.
template <class Host> struct GemmMma : Host {
  using typename Host::Scale;
  static constexpr bool kSharedSums =
      Host::kBlockM > 32;  // whether the sums of slices of K lie in shared memory, behind the stages, to save registers

  static constexpr int kThreads = Host::kWarps * 32;
  static constexpr int kWarpN = 32;
  static constexpr int kBlockN = Host::kWarps * kWarpN;
  static constexpr int kBlockK = 64, kStepK = 16;
  static constexpr int kTilesM = Host::kBlockM / 8;  // number of mma tiles per warp along m
  static constexpr int kTilesN = 2;                  // number of mma tiles per warp along n
  static constexpr int kXChunks = Host::kBlockM * kBlockK / 8;
  static constexpr int kWeightChunks = Host::kWarps * kBlockK;
  static constexpr int kXRowStep = kThreads / 8;
  static constexpr int kXCopies = Host::kBlockM / kXRowStep;
  static constexpr int kStageBytes = (kXChunks + kWeightChunks) * 16;
  static constexpr int kAccumulators = kTilesN * kTilesM * 4;

  static_assert(Host::kBlockM % 16 == 0, "ldmatrix loads 16 rows of x at a time");
  static_assert(Host::kBlockM % kXRowStep == 0, "the copies of x are divided evenly");
  static_assert(sizeof(typename Host::T) == 2, "tensor cores take 16-bit x");
  static_assert(!Host::kGated || Host::kWarps % 2 == 0, "half of the warps compute the gate");

  // The scales, offsets and zero points of one group for a lane's four columns. The zero points are stored in the form
  // that Codes::zero_low and Codes::zero_high return.
  struct Group {
    float scales[4];
    float offsets[4];
    uint32_t zeros[4];
  };

  // The parameters of the next group as they are stored in global memory, loaded while the current group is computed.
  struct NextGroup {
    Vector<Scale, 4> scales;
    Vector<Scale, 4> offsets;
    uint32_t zeros;
  };
};

template <class C, class Copy>
__device__ __forceinline__ void gemm_mma(const typename C::T* x, const uint32_t* qweight,
                                         const typename C::Scale* scales, const void* zeros,
                                         const typename C::Bias* bias, const typename C::T* residual, typename C::T* y,
                                         float* partials, uint32_t* counters, int m, int n, int k, int group_size,
                                         int ldx, int ldq, int lds, int ldz, int ldr, int ldy, float low, float high,
                                         Copy copy) {
  using T = typename C::T;
  using Scale = typename C::Scale;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t shared_begin = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int m_begin = blockIdx.x * C::kBlockM;
  const int tiles = ceil_div(k, C::kBlockK);
  const int tile_begin = slice_begin<int64_t>(tiles, blockIdx.z, gridDim.z);
  const int tile_end = slice_begin<int64_t>(tiles, blockIdx.z + 1, gridDim.z);

  // The lane's first column, and the first column that the lane reads. A lane whose columns lie past n reads the last
  // columns instead; its results are not stored.
  const int column = weight_column<C, C::kBlockN>(blockIdx.y, warp * C::kWarpN + g * 4, n);
  const int column_read = min(column, n - 4);

  // Per stage, a thread copies the 16-byte chunk x_chunk of rows x_row, x_row + kXRowStep, ... of x, and chunk w_chunk
  // of rows w_row and w_row + 32 of the weight. Only the source addresses change from stage to stage.
  const int x_row = threadIdx.x / 8;
  const int x_chunk = threadIdx.x % 8;
  const T* x_source = x + static_cast<int64_t>(m_begin + x_row) * ldx + tile_begin * C::kBlockK + x_chunk * 8;
  const int64_t x_step = static_cast<int64_t>(C::kXRowStep) * ldx;
  const uint32_t x_target = (x_row * 8 + (x_chunk ^ swizzle_bits(x_row))) * 16;
  const int w_row = threadIdx.x / C::kWarps;
  const int w_chunk = threadIdx.x % C::kWarps;
  const int w_slot = w_row / 16 * 16 + w_row % 16 / 8 * 8 + w_row % 2 * 4 + w_row % 8 / 2;
  const uint32_t w_target = (C::kXChunks + w_chunk * C::kBlockK + w_slot) * 16;
  const int w_first = weight_column<C, C::kBlockN>(blockIdx.y, w_chunk * C::kWarpN, n);
  const bool w_whole = C::kAligned && w_first + 24 < n;
  const uint32_t* w_source = qweight + static_cast<int64_t>(tile_begin * C::kBlockK + w_row) * ldq;

  auto start_stage = [&](int tile, int stage) {
    const uint32_t begin = shared_begin + stage * C::kStageBytes;
    // The number of weight rows in this k tile. Only the last k tile can be partial, and only if groups are smaller
    // than a k tile: otherwise K, a multiple of the group size, is a multiple of kBlockK.
    const int rows = C::kGroupInTile ? min(k - tile * C::kBlockK, C::kBlockK) : C::kBlockK;
#pragma unroll
    for (int i = 0; i < C::kXCopies; ++i) {
      const bool valid = m_begin + x_row + i * C::kXRowStep < m && x_chunk * 8 < rows;
      copy.start_16(begin + x_target + i * C::kXRowStep * 128, valid ? x_source + i * x_step : x, valid);
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
          const int word_column = weight_column<C, C::kBlockN>(blockIdx.y, w_chunk * C::kWarpN + word * 8, n);
          copy.start_4(target + word * 4, source + min(word_column, n - 8) / 8, valid);
        }
      }
    }
    x_source += C::kBlockK;
    w_source += static_cast<int64_t>(C::kBlockK) * ldq;
  };

  typename C::NextGroup next;
  const int last_group = k / group_size - 1;
  auto fetch_group = [&](int index) {
    const int64_t row = min(index, last_group);
    load<C::kAligned>(next.scales, scales + row * lds + column_read);
    if constexpr (C::kZeros == Zeros::kOffset) {
      load<C::kAligned>(next.offsets, static_cast<const Scale*>(zeros) + row * ldz + column_read);
      next.zeros = 0;
    } else if constexpr (C::kZeros == Zeros::kPacked) {
      next.zeros = static_cast<const uint32_t*>(zeros)[row * ldz + column_read / 8];
    } else {
      next.zeros = kSymmetricZeros;
    }
  };

  // These selectors of __byte_perm move one byte of the first word to bit 0 and the same byte of the second word to bit
  // 16; masks clear the other bits later. A lane's even columns are in byte 0 or 1 of a word, its odd columns in byte 2
  // or 3.
  const uint32_t even_bytes = 0x0400u + (column_read / 4 % 2) * 0x0101u;
  const uint32_t odd_bytes = even_bytes + 0x0202u;
  typename C::Group group;
  auto convert_group = [&] {
    const uint32_t even = __byte_perm(next.zeros, next.zeros, even_bytes);
    const uint32_t odd = __byte_perm(next.zeros, next.zeros, odd_bytes);
    group.zeros[0] = Codes<T>::zero_low(even);
    group.zeros[1] = Codes<T>::zero_low(odd);
    group.zeros[2] = Codes<T>::zero_high(even);
    group.zeros[3] = Codes<T>::zero_high(odd);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      group.scales[c] = to_float(next.scales.values[c]);
      if constexpr (C::kZeros == Zeros::kOffset) group.offsets[c] = to_float(next.offsets.values[c]);
    }
  };

  // The scaled accumulators of all groups, and the unscaled accumulators of the current group; both [mma tile along n]
  // [mma tile along m][value of the fragment].
  float accumulators[C::kTilesN][C::kTilesM][4] = {};
  float group_accumulators[C::kTilesN][C::kTilesM][4] = {};
  float x_sums[C::kTilesM][4] = {};
  auto& flat = reinterpret_cast<float (&)[C::kAccumulators]>(accumulators);
  SliceSums<C::kAccumulators, C::kSlices, C::kSharedSums ? C::kThreads : 0> slices(
      tiles, shared + C::kStages * C::kStageBytes);
  auto close_group = [&] {
#pragma unroll
    for (int j = 0; j < C::kTilesM; ++j) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
#pragma unroll
        for (int i = 0; i < C::kTilesN; ++i) {
          const int c = i * 2 + v / 2;
          accumulators[i][j][v] = fmaf(group_accumulators[i][j][v], group.scales[c], accumulators[i][j][v]);
          group_accumulators[i][j][v] = 0.0f;
          if constexpr (C::kZeros == Zeros::kOffset) {
            accumulators[i][j][v] = fmaf(x_sums[j][v], group.offsets[c], accumulators[i][j][v]);
          }
        }
        x_sums[j][v] = 0.0f;
      }
    }
  };

  int group_index = tile_begin * C::kBlockK / group_size;
  int group_end = (group_index + 1) * group_size;
  fetch_group(group_index);
  convert_group();
  fetch_group(group_index + 1);
  auto open_next_group = [&] {
    convert_group();
    ++group_index;
    group_end += group_size;
    fetch_group(group_index + 1);
  };
  auto change_group = [&] {
    close_group();
    open_next_group();
  };

  auto matmul = [&](int stage, int step) {
    const uint32_t x_begin = shared_begin + stage * C::kStageBytes;
    const auto* words = reinterpret_cast<const uint32_t*>(shared + stage * C::kStageBytes + C::kXChunks * 16);
    uint32_t a[C::kTilesN][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = warp * C::kBlockK + step * C::kStepK + half * 8 + t;
      const uint32_t word0 = words[chunk * 4 + g / 2];
      const uint32_t word1 = words[(chunk + 4) * 4 + g / 2];
      const uint32_t even = __byte_perm(word0, word1, even_bytes);
      const uint32_t odd = __byte_perm(word0, word1, odd_bytes);
      a[0][half * 2] = Codes<T>::low(even, group.zeros[0]);
      a[0][half * 2 + 1] = Codes<T>::low(odd, group.zeros[1]);
      a[1][half * 2] = Codes<T>::high(even, group.zeros[2]);
      a[1][half * 2 + 1] = Codes<T>::high(odd, group.zeros[3]);
    }
#pragma unroll
    for (int pair = 0; pair < C::kTilesM / 2; ++pair) {
      // ldmatrix loads matrices 0 and 1 from rows 0 .. 7 of x at k 0 .. 7 and k 8 .. 15, and matrices 2 and 3 from rows
      // 8 .. 15 at the same k.
      const int row = pair * 16 + lane / 16 * 8 + lane % 8;
      const int chunk = step * 2 + lane / 8 % 2;
      uint32_t b[4];
      ptx::ldmatrix_x4(b, x_begin + (row * 8 + (chunk ^ swizzle_bits(row))) * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < C::kTilesN; ++i) mma<T>(group_accumulators[i][pair * 2 + j], a[i], b[j * 2], b[j * 2 + 1]);
        if constexpr (C::kZeros == Zeros::kOffset) {
          // An offset contributes offset * (sum of x over the group) to y. An mma whose operand A is all ones computes
          // this sum.
          constexpr uint32_t kOne = sizeof(T) == 2 && Codes<T>::kMagic == 0x64006400u ? 0x3c003c00u : 0x3f803f80u;
          const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
          mma<T>(x_sums[pair * 2 + j], ones, b[j * 2], b[j * 2 + 1]);
        }
      }
    }
  };

#pragma unroll
  for (int stage = 0; stage < C::kStages - 1; ++stage) {
    if (tile_begin + stage < tile_end) start_stage(tile_begin + stage, stage);
    copy.commit();
  }
  int stage = 0;
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    copy.template wait<C::kStages - 2>();
    __syncthreads();
    // All warps have finished reading the preceding stage, which can now be refilled.
    const int tile_ahead = tile + C::kStages - 1;
    if (tile_ahead < tile_end) start_stage(tile_ahead, stage == 0 ? C::kStages - 1 : stage - 1);
    copy.commit();
    if (slices.begins_next(tile)) {
      close_group();
      slices.end_slice(flat);
      if (tile * C::kBlockK >= group_end) open_next_group();
    }
    if (!C::kGroupInTile && tile * C::kBlockK >= group_end) change_group();
#pragma unroll
    for (int step = 0; step < C::kBlockK / C::kStepK; ++step) {
      if constexpr (C::kGroupInTile) {
        // K, like a group, may end within a k tile; the steps past the end of K are skipped.
        if (tile * C::kBlockK + step * C::kStepK >= k) break;
        if (tile * C::kBlockK + step * C::kStepK >= group_end) change_group();
      }
      matmul(stage, step);
    }
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
  close_group();
  slices.add_to(flat);

  const int tile = blockIdx.y * gridDim.x + blockIdx.x;
  if (!reduce_split_k<C::kAccumulators, C::kThreads>(flat, partials, counters, tile, blockIdx.z, gridDim.z)) return;

  const Epilogue<T, C> epilogue{bias, residual, low, high, n, ldr};
  float* exchange = reinterpret_cast<float*>(shared);
  if constexpr (C::kGated) {
    // The second half of the warps has the columns of the up projection, and passes them to the first half, which has
    // the matching columns of the gate.
    copy.template wait<0>();
    __syncthreads();
    if (warp >= C::kWarps / 2) {
#pragma unroll
      for (int i = 0; i < C::kAccumulators; ++i)
        exchange[i * (C::kThreads / 2) + threadIdx.x - C::kThreads / 2] = flat[i];
    }
    __syncthreads();
    if (warp >= C::kWarps / 2 || column >= n / 2) return;
  }
  if (column >= n) return;
#pragma unroll
  for (int j = 0; j < C::kTilesM; ++j) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int row = m_begin + j * 8 + t * 2 + odd;
      if (row >= m) continue;
      Vector<T, 4> out;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int v = c % 2 * 2 + odd;
        if constexpr (C::kGated) {
          const int index = (c / 2 * C::kTilesM + j) * 4 + v;
          const float up = exchange[index * (C::kThreads / 2) + threadIdx.x];
          out.values[c] = epilogue.finish_gated(accumulators[c / 2][j][v], up, row, column + c);
        } else {
          out.values[c] = epilogue.finish(accumulators[c / 2][j][v], row, column + c);
        }
      }
      store<C::kAligned>(y + static_cast<int64_t>(row) * ldy + column, out);
    }
  }
}
