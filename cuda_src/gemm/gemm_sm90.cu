// SPDX-License-Identifier: Apache-2.0
// The GEMM of gemm_sm90.cuh with wgmma: the weight is operand A, in registers; x is operand B, in shared memory.
//
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n])
//
//   weight, bias, residual, y   as in gemm_sm90.cuh
//   x_map   tensor map of x as [k / 64][m][64], 128-byte swizzle; boxes are [2 * K_TILES][BLOCK_M][64]
//
// Scales are applied in one of two ways:
//   SCALED = 0   operand A holds codes minus zero points, exactly; the float32 accumulators of a group are multiplied
//                by its scale
//   SCALED = 1   operand A holds (q - z) * s * scale_factor, rounded once; the accumulators over all of K are
//                multiplied by result_factor at the end (both factors are powers of two)
//
// Limits: as for gemm_sm90.cuh; sm_90a. A consumer is WARPGROUPS warpgroups. Each computes M64_TILES * 64 columns of
// the CTA tile for all BLOCK_M rows, which are wgmma's N.
#include "gemm/gemm_sm90.cuh"
#include "gemm/gemm_sm90_config.cuh"
#include "hopper/wgmma.cuh"

static_assert(__CUDA_ARCH__ == 900, "gemm_sm90 needs sm_90a");

struct Config : GemmSm90Config {
  static constexpr int kWarpgroups = WARPGROUPS, kM64Tiles = M64_TILES;
  static constexpr bool kScaled = SCALED;
};

template <class Host> struct GemmSm90Wgmma : GemmSm90<Host> {
  // Bytes of half a k tile of x: BLOCK_M rows x 64 values, 128 bytes each.
  static constexpr int kXHalfBytes = Host::kBlockM * 128;
  // Number of accumulators per thread and m64 tile (64 columns of W x BLOCK_M rows of x).
  static constexpr int kAccumulators = Host::kBlockM / 2;
  static constexpr int kK16Steps = kWeightTileK / 16;

  static_assert(Host::kConsumerWarps == Host::kWarpgroups * 4, "a warpgroup is four warps");
  static_assert(Host::kXStageBytes == Host::kKTiles * 2 * kXHalfBytes &&
                    Host::kXRingBytes == Host::kStages * Host::kXStageBytes,
                "the producer copies x with the weight");
  static_assert(!Host::kScaled || Host::kStages >= 2 * Host::kConsumers,
                "a stage is released while its consumer multiplies the next one");
  static_assert(Host::kScaled || Host::kZeros != Zeros::kOffset, "offsets are added to scaled weights");
  static_assert(Host::kWeightTiles == Host::kWarpgroups * Host::kM64Tiles * 2, "a wgmma tile has 64 columns");
};

