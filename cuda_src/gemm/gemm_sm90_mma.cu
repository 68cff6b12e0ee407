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
// are; scales and zero points of a group are applied to its float32 sums. Those of x, which zero points multiply, come
// from the tensor cores, too: columns that one or two rows leave free take other parts of K, so that one instruction a
// row adds up a record, and lanes keep what they have of it times zero points to themselves until the end. What cancels
// then, and not in each group, are sums over all of K that a team takes: float32 relative to 15 times, in bfloat16 143
// times the sum of x * scale, at most 6e-4 of y's root mean square for 28672 bfloat16 x that are all positive.
#include "gemm/gemm_sm90.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/prefetch.cuh"
#include "common/warp.cuh"

static_assert(__CUDA_ARCH__ >= 900, "gemm_sm90_mma needs sm_90");

constexpr int kTilesM = kBlockM / 8;
constexpr int kTilesN = 2;
constexpr int kUnroll = kTilesM == 1 && kResident == 1 && kThreads <= 320 ? 2 : 1;
constexpr int kXRows = X_ROWS;  // of x in shared memory: a power of two
constexpr int kStageK = kDepth * kRecordK;
constexpr int kUnits = kStageK / 8;  // of 16 bytes, in a row of x in shared memory

// More rows gain nothing; of more groups a lane would need that of each of its slices.
constexpr bool kSliced = kXRows <= 2 && kGroups == 1;
constexpr int kSlices = kSliced ? 8 / kXRows : 1;  // of a record's 8 steps of 16 k, which one product adds up
// Where the compiler finds registers, at least 112 but for one row, to read a stream's part with x.
constexpr bool kEarly = kXRows == 1 || (kTilesM == 1 && kResident * kThreads < 512);
constexpr int kRows = kSliced ? kXRows : 2;  // of x among a lane's two

static_assert(kXBytes == 0, "the consumers bring x themselves");
static_assert(kXRows <= kBlockM, "a tile has no more rows of x");
static_assert(!kSliced || kTilesM == 1, "offsets are those of one tile of rows");
static_assert(kTeamWarps == kRecords, "a warp makes the columns of a record");

// The largest power of two up to `value`.
__device__ constexpr int last_power_of_two(int value) { return value < 2 ? 1 : 2 * last_power_of_two(value / 2); }

