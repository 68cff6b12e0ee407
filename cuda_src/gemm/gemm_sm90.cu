// SPDX-License-Identifier: Apache-2.0
// The matrix product of gemm_sm90.cuh by wgmma: operand A, the weight, from registers; B, x, from shared memory.
//
//   x_map  tensor map of x as [k / 64][m][64], swizzled by 128 bytes, in boxes of [2 * DEPTH][BLOCK_M][64], or of
//          [1][m][64] where the tile lacks rows
//
// sm_90a. A team is WARPGROUPS warpgroups; each makes TILES times 64 columns of the block's tile for all BLOCK_M rows,
// which are the instruction's N. Codes minus zero points enter exactly; the float32 sums over a group are multiplied by
// its scale. SCALED: weights enter as (q - z) * s * scale_factor, rounded once, and the sums over all of K are
// multiplied by result_factor in the end; both are powers of two.
#include "gemm/gemm_sm90.cuh"

static_assert(__CUDA_ARCH__ == 900, "gemm_sm90 needs sm_90a");

constexpr int kWarpgroups = WARPGROUPS;
constexpr int kTiles = TILES;
constexpr bool kScaled = SCALED;
constexpr int kStepsK16 = kRecordK / 16;
constexpr int kXHalfBytes = kBlockM * 128;

