// SPDX-License-Identifier: Apache-2.0
// GEMV, and GEMM for m <= ROWS, on CUDA cores in float32; each weight is read once:
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
// Limits: k and group_size are multiples of CHUNK, n of 8 (gated: of 16). Any architecture. ALIGNED: rows of scales and
// offsets start at multiples of 16 bytes. X_ALIGNED: rows of x start at multiples of 16 bytes. PTX_PATH: pairs of codes
// are converted with lop3.
//
// Grid: (tiles of 128 columns, split_k). 16 adjacent lanes (a slice) read a row of the tile, one word per lane. Each
// slice of each split has a contiguous range of K, in whole chunks of CHUNK rows. A lane accumulates x * (q - z) over a
// chunk and multiplies the partial sum by s once per chunk.
#include "common/epilogue.cuh"
#include "gemm/group.cuh"
#include "common/reduce.cuh"

using Options = EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>;
constexpr bool kAligned = ALIGNED;
constexpr bool kXAligned = X_ALIGNED;
constexpr bool kPtxPath = PTX_PATH;
constexpr Zeros kZeros = Zeros::ZEROS;
constexpr int kRows = ROWS;
constexpr int kChunk = CHUNK;
constexpr int kLanes = 16;
constexpr int kBlockN = kLanes * 8;
constexpr int kThreads = kBlockN;  // one thread per column of the tile, for the epilogue
constexpr int kSlices = kThreads / kLanes;
constexpr int kWarps = kThreads / 32;

static_assert(kZeros == Zeros::kOffset || sizeof(SCALE) == 2, "scales are 16-bit values");

// Computes code minus zero point, exactly, for the eight columns of an AWQ word.
__device__ __forceinline__ void differences(float (&out)[8], uint32_t word, uint32_t zeros) {
  if constexpr (kPtxPath) {
    using C = Codes<half_t>;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int shift = (i >> 1) * 8;
      const uint32_t pair = i & 1 ? C::high(word >> shift, C::zero_high(zeros >> shift))
                                  : C::low(word >> shift, C::zero_low(zeros >> shift));
      out[2 * i] = ptx::cvt_f32_f16(static_cast<uint16_t>(pair));
      out[2 * i + 1] = ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> 16));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[i] = static_cast<float>(static_cast<int32_t>(code(word, i)) - static_cast<int32_t>(code(zeros, i)));
    }
  }
}

// With one row, a bound of five CTAs per SM allows 96 registers per thread. Without it, the compiler aims at only 72
// registers on sm_80 to sm_89, and spills.
extern "C" __global__ void __launch_bounds__(kThreads, kRows == 1 ? 5 : 1)
    gemv(const X* x, const uint32_t* qweight, const SCALE* scales, const void* zeros, const BIAS* bias,
         const X* residual, X* y, float* partials, uint32_t* counters, int m, int n, int k, int group_size, int ldx,
         int ldq, int lds, int ldz, int ldr, int ldy, float low, float high) {
  const int lane = threadIdx.x % kLanes;
  const int slice = blockIdx.y * kSlices + threadIdx.x / kLanes;
  const int slices = gridDim.y * kSlices;
  const int chunks = k / kChunk;
  const int k_begin = static_cast<int>(static_cast<int64_t>(chunks) * slice / slices) * kChunk;
  const int k_end = static_cast<int>(static_cast<int64_t>(chunks) * (slice + 1) / slices) * kChunk;

  // A lane whose columns lie past n reads the last word of a row; the lane's results are not stored.
  const int first = min(weight_column<Options, kBlockN>(blockIdx.x, lane * 8, n), n - 8);
  float accumulators[kRows][8] = {};
  uint32_t words[kChunk];
  auto fetch_words = [&](int row) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) words[i] = qweight[static_cast<int64_t>(row + i) * ldq + first / 8];
  };

  WordGroup<SCALE, kZeros, kAligned> group;
  int group_end = k_begin;  // the first iteration ends an empty group and loads the first one
  if (k_begin < k_end) fetch_words(k_begin);
  for (int row = k_begin; row < k_end; row += kChunk) {
    if (row >= group_end) {
      const int index = row / group_size;
      group.fetch(scales, zeros, index, lds, ldz, first);
      group_end = (index + 1) * group_size;
    }
    uint32_t current[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) current[i] = words[i];
    if (row + kChunk < k_end) fetch_words(row + kChunk);

    float codes[kChunk][8];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) differences(codes[i], current[i], group.zeros);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= m) break;
      Vector<X, kChunk> x_row;
      load<kXAligned>(x_row, x + static_cast<int64_t>(r) * ldx + row);
      float part[8] = {};
      float x_sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const float x_value = to_float(x_row.values[i]);
        x_sum += x_value;
#pragma unroll
        for (int c = 0; c < 8; ++c) part[c] = fmaf(x_value, codes[i][c], part[c]);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float& acc = accumulators[r][c];
        acc = fmaf(part[c], to_float(group.scales.values[c]), acc);
        if constexpr (kZeros == Zeros::kOffset) acc = fmaf(x_sum, to_float(group.offsets.values[c]), acc);
      }
    }
  }

  // Sum over the slices of the CTA, then over the splits. Thread i has the totals of column i of the tile.
  __shared__ float tile[kWarps][kBlockN];
  float totals[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= m) {
      totals[r] = 0.0f;
      continue;
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float pair = accumulators[r][c] + __shfl_xor_sync(0xffffffffu, accumulators[r][c], kLanes);
      if (threadIdx.x % 32 < kLanes) tile[threadIdx.x / 32][lane * 8 + c] = pair;
    }
    __syncthreads();
    totals[r] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) totals[r] += tile[warp][threadIdx.x];
    __syncthreads();
  }
  if (!reduce_split_k<kRows, kThreads>(totals, partials, counters, blockIdx.x, blockIdx.y, gridDim.y)) return;

  const Epilogue<X, Options> epilogue{bias, residual, low, high, n, ldr};
  const int column = weight_column<Options, kBlockN>(blockIdx.x, threadIdx.x, n);
  if constexpr (Options::kGated) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= m) break;
      tile[0][threadIdx.x] = totals[r];
      __syncthreads();
      if (threadIdx.x < kBlockN / 2 && column < n / 2) {
        const float up = tile[0][threadIdx.x + kBlockN / 2];
        y[static_cast<int64_t>(r) * ldy + column] = epilogue.finish_gated(totals[r], up, r, column);
      }
      __syncthreads();
    }
  } else if (column < n) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= m) break;
      y[static_cast<int64_t>(r) * ldy + column] = epilogue.finish(totals[r], r, column);
    }
  }
}
