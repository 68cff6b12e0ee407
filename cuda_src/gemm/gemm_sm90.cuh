// SPDX-License-Identifier: Apache-2.0
// What the kernels on the repacked weight share: a producer warp that streams the weight through shared memory, and the
// sum over warps and thread blocks that have parts of one tile.
//
//   y[m, n] = epilogue(sum over k of x[m, k] * (q[k, n] - z[k / group_size, n]) * s[k / group_size, n])
//
//   weight    records of repacked.cuh
//   bias      BIAS [n] or null; residual X [m, n], row stride ldr values, or null
//   y         X [m, n] (gated: [m, n / 2]), row stride ldy values
// ADD_TO_STREAM, RMS_NORM_X: the fused residual add and RMSNorm of a decoder, see hopper/residual_stream.cuh.
// ALIGNED: rows of y and of the residual start at multiples of 16 bytes.
// k a multiple of 64, n of 8 (gated: of 64). The product is made transposed, y^T = W^T x^T: the weight is the operand
// that warps dequantize in registers, once for all BLOCK_M rows of x.
//
// A cluster of SPLITS blocks makes a tile of BLOCK_M rows and RECORDS * 32 columns; block r has the r-th part of K. In
// it TEAMS teams of warps take turns at the stages, each with sums of its own for the whole tile. In the end a block
// adds up its teams' sums of the rows that other blocks own and sends them there. Each block then adds, in a fixed
// order, its own teams' sums of its rows and what the others sent.
//
// Programmatic dependent launch: all that is read before griddepcontrol.wait is the weight; x and a stream are asked
// for in L2.
//
// Measured on an H200, 4096 x 4096, one row, dependent launches (microseconds a launch). In all 4.4; without the early
// launch of the next grid 5.6; without the math 2.9, so the math between x and the sums is the longest link of the
// chain (without the wait for x it is 2.9, too); without the last sums and stores 4.6: they cost nothing. Copies of one
// record each took 5.1: a warp starts a copy in tens of cycles, and 32 of them one after the other delay the stream.
#pragma once

#include "common/epilogue.cuh"
#include "hopper/hopper.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"
#include "gemm/repacked.cuh"
#include "hopper/residual_stream.cuh"

constexpr bool kAligned = ALIGNED;
constexpr int kBlockM = BLOCK_M;
constexpr int kRecords = RECORDS;
constexpr int kTeams = TEAMS;
constexpr int kTeamWarps = TEAM_WARPS;
constexpr int kStages = STAGES;
constexpr int kDepth = DEPTH;  // steps of 128 k in a stage: as many records of a run that one copy brings
constexpr int kSplits = SPLITS;
// Blocks that a multiprocessor shall have room for: with two, the next grid's weights can come while this one computes.
constexpr int kResident = RESIDENT;
constexpr int kXBytes = X_BYTES;  // of x that the producer brings with a stage of the weight, by the tensor map
constexpr int kXRingBytes = X_RING_BYTES;  // of x in shared memory

// Parts of x, of which a block asks L2 for one before the wait: neighbouring columns of tiles ask for different ones,
// eight for all. What comes with a stream was made just before.
constexpr int kXParts = 8;
constexpr bool kAsksX = !kAddsToStream && !kRmsNormsX;
// Whether all of a block's first weights are asked for before the wait for x, or those of its first stage alone. The
// copy engine takes its turns, so that x comes behind all that was asked for: a block that has to begin when the kernel
// before ends does better with stage after stage (4096 x 4096 at 64 rows: 6.6 us where 7.2 were), one that begins
// early with all it has room for.
constexpr bool kEager = EAGER;

constexpr int kBlockN = kRecords * kRecordColumns;
constexpr int kConsumerWarps = kTeams * kTeamWarps;
constexpr int kConsumerThreads = kConsumerWarps * 32;
// Registers that the producer's warpgroup leaves to the consumers; 0: the producer is one warp, and all have as many.
constexpr int kConsumerRegisters = CONSUMER_REGISTERS;
constexpr int kProducerRegisters = 40;
// Whether a warp behind the producer makes what a stream's norm multiplies sums by. Where the producer brings x, its
// consumers do so while they wait for x, for there may be many rows.
constexpr bool kFactorWarp = kRmsNormsX && kXBytes == 0;
constexpr int kThreads = kConsumerThreads + (kConsumerRegisters != 0 ? 128 : kFactorWarp ? 64 : 32);

