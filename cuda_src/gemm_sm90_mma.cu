// SPDX-License-Identifier: Apache-2.0
// The matrix product of gemm_sm90.cuh by mma m16n8k16, for few rows: below 16 rows of x wgmma takes as long as for 16,
// and a warp that needs no other can have a part of K of its own.
//
// sm_90. A team is one warp a record: it makes 32 columns of the block's tile for all BLOCK_M rows. Codes minus zero
// points enter exactly; the float32 sums over a group are multiplied by its scale.
#include "gemm_sm90.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

static_assert(__CUDA_ARCH__ >= 900, "gemm_sm90_mma needs sm_90");

constexpr int kTilesM = kBlockM / 8;
constexpr int kTilesN = 2;

static_assert(kTeamWarps == kRecords, "a warp makes the columns of a record");

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm_sm90_mma(const uint8_t* weight, const BIAS* bias, const X* residual, X* y,
                  const __grid_constant__ TensorMap x_map, int m, int n, int k, int ldr, int ldy, float low,
                  float high) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int team = warp / kTeamWarps;
  float sums[kTilesN][kTilesM][4] = {};

  auto consume = [&](const Tile& tile, const uint8_t* shared) {
    Position at{team, 0};
    for (int step = tile.step_begin + team; step < tile.step_end; step += kTeams) {
      wait(tile.full(at.stage), at.parity);
      const uint8_t* record = shared + kWeightBegin + at.stage * kWeightBytes + warp % kTeamWarps * kRecordBytes;
      Group groups[kTilesN];
      float parts[kTilesN][kTilesM][4] = {};
#pragma unroll
      for (int k64 = 0; k64 < 2; ++k64) {
        Vector<uint32_t, 4> words[kTilesN];
#pragma unroll
        for (int i = 0; i < kTilesN; ++i) {
          words[i] = reinterpret_cast<const Vector<uint32_t, 4>*>(record)[(k64 * 2 + i) * 32 + lane];
        }
#pragma unroll
        for (int k32 = 0; k32 < 2; ++k32) {
          const int part = (k64 * 2 + k32) * kGroups / 4;
          if ((k64 * 2 + k32) * kGroups % 4 == 0) {
#pragma unroll
            for (int i = 0; i < kTilesN; ++i) {
              groups[i] = load_group(record + kCodeBytes + part * kGroupBytes + i * kTileGroupBytes, lane / 4);
            }
          }
          uint32_t a[2][kTilesN][4];
#pragma unroll
          for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
            for (int i = 0; i < kTilesN; ++i) {
              RepackedCodes<X>::convert(a[k16][i], words[i].values[k32 * 2 + k16], groups[i].zeros);
            }
          }
#pragma unroll
          for (int j = 0; j < kTilesM; ++j) {
            // Four matrices of 8 rows and 8 k: those of two steps of 16 k.
            const int unit = k32 * 4 + lane / 8;
            const int row = j * 8 + lane % 8;
            uint32_t b[4];
            ptx::ldmatrix_x4(b, tile.x(at.stage) + k64 * kXHalfBytes + row * 128 + (unit ^ (row % 8)) * 16);
#pragma unroll
            for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
              for (int i = 0; i < kTilesN; ++i) {
                if constexpr (Codes<X>::kMagic == Codes<half_t>::kMagic) {
                  ptx::mma_m16n8k16_f16(parts[i][j], a[k16][i], b[k16 * 2], b[k16 * 2 + 1]);
                } else {
                  ptx::mma_m16n8k16_bf16(parts[i][j], a[k16][i], b[k16 * 2], b[k16 * 2 + 1]);
                }
              }
            }
          }
          if ((k64 * 2 + k32 + 1) * kGroups % 4 == 0) {
#pragma unroll
            for (int i = 0; i < kTilesN; ++i) {
#pragma unroll
              for (int j = 0; j < kTilesM; ++j) {
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                  sums[i][j][v] = fmaf(parts[i][j][v], groups[i].scales[v / 2], sums[i][j][v]);
                  parts[i][j][v] = 0.0f;
                }
              }
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile.empty(at.stage));
      at.advance(kTeams);
    }
  };
  auto push = [&](const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kTilesN; ++i) {
#pragma unroll
      for (int j = 0; j < kTilesM; ++j) {
        push_sums(tile, team, j * 8, warp % kTeamWarps * kRecordColumns + i * 16, sums[i][j]);
      }
    }
  };
  run_tile(weight, bias, residual, y, &x_map, m, n, k, ldr, ldy, low, high, consume, push);
}
