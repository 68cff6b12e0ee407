// SPDX-License-Identifier: Apache-2.0
// The matrix product of many rows by wgmma, on the weight of repacked.cuh.
//
//   y[m, n] = epilogue(result_factor * sum over k of x[m, k] * w[k, n])
//   w[k, n] = (q[k, n] - z[k / group_size, n]) * s[k / group_size, n] * scale_factor, rounded once to the type of x
//
//   weight    records of repacked.cuh
//   bias      BIAS [n] or null; residual X [m, n], row stride ldr values, or null
//   y         X [m, n] (gated: [m, n / 2]), row stride ldy values
// ALIGNED: rows of y and of the residual start at multiples of 16 bytes.
//   x_map     tensor map of x as [k / 64][m][64], swizzled by 128 bytes, in boxes of [2 / CLUSTER][BLOCK_M][64], or of
//             [1][m][64] where the tile lacks rows
//   factors   scale_factor is a power of two that brings scales to the middle of X's range, result_factor its inverse
//   partials, counters: see share_sums; unused without shared units
// k a multiple of 64, n of 8 (gated: of 64). sm_90a. The product is made transposed, y^T = W^T x^T: the weight is
// operand A, dequantized in registers; x is B.
//
// A block makes tiles of BLOCK_M rows and WARPGROUPS times TILES times 64 columns: each warpgroup has its columns, 64
// at a time for the instruction. Of 128 rows and 256 columns, a block takes 16 bytes of x and 8 of the weight a clock
// from L2, of 256 rows and 128 columns 32 and 4, but it converts half as many weights. A warpgroup converts 64 columns
// and k while the tensor cores have the 64 before. Blocks are persistent: the producer fills stages for the next tile
// while the warpgroups store the last, and the one that comes first to the end of a tile stores it while the other has
// the tensor cores.
//
// CLUSTER blocks take neighbouring columns of the same rows. Each of them brings its part of every stage of x to all of
// them.
//
// Measured on an H100: 690 to 780 TFLOP/s where the tiles fill the chip, at its limit of 700 W (1.3 to 1.6 GHz) in all
// that takes longer than 0.3 ms, so instructions cost speed twice, as slots and as energy: 315 of them a step and warp
// instead of 420 (scales made ready once for both halves of a record, descriptors in uniform registers) brought 7 to
// 10%, and tiles of 256 rows 1 to 5%. Tensor cores at their full rate take three of four slots of dispatch: of the
// products' share and the instructions a clock, 0.75 times the one and the other make at most 1. So tiles of 64 rows
// are bound by conversion (59% and 0.51), those of 128 nearly (90% and 0.33). Scales that are powers of two, which
// leave multipliers little to do, gained 4%. Clusters of two are 6% slower with 128 rows, and up to 5% faster with 256,
// which take more of x. A shared unit costs about 8 us: its partial sums go through L2.
#include "common/epilogue.cuh"
#include "hopper/hopper.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/stmatrix.cuh"
#include "gemm/repacked.cuh"

static_assert(__CUDA_ARCH__ == 900, "gemm_sm90_large needs sm_90a");

constexpr bool kAligned = ALIGNED;
constexpr int kBlockM = BLOCK_M;
constexpr int kStages = STAGES;
constexpr int kCluster = CLUSTER;
constexpr bool kShared = SHARED;  // whether there are shared units
// Rows of units in a band: blocks that run at the same time share rows of x and columns of the weight in L2.
constexpr int kBandRows = 8;

constexpr int kWarpgroups = WARPGROUPS;
constexpr int kTiles = TILES;
constexpr int kBlocks = 2 * kTiles;  // of 64 columns and 64 k in a stage, for a warpgroup
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kThreads = (kConsumerWarps + 4) * 32;
constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 112;
constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 24;
constexpr int kRecords = kWarpgroups * kTiles * 2;
constexpr int kBlockN = kRecords * kRecordColumns;
constexpr int kSums = kBlockM / 2;

// Shared memory, from a multiple of 1024: x [stage][k64][row][64 k], the weight [stage][record], what is on
// its way to y [warpgroup][kStoreRows][kRowBytes], barriers [full, empty][stage].
constexpr int kXHalfBytes = kBlockM * 128;
constexpr int kXBytes = 2 * kXHalfBytes;
constexpr int kWeightBytes = kRecords * kRecordBytes;
constexpr int kWeightBegin = kStages * kXBytes;
constexpr int kStoreRows = STORE_ROWS;
constexpr int kRowBytes = kTiles * 64 * 2 + 16;  // 8 rows lie in different banks
constexpr int kStoreBegin = kWeightBegin + kStages * kWeightBytes;
constexpr int kBarrierBegin = kStoreBegin + kWarpgroups * kStoreRows * kRowBytes;