// Sums of 8 rows and 16 columns as they lie in the lanes: float4 [column % 8][two rows]. Of a tile that a team has made
// all 4 pairs of rows, of what another block sends those that this block owns. Lanes that read the same column % 8 of
// neighbouring tiles meet in no bank.
template <int PAIRS>
struct SumTiles {
  static constexpr int kPairs = PAIRS;
  static constexpr int kColumnFloats = PAIRS * 4;
  static constexpr int kFloats = 8 * kColumnFloats + 8;

  // Of two rows, the first of which is `row`, and the columns `column` and `column` + 8.
  static __device__ __forceinline__ uint32_t index(uint32_t row, uint32_t column) {
    const uint32_t tile = row / (2 * PAIRS) * (kBlockN / 16) + column / 16;
    return tile * kFloats + column % 8 * kColumnFloats + row / 2 % PAIRS * 4;
  }
  // Adds 8 columns of a row, `column` a multiple of 8.
  static __device__ __forceinline__ void add(float (&out)[8], const float* sums, uint32_t row, uint32_t column) {
    const float* source = sums + index(row, column) + column / 8 % 2 * 2 + row % 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] += source[i * kColumnFloats];
  }
};

// Shared memory, from a multiple of 1024: x, the weight [stage][column of records][DEPTH], barriers [full,
// empty][stage]; over them, when nobody writes them any more, the sums of each team. Behind both a barrier and the sums
// that the other blocks of the cluster send for this block's rows [other].
constexpr int kWeightBytes = kRecords * kDepth * kRecordBytes;
constexpr int kWeightBegin = kXRingBytes;
constexpr int kBarrierBegin = kWeightBegin + kStages * kWeightBytes;
constexpr int kOwnedRows = kBlockM / kSplits;
using TeamSums = SumTiles<4>;
using SentSums = SumTiles<(kOwnedRows < 8 ? kOwnedRows / 2 : 4)>;
constexpr int kTeamFloats = kBlockM / 8 * (kBlockN / 16) * TeamSums::kFloats;
constexpr int kSentFloats = ceil_div(kOwnedRows, 8) * (kBlockN / 16) * SentSums::kFloats;
constexpr int kStagedBytes = kBarrierBegin + kStages * 16;
constexpr int kSentBarrier = kStagedBytes > kTeams * kTeamFloats * 4 ? kStagedBytes : kTeams * kTeamFloats * 4;
constexpr int kSentBegin = kSentBarrier + 16;
// Behind all of that, what a stream's norm multiplies the rows that this block owns by.
constexpr int kFactorsBegin = kSplits == 1 ? kSentBarrier : kSentBegin + (kSplits - 1) * kSentFloats * 4;
// Tiles of one column that follow each other: blocks that run at the same time share rows of x and columns of the
// weight in L2.
constexpr int kBandRows = 8;

static_assert(kBlockM % 8 == 0, "tensor cores take 8 rows of x at a time");
static_assert(kBlockM % (2 * kSplits) == 0, "every block of a cluster owns as many pairs of rows");
// Copies land in any order. A team that came early to a stage which another team had not even found full would take the
// parity of the phase before that for its own.
static_assert(kStages % kTeams == 0, "a stage belongs to one team");
// What the block starts with is all that it has: one register too many and setmaxnreg waits for ever.
static_assert(kConsumerWarps / 4 * kConsumerRegisters + (kConsumerRegisters != 0 ? kProducerRegisters : 0) <=
                  kThreads / 128 * (65536 / kThreads / 8 * 8),
              "registers come out of those that the block starts with");
static_assert(!kGated || kRecords % 2 == 0, "the gate takes half of the records");
static_assert(kEager || kXBytes != 0, "only where the producer brings x can it wait for that");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");
static_assert(!kAddsToStream || (!kGated && !kHasResidual && kAligned),
              "only a plain, aligned y can be added to the residual stream");

