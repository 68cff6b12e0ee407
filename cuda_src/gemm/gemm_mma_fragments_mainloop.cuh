// SPDX-License-Identifier: Apache-2.0
// The main loop of gemm_mma_fragments.cu: the products of a slice of a CTA for one unit, from stages in shared memory
// to accumulators in registers.
#pragma once

#include "gemm/gemm_mma_fragments_copies.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ldmatrix.cuh"

// Synchronizes the warps of one slice of K by a named barrier, or by __syncwarp if a slice is one warp.
template <class C> __device__ __forceinline__ void sync_slice(int slice) {
  if constexpr (C::kWarpsN == 1) {
    __syncwarp();
  } else if constexpr (C::kSlices == 1) {
    __syncthreads();
  } else {
    ptx::barrier_sync(1 + slice, C::kSliceThreads);
  }
}

// The scales and zero points of one group for a lane's columns of an mma tile of 16 columns.
template <class C> struct GroupOperands {
  using T = typename C::T;

  ScaledCodes<T, C> scaled;  // with kScaled, what converts codes to scaled weights
  uint32_t zeros;            // with kExact, the zero points as ExactCodes subtracts them
  float scales[2];           // with kExact, the scales of columns g and g + 8 (lane 4 g + t)

  GroupOperands() = default;
  __device__ __forceinline__ GroupOperands(const Group<C>& group, const typename ScaledCodes<T, C>::Factor& factor) {
    if constexpr (C::kMath == Math::kScaled) {
      scaled = ScaledCodes<T, C>(group, factor);
    } else {
      zeros = ExactCodes<T>::zeros(group.zeros);
      scales[0] = group.scale(0);
      scales[1] = group.scale(1);
    }
  }
  // Converts the eight codes of a step: a word of 4-bit codes, or two words of 8-bit codes.
  template <class Words> __device__ __forceinline__ void convert(uint32_t (&a)[4], const Words& words) const {
    if constexpr (C::kMath == Math::kExact) ExactCodes<T>::convert(a, words, zeros);
    if constexpr (C::kMath == Math::kScaled) scaled.convert(a, words);
  }
  // Returns the factor by which the epilogue multiplies the accumulators.
  static __device__ __forceinline__ float unit(float result_factor) {
    if constexpr (C::kMath == Math::kExact) return ExactCodes<T>::kUnit;
    return result_factor;
  }
};

template <class C> using Accumulators = float[C::kN16Tiles][C::kM8Tiles][4];