static_assert(kTiles * kBlockM * (kWarpgroups / 2) <= 256, "registers are enough");
static_assert(!kGated || kTiles == 2, "a warpgroup has both of a gate and what it gates");
static_assert(kCluster == 1 || kCluster == 2, "a stage of x has two parts");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");
static_assert(kStoreRows == 16 || kStoreRows == 32, "a matrix is stored in steps of 16 rows");

// The walk over the stages, on over all tiles of a block.
struct Position {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ Position next() const {
    return stage + 1 == kStages ? Position{0, parity ^ 1u} : Position{stage + 1, parity};
  }
};

// The parts of tiles that a cluster makes, one after the other. Units are the tiles of a cluster: neighbours along the
// columns, in bands of rows. `sharers` clusters divide all steps over k of the first `shared` units evenly, and take
// theirs from the last to the first: what they do first is another's to finish. Then all clusters take turns at whole
// units.
struct Schedule {
  int rows;  // of units
  int columns;
  int steps;
  int cluster;
  int shared;
  int sharers;
  int low;  // steps of shared units that are left
  int high;
  int whole;  // the next unit that is not shared

  int unit;
  int begin;  // steps of 128 k
  int end;

  __device__ __forceinline__ Schedule(int m, int n, int k, int shared, int sharers)
      : rows(ceil_div(m, kBlockM)),
        columns(ceil_div(n, kBlockN * kCluster)),
        steps(ceil_div(k, kRecordK)),
        cluster(blockIdx.x / kCluster),
        shared(shared),
        sharers(sharers),
        low(share(cluster)),
        high(share(cluster + 1)),
        whole(shared + cluster) {}
  // Where a cluster's share begins.
  __device__ __forceinline__ int share(int index) const {
    return shared * steps * min(index, sharers) / max(sharers, 1);
  }
  __device__ __forceinline__ bool advance() {
    if (kShared && high > low) {
      unit = (high - 1) / steps;
      end = high - unit * steps;
      high = max(low, unit * steps);
      begin = high - unit * steps;
      return true;
    }
    unit = whole;
    begin = 0;
    end = steps;
    whole += gridDim.x / kCluster;
    return unit < rows * columns;
  }
  // {row, column} of this block's tile
  __device__ __forceinline__ int2 tile() const {
    const int band = unit / (kBandRows * columns);
    const int height = min(kBandRows, rows - band * kBandRows);
    const int within = unit - band * kBandRows * columns;
    return {band * kBandRows + within % height, within / height * kCluster + rank()};
  }
  static __device__ __forceinline__ int rank() { return kCluster == 1 ? 0 : ptx::cluster_ctarank(); }
};

struct Shared {
  uint32_t begin;

  __device__ __forceinline__ uint32_t x(int stage) const { return begin + stage * kXBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const { return begin + kWeightBegin + stage * kWeightBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return begin + kBarrierBegin + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kStages + stage); }
};

// The producer warp, of which one lane asks for all copies.
__device__ __forceinline__ void produce(const Shared& shared, Schedule& schedule, const uint8_t* weight,
                                        const TensorMap* x_map, int m, int n, int k) {
  const bool leader = ptx::elect();
  const bool lacks = lacks_rows<kBlockM>(m);
  const int bytes = (lacks ? m : kBlockM) * (kXBytes / kBlockM) + kWeightBytes;
  const int boxes = kCluster == 1 && lacks ? 2 : 1;  // of x in a stage, that this block asks for
  const int rank = Schedule::rank();
  if (leader) ptx::prefetch_tensormap(x_map);
  ptx::griddepcontrol_wait();
  Position at{0, 1};
  while (schedule.advance()) {
    const int2 tile = schedule.tile();
    const int m_begin = first_row<kBlockM>(tile.x, m);
    // A warpgroup of a gated tile has 64 columns of the gate, then those of the up projection that belong to them.
    const Runs runs(weight, tile.y * (kGated ? kRecords / 2 : kRecords), 0, n, k);
    for (int step = schedule.begin; step < schedule.end; ++step) {
      wait(shared.empty(at.stage), at.parity);
      if (leader) {
        const uint32_t full = shared.full(at.stage);
        ptx::mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll
        for (int column = 0; column < kRecords; ++column) {
          const int of_weight =
              kGated ? column / 2 % 2 * (n / 2 / kRecordColumns) + column / 4 * 2 + column % 2 : column;
          ptx::cp_async_bulk(shared.weight(at.stage) + column * kRecordBytes, runs.record(of_weight, step),
                             kRecordBytes, full);
        }
        if constexpr (kCluster == 1) {
#pragma unroll 1
          for (int half = 0; half < boxes; ++half) {
            ptx::cp_async_bulk_tensor_3d(shared.x(at.stage) + half * kXHalfBytes, x_map, 0, m_begin, step * 2 + half,
                                         full);
          }
        } else {
          ptx::cp_async_bulk_tensor_3d_multicast(shared.x(at.stage) + rank * kXHalfBytes, x_map, 0, m_begin,
                                                 step * 2 + rank, full, (1 << kCluster) - 1);
        }
      }
      at = at.next();
    }
  }
  __syncwarp();
}