// x, stage by stage: each team has a ring of its own. Without the tensor copy engine x is there sooner, and few rows
// need few copies. Unit u of row r lies at u ^ (r % 8), so that ldmatrix meets no bank twice.
class StagedRows {
 public:
  __device__ __forceinline__ StagedRows(const X* x, int ldx, const Tile& tile, int team, int m, int k) : team_(team) {
    const int thread = threadIdx.x % kTeamThreads;
    const int row = thread / kRowLanes;
    const int unit = thread % kRowLanes;
    const int k_begin = tile.step_begin * kRecordK + team * kStageK + unit * 8;
    x_ = x + static_cast<int64_t>(tile.m_begin + row) * ldx + k_begin;
    ldx_ = ldx;
    rows_left_ = ptx::opaque(row < kTurnRows ? m - tile.m_begin - row : kNone);
    k_left_ = min(k, tile.step_end * kRecordK) - k_begin;
    ring_ = tile.shared_begin + team * kRingBytes;
    mine_ = ptx::opaque((row * kUnits + (unit ^ row % 8)) * 16);
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) start(stage * kStageBytes);
  }

  // Where the x of the team's next round begins, once it is there.
  __device__ __forceinline__ uint32_t next() {
    ptx::cp_async_wait_group<kStages - 2>();
    if constexpr (kTeamWarps == 1) {
      __syncwarp();
    } else {
      ptx::barrier_sync(team_ + 1, kTeamThreads);
    }
    // The stage that was read last is free now.
    start((read_ + (kStages - 1) * kStageBytes) % kRingBytes);
    const uint32_t begin = ring_ + read_;
    read_ = (read_ + kStageBytes) % kRingBytes;
    return begin;
  }

  // Copies beyond the last step write zeros, where the sums may come to lie.
  __device__ __forceinline__ void end() { ptx::cp_async_wait_group<0>(); }

 private:
  static constexpr int kStages = X_STAGES;
  static constexpr uint32_t kStageBytes = kXRows * kUnits * 16;
  static constexpr uint32_t kRingBytes = kStages * kStageBytes;
  static constexpr int kTeamThreads = kTeamWarps * 32;
  static constexpr int kRowLanes = kUnits < 32 ? kUnits : 32;  // that copy a row
  // Copied by the team in a turn: a power of two, so that the place of a thread's units changes by a constant.
  static constexpr int kTurnRows =
      last_power_of_two(kXRows * kRowLanes < kTeamThreads ? kXRows : kTeamThreads / kRowLanes);
  static constexpr int kNone = -kXRows;  // of a thread that copies nothing: less than any number of rows

  static_assert(kXRingBytes == kTeams * kRingBytes, "a team has stages of its own");
  static_assert(kTeamWarps == 1 || kTeams < 16, "there are 16 barriers, one is that of the block");

  // Fills the stage that begins `offset` bytes behind the ring.
  __device__ __forceinline__ void start(uint32_t offset) {
    if (kTurnRows * kRowLanes == kTeamThreads || rows_left_ != kNone) {
      const uint32_t target = ring_ + offset;
#pragma unroll
      for (int row = 0; row < kXRows; row += kTurnRows) {
#pragma unroll
        for (int unit = 0; unit < kUnits; unit += kRowLanes) {
          const bool valid = row < rows_left_ && unit * 8 < k_left_;
          ptx::cp_async_16(target + (mine_ ^ row % 8 * 16) + (row * kUnits + unit) * 16,
                           x_ + static_cast<int64_t>(row) * ldx_ + unit * 8, valid ? 16 : 0);
        }
      }
    }
    ptx::cp_async_commit_group();
    x_ += kTeams * kStageK;
    k_left_ -= kTeams * kStageK;
  }

  int team_;
  const X* x_;  // this thread's first unit of the stage that is filled next
  int ldx_;
  int rows_left_, k_left_;  // from this thread's row and unit on
  uint32_t ring_;
  uint32_t mine_;  // this thread's first unit in a stage, in bytes
  uint32_t read_ = 0;
};

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    gemm_sm90_mma(const uint8_t* weight, const BIAS* bias, const X* residual, X* y, FUSION_PARAMETERS const X* x, int m,
                  int n, int k, int ldr, int ldy, int ldx, float low, float high, float eps) {
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  const int team = warp / kTeamWarps;
  constexpr uint32_t kOnes[4] = {RawCodes<X>::kOnes[0], RawCodes<X>::kOnes[1], RawCodes<X>::kOnes[0],
                                 RawCodes<X>::kOnes[1]};
  float sums[kTilesN][kTilesM][4] = {};
  float offsets[kTilesN][4] = {};  // kSliced: to add to the sums of its only tile, this lane's part

  auto ask = [&](const Tile& tile) {
    constexpr int kLine = 128 / sizeof(X);
    const int k_end = min(k, tile.step_end * kRecordK);
    for (int part = tile.block_n % kXParts + threadIdx.x * kXParts;; part += kConsumerThreads * kXParts) {
      const int row = tile.m_begin + part % kXRows;
      const int column = tile.step_begin * kRecordK + part / kXRows * kLine;
      if (column >= k_end) break;
      if (row < m) ptx::prefetch_global_l2(x + static_cast<int64_t>(row) * ldx + column);
    }
  };
  auto consume = [&](const Tile& tile) {
    StagedRows rows(x, ldx, tile, team, m, k);
    // This lane's in the first stage, and in a stage of x.
    const uint32_t first_record = tile.weight(0) + warp % kTeamWarps * kDepth * kRecordBytes;
    const uint32_t my_words = ptx::opaque(first_record + lane * 16);
    const uint32_t my_scales = ptx::opaque(first_record + kCodeBytes + lane / 4 * 4);
    const uint32_t my_zeros = ptx::opaque(first_record + kCodeBytes + 32 + lane / 4 * 2);
    const int x_row = min(lane % 8, kXRows - 1);
    const uint32_t my_x = ptx::opaque((x_row * kUnits + (lane / 8 ^ x_row % 8)) * 16);
    const uint32_t my_other_x = ptx::opaque(my_x ^ 64);
    // kSliced: row i of a matrix is row i % kXRows of x at slice i / kXRows, in any order of K that meets no bank
    // twice.
    const int sliced_row = lane % kXRows;
    const int sliced_unit = kXRows == 1 ? lane % 16 : lane % 8 / kXRows * 2 + lane / 8 % 2;
    const uint32_t my_slices = (sliced_row * kUnits + (sliced_unit ^ sliced_row)) * 16;
    ptx::griddepcontrol_wait();
    rows.begin();

    Position at{team, 0};
    for (int round = team; round < tile.rounds(); round += kTeams) {
      wait(tile.full(at.stage), at.parity);
      const int depth = tile.depth(round);
      uint32_t x_begin = 0;
#pragma unroll kUnroll
      for (int step = 0; step < depth; ++step) {
        const uint32_t record = at.stage * kWeightBytes + step * kRecordBytes;
        // What does not need x comes first: it is there before x is.
        Vector<uint32_t, 4> words[2][kTilesN];
        const auto load_words = [&](int k64) {
#pragma unroll
          for (int i = 0; i < kTilesN; ++i) {
            ptx::ld_shared(words[k64][i].values, my_words + record + (k64 * kTilesN + i) * 512);
          }
        };
        Group groups[kGroups][kTilesN];
        const auto load_groups = [&](int part) {
#pragma unroll
          for (int i = 0; i < kTilesN; ++i) {
            const uint32_t tile_group = record + i * kTileGroupBytes;
            groups[part][i] = Group::load_shared(my_scales + tile_group, my_zeros + tile_group, part);
          }
        };
        load_words(0);
        if (kGroups == 1) load_words(1);
        load_groups(0);
        if (step == 0) x_begin = rows.next();

#pragma unroll
        for (int part = 0; part < kGroups; ++part) {
          if (part + 1 < kGroups) load_groups(part + 1);
          if (kGroups > 1 && part + 1 == kGroups / 2) load_words(1);
          float parts[kTilesN][kTilesM][4] = {};
          float x_sums[kTilesM][4] = {};
          if constexpr (kSliced) {
#pragma unroll
            for (int turn = 0; turn < kXRows; ++turn) {
              uint32_t b[2];
              ptx::ldmatrix_x2(b, x_begin + my_slices + (step * 16 + turn * 8) * 16);
              mma<X>(x_sums[0], kOnes, b[0], b[1]);
            }
          }
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
              const uint32_t within = (step * 16 + k32 / 2 * 8 + j * 8 * kUnits) * 16;
              uint32_t b[4];
              ptx::ldmatrix_x4(b, x_begin + (k32 % 2 == 0 ? my_x : my_other_x) + within);
#pragma unroll
              for (int k16 = 0; k16 < 2; ++k16) {
                if constexpr (!kSliced) mma<X>(x_sums[j], kOnes, b[k16 * 2], b[k16 * 2 + 1]);
#pragma unroll
                for (int i = 0; i < kTilesN; ++i) {
                  mma<X>(parts[i][j], a[k16][i], b[k16 * 2], b[k16 * 2 + 1]);
                }
              }
            }
          }
          if constexpr (kRows == 1) {
            x_sums[0][0] += x_sums[0][1];
            x_sums[0][2] += x_sums[0][3];
          }
#pragma unroll
          for (int i = 0; i < kTilesN; ++i) {
#pragma unroll
            for (int v = 0; v < 4; ++v) {
              if (v % 2 >= kRows) continue;
              const float scale = groups[part][i].scale(v / 2);
              const float zero = -(groups[part][i].zero(v / 2) + RawCodes<X>::kOffset);
#pragma unroll
              for (int j = 0; j < kTilesM; ++j) {
                float product = parts[i][j][v];
                if constexpr (kSliced) {
                  offsets[i][v] = fmaf(zero * scale, x_sums[j][v], offsets[i][v]);
                } else {
                  product = fmaf(zero, x_sums[j][v], product);
                }
                sums[i][j][v] = fmaf(product, scale, sums[i][j][v]);
              }
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(tile.empty(at.stage));
      at.advance(kTeams);
    }
    rows.end();
#pragma unroll
    for (int i = 0; i < kTilesN; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        if constexpr (kSliced) {
          if (v % 2 >= kRows) continue;
          offsets[i][v] += __shfl_xor_sync(kFullWarp, offsets[i][v], 1);
          offsets[i][v] += __shfl_xor_sync(kFullWarp, offsets[i][v], 2);
          sums[i][0][v] += offsets[i][v];
        }
#pragma unroll
        for (int j = 0; j < kTilesM; ++j) sums[i][j][v] *= RawCodes<X>::kUnits[v / 2];
      }
    }
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
  const ResidualStream stream{FUSION_ARGUMENTS, eps};
  run_tile<kEarly>(weight, bias, residual, y, nullptr, m, n, k, ldr, ldy, low, high, stream, ask, consume, push);
}
