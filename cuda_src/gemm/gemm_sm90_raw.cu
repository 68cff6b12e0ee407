// SPDX-License-Identifier: Apache-2.0
// GEMM on a weight in the AWQ layout ("raw"), for up to 16 rows of x, with mma m16n8k16 and TMA. The weight is read
// once.
//
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n])
//   or, with ZEROS = kOffset,                   (q[k, n] * s[k / group_size, n] + o[k / group_size, n])
//
//   scales    SCALE [groups, n], row stride lds values
//   zeros     kPacked: uint32 [groups, n / 8], row stride ldz words; kOffset: SCALE [groups, n], row stride ldz values;
//             kSymmetric: null
//   bias      BIAS [n] or null
//   residual  X [m, n], row stride ldr values, or null
//   y         X [m, n] (gated: [m, n / 2]), row stride ldy values
//   w_map     tensor map of qweight, uint32 [k, n / 8], as [row % 8][row / 8][n / 8], with INVARIANT as
//             [row % 4][row / 4][n / 8]
//   x_map     tensor map of x as [k / 32][m][32]; a box has all rows
//
// Limits: m <= ROWS; k and group_size are multiples of 32, n of 8 * WORDS (gated: of 16 * WORDS); addresses and row
// strides of all matrices, and the first up column of a gated weight, are multiples of 16 bytes. sm_90 and newer.
//
// The kernel computes y^T = W^T x^T with the weight as operand A of mma (ptx/mma.cuh). Any column of the weight may be
// any row of A, and any k of the weight any k of A, provided that x has the same order of k. A cluster of SPLIT_K CTAs
// computes 64 * WORDS columns; each warp of the cluster has a contiguous range of K. In a step of 32 k, lane 4g + t
// loads the WORDS adjacent words from word g * WORDS of the tile, for weight rows 8t .. 8t + 7, and the same k of rows
// g and g + 8 of x. The map from words to fragments is:
//   (lane, word, nibble pair i of 4) -> row g of A: column 2i of the word; row g + 8: column 2i + 1
//   (t, k16 step j of 2, register pair p of A, register p of B) -> k 8t + 4j + 2p, 8t + 4j + 2p + 1
// RawCodes converts a register that holds the low halves (even columns) or the high halves (odd columns) of the words
// of two adjacent k.
//
// INVARIANT: the arithmetic of gemm_sm80 with SPLIT_K * WARPS slices of K, for a batch-invariant GEMM. Operand A is q -
// z, each k16 step has the same 16 k, and the accumulators of all warps of the cluster are added one after the other:
//   (t, k16 step j of 2, register pair p of A, register p of B) -> k 16j + 4t + 2p, 16j + 4t + 2p + 1
//
// Each warp is producer and consumer of its own ring of STAGES stages, each of one step: the warp copies words and x by
// TMA and refills a stage once all lanes have read it. Since one warp has both roles, stages have full barriers but no
// empty barriers; hopper/pipeline.cuh explains why no wait passes early. Words are stored as [row % 8][t][word], so
// that lanes read different banks.
//
// Programmatic dependent launch (PDL): with MAY_PREFETCH_WEIGHTS, no kernel in flight writes the weight, so the words
// of all stages and the parameters of the first group are read before griddepcontrol.wait. Otherwise, nothing is read
// before griddepcontrol.wait; only scales and zero points are prefetched into L2.
#include "common/epilogue.cuh"
#include "common/tile_scheduler.cuh"
#include "common/warp.cuh"
#include "common/mma.cuh"
#include "dequantize/int4.cuh"
#include "gemm/group.cuh"
#include "hopper/cluster_reduction.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"
#include "hopper/tma.cuh"
#include "ptx/elect.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/prefetch.cuh"