// The walk over the stages.
struct Position {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ void advance(int steps) {
    stage += steps;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1u;
    }
  }
};

struct Tile {
  uint32_t shared_begin;
  int block_n;
  int m_begin;  // the first row of x
  int m_own;    // the first row that it stores
  uint32_t split;
  int step_begin;  // in steps of 128 k
  int step_end;    // step_begin + a multiple of DEPTH, or the end of K

  __device__ __forceinline__ int rounds() const { return ceil_div(step_end - step_begin, kDepth); }
  // Of them, those that no stage has to be given back for.
  __device__ __forceinline__ int first_rounds() const { return min(rounds(), kStages); }
  // Of the stage that is filled in a round.
  __device__ __forceinline__ int depth(int round) const {
    return kDepth == 1 ? 1 : min(kDepth, step_end - step_begin - round * kDepth);
  }
  __device__ __forceinline__ uint32_t x(int stage) const { return shared_begin + stage * kXBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const {
    return shared_begin + kWeightBegin + stage * kWeightBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return shared_begin + kBarrierBegin + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kStages + stage); }
};

// Called from different places by the roles of the block, as __syncthreads may not be.
__device__ __forceinline__ void synchronize_block() { ptx::barrier_sync(0, kThreads); }

// Whether the tile has rows that no copy brings, which the consumers clear.
__device__ __forceinline__ bool clears(int m) { return kXBytes != 0 && lacks_rows<kBlockM>(m); }

// All barriers are there, in all blocks of the cluster, and what consumers have cleared.
__device__ __forceinline__ void begin_roles(int m) {
  if (kSplits == 1 || clears(m)) synchronize_block();
  if constexpr (kSplits > 1) begin_cluster<kSplits>();
}

__device__ __forceinline__ Tile begin_tile(uint8_t* shared, int m, int k) {
  Tile tile;
  tile.shared_begin = ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
  tile.block_n = blockIdx.x / kSplits;
  int block_m = 0;
  if (gridDim.y > 1) {
    const int columns = gridDim.x / kSplits;
    const int index = blockIdx.y * columns + tile.block_n;
    const int band = index / (kBandRows * columns);
    const int height = min(kBandRows, static_cast<int>(gridDim.y) - band * kBandRows);
    const int within = index - band * kBandRows * columns;
    block_m = band * kBandRows + within % height;
    tile.block_n = within / height;
  }
  tile.m_begin = first_row<kBlockM>(block_m, m);
  tile.m_own = block_m * kBlockM;
  tile.split = kSplits == 1 ? 0 : ptx::cluster_ctarank();
  const int steps = ceil_div(k, kRecordK);
  const int rounds = ceil_div(steps, kDepth);
  tile.step_begin = rounds * tile.split / kSplits * kDepth;
  tile.step_end = min(steps, rounds * (tile.split + 1) / kSplits * kDepth);
  return tile;
}

// Of blocks without a tile, which make the launch's a whole number a multiprocessor. They end with the kernel before,
// so that the next one's blocks find as much room everywhere; else two of them come to lie where none is, and all wait.
__device__ __forceinline__ bool keeps_place(const Tile& tile, int n) {
  return gridDim.y == 1 && tile.block_n >= ceil_div(n, kBlockN);
}

// Boxes of x in a stage: it is one, or has one of each 64 k where it lacks rows.
__device__ __forceinline__ int x_boxes(int m) { return clears(m) ? 2 * kDepth : 1; }

