// SPDX-License-Identifier: Apache-2.0
// GEMM on the repacked weight with mma m16n8k16, for any M.
//
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n])
//
//   weight         the repacked layout of repacked_layout.cuh
//   bias           BIAS [n] or null
//   residual       X [m, n], row stride ldr values, or null
//   y              X [m, n] (gated: [m, n / 2]), row stride ldy values
//   partials       float32 [CTA][BLOCK_M][columns of a CTA tile], the sums of units that CTAs share
//   counters       uint32 [stream-K units], zero before and after the launch
//   x              X [m, k], row stride ldx values; rows start at multiples of 16 bytes
//   stream_k_units, stream_k_ctas   see StreamKTileScheduler
//   scale_factor   with MATH = kScaled, a power of two that moves the scales to the middle of X's range
//   result_factor  1 / scale_factor
//
// Limits: k % 64 == 0; n % 8 == 0 (gated: n % 64 == 0); sm_80 and newer. ALIGNED = 1 requires that the rows of y and of
// the residual start at multiples of 16 bytes.
//
// The kernel computes y^T = W^T x^T: the weight is operand A, which a warp converts in registers once for all BLOCK_M
// rows of x; x is operand B, loaded by ldmatrix. A warp computes WEIGHT_TILES * 32 columns of the CTA tile. WARPS_N
// warps are a slice: they share a ring of STAGES stages, which they fill with cp.async, and compute every WARPS_K-th
// weight tile along K. With few rows of x, a slice is a single warp, which needs no barrier in the main loop.
//
// The main loop loads and converts the operands of a step of 16 k during the mma of the preceding step. Before the last
// step of a stage, all operands of the stage are in registers, so the stage is refilled there.
#include "common/warp.cuh"
#include "gemm/gemm_mma_fragments.cuh"
#include "gemm/gemm_mma_fragments_epilogue.cuh"
#include "hopper/swizzle.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

static_assert(__CUDA_ARCH__ >= 800, "gemm_mma_fragments needs sm_80");

// Synchronizes the warps of a slice.
__device__ __forceinline__ void sync_slice(int slice) {
  if constexpr (kWarpsN == 1) {
    __syncwarp();
  } else if constexpr (kSlices == 1) {
    __syncthreads();
  } else {
    ptx::barrier_sync(1 + slice, kSliceThreads);
  }
}

// Copies the stages of a slice, in order. A warp copies the codes and groups of its own tile columns. Addresses are
// 64-bit addresses that all lanes share, plus 32-bit offsets.
class Copies {
 public:
  __device__ __forceinline__ Copies(const X* x, const uint8_t* weight, const Scheduler& scheduler,
                                    const TileCoordinates& tile, uint32_t ring, int slice, int m, int n, int k, int ldx)
      : ring_(ring), k_left_(k - (scheduler.k_tile_begin + slice) * kWeightTileK) {
    const int lane = threadIdx.x % 32;
    const int warp = uniform_warp() % kWarpsN;
    const int thread = warp * 32 + lane;
    // In a gated tile, the first half of the tile columns belongs to the gate projection, the second half to the up
    // projection.
    constexpr int kAdjacent = kGated ? kTileColumns / 2 : kTileColumns;
    const TileColumns<Config> columns(weight, tile.n_block * kAdjacent, scheduler.k_tile_begin + slice, n, k);
    weight_ = columns.begin;
#pragma unroll
    for (int i = 0; i < kWarpColumns; ++i) {
      const int column = warp * kWarpColumns + i;
      const int index = column < kAdjacent ? column : n / 2 / kWeightTileN + column - kAdjacent;
      weight_offsets_[i] = min(index, columns.last) * columns.column_bytes + lane * 16;
    }
    weight_target_ = kXStageBytes + warp * kWarpColumns * kPartBytes + lane * 16;
    const int row_begin = tile.m_block * kBlockM;
    x_ = reinterpret_cast<const uint8_t*>(x + static_cast<int64_t>(row_begin) * ldx +
                                          (scheduler.k_tile_begin + slice) * kWeightTileK);
#pragma unroll
    for (int i = 0; i < kXPasses; ++i) {
      const int index = i * kSliceThreads + thread;
      // Rows past m are copies of the last row; the resulting rows of y are not stored.
      const int row = min(index / 8 % kXRows, m - 1 - row_begin);
      x_offsets_[i] = (row * ldx + index / (8 * kXRows) * 64 + index % 8 * 8) * sizeof(X);
    }
    x_target_ = thread / 8 * 128 + (thread % 8 ^ swizzle_bits(thread / 8 % kXRows)) * 16;
  }