// Adds up the parts of a shared unit, in an order that depends on nothing. A block that does not have the unit's last
// steps leaves its sums in `partials`, float4 [block][warpgroup][kParts][128]; the one that has them waits for those of
// the clusters before it. `counters` [block of a unit][warpgroup] are zero before and after. Returns whether the sums
// are complete.
__device__ __forceinline__ bool share_sums(float (&sums)[kTiles][kSums], const Schedule& schedule, int warpgroup,
                                           float* partials, uint32_t* counters) {
  if (schedule.begin == 0 && schedule.end == schedule.steps) return true;
  constexpr int kParts = kSums / 4;
  const int thread = threadIdx.x % 128;
  const auto slot = [&](int cluster) {
    const int block = cluster * kCluster + Schedule::rank();
    return reinterpret_cast<Vector<float, 4>*>(partials) + (block * kWarpgroups + warpgroup) * (kTiles * kParts * 128) +
           thread;
  };
  uint32_t* counter = counters + (schedule.unit * kCluster + Schedule::rank()) * kWarpgroups + warpgroup;
  if (schedule.end != schedule.steps) {
    Vector<float, 4>* target = slot(schedule.cluster);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        target[(i * kParts + part) * 128] = {sums[i][4 * part], sums[i][4 * part + 1], sums[i][4 * part + 2],
                                             sums[i][4 * part + 3]};
      }
    }
    ptx::barrier_sync(1 + warpgroup, 128);
    if (thread == 0) {
      __threadfence();
      atomicAdd(counter, 1u);
    }
    return false;
  }
  int first = schedule.cluster - 1;
  while (schedule.share(first) > schedule.unit * schedule.steps) --first;
  if (thread == 0) {
    while (*const_cast<volatile uint32_t*>(counter) != schedule.cluster - first) {
    }
    *counter = 0;
    __threadfence();
  }
  ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll 1
  for (int cluster = first; cluster < schedule.cluster; ++cluster) {
    const Vector<float, 4>* source = slot(cluster);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const Vector<float, 4> values = source[(i * kParts + part) * 128];
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][4 * part + e] += values.values[e];
      }
    }
  }
  return true;
}

// Asks L2 for the residual that a warpgroup will add.
__device__ __forceinline__ void ask_residual(const Epilogue<X>& epilogue, const int2& tile, int warpgroup, int m,
                                             int n) {
  constexpr int kWidth = kGated ? 64 : kTiles * 64;
  constexpr int kLine = 128 / sizeof(X);
  for (int i = threadIdx.x % 128; i < kBlockM * (kWidth / kLine); i += 128) {
    const int row = tile.x * kBlockM + i % kBlockM;
    const int column = (tile.y * kWarpgroups + warpgroup) * kWidth + i / kBlockM * kLine;
    if (row >= m || column >= (kGated ? n / 2 : n)) continue;
    ptx::prefetch_global_l2(epilogue.residual + static_cast<int64_t>(row) * epilogue.ldr + column);
  }
}

