// SPDX-License-Identifier: Apache-2.0
// GEMM on CUDA cores, in float32; the fallback for problems that no tensor-core kernel supports:
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
// Limits: n % 8 == 0 (gated: n % 16 == 0). Any group_size, any alignment, any architecture.
//
// Grid: (tiles of 64 rows, tiles of 64 columns, split_k). A CTA iterates over k tiles of 16; each of its 256 threads
// has 4 x 4 accumulators. Shared memory is double-buffered: while one buffer is in use, the next k tile is loaded into
// registers, dequantized and stored to the other buffer.
#include "common/epilogue.cuh"
#include "dequantize/int4.cuh"
#include "common/reduce.cuh"

using Options = EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>;
constexpr Zeros kZeros = Zeros::ZEROS;
// Number of slices of K that a CTA computes one after the other (reduce.cuh); 1 with split-K.
constexpr int kSlices = SLICES;
constexpr int kBlockM = 64;
constexpr int kBlockN = 64;
constexpr int kBlockK = 16;
constexpr int kThreads = 256;
constexpr int kThreadM = 4;
constexpr int kThreadN = 4;
constexpr int kXValues = kBlockM * kBlockK / kThreads;
constexpr int kWordThreads = kBlockK * kBlockN / 8;  // number of threads that load one word of the weight each

static_assert(kBlockM / kThreadM * (kBlockN / kThreadN) == kThreads, "the threads cover the tile");
static_assert(kWordThreads <= kThreads, "a k tile has at most one word per thread");

struct Step {
  // Four values of padding avoid bank conflicts when adjacent threads store a column of the tile.
  float x[kBlockK][kBlockM + 4];
  float w[kBlockK][kBlockN];
};

union Shared {
  Step steps[2];
  float tile[kBlockM][kBlockN];
};

extern "C" __global__ void __launch_bounds__(kThreads)
    gemm_simt(const X* x, const uint32_t* qweight, const SCALE* scales, const void* zeros, const BIAS* bias,
              const X* residual, X* y, float* partials, uint32_t* counters, int m, int n, int k, int group_size,
              int ldx, int ldq, int lds, int ldz, int ldr, int ldy, float low, float high) {
  __shared__ Shared shared;
  const int m_begin = blockIdx.x * kBlockM;
  const int steps = ceil_div(k, kBlockK);
  const int step_begin = slice_begin<int64_t>(steps, blockIdx.z, gridDim.z);
  const int step_end = slice_begin<int64_t>(steps, blockIdx.z + 1, gridDim.z);

  // Thread i loads column i % 16 of rows i / 16, i / 16 + 16, ... of x, and word i % 8 of row i / 8 of the weight.
  const int x_k = threadIdx.x % kBlockK;
  const int x_m = threadIdx.x / kBlockK;
  const int w_k = threadIdx.x / (kBlockN / 8);
  const int w_local = threadIdx.x % (kBlockN / 8) * 8;
  const int w_column = weight_column<Options, kBlockN>(blockIdx.y, w_local, n);
  const bool has_word = threadIdx.x < kWordThreads && w_column < n;

  float x_values[kXValues];
  float w_values[8];
  auto fetch = [&](int step) {
    const int k_x = step * kBlockK + x_k;
#pragma unroll
    for (int i = 0; i < kXValues; ++i) {
      const int row = m_begin + x_m + i * (kThreads / kBlockK);
      x_values[i] = row < m && k_x < k ? to_float(x[static_cast<int64_t>(row) * ldx + k_x]) : 0.0f;
    }
    const int k_w = step * kBlockK + w_k;
    const bool valid = has_word && k_w < k;
    const int64_t group = valid ? k_w / group_size : 0;
    const uint32_t word = valid ? qweight[static_cast<int64_t>(k_w) * ldq + w_column / 8] : 0;
    uint32_t zero_word = kZeros == Zeros::kOffset ? 0 : kSymmetricZeros;
    if (kZeros == Zeros::kPacked && valid) zero_word = static_cast<const uint32_t*>(zeros)[group * ldz + w_column / 8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float scale = valid ? to_float(scales[group * lds + w_column + c]) : 0.0f;
      float offset = 0.0f;
      if (kZeros == Zeros::kOffset && valid) {
        offset = to_float(static_cast<const SCALE*>(zeros)[group * ldz + w_column + c]);
      }
      const int32_t difference = static_cast<int32_t>(code(word, c)) - static_cast<int32_t>(code(zero_word, c));
      w_values[c] = fmaf(static_cast<float>(difference), scale, offset);
    }
  };
  auto keep = [&](Step& step) {
#pragma unroll
    for (int i = 0; i < kXValues; ++i) step.x[x_k][x_m + i * (kThreads / kBlockK)] = x_values[i];
    if (threadIdx.x < kWordThreads) {
#pragma unroll
      for (int c = 0; c < 8; ++c) step.w[w_k][w_local + c] = w_values[c];
    }
  };

  // A thread computes rows m_local .. m_local + 3 and columns n_local .. n_local + 3 of the tile.
  const int m_local = threadIdx.x / (kBlockN / kThreadN) * kThreadM;
  const int n_local = threadIdx.x % (kBlockN / kThreadN) * kThreadN;
  float accumulators[kThreadM * kThreadN] = {};
  SliceSums<kThreadM * kThreadN, kSlices> slices(steps);
  if (step_begin < step_end) {
    fetch(step_begin);
    keep(shared.steps[step_begin & 1]);
  }
  __syncthreads();
  for (int step = step_begin; step < step_end; ++step) {
    const Step& current = shared.steps[step & 1];
    if (slices.begins_next(step)) slices.end_slice(accumulators);
    if (step + 1 < step_end) fetch(step + 1);
#pragma unroll
    for (int i = 0; i < kBlockK; ++i) {
#pragma unroll
      for (int a = 0; a < kThreadM; ++a) {
#pragma unroll
        for (int b = 0; b < kThreadN; ++b) {
          accumulators[a * kThreadN + b] =
              fmaf(current.x[i][m_local + a], current.w[i][n_local + b], accumulators[a * kThreadN + b]);
        }
      }
    }
    if (step + 1 < step_end) keep(shared.steps[(step + 1) & 1]);
    __syncthreads();
  }

  slices.add_to(accumulators);
  const int tile = blockIdx.y * gridDim.x + blockIdx.x;
  if (!reduce_split_k<kThreadM * kThreadN, kThreads>(accumulators, partials, counters, tile, blockIdx.z, gridDim.z))
    return;

  const Epilogue<X, Options> epilogue{bias, residual, low, high, n, ldr};
  if constexpr (Options::kGated) {
#pragma unroll
    for (int i = 0; i < kThreadM * kThreadN; ++i) {
      shared.tile[m_local + i / kThreadN][n_local + i % kThreadN] = accumulators[i];
    }
    __syncthreads();
    if (n_local >= kBlockN / 2) return;
  }
#pragma unroll
  for (int i = 0; i < kThreadM * kThreadN; ++i) {
    const int row = m_begin + m_local + i / kThreadN;
    const int local = n_local + i % kThreadN;
    const int column = weight_column<Options, kBlockN>(blockIdx.y, local, n);
    if (row >= m || column >= n) continue;
    X& target = y[static_cast<int64_t>(row) * ldy + column];
    if constexpr (Options::kGated) {
      const float up = shared.tile[m_local + i / kThreadN][local + kBlockN / 2];
      target = epilogue.finish_gated(accumulators[i], up, row, column);
    } else {
      target = epilogue.finish(accumulators[i], row, column);
    }
  }
}