static_assert(__CUDA_ARCH__ >= 900, "gemm_sm90_raw needs sm_90");

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL> {
  using T = X;  // type of x, the residual and y
  using Scale = SCALE;
  static constexpr Zeros kZeros = Zeros::ZEROS;
  static constexpr int kRows = ROWS, kWords = WORDS, kWarps = WARPS;
  static constexpr int kStages = STAGES;  // number of stages per warp; each warp has a ring of its own
  static constexpr int kSplitK = SPLIT_K;
  static constexpr bool kMayPrefetchWeights = MAY_PREFETCH_WEIGHTS, kInvariant = INVARIANT;
  static constexpr int kCtasPerSm = CTAS_PER_SM, kSharedBytes = SHARED_BYTES;
};

template <class Host> struct GemmSm90Raw : Host {
  static constexpr int kThreads = Host::kWarps * 32;
  static constexpr int kBlockN = 64 * Host::kWords;
  static constexpr int kStepK = 32;
  static constexpr int kTilesM = ceil_div(Host::kRows, 8);
  static constexpr int kOdd = Host::kRows == 1 ? 1 : 2;       // number of rows per lane in each tile of 8 rows
  static constexpr int kLaneRows = Host::kInvariant ? 4 : 8;  // number of adjacent rows of the weight per lane
  static constexpr int kSliceSteps =
      Host::kInvariant ? 2 : 1;  // number of steps (32 k) of which the length of a slice of K is a multiple

  // A gated tile has two column ranges: columns of the gate and the matching columns of the up projection.
  static constexpr int kColumnRanges = Host::kGated ? 2 : 1;
  static constexpr int kRangeWords = 8 * Host::kWords / kColumnRanges;
  static constexpr int kRangeBytes = kStepK * kRangeWords * 4;
  static constexpr int kWordBytes = kColumnRanges * kRangeBytes;
  static constexpr int kXTileBytes = 8 * kStepK * 2;
  static constexpr int kXBytes = Host::kRows * kStepK * 2;
  static constexpr int kStepBytes = kWordBytes + (kXBytes > 128 ? kXBytes : 128);

  // Each warp has a ring of stages; a stage holds words [column range][row % kLaneRows][row / kLaneRows][kRangeWords]
  // and x [row][32].
  // After the main loop, the warp's accumulators, float [row][kSumStride], overwrite the ring.
  static constexpr int kSumStride = kBlockN + 4;
  static constexpr int kTileFloats = Host::kRows * kSumStride;
  static constexpr int kRingFloats = Host::kStages * kStepBytes / 4;
  static constexpr int kWarpFloats = kRingFloats > kTileFloats ? kRingFloats : ceil_div(kTileFloats, 32) * 32;

  struct SharedStorage {
    using Warps = SharedArray<0, Host::kWarps, kWarpFloats * 4>;
    // The partial sums that CTA 0 receives: a tile of each other CTA or, if batch-invariant, of each of their warps.
    using Received =
        SharedArray<Warps::kEnd, (Host::kSplitK - 1) * (Host::kInvariant ? Host::kWarps : 1), kTileFloats * 4>;
    using ReceivedBarrier = SharedArray<Received::kEnd, 1, kBarrierBytes>;
    using FullBarriers = SharedArray<ReceivedBarrier::kEnd, Host::kWarps, Host::kStages * kBarrierBytes>;
    static constexpr int kBytes = FullBarriers::kEnd;

    uint32_t begin;  // shared address of the first byte

    __device__ __forceinline__ PartialSumBarrier received_barrier() const { return {ReceivedBarrier::at(begin)}; }
  };
  ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);

  // The layout of the accumulators, for send_partial_sums and add_all (cluster_reduction.cuh): each warp is a consumer,
  // and CTA 0 owns all rows.
  struct Sums : RowMajorSums<kBlockN, kSumStride> {
    static constexpr int kConsumers = Host::kWarps, kConsumerFloats = kWarpFloats, kSplitK = Host::kSplitK;
    static constexpr int kReceivedFloats = kTileFloats;
    static constexpr bool kSendsEach = Host::kInvariant, kRankOrder = false;
    static constexpr int kOwnedRows = Host::kRows, kRows = Host::kRows;
    static constexpr uint32_t kUnits = kRows * (kBlockN / 4);
    static constexpr int kRankStep = 1;
    static constexpr uint32_t kThreads = GemmSm90Raw::kThreads;
  };

  static_assert(sizeof(typename Host::T) == 2, "tensor cores take 16-bit x");
};

