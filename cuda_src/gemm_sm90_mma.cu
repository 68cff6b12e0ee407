// SPDX-License-Identifier: Apache-2.0
// The matrix product of gemm_sm90.cuh by mma m16n8k16, for few rows: below 16 rows of x wgmma takes as long as for 16,
// and a warp that needs no other can have a part of K of its own.
//
//   x  X [m, k], row stride ldx values; rows start at multiples of 16 bytes
//
// Predicted and measured otherwise: one tensor copy of all of x was slower than 32 small ones (5.5 against 4.7
// microseconds, 4096 x 4096, one row), for nobody can begin before it ends; copies by the consumers were no slower than
// those.
//
// sm_90. A team is one warp a record: it makes 32 columns of the block's tile for all BLOCK_M rows. Codes enter as they
// are; zero points and scales of a group are applied to its float32 sums.
#include "gemm_sm90.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

static_assert(__CUDA_ARCH__ >= 900, "gemm_sm90_mma needs sm_90");

constexpr int kTilesM = kBlockM / 8;
constexpr int kTilesN = 2;
constexpr int kUnroll = kTilesM == 1 && kResident == 1 && kThreads <= 320 ? 2 : 1;
constexpr int kChains = kTilesM == 1 ? 2 : 1;  // of mma that do not wait for each other, a tile
constexpr int kXRows = X_ROWS;                 // of x in shared memory: a power of two
constexpr int kXStages = X_STAGES;             // stages of x that a team has there
constexpr int kStageK = kDepth * kRecordK;
constexpr int kUnits = kStageK / 8;  // of 16 bytes, in a row
constexpr int kXStageBytes = kXRows * kUnits * 16;