// The producer warp, of which one lane asks for all copies. The first weights are under way before the block meets and
// before the wait for the grid that makes x.
__device__ __forceinline__ void produce(const Tile& tile, const uint8_t* weight, const TensorMap* x_map, int m, int n,
                                        int k) {
  const bool leader = ptx::elect();
  // A gated tile has columns of records of the gate, then those of the up projection that belong to them.
  constexpr int kNeighbours = kGated ? kRecords / 2 : kRecords;
  const Runs runs(weight, tile.block_n * kNeighbours, tile.step_begin, n, k);
  const int x_bytes = clears(m) ? m * (kXBytes / kBlockM) : kXBytes;
  auto expect = [&](int round, int stage) {
    ptx::mbarrier_arrive_expect_tx(tile.full(stage), kRecords * tile.depth(round) * kRecordBytes + x_bytes);
  };
  auto start_run = [&](int column, int round, int stage) {
    const int of_weight = column < kNeighbours ? column : n / 2 / kRecordColumns + column - kNeighbours;
    ptx::cp_async_bulk(tile.weight(stage) + column * kDepth * kRecordBytes, runs.record(of_weight, round * kDepth),
                       tile.depth(round) * kRecordBytes, tile.full(stage));
  };
  auto start_weight = [&](int round, int stage) {
#pragma unroll
    for (int column = 0; column < kRecords; ++column) start_run(column, round, stage);
  };
  auto start_x = [&](int round, int stage) {
    if constexpr (kXBytes != 0) {
      const int boxes = x_boxes(m);
#pragma unroll 1
      for (int box = 0; box < boxes; ++box) {
        ptx::cp_async_bulk_tensor_3d(tile.x(stage) + box * (kXBytes / kDepth / 2), x_map, 0, tile.m_begin,
                                     (tile.step_begin + round * kDepth) * 2 + box, tile.full(stage));
      }
    }
  };

  const int ahead = tile.first_rounds();
  if (leader) {
    if constexpr (kXBytes != 0) ptx::prefetch_tensormap(x_map);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(tile.full(stage), 1);
      ptx::mbarrier_init(tile.empty(stage), kTeamWarps);
    }
    if constexpr (kSplits > 1) ptx::mbarrier_init(tile.shared_begin + kSentBarrier, 1);
    ptx::fence_mbarrier_init();
    if constexpr (kSplits > 1) {
      ptx::mbarrier_arrive_expect_tx(tile.shared_begin + kSentBarrier, (kSplits - 1) * kOwnedRows * kBlockN * 4);
    }
    for (int round = 0; round < ahead; ++round) {
      expect(round, round);
      if (!kEager && round == 0) start_weight(round, round);
    }
  }
  __syncwarp();
  // Each lane's copy behind the other's: the kernel before may still run, and 4096 x 4096 at 8 rows took 1.12 times as
  // long where one lane asked for all of them, four times as fast.
  if constexpr (kEager) {
    for (int index = threadIdx.x % 32; index < ahead * kRecords; index += 32) {
      start_run(index % kRecords, index / kRecords, index / kRecords);
    }
  }
  begin_roles(m);
  ptx::griddepcontrol_launch_dependents();
  if constexpr (kXBytes != 0) {
    ptx::griddepcontrol_wait();
    if (leader) {
      for (int round = 0; round < ahead; ++round) {
        if (!kEager && round > 0) start_weight(round, round);
        start_x(round, round);
      }
    }
  }
  Position at{0, 0};
  for (int round = ahead; round < tile.rounds(); ++round) {
    wait(tile.empty(at.stage), at.parity);
    if (leader) {
      expect(round, at.stage);
      start_weight(round, at.stage);
      start_x(round, at.stage);
    }
    at.advance(1);
  }
  __syncwarp();
}

// A team's sums of 16 columns from `column` on and 8 rows from `row` on, for the block to see; c as in ptx/mma.cuh.
__device__ __forceinline__ void push_sums(float* sums, int team, int row, int column, const float (&c)[4]) {
  const int lane = threadIdx.x % 32;
  const int index = TeamSums::index(row + lane % 4 * 2, column + lane / 4);
  store<true>(sums + team * kTeamFloats + index, Vector<float, 4>{c[0], c[1], c[2], c[3]});
}