// The body of the kernel, for one configuration; `gemm_sm90_raw` below passes its arguments on.
template <class C>
__device__ __forceinline__ void gemm_sm90_raw_tile(const typename C::Scale* scales, const void* zeros,
                                                   const typename C::Bias* bias, const typename C::T* residual,
                                                   typename C::T* y, const TensorMap* w_map, const TensorMap* x_map,
                                                   int m, int n, int k, int group_size, int lds, int ldz, int ldr,
                                                   int ldy, float low, float high) {
  using T = typename C::T;
  using Scale = typename C::Scale;
  extern __shared__ __align__(128) float shared[];
  const uint32_t shared_begin = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const typename C::SharedStorage storage{shared_begin};
  const int warp = uniform_warp();
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int split = cluster_rank<C::kSplitK>();
  const int tile = blockIdx.x / C::kSplitK;
  const int slice = split * C::kWarps + warp;
  const int steps = k / C::kStepK;
  const int units = ceil_div(steps, C::kSliceSteps);
  const int step_begin = slice_begin(units, slice, C::kSplitK * C::kWarps) * C::kSliceSteps;
  const int slice_end = slice_begin(units, slice + 1, C::kSplitK * C::kWarps) * C::kSliceSteps;
  const int step_end = C::kInvariant ? min(steps, slice_end) : slice_end;
  // A lane whose columns lie past n reads the scales of the last columns; the lane's accumulators are not stored.
  const int column = min(weight_column<C, C::kBlockN>(tile, g * C::kWords * 8, n), n - 8 * C::kWords);

  if constexpr (C::kSplitK > 1) {
    if (threadIdx.x == 0) {
      storage.received_barrier().init();
      ptx::fence_mbarrier_init();
      storage.received_barrier().expect((C::kSplitK - 1) * (C::kInvariant ? C::kWarps : 1) * m * C::kBlockN * 4);
    }
    ptx::barrier_cluster_arrive_relaxed();
  }
  const int group_steps = group_size / C::kStepK;
  int group = step_begin / group_steps;

  const uint32_t ring = ptx::opaque(shared_begin + warp * (C::kWarpFloats * 4));
  const uint32_t full_barriers = ptx::opaque(C::SharedStorage::FullBarriers::at(shared_begin, warp));
  const int my_word = g * C::kWords;  // index of the lane's first word within a row of the tile
  const uint32_t my_words = ptx::opaque(ring + my_word / C::kRangeWords * C::kRangeBytes +
                                        (t * C::kRangeWords + my_word % C::kRangeWords) * 4);
  const uint32_t my_x = ptx::opaque(
      ring + C::kWordBytes + (C::kInvariant ? (C::kRows == 1 ? 0 : g) * 64 + t * 8 : (C::kRows == 1 ? t : lane) * 16));
  const int first_word = weight_column<C, C::kBlockN>(tile, 0, n) / 8;
  const bool leader = ptx::elect();
  auto copy = [&](int step, uint32_t stage_offset, uint32_t full_barrier, bool words, bool x) {
    if (words) {
      ptx::mbarrier_arrive_expect_tx(full_barrier, C::kWordBytes + m * (C::kStepK * 2));
#pragma unroll
      for (int i = 0; i < C::kColumnRanges; ++i) {
        const uint32_t target = ring + stage_offset + i * C::kRangeBytes;
        ptx::cp_async_bulk_tensor_3d(target, w_map, first_word + i * (n / 16), step * (C::kStepK / C::kLaneRows), 0,
                                     full_barrier);
      }
    }
    if (x) ptx::cp_async_bulk_tensor_3d(ring + stage_offset + C::kWordBytes, x_map, 0, 0, step, full_barrier);
  };
  auto copy_first = [&](bool words, bool x) {
    if (!leader) return;
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) {
      if (step_begin + i < step_end)
        copy(step_begin + i, i * C::kStepBytes, full_barriers + i * kBarrierBytes, words, x);
    }
  };

  if (leader) {
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) ptx::mbarrier_init(full_barriers + i * kBarrierBytes, 1);
    ptx::fence_mbarrier_init();
  }
  if constexpr (C::kMayPrefetchWeights) copy_first(true, false);
  // TMA does not fill rows past m. Zero these rows, because mma reads them; the resulting rows of y are not stored.
  if constexpr (C::kRows > 1) {
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) {
#pragma unroll
      for (int chunk = lane; chunk < C::kXBytes / 16; chunk += 32) {
        float* target = shared + warp * C::kWarpFloats + (i * C::kStepBytes + C::kWordBytes) / 4 + chunk * 4;
        if (chunk >= m * (C::kStepK * 2 / 16)) store<true>(target, Vector<float, 4>{});
      }
    }
  }
  __syncwarp();
  if (lane % 4 == 0 && (g % 2 == 0 ? step_begin : (group + 1) * group_steps) < step_end) {
    // Prefetch the scales and zero points of the warp's first two groups; each of eight lanes takes a quarter of the
    // columns of one group.
    const int index = group + g % 2;
    const int first = weight_column<C, C::kBlockN>(tile, g / 2 * (C::kBlockN / 4), n);
    if (first < n) {
      ptx::prefetch_global_l2(scales + static_cast<int64_t>(index) * lds + first);
      if constexpr (C::kZeros == Zeros::kPacked) {
        ptx::prefetch_global_l2(static_cast<const uint32_t*>(zeros) + static_cast<int64_t>(index) * ldz + first / 8);
      }
    }
  }
  ptx::griddepcontrol_launch_dependents();
  if constexpr (C::kSplitK > 1) ptx::barrier_cluster_wait_acquire();

  // The accumulators of all groups before the current one, and of the current group, both [word][nibble pair][tile of 8
  // rows]; values are in units of RawCodes::kUnits.
  float accumulators[C::kWords][4][C::kTilesM][2][C::kOdd] = {};
  float group_sums[C::kWords][4][C::kTilesM][4] = {};
  float x_sums[C::kTilesM][4] = {};
  WordGroup<Scale, C::kZeros, true> parameters[C::kWords];
  // INVARIANT: the zero points in the form that Codes::low and Codes::high subtract, [word][odd column][nibble pair],
  // and the words of zero points of the next group.
  uint32_t group_zeros[C::kWords][2][4], next_zeros[C::kWords];
  auto fetch_zeros = [&](int index) {
#pragma unroll
    for (int w = 0; w < C::kWords; ++w) {
      next_zeros[w] = C::kZeros == Zeros::kOffset ? 0 : kSymmetricZeros;
      if constexpr (C::kZeros == Zeros::kPacked) {
        const int64_t row = min(index, k / group_size - 1);
        next_zeros[w] = static_cast<const uint32_t*>(zeros)[row * ldz + column / 8 + w];
      }
    }
  };
  auto fetch_group = [&] {
#pragma unroll
    for (int w = 0; w < C::kWords; ++w) {
      parameters[w].fetch(scales, zeros, group, lds, ldz, column + w * 8);
      if constexpr (C::kInvariant) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t pair = __byte_perm(next_zeros[w], next_zeros[w], odd ? 0x3232 : 0x1010);
          group_zeros[w][odd][0] = Codes<T>::zero_low(pair);
          group_zeros[w][odd][1] = Codes<T>::zero_high(pair);
          group_zeros[w][odd][2] = Codes<T>::zero_low(pair >> 8);
          group_zeros[w][odd][3] = Codes<T>::zero_high(pair >> 8);
        }
      }
    }
    if constexpr (C::kInvariant) fetch_zeros(group + 1);
  };
  auto close_group = [&] {
#pragma unroll
    for (int j = 0; j < C::kTilesM; ++j) {
#pragma unroll
      for (int odd = 0; odd < C::kOdd; ++odd) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x_sum = C::kInvariant ? -x_sums[j][odd] : -x_sums[j][odd] / RawCodes<T>::kUnits[i % 2];
#pragma unroll
          for (int w = 0; w < C::kWords; ++w) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int c = 2 * i + half;
              float& sum = accumulators[w][i][j][half][odd];
              float zero = RawCodes<T>::kOffset;
              if constexpr (C::kZeros != Zeros::kOffset) zero += static_cast<float>(code(parameters[w].zeros, c));
              const float group_sum = group_sums[w][i][j][half * 2 + odd];
              const float difference = C::kInvariant ? group_sum : fmaf(zero, x_sum, group_sum);
              sum = fmaf(difference, to_float(parameters[w].scales.values[c]), sum);
              if constexpr (C::kZeros == Zeros::kOffset) {
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
        for (int i = 0; i < 4 * C::kWords; ++i) group_sums[i / 4][i % 4][j][c] = 0.0f;
      }
    }
  };
  auto multiply = [&](uint32_t stage_offset) {
    uint32_t x_step[C::kTilesM][4];
#pragma unroll
    for (int j = 0; j < C::kTilesM; ++j) {
      const uint32_t begin = my_x + stage_offset + j * C::kXTileBytes;
      if constexpr (C::kInvariant) {
        uint32_t halves[2][2];
        ptx::ld_shared(halves[0], begin);
        ptx::ld_shared(halves[1], begin + 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) x_step[j][i] = halves[i / 2][i % 2];
      } else {
        ptx::ld_shared(x_step[j], begin);
      }
    }
    constexpr uint32_t kOnes[4] = {RawCodes<T>::kOne, RawCodes<T>::kOne, RawCodes<T>::kOne, RawCodes<T>::kOne};
#pragma unroll
    for (int k16 = 0; k16 < 2; ++k16) {
      uint32_t words[4][C::kWords];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int offset = C::kInvariant ? k16 * (C::kRangeBytes / 8) + i * (C::kRangeBytes / 4)
                                         : (k16 * 4 + i) * (C::kRangeBytes / 8);
        ptx::ld_shared(words[i], my_words + stage_offset + offset);
      }
      auto multiply_by = [&](int j, float (&c)[4], const uint32_t (&a)[4]) {
        mma<T>(c, a, x_step[j][2 * k16], x_step[j][2 * k16 + 1]);
      };
      if constexpr (!C::kInvariant || C::kZeros == Zeros::kOffset) {
#pragma unroll
        for (int j = 0; j < C::kTilesM; ++j) multiply_by(j, x_sums[j], kOnes);
      }
#pragma unroll
      for (int w = 0; w < C::kWords; ++w) {
        uint32_t codes[4][4];  // operand A for 16 k and four pairs of columns: [register of A][nibble pair]
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t pair = __byte_perm(words[i / 2 * 2][w], words[i / 2 * 2 + 1][w], i % 2 ? 0x7632 : 0x5410);
          if constexpr (C::kInvariant) {
            codes[i][0] = Codes<T>::low(pair, group_zeros[w][i % 2][0]);
            codes[i][1] = Codes<T>::high(pair, group_zeros[w][i % 2][1]);
            codes[i][2] = Codes<T>::low(pair >> 8, group_zeros[w][i % 2][2]);
            codes[i][3] = Codes<T>::high(pair >> 8, group_zeros[w][i % 2][3]);
          } else {
            RawCodes<T>::convert(codes[i], pair);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t a[4] = {codes[0][i], codes[1][i], codes[2][i], codes[3][i]};
#pragma unroll
          for (int j = 0; j < C::kTilesM; ++j) multiply_by(j, group_sums[w][i][j], a);
        }
      }
    }
  };

  auto fetch_first_group = [&] {
    if (step_begin >= step_end) return;
    if constexpr (C::kInvariant) fetch_zeros(group);
    fetch_group();
  };
  if constexpr (C::kMayPrefetchWeights) fetch_first_group();
  ptx::griddepcontrol_wait();
  copy_first(!C::kMayPrefetchWeights, true);
  if constexpr (!C::kMayPrefetchWeights) fetch_first_group();
  PipelineAddresses<C::kStages, C::kStepBytes> state{0, full_barriers, 0};
  for (int step = step_begin; step < step_end; ++step) {
    if (step == (group + 1) * group_steps) {
      close_group();
      ++group;
      fetch_group();
    }
    wait(state.full_barrier, state.phase);
    multiply(state.stage_offset);
    __syncwarp();
    if (leader && step + C::kStages < step_end)
      copy(step + C::kStages, state.stage_offset, state.full_barrier, true, true);
    state.advance(full_barriers);
  }
  if (step_begin < step_end) close_group();