  // Starts the copies of the next stage, part `PART` of a weight tile, into stage `stage_idx`.
  template <int PART>
  __device__ __forceinline__ void start(int stage_idx) {
    const uint32_t stage = ring_ + stage_idx * kStageBytes;
#pragma unroll
    for (int i = 0; i < kXPasses; ++i) {
      const int first = i * kSliceThreads;
      if (first + kSliceThreads > kXChunks && first + thread_in_slice() >= kXChunks) continue;
      // The last weight tile may be longer than K; zeros fill it.
      const int k64 = (8 * kXRows % kSliceThreads == 0 ? first : first + thread_in_slice()) / (8 * kXRows);
      // A pass of four rows changes bit 2 of the row, so that the swizzle flips bit 2 of the chunk.
      const uint32_t target = kXRows % 8 == 0 && kSliceThreads == 32 ? x_target_ ^ i % 2 * 64 : x_target_;
      ptx::cp_async_16(stage + target + first / 8 * 128, x_ + x_offsets_[i] + PART * 128,
                       (PART * kK64Parts + k64) * 64 < k_left_ ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < kWarpColumns; ++i) {
      const uint32_t target = stage + weight_target_ + i * kPartBytes;
      const uint8_t* source = weight_ + weight_offsets_[i];
#pragma unroll
      for (int byte = 0; byte < kStageCodeBytes; byte += 512) {
        ptx::cp_async_16(target + byte, source + PART * kStageCodeBytes + byte, 16);
      }
      constexpr int kGroupsBegin = kCodeBytes + (kGroups > 1 ? PART * kStageGroups * kGroupBytes : 0);
#pragma unroll
      for (int byte = 0; byte < kStageGroups * kGroupBytes; byte += 512) {
        if (byte + static_cast<int>(threadIdx.x % 32) * 16 >= kStageGroups * kGroupBytes) continue;
        ptx::cp_async_16(target + kStageCodeBytes + byte, source + kGroupsBegin + byte, 16);
      }
    }
    if constexpr (PART + 1 == kParts) {
      x_ += kSlices * kWeightTileK * sizeof(X);
      weight_ += kSlices * kWeightTileBytes;
      k_left_ -= kSlices * kWeightTileK;
    }
  }

 private:
  static constexpr int kXChunks = kXRows * kStageK / 8;
  static constexpr int kXPasses = ceil_div(kXChunks, kSliceThreads);

  static_assert(kWarpsN == 1 || kWarpsN % 2 == 0, "the rows of a pass are a multiple of 8, or 4");

  static __device__ __forceinline__ int thread_in_slice() { return threadIdx.x % kSliceThreads; }

  uint32_t ring_;
  int k_left_;  // number of rows of W from the current weight tile to the end of K
  const uint8_t* weight_;
  uint32_t weight_offsets_[kWarpColumns];
  uint32_t weight_target_;
  const uint8_t* x_;
  uint32_t x_offsets_[kXPasses];
  uint32_t x_target_;
};

// Converts codes to operand A with one fma: a value is (q * s - z * s) * factor * 2^-15, where z * s is rounded to
// float16 and the difference is rounded again. `factor` moves the largest scale to at most 64, so that no intermediate
// value overflows. As the bits of a float16, a code in the lowest four bits is the subnormal q * 2^-24, a code four
// bits higher is q * 2^-20; the former are those of column g, the latter those of column g + 8.
struct FusedCodes {
  static constexpr float kUnit = 32768.0f;
  static constexpr uint32_t kScaleFactors = 0x50006000u;  // 2^5 and 2^9: exponents 20 and 24, << 10
  static constexpr uint32_t kZeroFactor = 0x82008200u;    // -2^-15, a subnormal
  static constexpr uint32_t kMinus1024 = 0xe400e400u;
  static constexpr uint32_t kOne = 0x3c003c00u;