static_assert(kXBytes == 0 && kXRingBytes == kTeams * kXStages * kXStageBytes, "teams bring x themselves");
static_assert(kXRows <= kBlockM, "a tile has no more rows of x");
static_assert(kTeamWarps == 1 || kTeams < 16, "there are 16 barriers, one is that of the block");
static_assert(kTeamWarps == kRecords, "a warp makes the columns of a record");

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    gemm_sm90_mma(const uint8_t* weight, const BIAS* bias, const X* residual, X* y, const X* x, int m, int n, int k,
                  int ldr, int ldy, int ldx, float low, float high) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int team = warp / kTeamWarps;
  float sums[kTilesN][kTilesM][4] = {};

  auto consume = [&](const Tile& tile, const uint8_t* shared) {
    // 16 bytes of x a lane: unit u of row r lies at u ^ (r % 8), so that ldmatrix meets no bank twice. Without the
    // tensor copy engine x is there sooner, and few rows need few copies.
    const uint32_t x_ring = tile.shared_begin + team * kXStages * kXStageBytes;
    constexpr int kTeamThreads = kTeamWarps * 32;
    const int thread = threadIdx.x % kTeamThreads;
    const int rows = m - tile.m_begin;
    const int k_end = min(k, tile.step_end * kRecordK);
    int k_next = tile.step_begin * kRecordK + team * kStageK;
    auto start_x = [&](int stage) {
#pragma unroll
      for (int begin = 0; begin < kXRows * kUnits; begin += kTeamThreads) {
        const int row = (begin + thread) / kUnits;
        const int unit = (begin + thread) % kUnits;
        if (kXRows * kUnits % kTeamThreads != 0 && row >= kXRows) break;
        const int k_unit = k_next + unit * 8;
        const bool valid = row < rows && k_unit < k_end;
        const uint32_t target = x_ring + stage * kXStageBytes + (row * kUnits + (unit ^ (row % 8))) * 16;
        ptx::cp_async_16(target, x + static_cast<int64_t>(tile.m_begin + row) * ldx + k_unit, valid ? 16 : 0);
      }
      ptx::cp_async_commit_group();
      k_next += kTeams * kStageK;
    };
    auto synchronize_team = [&] {
      if constexpr (kTeamWarps == 1) {
        __syncwarp();
      } else {
        ptx::barrier_sync(team + 1, kTeamThreads);
      }
    };
    ptx::griddepcontrol_wait();
#pragma unroll
    for (int stage = 0; stage < kXStages - 1; ++stage) start_x(stage);

    Position at{team, 0};
    int x_stage = 0;
    for (int round = team; round < tile.rounds(); round += kTeams) {
      wait(tile.full(at.stage), at.parity);
      const int depth = tile.depth(round);
      uint32_t x_begin = 0;
#pragma unroll kUnroll
      for (int step = 0; step < depth; ++step) {
        const uint8_t* record =
            shared + kWeightBegin + at.stage * kWeightBytes + (warp % kTeamWarps * kDepth + step) * kRecordBytes;
        // What does not need x comes first: it is there before x is.
        Vector<uint32_t, 4> words[2][kTilesN];
#pragma unroll
        for (int index = 0; index < 2 * kTilesN; ++index) {
          words[index / kTilesN][index % kTilesN] =
              reinterpret_cast<const Vector<uint32_t, 4>*>(record)[index * 32 + lane];
        }
        Group groups[kGroups][kTilesN];
#pragma unroll
        for (int part = 0; part < kGroups; ++part) {
#pragma unroll
          for (int i = 0; i < kTilesN; ++i) groups[part][i] = Group::load(record, part, i, lane / 4);
        }
        if (step == 0) {
          ptx::cp_async_wait_group<kXStages - 2>();
          synchronize_team();
          // The stage that was read last is free now.
          start_x(x_stage == 0 ? kXStages - 1 : x_stage - 1);
          x_begin = x_ring + x_stage * kXStageBytes;
          x_stage = x_stage + 1 == kXStages ? 0 : x_stage + 1;
        }

#pragma unroll
        for (int part = 0; part < kGroups; ++part) {
          float parts[kChains][kTilesN][kTilesM][4] = {};
          float x_sums[kChains][kTilesM][4] = {};
#pragma unroll
          for (int k32 = part * 4 / kGroups; k32 < (part + 1) * 4 / kGroups; ++k32) {
            uint32_t a[2][kTilesN][4];
#pragma unroll
            for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
              for (int i = 0; i < kTilesN; ++i) {
                RawCodes<X>::convert(a[k16][i], words[k32 / 2][i].values[k32 % 2 * 2 + k16]);
              }
            }
#pragma unroll
            for (int j = 0; j < kTilesM; ++j) {
              // Four matrices of 8 rows and 8 k: those of two steps of 16 k. Rows that x does not have repeat its last
              // one and give columns of the product that nobody stores.
              const int unit = step * 16 + k32 * 4 + lane / 8;
              const int row = min(j * 8 + lane % 8, kXRows - 1);
              uint32_t b[4];
              ptx::ldmatrix_x4(b, x_begin + (row * kUnits + (unit ^ (row % 8))) * 16);
#pragma unroll
              for (int k16 = 0; k16 < 2; ++k16) {
                constexpr uint32_t kOnes[4] = {RawCodes<X>::kOne, RawCodes<X>::kOne, RawCodes<X>::kOne,
                                               RawCodes<X>::kOne};
                mma<X>(x_sums[k16 % kChains][j], kOnes, b[k16 * 2], b[k16 * 2 + 1]);
#pragma unroll
                for (int i = 0; i < kTilesN; ++i) {
                  mma<X>(parts[k16 % kChains][i][j], a[k16][i], b[k16 * 2], b[k16 * 2 + 1]);
                }
              }
            }
          }
#pragma unroll
          for (int i = 0; i < kTilesN; ++i) {
#pragma unroll
            for (int v = 0; v < 4; ++v) {
              const float unit = RawCodes<X>::kUnits[v / 2];
              const float scale = groups[part][i].scale(v / 2) * unit;
              const float zero = (groups[part][i].zero(v / 2) + RawCodes<X>::kOffset) / -unit;
#pragma unroll
              for (int j = 0; j < kTilesM; ++j) {
                float product = parts[0][i][j][v];
                float x_sum = x_sums[0][j][v];
                if constexpr (kChains == 2) {
                  product += parts[1][i][j][v];
                  x_sum += x_sums[1][j][v];
                }
                const float difference = fmaf(zero, x_sum, product);
                sums[i][j][v] = fmaf(difference, scale, sums[i][j][v]);
              }
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile.empty(at.stage));
      at.advance(kTeams);
    }
    // Copies beyond the last step write zeros, where the sums may come to lie.
    ptx::cp_async_wait_group<0>();
  };
  auto push = [&](float* shared_sums) {
#pragma unroll
    for (int i = 0; i < kTilesN; ++i) {
#pragma unroll
      for (int j = 0; j < kTilesM; ++j) {
        push_sums(shared_sums, team, j * 8, warp % kTeamWarps * kRecordColumns + i * 16, sums[i][j]);
      }
    }
  };
  run_tile(weight, bias, residual, y, nullptr, m, n, k, ldr, ldy, low, high, consume, push);
}