template <class C>
__device__ __forceinline__ void gemm_sm90_wgmma(const GemmArguments<C>& args, float scale_factor, float result_factor) {
  using T = typename C::T;
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  const int consumer = warp / C::kConsumerWarps;
  const int warpgroup = warp % C::kConsumerWarps / 4;
  float accumulators[C::kM64Tiles][C::kAccumulators] = {};

  // The shared addresses of this lane's codes, scales and zero points in stage 0, for the warpgroup's first weight
  // tile.
  struct Operands {
    uint32_t codes, scales, zeros;
  };
  const auto lane_operands = [&](const Tile<C>& tile) {
    const uint32_t weight_tile =
        tile.shared.weight(0) + (warpgroup * 2 + warp % 4 / 2) * C::kKTiles * C::kWeightTileBytes;
    const uint32_t scales = weight_tile + kCodeBytes + warp % 2 * C::kHalfGroupBytes + lane / 4 * 4;
    return Operands{ptx::opaque(weight_tile + warp % 2 * 512 + lane * 16), ptx::opaque(scales),
                    ptx::opaque(scales + 32 - lane / 4 * 2)};
  };
  // Returns the number of bytes to add to the addresses of `Operands` for m64 tile i and k tile `k_tile` of the stage
  // at `stage_offset`.
  const auto weight_tile_offset = [](uint32_t stage_offset, int i, int k_tile) {
    return stage_offset + (i * C::kWarpgroups * 2 * C::kKTiles + k_tile) * C::kWeightTileBytes;
  };

  // SCALED = 1: the warpgroup dequantizes the next slice (64 columns x 64 k) of the weight while the tensor cores
  // multiply the current slice.
  auto accumulate_scaled = [&](const Tile<C>& tile) {
    const auto pipeline = tile.shared.pipeline();
    auto state = PipelineState<C::kStages>::consumer(consumer);
    const Operands mine = lane_operands(tile);
    uint32_t preceding = 0;  // address of the preceding stage's empty barrier until that stage is released, then 0
    uint32_t a[2][4][4];
    const typename ScaledCodes<T, C>::Factor factor(scale_factor);
    for (int iteration = consumer; iteration < tile.iterations(); iteration += C::kConsumers) {
      pipeline.consumer_wait(state);
      const int k_tiles = tile.k_tiles(iteration);
      const uint32_t stage_offset = uniform(state.stage_idx * C::kWeightStageBytes);
#pragma unroll 1
      for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        const uint64_t x = ptx::wgmma_descriptor(tile.shared.x(state.stage_idx) + k_tile * 2 * C::kXHalfBytes);
#pragma unroll
        for (int i = 0; i < C::kM64Tiles; ++i) {
          const uint32_t offset = weight_tile_offset(stage_offset, i, k_tile);
          constexpr int kHalfGroups = C::kGroups > 1 ? C::kGroups / 2 : 1;  // number of groups per slice of 64 k
          ScaledCodes<T, C> codes[kHalfGroups];
#pragma unroll
          for (int k64 = 0; k64 < 2; ++k64) {
            Vector<uint32_t, 4> words;
            ptx::ld_shared(words.values, mine.codes + offset + k64 * 1024);
            if (C::kGroups > 1 || k64 == 0) {
#pragma unroll
              for (int g = 0; g < kHalfGroups; ++g) {
                codes[g] = ScaledCodes<T, C>(
                    Group<C>::load_shared(mine.scales + offset, mine.zeros + offset, k64 * kHalfGroups + g), factor);
              }
            }
            ptx::wgmma_wait_group<1>();
#pragma unroll
            for (int k16 = 0; k16 < 4; ++k16) codes[k16 * kHalfGroups / 4].convert(a[k64][k16], words.values[k16]);
            ptx::wgmma_fence();
#pragma unroll
            for (int k16 = 0; k16 < 4; ++k16) {
              wgmma<T, true>(accumulators[i], a[k64][k16], x + k64 * C::kXHalfBytes / 16 + k16 * 2);
            }
            ptx::wgmma_commit_group();
          }
        }
        // At most two wgmma groups are pending, both on the current stage: the preceding stage can be released.
        if (preceding != 0) {
          pipeline.release(preceding, lane);
          preceding = 0;
        }
      }
      preceding = pipeline.empty_barrier(state.stage_idx);
      state.advance_by(C::kConsumers);
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < C::kM64Tiles; ++i) {
#pragma unroll
      for (int v = 0; v < C::kAccumulators; ++v) accumulators[i][v] *= result_factor;
    }
  };

  // SCALED = 0: the tensor cores accumulate over one group; then the accumulators are multiplied by the group's scale.
  auto accumulate_unscaled = [&](const Tile<C>& tile) {
    const auto pipeline = tile.shared.pipeline();
    auto state = PipelineState<C::kStages>::consumer(consumer);
    const Operands mine = lane_operands(tile);
    for (int iteration = consumer; iteration < tile.iterations(); iteration += C::kConsumers) {
      pipeline.consumer_wait(state);
      const int k_tiles = tile.k_tiles(iteration);
      const uint32_t stage_offset = uniform(state.stage_idx * C::kWeightStageBytes);
#pragma unroll 1
      for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        const uint64_t x = ptx::wgmma_descriptor(tile.shared.x(state.stage_idx) + k_tile * 2 * C::kXHalfBytes);
#pragma unroll
        for (int i = 0; i < C::kM64Tiles; ++i) {
          const uint32_t offset = weight_tile_offset(stage_offset, i, k_tile);
          Vector<uint32_t, 4> words[2];
#pragma unroll
          for (int k64 = 0; k64 < 2; ++k64) ptx::ld_shared(words[k64].values, mine.codes + offset + k64 * 1024);
#pragma unroll
          for (int g = 0; g < C::kGroups; ++g) {
            constexpr int kSteps = C::kK16Steps / C::kGroups;
            const Group<C> group = Group<C>::load_shared(mine.scales + offset, mine.zeros + offset, g);
            const uint32_t zeros = ExactCodes<T>::zeros(group.zeros);
            const float scales[2] = {group.scale(0) * ExactCodes<T>::kUnit, group.scale(1) * ExactCodes<T>::kUnit};
            uint32_t a[kSteps][4];
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
              const int k16 = g * kSteps + s;
              ExactCodes<T>::convert(a[s], words[k16 / 4].values[k16 % 4], zeros);
            }
            float group_sums[C::kAccumulators];
            ptx::wgmma_fence();
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
              const int k16 = g * kSteps + s;
              const uint64_t b = x + (k16 / 4 * C::kXHalfBytes) / 16 + k16 % 4 * 2;
              if (s == 0) {
                wgmma<T, false>(group_sums, a[s], b);
              } else {
                wgmma<T, true>(group_sums, a[s], b);
              }
            }
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group<0>();
#pragma unroll
            for (int v = 0; v < C::kAccumulators; ++v) {
              accumulators[i][v] = fmaf(group_sums[v], scales[v / 2 % 2], accumulators[i][v]);
            }
          }
        }
      }
      pipeline.consumer_release(state.stage_idx, lane);
      state.advance_by(C::kConsumers);
    }
  };

  auto accumulate = [&](const Tile<C>& tile) {
    if constexpr (C::kScaled) {
      accumulate_scaled(tile);
    } else {
      accumulate_unscaled(tile);
    }
  };
  auto store_all = [&](float* shared_accumulators) {
#pragma unroll
    for (int i = 0; i < C::kM64Tiles; ++i) {
#pragma unroll
      for (int j = 0; j < C::kBlockM / 8; ++j) {
        const float* c = accumulators[i] + 4 * j;
        store_accumulators<C>(shared_accumulators, consumer, j * 8,
                              (i * C::kWarpgroups + warpgroup) * 64 + warp % 4 * 16, {c[0], c[1], c[2], c[3]});
      }
    }
  };
  // Only the part of x that the prologue copies is prefetched. Later copies are issued long before their use, and
  // prefetches would delay these copies.
  auto prefetch_x = [&](const Tile<C>& tile) {
    if (threadIdx.x != 0) return;
    for (int i = tile.n_block % kXParts; i < tile.prologue_iterations(); i += kXParts) {
      ptx::cp_async_bulk_prefetch_tensor_3d(args.x_map, 0, tile.m_begin, (tile.k_tile_begin + i * C::kKTiles) * 2);
    }
  };
  run_tile<C, true>(args, prefetch_x, accumulate, store_all);
}

using Kernel = GemmSm90Wgmma<Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    gemm_sm90(const uint8_t* weight, const BIAS* bias, const X* residual, X* y,
              FUSION_PARAMETERS NEXT_WEIGHT_PARAMETER const __grid_constant__ TensorMap x_map, int m, int n, int k,
              int ldr, int ldy, float low, float high, float eps, float scale_factor,
              float result_factor NEXT_WEIGHT_SCALARS) {
  const ResidualStream<Kernel::kOrdersY> stream{FUSION_ARGUMENTS, eps};
  const NextWeight next{NEXT_WEIGHT_ARGUMENTS};
  const GemmArguments<Kernel> args{weight, bias, residual, y, &x_map, m, n, k, ldr, ldy, low, high, stream, next};
  gemm_sm90_wgmma(args, scale_factor, result_factor);
}