  uint32_t scales, zeros;

  FusedCodes() = default;
  __device__ __forceinline__ FusedCodes(const Group<Config>& group, float factor) {
    const uint32_t scaled = pack<half_t>(group.scale(0) * factor, group.scale(1) * factor);
    scales = ptx::mul_f16x2(scaled, kScaleFactors);
    const uint32_t z = ptx::fma_f16x2(__byte_perm(group.zeros, 0x64u, 0x4140), kOne, kMinus1024);
    zeros = ptx::mul_f16x2(ptx::mul_f16x2(z, scaled), kZeroFactor);
  }
  __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const uint32_t part = word >> (8 * upper);
      a[2 * upper] = ptx::fma_f16x2(part & 0x000f000fu, ptx::twice<0>(scales), ptx::twice<0>(zeros));
      a[2 * upper + 1] = ptx::fma_f16x2(part & 0x00f000f0u, ptx::twice<1>(scales), ptx::twice<1>(zeros));
    }
  }
};

// The parameters of one group for the 16 columns of an mma tile.
struct GroupOperands {
  ScaledCodes<X, Config> scaled;  // kScaled
  FusedCodes fused;               // kFused
  uint32_t zeros;                 // kExact: in the form that ExactCodes takes
  float scales[2];                // kRaw, kExact: of columns g and g + 8
  float minus_zeros[2];           // kRaw

  GroupOperands() = default;
  __device__ __forceinline__ GroupOperands(const Group<Config>& group,
                                           const typename ScaledCodes<X, Config>::Factor& factor) {
    if constexpr (kMath == Math::kScaled) {
      scaled = ScaledCodes<X, Config>(group, factor);
    } else if constexpr (kMath == Math::kFused) {
      fused = FusedCodes(group, factor.value);
    } else {
      if constexpr (kMath == Math::kExact) zeros = ExactCodes<X>::zeros(group.zeros);
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        scales[upper] = group.scale(upper);
        if constexpr (kMath == Math::kRaw) minus_zeros[upper] = -(group.zero(upper) + RawCodes<X>::kOffset);
      }
    }
  }
  __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) const {
    if constexpr (kMath == Math::kRaw) RawCodes<X>::convert(a, word);
    if constexpr (kMath == Math::kExact) ExactCodes<X>::convert(a, word, zeros);
    if constexpr (kMath == Math::kScaled) scaled.convert(a, word);
    if constexpr (kMath == Math::kFused) fused.convert(a, word);
  }
};

using Accumulators = float[kN16Tiles][kM8Tiles][4];

// The factor of accumulator v of an mma tile.
__device__ __forceinline__ float unit(int v, float result_factor) {
  if constexpr (kMath == Math::kRaw) return RawCodes<X>::kUnits[v / 2];
  if constexpr (kMath == Math::kExact) return ExactCodes<X>::kUnit;
  if constexpr (kMath == Math::kFused) return result_factor * FusedCodes::kUnit;
  return result_factor;
}