// The block's sums of the rows that other blocks of the cluster own, to them.
__device__ __forceinline__ void send_sums(const Tile& tile, const float* sums) {
  constexpr uint32_t kUnits = kOwnedRows / 2 * (kBlockN / 2);
  constexpr uint32_t kAll = (kSplits - 1) * kUnits;
  constexpr uint32_t kPairs = SentSums::kPairs;
#pragma unroll 4
  for (uint32_t begin = 0; begin < kAll; begin += kConsumerThreads) {
    const uint32_t index = begin + threadIdx.x;
    if (kAll % kConsumerThreads != 0 && index >= kAll) break;
    const uint32_t owner = (tile.split + 1 + index / kUnits) % kSplits;
    const uint32_t unit = index % kUnits;
    const uint32_t row = unit % kPairs * 2 + unit / (kPairs * (kBlockN / 2)) * 8;
    const uint32_t column = unit / kPairs % 8 + unit / (kPairs * 8) % (kBlockN / 16) * 16;
    const float* source = sums + TeamSums::index(owner * kOwnedRows + row, column);
    float total[4] = {};
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      Vector<float, 4> part;
      load<true>(part, source + team * kTeamFloats);
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += part.values[i];
    }
    const uint32_t slot = tile.split < owner ? tile.split : tile.split - 1;
    const uint32_t target = tile.shared_begin + kSentBegin + (slot * kSentFloats + SentSums::index(row, column)) * 4;
    ptx::st_async(ptx::mapa(target, owner), total, ptx::mapa(tile.shared_begin + kSentBarrier, owner));
  }
}

// Until the other blocks' sums have come.
__device__ __forceinline__ void wait_for_sums(const Tile& tile) { wait(tile.shared_begin + kSentBarrier, 0); }

constexpr int kStoredColumns = kGated ? kBlockN / 2 : kBlockN;  // of y, by a block

// Of eight columns of y that a thread stores: its index-th.
struct Place {
  uint32_t local_row, local_column;
  int row, column;
  bool valid;

  __device__ __forceinline__ Place(const Tile& tile, uint32_t index, int m, int n_out) {
    local_row = index / (kStoredColumns / 8);
    local_column = index % (kStoredColumns / 8) * 8;
    row = tile.m_begin + tile.split * kOwnedRows + local_row;
    column = tile.block_n * kStoredColumns + local_column;
    valid = index < kOwnedRows * (kStoredColumns / 8) && row >= tile.m_own && row < m && column < n_out;
  }
};

// Adds the parts of this block's rows and stores them, once all are there. `part` is the stream's at the thread's first
// place.
__device__ __forceinline__ void store_tile(const Tile& tile, const uint8_t* shared, const BIAS* bias, const X* residual,
                                           X* y, int m, int n, int ldr, int ldy, float low, float high,
                                           const ResidualStream& stream, ResidualStream::Part part) {
  const Epilogue<X> epilogue{bias, residual, low, high, n, ldr};
  const float* team_sums = reinterpret_cast<const float*>(shared);
  const float* sent_sums = reinterpret_cast<const float*>(shared + kSentBegin);
  const float* factors = reinterpret_cast<const float*>(shared + kFactorsBegin);
  auto load_sums = [&](float (&out)[8], uint32_t row, uint32_t column) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = 0.0f;
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      TeamSums::add(out, team_sums + team * kTeamFloats, tile.split * kOwnedRows + row, column);
    }
    if constexpr (kSplits > 1) wait_for_sums(tile);
#pragma unroll
    for (int other = 0; other < kSplits - 1; ++other) SentSums::add(out, sent_sums + other * kSentFloats, row, column);
    if constexpr (kRmsNormsX) {
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] *= factors[row];
    }
  };
  const int n_out = kGated ? n / 2 : n;
  for (uint32_t index = threadIdx.x; index < kOwnedRows * (kStoredColumns / 8); index += kConsumerThreads) {
    const Place at(tile, index, m, n_out);
    float squares = 0.0f;
    if (at.valid) {
      const Vector<X, 8> added = epilogue.residuals<kAligned>(at.row, at.column);
      float total[8];
      load_sums(total, at.local_row, at.local_column);
      if constexpr (kGated) {
        float up[8];
        load_sums(up, at.local_row, at.local_column + kStoredColumns);
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] = epilogue.product(total[i], up[i], at.column + i);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] = epilogue.activate(epilogue.biased(total[i], at.column + i));
      }
      if constexpr (kAddsToStream) {
        if (index != threadIdx.x) part = stream.part(at.row, at.column, n);
        squares = stream.add(total, part, at.row, at.column, n);
      }
      Vector<X, 8> out;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (kHasResidual) total[i] += to_float(added.values[i]);
        out.values[i] = from_float<X>(total[i]);
      }
      store<kAligned>(y + static_cast<int64_t>(at.row) * ldy + at.column, out);
    }
    if constexpr (kAddsToStream) stream.store_square_sum(squares, at.valid, at.row, at.column, n);
  }
}