// A warpgroup's part of a tile to y, by way of shared memory: what lies in a lane along the rows of x is to be stored
// along the columns.
__device__ __forceinline__ void store_tile(uint8_t* buffer, const float (&sums)[kTiles][kSums], const int2& tile,
                                           int warpgroup, const Epilogue<X>& epilogue, X* y, int m, int n, int ldy,
                                           float result_factor) {
  constexpr int kWidth = kGated ? 64 : kTiles * 64;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int n_out = kGated ? n / 2 : n;
  const int column_begin = (tile.y * kWarpgroups + warpgroup) * kWidth;
  const int row_begin = first_row<kBlockM>(tile.x, m);
  // Of sums[i], values v = 0, 1 belong to this column, 2, 3 to the one 8 further.
  const int my_column = column_begin + thread / 32 * 16 + lane / 4;
  float biases[kTiles][2] = {};
  if constexpr (kHasBias) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int column = my_column + upper * 8 + (kGated ? 0 : i * 64);
        if (column < n_out) biases[i][upper] = epilogue.biased(0.0f, column + (kGated ? i * (n / 2) : 0));
      }
    }
  }
  auto finish = [&](int i, int index) {
    const int upper = index / 2 % 2;
    float value = epilogue.activate(fmaf(sums[i][index], result_factor, biases[i][upper]));
    if constexpr (kGated) value *= fmaf(sums[1][index], result_factor, biases[1][upper]);
    return value;
  };
  // The thread moves 8 columns of a row of a chunk in each pass.
  constexpr int kChunks = kBlockM / kStoreRows;
  constexpr int kPasses = kStoreRows * kWidth / 8 / 128;
  auto row = [&](int chunk, int pass) { return row_begin + chunk * kStoreRows + (pass * 128 + thread) / (kWidth / 8); };
  auto column = [&](int pass) { return column_begin + (pass * 128 + thread) % (kWidth / 8) * 8; };
  auto exists = [&](int chunk, int pass) {
    return row(chunk, pass) >= tile.x * kBlockM && row(chunk, pass) < m && column(pass) < n_out;
  };
  auto moved = [&](int pass) -> Vector<X, 8>& {
    const int offset = (pass * 128 + thread) / (kWidth / 8) * kRowBytes + (column(pass) - column_begin) * 2;
    return *reinterpret_cast<Vector<X, 8>*>(buffer + offset);
  };
  Vector<X, 8> residuals[kPasses] = {};
  auto fetch_residuals = [&](int chunk) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (exists(chunk, pass)) residuals[pass] = epilogue.residuals<kAligned>(row(chunk, pass), column(pass));
    }
  };
  if constexpr (kHasResidual) fetch_residuals(0);
  const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(buffer)) +
                          (lane / 16 * 8 + lane % 8) * kRowBytes + (thread / 32 * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    ptx::barrier_sync(1 + warpgroup, 128);
    if constexpr (kHasResidual) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) moved(pass) = residuals[pass];
      ptx::barrier_sync(1 + warpgroup, 128);
      if (chunk + 1 < kChunks) fetch_residuals(chunk + 1);
    }