// Computes the accumulators of a slice for one unit.
class MainLoop {
 public:
  __device__ __forceinline__ MainLoop(uint32_t ring, int slice, float scale_factor)
      : slice_(slice), factor_(scale_factor) {
    const int lane = threadIdx.x % 32;
    const uint32_t weight = ring + kXStageBytes + uniform_warp() % kWarpsN * (kWarpColumns * kPartBytes);
    codes_ = weight + lane * 16;
    scales_ = weight + kStageCodeBytes + lane / 4 * 4;
    zeros_ = weight + kStageCodeBytes + 32 + lane / 4 * 2;
    // ldmatrix loads matrices 0 and 1 from rows 0 .. 7 of x at k 0 .. 7 and k 8 .. 15, and matrices 2 and 3 from rows 8
    // .. 15 at the same k. With 8 rows, it loads all four matrices from these rows, at k 0 .. 31; lanes past the last
    // row of x load that row again, and the resulting rows of y are not stored.
    const int row = kM8Tiles == 1 ? min(lane % 8, kXRows - 1) : lane / 16 * 8 + lane % 8;
    const int chunk = kM8Tiles == 1 ? lane / 8 : lane / 8 % 2;
    x_ = ring + row * 128 + (chunk ^ swizzle_bits(row)) * 16;
  }

  // Adds the products of the slice's `weight_tiles` weight tiles.
  __device__ __forceinline__ void run(Accumulators& accumulators, Copies& copies, int weight_tiles) {
    const int stages = weight_tiles * kParts;
    if (stages <= 0) return;
    fill<0>(copies, stages);
    ptx::cp_async_wait_group<kStages - 1>();
    sync_slice(slice_);
    load_codes(0);
    load_group(0, 0);
    load_x<0>(0);
    begin_group();
    convert(0);
    int stage_idx = 0;
#pragma unroll 1
    for (int index = 0; index < stages; index += kParts) {
      multiply_stage<0>(accumulators, copies, index, stages, stage_idx);
      if constexpr (kParts == 2) multiply_stage<1>(accumulators, copies, index + 1, stages, stage_idx);
    }
  }

 private:
  // Starts the copies of the first stages. The copies of a stage are one group of cp.async, which may be empty.
  template <int INDEX>
  __device__ __forceinline__ void fill(Copies& copies, int stages) {
    if constexpr (INDEX < kStages) {
      if (INDEX < stages) copies.start<INDEX % kParts>(INDEX);
      ptx::cp_async_commit_group();
      fill<INDEX + 1>(copies, stages);
    }
  }
  // Multiplies stage `index`, which is part PART of a weight tile and lies at `stage_idx` of the ring, from turn TURN
  // on; the operands of this turn are loaded and converted.
  template <int PART, int TURN = 0>
  __device__ __forceinline__ void multiply_stage(Accumulators& accumulators, Copies& copies, int index, int stages,
                                                 int& stage_idx) {
    constexpr int kStep = TURN / kStepTurns;
    constexpr bool kEndsStep = (TURN + 1) % kStepTurns == 0;
    constexpr bool kEndsGroup = kEndsStep && (kStep + 1) % kGroupSteps == 0;
    const uint32_t stage = stage_idx * kStageBytes;
    if constexpr (TURN + 1 < kTurns) {
      if constexpr (kEndsGroup) load_group(stage, (kStep + 1) / kGroupSteps);
      load_x<TURN + 1>(stage);
    } else if (index + 1 < stages) {
      // Stage index + 1 has landed, and all warps of the slice have loaded the operands of stage `index`.
      ptx::cp_async_wait_group<kStages - 2>();
      sync_slice(slice_);
      const int refilled = stage_idx;
      stage_idx = stage_idx + 1 == kStages ? 0 : stage_idx + 1;
      const uint32_t next = stage_idx * kStageBytes;
      load_codes(next);
      load_group(next, 0);
      load_x<0>(next);
      if (index + kStages < stages) copies.start<(PART + kStages) % kParts>(refilled);
      ptx::cp_async_commit_group();
    }
    multiply<TURN>(accumulators);
    if constexpr (kEndsGroup) {
      if constexpr (!kScalesWeight) end_group(accumulators);
      begin_group();
    }
    if constexpr (kEndsStep) convert((kStep + 1) % kSteps);
    if constexpr (TURN + 1 < kTurns) multiply_stage<PART, TURN + 1>(accumulators, copies, index, stages, stage_idx);
  }

