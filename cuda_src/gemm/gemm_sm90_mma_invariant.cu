// SPDX-License-Identifier: Apache-2.0
// The GEMM of gemm_sm90.cuh with mma m16n8k16 and the arithmetic of wgmma, for up to 16 rows of x of a batch-invariant
// GEMM, which computes more rows with gemm_sm90 or gemm_sm90_large.
//
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n])
//
//   weight, bias, residual, y   as in gemm_sm90.cuh
//   x                           X [m, k], row stride ldx values; rows start at multiples of 16 bytes
//   SCALED, scale_factor, result_factor   as in gemm_sm90.cu
//
// Limits: as for gemm_sm90.cuh, and m <= 16; sm_90, whose mma m16n8k16 and wgmma k16 both add 16 products to an
// accumulator in one step, with the same rounding. tests/test_batch_invariant.py compares the bits of both on a GPU. On
// older architectures, mma rounds differently.
//
// A consumer has two warps per tile column; a warp computes 16 columns of the CTA tile for all BLOCK_M rows. With
// SCALED = 1, all mma of an accumulator form a chain, in which each waits for the preceding one.
#include "gemm/gemm_sm90_config.cuh"
#include "gemm/gemm_sm90_x_ring.cuh"
#include "ptx/ldmatrix.cuh"

static_assert(__CUDA_ARCH__ == 900, "gemm_sm90_mma_invariant needs the mma of sm_90");

struct Config : GemmSm90Config {
  static constexpr int kXRows = X_ROWS, kXStages = X_STAGES;
  static constexpr bool kScaled = SCALED;
};

template <class Host> struct GemmSm90MmaInvariant : GemmSm90X<Host> {
  static constexpr int kM8Tiles = Host::kBlockM / 8;
  static constexpr int kK16Steps = kWeightTileK / 16;
  // The number of k tiles whose mma are interleaved to hide latency. With SCALED = 0, the mma of each group form a
  // chain of their own, so k tiles are independent.
  static constexpr int kInterleaved = Host::kScaled || kM8Tiles > 1 || Host::kKTiles == 1 ? 1 : 2;

  static_assert(Host::kConsumerWarps == 2 * Host::kWeightTiles, "a warp computes 16 columns");
  static_assert(!Host::kAddsToStream && !Host::kRmsNormsX, "a batch-invariant GEMM has no fusion");
  static_assert(Host::kZeros != Zeros::kOffset, "only wgmma adds offsets");
};