#pragma unroll
    for (int i = 0; i < kWidth / 64; ++i) {
#pragma unroll
      for (int rows = 0; rows < kStoreRows; rows += 16) {
        const uint32_t address = target + rows * kRowBytes + i * 128;
        uint32_t values[4] = {};
        if constexpr (kHasResidual) ptx::ldmatrix_x4_trans(values, address);
#pragma unroll
        for (int matrix = 0; matrix < 4; ++matrix) {
          const int index = (chunk * kStoreRows + rows) / 2 + matrix * 2;
          float low = finish(i, index), high = finish(i, index + 1);
          if constexpr (kHasResidual) {
            low += to_float(X{static_cast<uint16_t>(values[matrix])});
            high += to_float(X{static_cast<uint16_t>(values[matrix] >> 16)});
          }
          values[matrix] = from_float<X>(low).bits | uint32_t{from_float<X>(high).bits} << 16;
        }
        ptx::stmatrix_x4_trans(address, values);
      }
    }
    ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!exists(chunk, pass)) continue;
      store<kAligned>(y + static_cast<int64_t>(row(chunk, pass)) * ldy + column(pass), moved(pass));
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm_sm90_large(const uint8_t* weight, const BIAS* bias, const X* residual, X* y, float* partials,
                    uint32_t* counters, const __grid_constant__ TensorMap x_map, int m, int n, int k, int ldr, int ldy,
                    int shared_units, int sharers, float low, float high, float scale_factor, float result_factor) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared shared{ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(memory)))};
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  if (warp == kConsumerWarps && ptx::elect()) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(shared.full(stage), 1);
      ptx::mbarrier_init(shared.empty(stage), kConsumerWarps * kCluster);
    }
    ptx::fence_mbarrier_init();
  }
  if (lacks_rows<kBlockM>(m)) {
    clear<kStages * kXBytes, kThreads>(memory);
    synchronize_cluster<kCluster>();
  } else {
    begin_cluster<kCluster>();
  }
  ptx::griddepcontrol_launch_dependents();
  if (warp < kConsumerWarps) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int warpgroup = warp / 4;
    Schedule schedule(m, n, k, shared_units, sharers);
    const Epilogue<X> epilogue{bias, residual, low, high, n, ldr};
    if constexpr (kHasResidual) ptx::griddepcontrol_wait();

    // Block b of a stage: 64 columns (tile b / 2) and 64 k (b % 2), with kParts groups or in one with its neighbour.
    constexpr int kParts = kGroups > 1 ? kGroups / 2 : 1;
    const typename ScaledCodes<X>::Factor factor(scale_factor);
    const uint32_t my_records = shared.weight(0) + (warpgroup * kTiles * 2 + warp % 4 / 2) * kRecordBytes;
    const uint32_t my_words = ptx::opaque(my_records + warp % 2 * 512 + lane * 16);
    const uint32_t my_scales = ptx::opaque(my_records + kCodeBytes + warp % 2 * kTileGroupBytes + lane / 4 * 4);
    const uint32_t my_zeros = ptx::opaque(my_scales + 32 - lane / 4 * 2);
    Vector<uint32_t, 4> words;
    ScaledCodes<X> codes[kParts];
    auto load_block = [&](int stage, int b) {
      const uint32_t record = uniform(stage * kWeightBytes) + b / 2 * 2 * kRecordBytes;
      ptx::ld_shared(words.values, my_words + record + b % 2 * 1024);
      if (kGroups > 1 || b % 2 == 0) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int index = kGroups > 1 ? b % 2 * kParts + part : 0;
          codes[part] = ScaledCodes<X>(Group::load_shared(my_scales + record, my_zeros + record, index), factor);
        }
      }
    };
    auto convert = [&](uint32_t (&a)[4][4]) {
#pragma unroll
      for (int s = 0; s < 4; ++s) codes[s * kParts / 4].convert(a[s], words.values[s]);
    };
    // Of the block that a lane gives stages back to.
    const uint32_t my_empty = kCluster == 1 ? shared.empty(0) : ptx::mapa(shared.empty(0), lane % kCluster);
    auto release = [&](uint32_t barrier) {
      __syncwarp();
      if constexpr (kCluster == 1) {
        if (lane == 0) ptx::mbarrier_arrive(barrier);
      } else {
        if (lane < kCluster) ptx::mbarrier_arrive_cluster(barrier);
      }
    };

    Position at{0, 0};
    while (schedule.advance()) {
      if constexpr (kHasResidual) ask_residual(epilogue, schedule.tile(), warpgroup, m, n);
      float sums[kTiles][kSums] = {};
      uint32_t a[2][4][4];
      uint32_t last = 0;  // the barrier of the stage before
      wait(shared.full(at.stage), at.parity);
      load_block(at.stage, 0);
      convert(a[0]);
      for (int step = schedule.begin; step < schedule.end; ++step) {
        const int stage = at.stage;
        at = at.next();
        // Between shared units the compiler does not see that all lanes of a warp are at the same stage.
        const uint32_t x = uniform(shared.x(stage));
        const uint64_t x_begin = ptx::wgmma_descriptor(x);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          ptx::wgmma_fence();
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            wgmma<true>(sums[b / 2], a[b % 2][s], x_begin + b % 2 * (kXHalfBytes / 16) + s * 2);
          }
          ptx::wgmma_commit_group();
          // The tensor cores have this block; the next is converted meanwhile. After the last one the block before is
          // converted again, for nothing.
          if (b < kBlocks - 1) {
            load_block(stage, b + 1);
          } else if (step + 1 < schedule.end) {
            wait(shared.full(at.stage), at.parity);
            load_block(at.stage, 0);
          }
          ptx::wgmma_wait_group<1>();
          if (b == 0 && step > schedule.begin) release(last);
          convert(a[(b + 1) % 2]);
        }
        last = my_empty + stage * 8;
      }
      ptx::wgmma_wait_group<0>();
      release(last);
      if (!kShared || share_sums(sums, schedule, warpgroup, partials, counters)) {
        uint8_t* buffer = memory + kStoreBegin + warpgroup * kStoreRows * kRowBytes;
        store_tile(buffer, sums, schedule.tile(), warpgroup, epilogue, y, m, n, ldy, result_factor);
      }
    }
    end_cluster<kCluster>();
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == kConsumerWarps) {
      Schedule schedule(m, n, k, shared_units, sharers);
      produce(shared, schedule, weight, &x_map, m, n, k);
    }
    end_cluster<kCluster>();
  }
}