#pragma unroll
  for (int j = 0; j < C::kTilesM; ++j) {
#pragma unroll
    for (int odd = 0; odd < C::kOdd; ++odd) {
      const int row = j * 8 + t * 2 + odd;
      if (row >= C::kRows) continue;
#pragma unroll
      for (int quad = 0; quad < 2 * C::kWords; ++quad) {
        Vector<float, 4> out;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int i = quad % 2 * 2 + c / 2;
          out.values[c] = accumulators[quad / 2][i][j][c % 2][odd];
          if constexpr (!C::kInvariant) out.values[c] *= RawCodes<T>::kUnits[i % 2];
        }
        store<true>(shared + warp * C::kWarpFloats + row * C::kSumStride + g * C::kWords * 8 + quad * 4, out);
      }
    }
  }
  __syncthreads();

  if constexpr (C::kSplitK > 1) {
    send_partial_sums<typename C::Sums>(storage, shared, split, 0, m);
    if (split != 0) return;
  }
  auto add_up = [&](float (&total)[4], int row, int local) {
    add_all<typename C::Sums>(total, storage, shared, shared + C::SharedStorage::Received::kBegin / 4, 0, row, local);
  };
  const Epilogue<T, C> epilogue{bias, residual, low, high, n, ldr};
  constexpr int kWidth = C::kGated ? C::kBlockN / 2 : C::kBlockN;
  for (int item = threadIdx.x; item < m * (kWidth / 4); item += C::kThreads) {
    const int row = item / (kWidth / 4);
    const int local = item % (kWidth / 4) * 4;
    const int out_column = tile * kWidth + local;
    if (out_column >= (C::kGated ? n / 2 : n)) continue;
    float total[4];
    add_up(total, row, local);
    Vector<T, 4> out;
    if constexpr (C::kGated) {
      float up[4];
      add_up(up, row, local + kWidth);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        out.values[c] = epilogue.finish_gated(total[c], up[c], row, out_column + c);
      }
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) out.values[c] = epilogue.finish(total[c], row, out_column + c);
    }
    store<true>(y + static_cast<int64_t>(row) * ldy + out_column, out);
  }
}

using Kernel = GemmSm90Raw<Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    gemm_sm90_raw(const SCALE* scales, const void* zeros, const BIAS* bias, const X* residual, X* y,
                  const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, int m, int n, int k,
                  int group_size, int lds, int ldz, int ldr, int ldy, float low, float high) {
  gemm_sm90_raw_tile<Kernel>(scales, zeros, bias, residual, y, &w_map, &x_map, m, n, k, group_size, lds, ldz, ldr, ldy,
                             low, high);
}