// The main loop of one slice of K: adds the products of its part of a tile's K to the accumulators of its warps.
template <class C> class MainLoop {
  using T = typename C::T;

 public:
  __device__ __forceinline__ MainLoop(uint32_t ring, int slice, float scale_factor)
      : slice_(slice), factor_(scale_factor) {
    const int lane = threadIdx.x % 32;
    const uint32_t weight = ring + C::kXStageBytes + uniform_warp() % C::kWarpsN * (C::kWarpColumns * C::kPartBytes);
    codes_ = weight + lane * 16;
    scales_ = weight + C::kStageCodeBytes + lane / 4 * 4;
    zeros_ = weight + C::kStageCodeBytes + 32 + lane / 4 * 2;
    // ldmatrix loads matrices 0 and 1 from rows 0 .. 7 of x at k 0 .. 7 and k 8 .. 15, and matrices 2 and 3 from rows 8
    // .. 15 at the same k. With 8 rows, it loads all four matrices from these rows, at k 0 .. 31; lanes past the last
    // row of x load that row again, and the resulting rows of y are not stored.
    const int row = C::kM8Tiles == 1 ? min(lane % 8, C::kXRows - 1) : lane / 16 * 8 + lane % 8;
    const int chunk = C::kM8Tiles == 1 ? lane / 8 : lane / 8 % 2;
    x_ = ring + row * 128 + (chunk ^ swizzle_bits(row)) * 16;
  }

  // Starts the copies of the first stages of the slice's `weight_tiles` weight tiles. In a dependent launch, those of
  // the weight start before the preceding kernel has finished, which may write x.
  __device__ __forceinline__ void begin(Copies<C>& copies, int weight_tiles) {
    if constexpr (C::kDependent) {
      fill<0, false, true>(copies, weight_tiles * C::kParts);
      ptx::griddepcontrol_wait();
      fill<0, true, false>(copies, weight_tiles * C::kParts);
    } else if constexpr (C::kAsync) {
      fill<0>(copies, weight_tiles * C::kParts);
    } else {
      if (weight_tiles > 0) copies.template load_next<0>();
    }
  }

  // Adds the products of the slice's weight tiles (128 k each), stage by stage.
  __device__ __forceinline__ void run(Accumulators<C>& accumulators, Copies<C>& copies, int weight_tiles) {
    const int stages = weight_tiles * C::kParts;
    if (stages <= 0) return;
    if constexpr (C::kAsync) {
      ptx::cp_async_wait_group<C::kStages - 1>();
    } else {
      copies.store_loaded(0);
    }
    sync_slice<C>(slice_);
    load_codes(0);
    load_group(0, 0);
    load_x<0>(0);
    begin_group();
    convert(0);
    int stage_idx = 0;
#pragma unroll 1
    for (int index = 0; index < stages; index += C::kParts) {
      multiply_stage<0>(accumulators, copies, index, stages, stage_idx);
      if constexpr (C::kParts == 2) multiply_stage<1>(accumulators, copies, index + 1, stages, stage_idx);
    }
  }

 private:
  // Starts the copies of the first stages: of x, of the weight, or of both. The copies of a stage are one group of
  // cp.async, which may be empty; copies of the weight alone join the first group.
  template <int INDEX, bool kX = true, bool kWeight = true>
  static __device__ __forceinline__ void fill(Copies<C>& copies, int stages) {
    if constexpr (INDEX < C::kStages) {
      if (INDEX < stages) copies.template start<INDEX % C::kParts, kX, kWeight>(INDEX);
      if constexpr (kX) ptx::cp_async_commit_group();
      fill<INDEX + 1, kX, kWeight>(copies, stages);
    }
  }
  // Multiplies stage `index`, which is part PART of a weight tile and lies at `stage_idx` of the ring, from turn TURN
  // on; the operands of this turn are loaded and converted.
  template <int PART, int TURN = 0> __device__ __forceinline__ void multiply_stage(Accumulators<C>& accumulators,
                                                                                   Copies<C>& copies, int index,
                                                                                   int stages, int& stage_idx) {
    constexpr int kStep = TURN / kStepTurns;
    constexpr bool kEndsStep = (TURN + 1) % kStepTurns == 0;
    constexpr bool kEndsGroup = kEndsStep && (kStep + 1) % C::kGroupSteps == 0;
    const uint32_t stage = stage_idx * C::kStageBytes;
    if constexpr (!C::kAsync && TURN == 0) {
      if (index + 1 < stages) copies.template load_next<(PART + 1) % C::kParts>();
    }
    if constexpr (TURN + 1 < kTurns) {
      if constexpr (kEndsGroup) load_group(stage, (kStep + 1) / C::kGroupSteps);
      load_x<TURN + 1>(stage);
    } else if (index + 1 < stages) {
      const int finished = stage_idx;
      stage_idx = stage_idx + 1 == C::kStages ? 0 : stage_idx + 1;
      if constexpr (C::kAsync) {
        ptx::cp_async_wait_group<C::kStages - 2>();
      } else {
        copies.store_loaded(stage_idx);
      }
      // Stage index + 1 has landed, and all warps of the slice have loaded the operands of stage `index`.
      sync_slice<C>(slice_);
      const uint32_t next = stage_idx * C::kStageBytes;
      load_codes(next);
      load_group(next, 0);
      load_x<0>(next);
      if constexpr (C::kAsync) {
        if (index + C::kStages < stages) copies.template start<(PART + C::kStages) % C::kParts>(finished);
        ptx::cp_async_commit_group();
      }
    }
    multiply<TURN>(accumulators);
    if constexpr (kEndsGroup) {
      if constexpr (!C::kScalesWeight) end_group(accumulators);
      begin_group();
    }
    if constexpr (kEndsStep) convert((kStep + 1) % C::kSteps);
    if constexpr (TURN + 1 < kTurns) multiply_stage<PART, TURN + 1>(accumulators, copies, index, stages, stage_idx);
  }

  __device__ __forceinline__ void load_codes(uint32_t stage) {
#pragma unroll
    for (int k64 = 0; k64 < C::kK64Parts; ++k64) {
#pragma unroll
      for (int i = 0; i < C::kN16Tiles; ++i) {
#pragma unroll
        for (int v = 0; v < C::kCodeVectors; ++v) {
          const int offset = i / 2 * C::kPartBytes + ((k64 * 2 + i % 2) * C::kCodeVectors + v) * 512;
          ptx::ld_shared(words_[k64][i][v].values, codes_ + stage + offset);
        }
      }
    }
  }
  __device__ __forceinline__ void load_group(uint32_t stage, int group) {
#pragma unroll
    for (int i = 0; i < C::kN16Tiles; ++i) {
      const uint32_t begin = stage + i / 2 * C::kPartBytes + i % 2 * C::kHalfGroupBytes;
      groups_[i] = Group<C>::load_shared(scales_ + begin, zeros_ + begin, group);
    }
  }
  // Loads the rows of x (operand B) for a turn; with 8 rows of x, for two turns at once.
  template <int TURN> __device__ __forceinline__ void load_x(uint32_t stage) {
    constexpr int kStep = TURN / kStepTurns;
    constexpr int kBegin = kStep / 4 * (C::kXRows * 128) + TURN % kStepTurns * (kTurnM8Tiles * 8 * 128);
    if constexpr (C::kM8Tiles > 1) {
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
    for (int i = 0; i < C::kN16Tiles; ++i) {
      if constexpr (C::kBits == 4) {
        operands_[i].convert(a_[step % 2][i], words_[step / 4][i][0].values[step % 4]);
      } else {
        const uint32_t* words = words_[step / 4][i][step / 2 % 2].values + step % 2 * 2;
        const uint32_t pair[2] = {words[0], words[1]};
        operands_[i].convert(a_[step % 2][i], pair);
      }
    }
  }
  template <int TURN> __device__ __forceinline__ void multiply(Accumulators<C>& accumulators) {
    constexpr int kStep = TURN / kStepTurns;
#pragma unroll
    for (int j = 0; j < kTurnM8Tiles; ++j) {
      const uint32_t* b = C::kM8Tiles == 1 ? b_[kStep / 2 % 2][0] + kStep % 2 * 2 : b_[TURN % 2][j / 2] + j % 2 * 2;
      const int row = TURN % kStepTurns * kTurnM8Tiles + j;
#pragma unroll
      for (int i = 0; i < C::kN16Tiles; ++i) {
        mma<T>(C::kScalesWeight ? accumulators[i][row] : sums_[i][row], a_[kStep % 2][i], b[0], b[1]);
      }
    }
  }
  // Begins a group: makes operands_ of the scales and zero points that load_group has loaded, and sets the sums over
  // the group to 0.
  __device__ __forceinline__ void begin_group() {
#pragma unroll
    for (int i = 0; i < C::kN16Tiles; ++i) {
      operands_[i] = GroupOperands<C>(groups_[i], factor_);
#pragma unroll
      for (int j = 0; j < C::kM8Tiles; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums_[i][j][v] = 0.0f;
      }
    }
  }
  // Adds the sums over a group, multiplied by the group's scales, to the accumulators.
  __device__ __forceinline__ void end_group(Accumulators<C>& accumulators) const {
#pragma unroll
    for (int i = 0; i < C::kN16Tiles; ++i) {
#pragma unroll
      for (int j = 0; j < C::kM8Tiles; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          accumulators[i][j][v] = fmaf(sums_[i][j][v], operands_[i].scales[v / 2], accumulators[i][j][v]);
        }
      }
    }
  }

  // A step takes one turn, or two turns of half of the rows, so that fewer registers hold operand B.
  static constexpr int kStepTurns = C::kBlockM > 64 ? 2 : 1;
  static constexpr int kTurns = C::kSteps * kStepTurns;
  static constexpr int kTurnM8Tiles = C::kM8Tiles / kStepTurns;

  int slice_;
  typename ScaledCodes<T, C>::Factor factor_;
  // Shared addresses of what this lane reads in stage 0: codes, scales, zero points, x.
  uint32_t codes_, scales_, zeros_, x_;
  Vector<uint32_t, 4> words_[C::kK64Parts][C::kN16Tiles][C::kCodeVectors];
  Group<C> groups_[C::kN16Tiles];
  GroupOperands<C> operands_[C::kN16Tiles];
  uint32_t a_[2][C::kN16Tiles][4];
  uint32_t b_[2][ceil_div(kTurnM8Tiles, 2)][4];
  Accumulators<C> sums_;
};

// Stores the warp's accumulators of kPassRows rows, from row `first` of the tile on, to shared memory.
template <class C> __device__ __forceinline__ void store_accumulators(float* target,
                                                                      const Accumulators<C>& accumulators, int first,
                                                                      float unit) {
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  float* mine = target + warp / C::kWarpsN * (C::kPassRows * C::kPitch) + lane % 4 * 2 * C::kPitch +
                warp % C::kWarpsN * C::kWarpColumns * kWeightTileN + lane / 4;
#pragma unroll
  for (int j = 0; j < C::kPassRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < C::kN16Tiles; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        mine[(j * 8 + v % 2) * C::kPitch + i * 16 + v / 2 * 8] = accumulators[i][first / 8 + j][v] * unit;
      }
    }
  }
}