  __device__ __forceinline__ void load_codes(uint32_t stage) {
#pragma unroll
    for (int k64 = 0; k64 < kK64Parts; ++k64) {
#pragma unroll
      for (int i = 0; i < kN16Tiles; ++i) {
        const int offset = i / 2 * kPartBytes + (k64 * 2 + i % 2) * 512;
        ptx::ld_shared(words_[k64][i].values, codes_ + stage + offset);
      }
    }
  }
  __device__ __forceinline__ void load_group(uint32_t stage, int group) {
#pragma unroll
    for (int i = 0; i < kN16Tiles; ++i) {
      const uint32_t begin = stage + i / 2 * kPartBytes + i % 2 * kHalfGroupBytes;
      groups_[i] = Group<Config>::load_shared(scales_ + begin, zeros_ + begin, group);
    }
  }
  // Loads operand B of a turn; with 8 rows, of two turns.
  template <int TURN>
  __device__ __forceinline__ void load_x(uint32_t stage) {
    constexpr int kStep = TURN / kStepTurns;
    constexpr int kBegin = kStep / 4 * (kXRows * 128) + TURN % kStepTurns * (kTurnM8Tiles * 8 * 128);
    if constexpr (kM8Tiles > 1) {
      load_x_pairs<kBegin>(b_[TURN % 2], (x_ ^ kStep % 4 * 32) + stage);
    } else if constexpr (kStep % 2 == 0) {
      ptx::ldmatrix_x4<kBegin>(b_[kStep / 2 % 2][0], (x_ ^ kStep / 2 % 2 * 64) + stage);
    }
  }
  template <int BEGIN, int PAIR = 0, int PAIRS>
  static __device__ __forceinline__ void load_x_pairs(uint32_t (&b)[PAIRS][4], uint32_t address) {
    if constexpr (PAIR < PAIRS) {
      ptx::ldmatrix_x4<BEGIN + PAIR * (16 * 128)>(b[PAIR], address);
      load_x_pairs<BEGIN, PAIR + 1>(b, address);
    }
  }
  __device__ __forceinline__ void convert(int step) {
#pragma unroll
    for (int i = 0; i < kN16Tiles; ++i) {
      operands_[i].convert(a_[step % 2][i], words_[step / 4][i].values[step % 4]);
    }
  }
  template <int TURN>
  __device__ __forceinline__ void multiply(Accumulators& accumulators) {
    constexpr int kStep = TURN / kStepTurns;
#pragma unroll
    for (int j = 0; j < kTurnM8Tiles; ++j) {
      const uint32_t* b = kM8Tiles == 1 ? b_[kStep / 2 % 2][0] + kStep % 2 * 2 : b_[TURN % 2][j / 2] + j % 2 * 2;
      const int row = TURN % kStepTurns * kTurnM8Tiles + j;
#pragma unroll
      for (int i = 0; i < kN16Tiles; ++i) {
        mma<X>(kScalesWeight ? accumulators[i][row] : sums_[i][row], a_[kStep % 2][i], b[0], b[1]);
      }
      if constexpr (kMath == Math::kRaw) {
        constexpr uint32_t kOnes[4] = {RawCodes<X>::kOnes[0], RawCodes<X>::kOnes[1], RawCodes<X>::kOnes[0],
                                       RawCodes<X>::kOnes[1]};
        mma<X>(x_sums_[row], kOnes, b[0], b[1]);
      }
    }
  }
  // Prepares the group that load_group has loaded.
  __device__ __forceinline__ void begin_group() {
#pragma unroll
    for (int i = 0; i < kN16Tiles; ++i) {
      operands_[i] = GroupOperands(groups_[i], factor_);
#pragma unroll
      for (int j = 0; j < kM8Tiles; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums_[i][j][v] = x_sums_[j][v] = 0.0f;
      }
    }
  }
  // Adds the sums of a group to the accumulators.
  __device__ __forceinline__ void end_group(Accumulators& accumulators) {
#pragma unroll
    for (int i = 0; i < kN16Tiles; ++i) {
#pragma unroll
      for (int j = 0; j < kM8Tiles; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          float sum = sums_[i][j][v];
          if constexpr (kMath == Math::kRaw) sum = fmaf(operands_[i].minus_zeros[v / 2], x_sums_[j][v], sum);
          accumulators[i][j][v] = fmaf(sum, operands_[i].scales[v / 2], accumulators[i][j][v]);
        }
      }
    }
  }

  // A step takes one turn, or two turns of half of the rows, so that fewer registers hold operand B.
  static constexpr int kStepTurns = kBlockM > 64 ? 2 : 1;
  static constexpr int kTurns = kSteps * kStepTurns;
  static constexpr int kTurnM8Tiles = kM8Tiles / kStepTurns;

  int slice_;
  typename ScaledCodes<X, Config>::Factor factor_;
  uint32_t codes_, scales_, zeros_, x_;  // the shared addresses of this lane's operands in stage 0
  Vector<uint32_t, 4> words_[kK64Parts][kN16Tiles];
  Group<Config> groups_[kN16Tiles];
  GroupOperands operands_[kN16Tiles];
  uint32_t a_[2][kN16Tiles][4];
  uint32_t b_[2][ceil_div(kTurnM8Tiles, 2)][4];
  Accumulators sums_;
  float x_sums_[kM8Tiles][4];
};