// By WARPS warps, of which this is the warp-th.
template <int WARPS>
__device__ __forceinline__ void make_factors(const Tile& tile, const ResidualStream& stream, uint8_t* shared, int warp,
                                             int m, int k) {
  ptx::griddepcontrol_wait();
  stream.make_factors<kOwnedRows, WARPS>(reinterpret_cast<float*>(shared + kFactorsBegin), warp,
                                         tile.m_begin + tile.split * kOwnedRows, m, k, tile.block_n == 0);
}

// The whole kernel: `ask(tile)` asks L2 for the block's part of x, `consume(tile)` adds up a team's part of K,
// `push(sums)` pushes its sums. EARLY: a thread has 17 registers for what its place in the stream holds, so that it can
// read that as early as x.
template <bool EARLY, class Ask, class Consume, class Push>
__device__ __forceinline__ void run_tile(const uint8_t* weight, const BIAS* bias, const X* residual, X* y,
                                         const TensorMap* x_map, int m, int n, int k, int ldr, int ldy, float low,
                                         float high, const ResidualStream& stream, Ask ask, Consume consume,
                                         Push push) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Tile tile = begin_tile(shared, m, k);
  if (keeps_place(tile, n)) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    return;
  }
  const int warp = uniform_warp();
  // Registers move between the roles only while each is one branch to its end.
  if (warp < kConsumerWarps) {
    if constexpr (kConsumerRegisters != 0) ptx::setmaxnreg_inc<kConsumerRegisters>();
    if (clears(m)) clear<kXRingBytes, kConsumerThreads>(shared);
    if constexpr (kAsksX) ask(tile);
    begin_roles(m);
    ptx::griddepcontrol_launch_dependents();
    float* sums = reinterpret_cast<float*>(shared);
    const Place first(tile, threadIdx.x, m, n);  // for a stream
    // The weights between have driven it out of L2, and in the end all would wait for it.
    if (kAddsToStream && first.valid) stream.prefetch(first.row, first.column, n);
    if constexpr (kRmsNormsX && !kFactorWarp) make_factors<kConsumerWarps>(tile, stream, shared, warp, m, k);
    ResidualStream::Part part = {};
    auto load_part = [&]() {
      ptx::griddepcontrol_wait();
      // The late one makes the place anew, so that it needs no registers before.
      const Place place = EARLY ? first : Place(tile, ptx::opaque(threadIdx.x), m, n);
      if (place.valid) part = stream.part(place.row, place.column, n);
    };
    if constexpr (kAddsToStream && EARLY) load_part();
    consume(tile);
    if constexpr (kAddsToStream && !EARLY) load_part();
    synchronize_block();
    push(sums);
    synchronize_block();
    if constexpr (kSplits > 1) send_sums(tile, sums);
    if constexpr (kHasResidual) ptx::griddepcontrol_wait();
    store_tile(tile, shared, bias, residual, y, m, n, ldr, ldy, low, high, stream, part);
    if constexpr (kSplits > 1) wait_for_sums(tile);  // none may end while others send to it
  } else {
    if constexpr (kConsumerRegisters != 0) ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == kConsumerWarps) {
      produce(tile, weight, x_map, m, n, k);
    } else {
      begin_roles(m);
      ptx::griddepcontrol_launch_dependents();
      if (kFactorWarp && warp == kConsumerWarps + 1) make_factors<1>(tile, stream, shared, 0, m, k);
    }
    synchronize_block();
    synchronize_block();
  }
}