// The body of the kernel, for one configuration; x and ldx are arguments of `gemm_sm90_mma_invariant` below.
template <class C> __device__ __forceinline__ void gemm_sm90_invariant_tile(const GemmArguments<C>& args,
                                                                            const typename C::T* x, int ldx,
                                                                            float scale_factor, float result_factor) {
  using T = typename C::T;

  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  const int consumer = warp / C::kConsumerWarps;
  float accumulators[C::kM8Tiles][4] = {};

  auto accumulate = [&](const Tile<C>& tile) {
    XRing<C> ring(x, ldx, tile, consumer, args.m, args.k);
    const auto pipeline = tile.shared.pipeline();
    // The shared addresses of this lane's codes, scales and zero points in stage 0, and the byte offsets of this lane's
    // operands in a stage of x.
    const uint32_t weight_tile =
        tile.shared.weight(0) + warp % C::kConsumerWarps / 2 * C::kKTiles * C::kWeightTileBytes;
    const uint32_t my_codes = ptx::opaque(weight_tile + warp % 2 * 512 + lane * 16);
    const uint32_t my_scales = ptx::opaque(weight_tile + kCodeBytes + warp % 2 * C::kHalfGroupBytes + lane / 4 * 4);
    const uint32_t my_zeros = ptx::opaque(my_scales + 32 - lane / 4 * 2);
    const int x_row = min(lane % 8, C::kXRows - 1);
    const uint32_t my_x = ptx::opaque((x_row * C::kXChunks + (lane / 8 ^ swizzle_bits(x_row))) * 16);
    const uint32_t my_other_x = ptx::opaque(my_x ^ 64);
    const typename ScaledCodes<T, C>::Factor factor(scale_factor);

    // What a lane holds of one k tile of the weight (128 k): codes, scales and zero points.
    struct Weights {
      Vector<uint32_t, 4> words[2];
      Group<C> groups[C::kGroups];

      __device__ __forceinline__ uint32_t word(int k16) const { return words[k16 / 4].values[k16 % 4]; }
    };
    auto load_weights = [&](Weights& weights, uint32_t offset) {
#pragma unroll
      for (int k64 = 0; k64 < 2; ++k64) ptx::ld_shared(weights.words[k64].values, my_codes + offset + k64 * 1024);
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        weights.groups[g] = Group<C>::load_shared(my_scales + offset, my_zeros + offset, g);
      }
    };
    // Loads operand B for 32 k of a k tile. Lanes past the last row of x load that row again; the resulting columns of
    // y^T are not stored.
    auto load_x = [&](uint32_t (&b)[C::kM8Tiles][4], uint32_t x_begin, int k32) {
#pragma unroll
      for (int j = 0; j < C::kM8Tiles; ++j) {
        ptx::ldmatrix_x4(b[j], x_begin + (k32 % 2 == 0 ? my_x : my_other_x) + (k32 / 2 * 8 + j * 8 * C::kXChunks) * 16);
      }
    };
    auto multiply_scaled = [&](const Weights& weights, uint32_t x_begin) {
      ScaledCodes<T, C> codes[C::kGroups];
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) codes[g] = ScaledCodes<T, C>(weights.groups[g], factor);
#pragma unroll
      for (int k16 = 0; k16 < C::kK16Steps; k16 += 2) {
        uint32_t b[C::kM8Tiles][4];
        load_x(b, x_begin, k16 / 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4];
          codes[(k16 + i) * C::kGroups / C::kK16Steps].convert(a, weights.word(k16 + i));
#pragma unroll
          for (int j = 0; j < C::kM8Tiles; ++j) mma<T>(accumulators[j], a, b[j][i * 2], b[j][i * 2 + 1]);
        }
      }
    };
    auto multiply_exact = [&](int tiles, const Weights(&weights)[C::kInterleaved], uint32_t x_begin) {
      float group_sums[C::kInterleaved][C::kGroups][C::kM8Tiles][4] = {};
#pragma unroll
      for (int k16 = 0; k16 < C::kK16Steps; k16 += 2) {
        uint32_t b[C::kInterleaved][C::kM8Tiles][4];
#pragma unroll
        for (int tile = 0; tile < C::kInterleaved; ++tile) {
          if (tile < tiles) load_x(b[tile], x_begin + tile * 256, k16 / 2);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int g = (k16 + i) * C::kGroups / C::kK16Steps;
#pragma unroll
          for (int tile = 0; tile < C::kInterleaved; ++tile) {
            if (tile >= tiles) continue;
            uint32_t a[4];
            ExactCodes<T>::convert(a, weights[tile].word(k16 + i), ExactCodes<T>::zeros(weights[tile].groups[g].zeros));
#pragma unroll
            for (int j = 0; j < C::kM8Tiles; ++j) {
              mma<T>(group_sums[tile][g][j], a, b[tile][j][i * 2], b[tile][j][i * 2 + 1]);
            }
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < C::kInterleaved; ++tile) {
        if (tile >= tiles) continue;
#pragma unroll
        for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
          for (int v = 0; v < 4; ++v) {
            const float scale = weights[tile].groups[g].scale(v / 2) * ExactCodes<T>::kUnit;
#pragma unroll
            for (int j = 0; j < C::kM8Tiles; ++j) {
              accumulators[j][v] = fmaf(group_sums[tile][g][j][v], scale, accumulators[j][v]);
            }
          }
        }
      }
    };
    wait_for_x<C>();
    ring.begin();

    auto state = PipelineState<C::kStages>::consumer(consumer);
    for (int iteration = consumer; iteration < tile.iterations(); iteration += C::kConsumers) {
      pipeline.consumer_wait(state);
      const int k_tiles = tile.k_tiles(iteration);
      const uint32_t stage_offset = state.stage_idx * C::kWeightStageBytes;
      // The weights of the next k tiles are loaded while the current ones are multiplied.
      Weights weights[2][C::kInterleaved];
      auto load = [&](int k_tile) {
#pragma unroll
        for (int i = 0; i < C::kInterleaved; ++i) {
          if (k_tile + i < C::kKTiles && k_tile + i < k_tiles) {
            load_weights(weights[k_tile / C::kInterleaved % 2][i], stage_offset + (k_tile + i) * C::kWeightTileBytes);
          }
        }
      };
      load(0);
      const uint32_t x_begin = ring.next();
#pragma unroll
      for (int k_tile = 0; k_tile < C::kKTiles; k_tile += C::kInterleaved) {
        if (k_tile >= k_tiles) break;
        load(k_tile + C::kInterleaved);
        const auto& mine = weights[k_tile / C::kInterleaved % 2];
        const uint32_t my_x_begin = x_begin + k_tile * 256;
        if constexpr (C::kScaled) {
          multiply_scaled(mine[0], my_x_begin);
        } else if (k_tile + C::kInterleaved <= k_tiles) {
          multiply_exact(C::kInterleaved, mine, my_x_begin);
        } else {
          multiply_exact(1, mine, my_x_begin);
        }
      }
      pipeline.consumer_release(state.stage_idx, lane);
      state.advance_by(C::kConsumers);
    }
    ring.end();
    if constexpr (C::kScaled) {
#pragma unroll
      for (int j = 0; j < C::kM8Tiles; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) accumulators[j][v] *= result_factor;
      }
    }
  };
  auto store_all = [&](float* shared_accumulators) {
#pragma unroll
    for (int j = 0; j < C::kM8Tiles; ++j) {
      store_accumulators<C>(shared_accumulators, consumer, j * 8, warp % C::kConsumerWarps * 16, accumulators[j]);
    }
  };
  run_tile<C, true>(
      args, [&](const Tile<C>& tile) { prefetch_x(tile, x, ldx, args.m, args.k); }, accumulate, store_all);
}

using Kernel = GemmSm90MmaInvariant<Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    gemm_sm90_mma_invariant(const uint8_t* weight, const BIAS* bias, const X* residual, X* y, const X* x, int m, int n,
                            int k, int ldr, int ldy, int ldx, float low, float high, float /* eps */,
                            float scale_factor, float result_factor) {
  const GemmArguments<Kernel> args{weight, bias, residual, y, nullptr, m, n, k, ldr, ldy, low, high, {}, {}};
  gemm_sm90_invariant_tile(args, x, ldx, scale_factor, result_factor);
}