static_assert(kTeamWarps == kWarpgroups * 4, "a warpgroup is four warps");
static_assert(kXBytes == kDepth * 2 * kXHalfBytes && kXRingBytes == kStages * kXBytes, "x comes with the weight");
static_assert(!kScaled || kStages >= 2 * kTeams, "a stage is released while its team is at the next");
static_assert(kRecords == kWarpgroups * kTiles * 2, "a warpgroup makes 64 columns at a time");

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    gemm_sm90(const uint8_t* weight, const BIAS* bias, const X* residual, X* y,
              FUSION_PARAMETERS const __grid_constant__ TensorMap x_map, int m, int n, int k, int ldr, int ldy,
              float low, float high, float eps, float scale_factor, float result_factor) {
  constexpr int kSums = kBlockM / 2;
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  const int team = warp / kTeamWarps;
  const int warpgroup = warp % kTeamWarps / 4;
  float sums[kTiles][kSums] = {};

  // This lane's in the warpgroup's first record.
  struct Lane {
    uint32_t words, scales, zeros;
  };
  const auto begin_lane = [&](const Tile& tile) {
    const uint32_t record = tile.weight(0) + (warpgroup * 2 + warp % 4 / 2) * kDepth * kRecordBytes;
    const uint32_t scales = record + kCodeBytes + warp % 2 * kTileGroupBytes + lane / 4 * 4;
    return Lane{ptx::opaque(record + warp % 2 * 512 + lane * 16), ptx::opaque(scales),
                ptx::opaque(scales + 32 - lane / 4 * 2)};
  };
  // Tensor cores multiply 64 k while the next 64 are converted.
  auto consume_scaled = [&](const Tile& tile) {
    Position at{team, 0};
    const Lane mine = begin_lane(tile);
    uint32_t last = 0;  // the barrier of the stage before
    uint32_t a[2][4][4];
    const ScaledCodes<X>::Factor factor(scale_factor);
    for (int round = team; round < tile.rounds(); round += kTeams) {
      wait(tile.full(at.stage), at.parity);
      const int depth = tile.depth(round);
      const uint32_t records = uniform(at.stage * kWeightBytes);
#pragma unroll 1
      for (int step = 0; step < depth; ++step) {
        const uint64_t x_begin = ptx::wgmma_descriptor(tile.x(at.stage) + step * 2 * kXHalfBytes);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const uint32_t record = records + (i * kWarpgroups * 2 * kDepth + step) * kRecordBytes;
          constexpr int kParts = kGroups > 1 ? kGroups / 2 : 1;  // groups in 64 k
          ScaledCodes<X> codes[kParts];
#pragma unroll
          for (int k64 = 0; k64 < 2; ++k64) {
            Vector<uint32_t, 4> words;
            ptx::ld_shared(words.values, mine.words + record + k64 * 1024);
            if (kGroups > 1 || k64 == 0) {
#pragma unroll
              for (int part = 0; part < kParts; ++part) {
                codes[part] = ScaledCodes<X>(
                    Group::load_shared(mine.scales + record, mine.zeros + record, k64 * kParts + part), factor);
              }
            }
            ptx::wgmma_wait_group<1>();
#pragma unroll
            for (int s = 0; s < 4; ++s) codes[s * kParts / 4].convert(a[k64][s], words.values[s]);
            ptx::wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; ++s) wgmma<true>(sums[i], a[k64][s], x_begin + k64 * kXHalfBytes / 16 + s * 2);
            ptx::wgmma_commit_group();
          }
        }
        if (last != 0) {
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(last);
          last = 0;
        }
      }
      last = tile.empty(at.stage);
      at.advance(kTeams);
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int v = 0; v < kSums; ++v) sums[i][v] *= result_factor;
    }
  };
  auto consume_exact = [&](const Tile& tile) {
    Position at{team, 0};
    const Lane mine = begin_lane(tile);
    for (int round = team; round < tile.rounds(); round += kTeams) {
      wait(tile.full(at.stage), at.parity);
      const int depth = tile.depth(round);
      const uint32_t records = uniform(at.stage * kWeightBytes);
#pragma unroll 1
      for (int step = 0; step < depth; ++step) {
        const uint64_t x_begin = ptx::wgmma_descriptor(tile.x(at.stage) + step * 2 * kXHalfBytes);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const uint32_t record = records + (i * kWarpgroups * 2 * kDepth + step) * kRecordBytes;
          Vector<uint32_t, 4> words[2];
#pragma unroll
          for (int k64 = 0; k64 < 2; ++k64) ptx::ld_shared(words[k64].values, mine.words + record + k64 * 1024);
#pragma unroll
          for (int part = 0; part < kGroups; ++part) {
            constexpr int kSteps = kStepsK16 / kGroups;
            const Group group = Group::load_shared(mine.scales + record, mine.zeros + record, part);
            const uint32_t zeros = ExactCodes<X>::zeros(group.zeros);
            const float scales[2] = {group.scale(0) * ExactCodes<X>::kUnit, group.scale(1) * ExactCodes<X>::kUnit};
            uint32_t a[kSteps][4];
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
              const int k16 = part * kSteps + s;
              ExactCodes<X>::convert(a[s], words[k16 / 4].values[k16 % 4], zeros);
            }
            float parts[kSums];
            ptx::wgmma_fence();
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
              const int k16 = part * kSteps + s;
              const uint64_t b = x_begin + (k16 / 4 * kXHalfBytes) / 16 + k16 % 4 * 2;
              if (s == 0) {
                wgmma<false>(parts, a[s], b);
              } else {
                wgmma<true>(parts, a[s], b);
              }
            }
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group<0>();
#pragma unroll
            for (int v = 0; v < kSums; ++v) sums[i][v] = fmaf(parts[v], scales[v / 2 % 2], sums[i][v]);
          }
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile.empty(at.stage));
      at.advance(kTeams);
    }
  };
  auto push = [&](float* shared_sums) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) {
        const float c[4] = {sums[i][4 * j], sums[i][4 * j + 1], sums[i][4 * j + 2], sums[i][4 * j + 3]};
        push_sums(shared_sums, team, j * 8, (i * kWarpgroups + warpgroup) * 64 + warp % 4 * 16, c);
      }
    }
  };
  // For the first stages: from then on copies are as far ahead. More of it delays them.
  auto ask = [&](const Tile& tile) {
    if (threadIdx.x >= x_boxes(m)) return;
    for (int round = tile.block_n % kXParts; round < tile.first_rounds(); round += kXParts) {
      const int k64 = (tile.step_begin + round * kDepth) * 2 + threadIdx.x;
      ptx::cp_async_bulk_prefetch_tensor_3d(&x_map, 0, tile.m_begin, k64);
    }
  };
  auto consume = [&](const Tile& tile) {
    if constexpr (kScaled) {
      consume_scaled(tile);
    } else {
      consume_exact(tile);
    }
  };
  const ResidualStream stream{FUSION_ARGUMENTS, eps};
  run_tile<true>(weight, bias, residual, y, &x_map, m, n, k, ldr, ldy, low, high, stream, ask, consume, push);
}
