// SPDX-License-Identifier: Apache-2.0
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n]),  m <= ROWS
// (q * s + o with offsets in place of zero points) on tensor cores, from AWQ's own layout of the weight, every weight
// read once and by no way but registers.
//
//   x        X [m, k], row stride ldx values; rows start at multiples of 16 bytes
//   qweight  uint32 [k, n / 8], row stride ldq words
//   scales   SCALE [groups, n], row stride lds values
//   zeros    uint32 [groups, n / 8], row stride ldz words; or SCALE [groups, n], row stride ldz values; or null
//   y        X [m, n] (gated: [m, n / 2]), row stride ldy values
// sm_90; k and group_size multiples of 32, n of 8 * WORDS (gated: of 16 * WORDS). ALIGNED: qweight, scales,
// offsets and y start at, and step by, multiples of 16 bytes; WORDS above 1 needs it.
//
// The product is made transposed, y^T = W^T x^T: the weight is operand A of mma (ptx/mma.cuh), whose rows may be any
// columns of the weight and whose k any k, as long as x has the same. A cluster of SPLITS blocks makes 64 * WORDS
// columns; its warps have adjacent parts of K each. In a step of 32 k lane 4g + t takes WORDS adjacent words, g-th of
// the tile, of rows 8t .. 8t + 7, and the same k of rows g, g + 8 of x:
//   (lane, word, nibble i of 4) -> row g of a product: column 2i of the word, row g + 8: column 2i + 1
//   (t, k16 j of 2, register pair p of A and register p of B) -> k 8t + 4j + 2p, 8t + 4j + 2p + 1
// The low (even columns) and high halves of two adjacent k's words, side by side, are what RawCodes takes.
//
// Programmatic dependent launch: the kernel before may have made any of the arrays, so they are read once it has ended.
//
// Predicted and measured otherwise (H100, 4096 x 4096, one row, 4.5 microseconds on the repacked weight): asking L2 for
// all words before that, by prefetch, by bulk prefetch, or by loads whose L2::256B brings their neighbours, was no
// faster or slower (6.5 to 8.5 against 6.5); real loads there, which are not allowed, would take 5.5.
// What helped: many warps with little under way each (24 warps with one step 5.8, 16 with four 6.7), and st.async in
// place of a barrier of the cluster, which waits for memory (7.1 to 6.5).
#include "copied.cuh"
#include "epilogue.cuh"
#include "group.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld.cuh"
#include "raw_codes.cuh"
#include "warp.cuh"

static_assert(__CUDA_ARCH__ >= 900, "gemm_sm90_raw needs sm_90");

constexpr bool kAligned = ALIGNED;
constexpr Zeros kZeros = Zeros::ZEROS;
constexpr int kRows = ROWS;
constexpr int kWords = WORDS;
constexpr int kWarps = WARPS;
constexpr int kDepth = DEPTH;  // steps under way
constexpr int kSplits = SPLITS;

constexpr int kThreads = kWarps * 32;
constexpr int kBlockN = 64 * kWords;
constexpr int kStepK = 32;
constexpr int kTilesM = ceil_div(kRows, 8);
constexpr int kOdd = kRows == 1 ? 1 : 2;  // rows of a lane's sums in each tile

// Shared memory: sums float32 [warp][row][kSumStride], then those of each block of the cluster at its first block
// [split][row][kSumStride], and a barrier for their bytes.
constexpr int kSumStride = kBlockN + 4;
constexpr int kPartSums = kRows * kSumStride;
constexpr int kJoinedBegin = kWarps * kPartSums;
constexpr int kBarrierBegin = kJoinedBegin + kSplits * kPartSums;

static_assert(kWords == 1 || kAligned, "words move together");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");

struct Step {
  uint32_t words[8][kWords];
  Vector<uint32_t, 4> x[kTilesM];
};

extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    gemm_sm90_raw(const X* x, const uint32_t* qweight, const SCALE* scales, const void* zeros, const BIAS* bias,
                  const X* residual, X* y, float* partials, uint32_t* counters, int m, int n, int k, int group_size,
                  int ldx, int ldq, int lds, int ldz, int ldr, int ldy, float low, float high) {
  extern __shared__ __align__(16) float shared[];
  const uint32_t shared_begin = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t barrier = shared_begin + kBarrierBegin * 4;
  const int warp = uniform_warp();
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int split = kSplits == 1 ? 0 : ptx::cluster_ctarank();
  const int tile = blockIdx.x / kSplits;
  const int part = split * kWarps + warp;
  const int steps = k / kStepK;
  const int step_begin = steps * part / (kSplits * kWarps);
  const int step_end = steps * (part + 1) / (kSplits * kWarps);
  // A lane past n reads the last words, and its sums are not stored.
  const int column = min(weight_column<kBlockN>(tile, g * kWords * 8, n), n - 8 * kWords);

  if constexpr (kSplits > 1) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(barrier, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(barrier, kSplits * m * kBlockN * 4);
    }
    ptx::barrier_cluster_arrive_relaxed();
  }
  const uint32_t* w_source = qweight + static_cast<int64_t>(step_begin * kStepK + t * 8) * ldq + column / 8;
  const int64_t w_step = static_cast<int64_t>(ldq) * kStepK;
  const X* x_source[kTilesM];
#pragma unroll
  for (int j = 0; j < kTilesM; ++j) {
    // Rows that x does not have repeat its last one and give sums that nobody stores.
    x_source[j] = x + static_cast<int64_t>(min(j * 8 + g, m - 1)) * ldx + step_begin * kStepK + t * 8;
  }
  const int group_steps = group_size / kStepK;
  int group = step_begin / group_steps;
  if constexpr (kSplits > 1) ptx::barrier_cluster_wait_acquire();
  ptx::griddepcontrol_wait();

  auto fetch = [&](Step& step) {
#pragma unroll
    for (int i = 0; i < 8; ++i) ptx::ld_global_once(step.words[i], w_source + static_cast<int64_t>(ldq) * i);
    w_source += w_step;
#pragma unroll
    for (int j = 0; j < kTilesM; ++j) {
      load<true>(step.x[j], reinterpret_cast<const uint32_t*>(x_source[j]));
      x_source[j] += kStepK;
    }
  };

  // Of word, nibble, tile of rows: sums, and those of the present group, in units of RawCodes.
  float sums[kWords][4][kTilesM][2][kOdd] = {};
  float parts[kWords][4][kTilesM][4] = {};
  float x_sums[kTilesM][4] = {};
  WordGroup<SCALE, kZeros, kAligned> parameters[kWords];
  auto fetch_group = [&] {
#pragma unroll
    for (int w = 0; w < kWords; ++w) parameters[w].fetch(scales, zeros, group, lds, ldz, column + w * 8);
  };
  auto close_group = [&] {
#pragma unroll
    for (int j = 0; j < kTilesM; ++j) {
#pragma unroll
      for (int odd = 0; odd < kOdd; ++odd) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x_sum = -x_sums[j][odd] / RawCodes<X>::kUnits[i % 2];
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int c = 2 * i + half;
              float& sum = sums[w][i][j][half][odd];
              float zero = RawCodes<X>::kOffset;
              if constexpr (kZeros != Zeros::kOffset) zero += static_cast<float>(code(parameters[w].zeros, c));
              const float difference = fmaf(zero, x_sum, parts[w][i][j][half * 2 + odd]);
              sum = fmaf(difference, to_float(parameters[w].scales.values[c]), sum);
              if constexpr (kZeros == Zeros::kOffset) {
                sum = fmaf(-to_float(parameters[w].offsets.values[c]), x_sum, sum);
              }
            }
          }
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x_sums[j][c] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4 * kWords; ++i) parts[i / 4][i % 4][j][c] = 0.0f;
      }
    }
  };
  auto multiply = [&](const Step& step) {
    constexpr uint32_t kOnes[4] = {RawCodes<X>::kOne, RawCodes<X>::kOne, RawCodes<X>::kOne, RawCodes<X>::kOne};
#pragma unroll
    for (int k16 = 0; k16 < 2; ++k16) {
      auto multiply_by = [&](int j, float (&c)[4], const uint32_t (&a)[4]) {
        mma<X>(c, a, step.x[j].values[2 * k16], step.x[j].values[2 * k16 + 1]);
      };
#pragma unroll
      for (int j = 0; j < kTilesM; ++j) multiply_by(j, x_sums[j], kOnes);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t codes[4][4];  // of a register of A, nibble
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = k16 * 4 + i / 2 * 2;
          const uint32_t pair = __byte_perm(step.words[row][w], step.words[row + 1][w], i % 2 ? 0x7632 : 0x5410);
          RawCodes<X>::convert(codes[i], pair);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t a[4] = {codes[0][i], codes[1][i], codes[2][i], codes[3][i]};
#pragma unroll
          for (int j = 0; j < kTilesM; ++j) multiply_by(j, parts[w][i][j], a);
        }
      }
    }
  };

  Step ring[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    if (step_begin + i < step_end) fetch(ring[i]);
  }
  if (step_begin < step_end) fetch_group();
  for (int first = step_begin; first < step_end; first += kDepth) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (first + i >= step_end) break;
      if (first + i == (group + 1) * group_steps) {
        close_group();
        ++group;
        fetch_group();
      }
      multiply(ring[i]);
      if (first + i + kDepth < step_end) fetch(ring[i]);
    }
  }
  if (step_begin < step_end) close_group();
  ptx::griddepcontrol_launch_dependents();