// Stores the warp's accumulators of kPassRows rows, from row `first` of the tile on, to shared memory.
__device__ __forceinline__ void store_accumulators(float* target, const Accumulators& accumulators, int first,
                                                   float result_factor) {
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  float* mine = target + warp / kWarpsN * (kPassRows * kPitch) + lane % 4 * 2 * kPitch +
                warp % kWarpsN * kWarpColumns * kWeightTileN + lane / 4;
#pragma unroll
  for (int j = 0; j < kPassRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < kN16Tiles; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        mine[(j * 8 + v % 2) * kPitch + i * 16 + v / 2 * 8] =
            accumulators[i][first / 8 + j][v] * unit(v, result_factor);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    gemm_mma_fragments(const uint8_t* weight, const BIAS* bias, const X* residual, X* y, float* partials,
                        uint32_t* counters, const X* x, int m, int n, int k, int ldr, int ldy, int ldx,
                        int stream_k_units, int stream_k_ctas, float low, float high, float scale_factor,
                        float result_factor) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int slice = uniform_warp() / kWarpsN;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + slice * (kStages * kStageBytes);
  float* shared_accumulators = reinterpret_cast<float*>(memory);
  const Output output{{bias, residual, low, high, n, ldr}, y, partials, m, n, ldy};
  Scheduler scheduler(ceil_div(m, kBlockM), ceil_div(kGated ? n / 2 : n, kStoreN), ceil_div(k, kWeightTileK),
                      stream_k_units, stream_k_ctas);
  while (scheduler.advance()) {
    const TileCoordinates tile = scheduler.tile(0);
    Accumulators accumulators = {};
    Copies copies(x, weight, scheduler, tile, ring, slice, m, n, k, ldx);
    MainLoop loop(ring, slice, scale_factor);
    const int weight_tiles = scheduler.k_tile_end - scheduler.k_tile_begin - slice;
    loop.run(accumulators, copies, ceil_div(weight_tiles, kSlices));
    uint32_t* counter = counters + scheduler.unit;
    if (kStreamK && scheduler.adds_partial_sums()) {
      wait_for_partial_sums(counter, scheduler.cluster_idx - scheduler.first_sharer());
    }
    for_each_constant<kBlockM / kPassRows>([&](int pass) {
      __syncthreads();  // the stages, or the accumulators of the preceding pass, are no longer read
      store_accumulators(shared_accumulators, accumulators, pass * kPassRows, result_factor);
      __syncthreads();
      output.store_pass(shared_accumulators, scheduler, tile, pass * kPassRows);
    });
    if (kStreamK && !scheduler.has_last_k_tile()) signal_partial_sums(counter);
    __syncthreads();  // the accumulators are no longer read
  }
}