#pragma unroll
  for (int j = 0; j < kTilesM; ++j) {
#pragma unroll
    for (int odd = 0; odd < kOdd; ++odd) {
      const int row = j * 8 + t * 2 + odd;
      if (row >= kRows) continue;
#pragma unroll
      for (int quad = 0; quad < 2 * kWords; ++quad) {
        Vector<float, 4> out;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int i = quad % 2 * 2 + c / 2;
          out.values[c] = sums[quad / 2][i][j][c % 2][odd] * RawCodes<X>::kUnits[i % 2];
        }
        store<true>(shared + warp * kPartSums + row * kSumStride + g * kWords * 8 + quad * 4, out);
      }
    }
  }
  __syncthreads();

  // Adds COUNT parts at `begin` of four columns of a row.
  auto add_up = [&](int begin, int count, int offset) {
    Vector<float, 4> total = {};
#pragma unroll
    for (int i = 0; i < count; ++i) {
      Vector<float, 4> values;
      load<true>(values, shared + begin + i * kPartSums + offset);
#pragma unroll
      for (int c = 0; c < 4; ++c) total.values[c] += values.values[c];
    }
    return total;
  };
  for (int item = threadIdx.x; item < m * (kBlockN / 4); item += kThreads) {
    const int offset = item / (kBlockN / 4) * kSumStride + item % (kBlockN / 4) * 4;
    const Vector<float, 4> total = add_up(0, kWarps, offset);
    const int target = kJoinedBegin + split * kPartSums + offset;
    if constexpr (kSplits == 1) {
      store<true>(shared + target, total);
    } else {
      ptx::st_async(ptx::mapa(shared_begin + target * 4, 0), total.values, ptx::mapa(barrier, 0));
    }
  }
  if constexpr (kSplits == 1) {
    __syncthreads();
  } else {
    if (split != 0) return;
    wait(barrier, 0);
  }

  const Epilogue<X> epilogue{bias, residual, low, high, n, ldr};
  constexpr int kWidth = kGated ? kBlockN / 2 : kBlockN;
  for (int item = threadIdx.x; item < m * (kWidth / 4); item += kThreads) {
    const int row = item / (kWidth / 4);
    const int local = item % (kWidth / 4) * 4;
    const int out_column = tile * kWidth + local;
    if (out_column >= (kGated ? n / 2 : n)) continue;
    const Vector<float, 4> total = add_up(kJoinedBegin, kSplits, row * kSumStride + local);
    Vector<X, 4> out;
    if constexpr (kGated) {
      const Vector<float, 4> up = add_up(kJoinedBegin, kSplits, row * kSumStride + local + kWidth);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        out.values[c] = epilogue.finish_gated(total.values[c], up.values[c], row, out_column + c);
      }
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) out.values[c] = epilogue.finish(total.values[c], row, out_column + c);
    }
    store<kAligned>(y + static_cast<int64_t>(row) * ldy + out_column, out);
  }
}
