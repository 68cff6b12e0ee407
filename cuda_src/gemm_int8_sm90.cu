// SPDX-License-Identifier: Apache-2.0
// The integer product of gemm_int8.cuh by wgmma, for hundreds of rows and more: all blocks in one launch, each block's
// int32 products scaled and added up in registers. sm_90a. The product is made transposed, y^T = W x^T: the weight is
// operand A, unpacked in registers; x is B.
//
//   weight      records [ceil(n / 64)][ceil(k / 128)], see below
//   x_map       tensor map of xq as [1][m][k] in boxes of [1][128 / CLUSTER][128], swizzled by 128 bytes
//   x_scale, x_offset, x_sums   as in gemm_int8.cuh
//   rows, columns   of units
//   bias        BIAS [n] or null; y  Y [m, n], row stride ldy values; aligned: rows start at multiples of 16 bytes
// k a multiple of 16; block a multiple of 128, or 64 or 32, or one block for all of k. X_BLOCKS: blocks in 128 k.
//
// A record holds 64 columns and 128 k of the weight, zero beyond its ends:
//   codes       With g = lane / 4 and t = lane % 4, warp w of a warpgroup has columns 16 w + g and 16 w + 8 + g; 16
//               bytes a lane. For 4 bits [2 of k64][warp][lane]: byte 8 s + 4 h + i holds k = 32 s + 16 h + 4 t + i of
//               the 64, of column g in its low and of g + 8 in its high nibble; for 8 bits [4 of k32][warp][lane]: byte
//               8 h + 4 c + i holds k = 16 h + 4 t + i of column g + 8 c, as two's complement.
//   parameters  float32 [X_BLOCKS][part][warp][8 of g][2 of g, g + 8]: the scale, then with WEIGHT_OFFSET the offset of
//               the codes as they are multiplied, then with X_OFFSET the sum over the block of what the codes stand
//               for. The last two are zero but in the last step of 128 k of a block.
// 4-bit codes are multiplied as unsigned bytes with WEIGHT_OFFSET, else as signed ones; where they stand in a byte, so
// that those of high nibbles, and all signed ones, are worth 16 times as much. Scale and offset allow for it.
//
// FP8: xq is e4m3 with one scale a row, x_scale [m]; x_sums are float32, of its values. 4-bit codes in the low bits of
// a byte are e4m3 as they lie: code * 2^-9. Products are float32; the scale of x comes last.
//
// A block makes tiles of 128 rows and 256 columns: two warpgroups with 64 rows each, whose four tiles of 64 columns
// share the parameters of x in registers. While one warpgroup adds up a block of products the other has the tensor
// cores. Blocks are persistent, and CLUSTER of them, with neighbouring columns of the same rows, share what they bring
// of xq.
#include "copied.cuh"
#include "epilogue.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/thread_index.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "ptx/wgmma_s8.cuh"

static_assert(__CUDA_ARCH__ == 900, "gemm_int8_sm90 needs sm_90a");

#if FP8
using Product = float;
#else
using Product = int32_t;
#endif

constexpr bool kFp8 = FP8;
constexpr int kBits = BITS;
constexpr bool kXOffset = X_OFFSET;
constexpr bool kWeightOffset = WEIGHT_OFFSET;
constexpr int kXBlocks = X_BLOCKS;
constexpr int kStages = STAGES;
constexpr int kCluster = CLUSTER;
// Rows of units in a band: blocks that run at the same time share rows of x and columns of the weight in L2.
constexpr int kBandRows = 8;

constexpr int kWarpgroups = 2;
constexpr int kTiles = 4;
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kParameterWarps = 2;
constexpr int kThreads = (kConsumerWarps + 4) * 32;
constexpr int kConsumerRegisters = 232;
constexpr int kProducerRegisters = 40;
// Those before are of __syncthreads and of the warpgroups.
constexpr int kTurnBarrier = 1 + kWarpgroups;
constexpr int kBlockM = 128;
constexpr int kRows = kBlockM / kWarpgroups;
constexpr int kBlockN = kTiles * 64;
constexpr int kBlockK = 128;
constexpr int kSums = kRows / 2;

// What is multiplied at once: 64 columns and the k of one block, or all 128.
constexpr int kSteps = kBlockK / 32 / kXBlocks;
constexpr int kWords = kSteps * kBits / 2;
constexpr bool kTurns = kSteps > 1;

constexpr int kParts = 1 + kWeightOffset + kXOffset;
// Of those of x, what stays in registers for all tiles.
constexpr int kKeptParts = kParts < 2 ? kParts : 2;
constexpr int kOffsetPart = 1;
constexpr int kColumnPart = 1 + kWeightOffset;
constexpr int kCodeBytes = 64 * kBlockK * kBits / 8;
constexpr int kRecordBytes = kCodeBytes + kXBlocks * kParts * 64 * 4;

// Shared memory, from a multiple of 1024: x [stage][row][128 k], the weight [stage][record], parameters of x float32
// [stage][X_BLOCKS][part: scale, scale * sum, offset][row], what is on its way to y [warpgroup][kStoreRows][kRowBytes],
// barriers [full, empty][stage].
constexpr int kXBytes = kBlockM * kBlockK;
constexpr int kWeightBytes = kTiles * kRecordBytes;
constexpr int kXParameterBytes = kXBlocks * kParts * kBlockM * 4;
constexpr int kWeightBegin = kStages * kXBytes;
constexpr int kXParameterBegin = kWeightBegin + kStages * kWeightBytes;
constexpr int kStoreRows = sizeof(Y) == 2 ? 16 : 8;
constexpr int kRowBytes = kBlockN * sizeof(Y) + 16;  // 8 rows lie in different banks
constexpr int kStoreBegin = kXParameterBegin + kStages * kXParameterBytes;
constexpr int kBarrierBegin = kStoreBegin + kWarpgroups * kStoreRows * kRowBytes;

static_assert(!kFp8 || (kBits == 4 && kWeightOffset && !kXOffset), "what FP8 takes");
static_assert(kCluster == 1 || kCluster == 2, "a stage of x has two parts");
// What the block starts with is all that it has: one register too many and setmaxnreg waits for ever.
static_assert(kWarpgroups * kConsumerRegisters + kProducerRegisters <= kThreads / 128 * (65536 / kThreads / 8 * 8),
              "registers come out of those that the block starts with");

// The walk over the stages, on over all tiles of a block.
struct Position {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ Position next() const {
    return stage + 1 == kStages ? Position{0, parity ^ 1u} : Position{stage + 1, parity};
  }
};

// The units of a cluster, tiles that are neighbours along the columns, one after the other, in bands of rows.
struct Schedule {
  int rows;  // of units
  int columns;
  int unit;

  __device__ __forceinline__ Schedule(int rows, int columns)
      : rows(rows), columns(columns), unit(blockIdx.x / kCluster) {}
  __device__ __forceinline__ bool is_there() const { return unit < rows * columns; }
  __device__ __forceinline__ void advance() { unit += gridDim.x / kCluster; }
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

// The warp that brings xq and the weight.
__device__ __forceinline__ void produce(const Shared& shared, const uint8_t* weight, const TensorMap* x_map, int rows,
                                        int columns, int n, int k) {
  const int lane = threadIdx.x % 32;
  const int rank = Schedule::rank();
  const int steps = ceil_div(k, kBlockK);
  if (lane == 0) ptx::prefetch_tensormap(x_map);
  ptx::griddepcontrol_wait();
  Position at{0, 1};
  for (Schedule schedule(rows, columns); schedule.is_there(); schedule.advance()) {
    const int2 tile = schedule.tile();
    // The last tile may reach beyond the weight: it reads some records there, and stores nothing of them.
    const int64_t column = min(tile.y * kTiles + lane % kTiles, ceil_div(n, 64) - 1);
    const uint8_t* source = weight + column * steps * kRecordBytes;
    for (int step = 0; step < steps; ++step) {
      wait(shared.empty(at.stage), at.parity);
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(shared.full(at.stage), kXBytes + kWeightBytes);
      __syncwarp();
      if (lane < kTiles) {
        ptx::cp_async_bulk(shared.weight(at.stage) + lane * kRecordBytes, source, kRecordBytes, shared.full(at.stage));
        source += kRecordBytes;
      } else if (lane == kTiles) {
        if constexpr (kCluster == 1) {
          ptx::cp_async_bulk_tensor_3d(shared.x(at.stage), x_map, step * kBlockK, tile.x * kBlockM, 0,
                                       shared.full(at.stage));
        } else {
          ptx::cp_async_bulk_tensor_3d_multicast(shared.x(at.stage) + rank * (kXBytes / kCluster), x_map,
                                                 step * kBlockK, tile.x * kBlockM + rank * (kBlockM / kCluster), 0,
                                                 shared.full(at.stage), (1 << kCluster) - 1);
        }
      }
      at = at.next();
    }
  }
  __syncwarp();
}

// The warps that bring the parameters of x, each of them those of two adjacent rows a lane.
__device__ __forceinline__ void produce_parameters(const Shared& shared, uint8_t* memory, const float* x_scale,
                                                   const float* x_offset, const Product* x_sums, int rows, int columns,
                                                   int m, int k, int block) {
  const int lane = threadIdx.x % 32;
  const int local_row = (threadIdx.x / 32 - kConsumerWarps - 1) * (kBlockM / kParameterWarps) + lane * 2;
  const int steps = ceil_div(k, kBlockK);
  const int blocks = ceil_div(k, block);
  ptx::griddepcontrol_wait();
  Position at{0, 1};
  for (Schedule schedule(rows, columns); schedule.is_there(); schedule.advance()) {
    const int row = schedule.tile().x * kBlockM + local_row;
    const int64_t source_rows[2] = {min(row, m - 1), min(row + 1, m - 1)};
    for (int step = 0; step < steps; ++step) {
      auto* target = reinterpret_cast<float*>(memory + kXParameterBegin + at.stage * kXParameterBytes) + local_row;
#pragma unroll 1
      for (int b = 0; b < kXBlocks; ++b, target += kParts * kBlockM) {
        const int index = min(kXBlocks == 1 ? step * kBlockK / block : step * kXBlocks + b, blocks - 1);
        Vector<float, 2> values[kParts];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t source = source_rows[i] * blocks + index;
          const float scale = x_scale[kFp8 ? source_rows[i] : source];
          values[0].values[i] = scale;
          if constexpr (kWeightOffset) {
            const auto sum = static_cast<float>(x_sums[source]);
            values[kOffsetPart].values[i] = kFp8 ? sum : scale * sum;
          }
          if constexpr (kXOffset) values[kColumnPart].values[i] = x_offset[source];
        }
        if (b == 0) wait(shared.empty(at.stage), at.parity);
#pragma unroll
        for (int part = 0; part < kParts; ++part) store<true>(target + part * kBlockM, values[part]);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(shared.full(at.stage));
      at = at.next();
    }
  }
  __syncwarp();
}

// Codes of one step of 32 k to operand A.
__device__ __forceinline__ void unpack(uint32_t (&a)[4], const uint32_t (&words)[kWords], int step) {
  constexpr uint32_t kLow = 0x0f0f0f0fu;
  constexpr uint32_t kHigh = 0xf0f0f0f0u;
  constexpr uint32_t kSigns = 0x80808080u;
  if constexpr (kBits == 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = words[step * 4 + i];
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = words[step * 2 + i];
      a[2 * i] = kWeightOffset ? word & kLow : ((word << 4) & kHigh) ^ kSigns;
      a[2 * i + 1] = kFp8 ? (word >> 4) & kLow : kWeightOffset ? word & kHigh : (word & kHigh) ^ kSigns;
    }
  }
}

template <bool ACCUMULATE>
__device__ __forceinline__ void wgmma(Product (&d)[kSums], const uint32_t (&a)[4], uint32_t b) {
  if constexpr (kFp8) {
    ptx::wgmma_e4m3<ACCUMULATE>(d, a, b);
  } else if constexpr (kBits == 4 && kWeightOffset) {
    ptx::wgmma_u8_s8<ACCUMULATE>(d, a, b);
  } else {
    ptx::wgmma_s8_s8<ACCUMULATE>(d, a, b);
  }
}

// A warpgroup's part of a tile to y, by way of shared memory: what lies in a lane along the rows of x is to be stored
// along the columns.
template <class T>
__device__ __forceinline__ void store_tile(uint8_t* memory, const float (&sums)[kTiles][kSums], const int2& tile,
                                           const Epilogue<T>& epilogue, T* y, int m, int n, int ldy, bool aligned) {
  constexpr int kUnit = 16 / sizeof(T);
  // Nothing of this is to take registers while products are added up.
  const int index = ptx::thread_index_now();
  const int warpgroup = index / 128;
  const int thread = index % 128;
  const int lane = thread % 32;
  const int row_begin = tile.x * kBlockM + warpgroup * kRows;
  const int column_begin = tile.y * kBlockN;
  uint8_t* buffer = memory + kStoreBegin + warpgroup * kStoreRows * kRowBytes;
  // Of sums[i], values v = 0, 1 belong to this column of tile i, 2, 3 to the one 8 further.
  const int my_column = thread / 32 * 16 + lane / 4;
  float biases[kTiles][2] = {};
  if constexpr (kHasBias) {
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {
      const int column = column_begin + my_column + i / 2 * 64 + i % 2 * 8;
      if (column < n) biases[i / 2][i % 2] = to_float(epilogue.bias[column]);
    }
  }
  auto finish = [&](int i, int index) {
    const float sum = kHasBias ? sums[i][index] + biases[i][index / 2 % 2] : sums[i][index];
    return from_float<T>(epilogue.activate(sum));
  };
#pragma unroll
  for (int chunk = 0; chunk < kRows / kStoreRows; ++chunk) {
    ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if constexpr (sizeof(T) == 2) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(buffer)) +
                                (lane / 16 * 8 + lane % 8) * kRowBytes +
                                (i * 64 + thread / 32 * 16 + lane / 8 % 2 * 8) * 2;
        uint32_t values[4];
#pragma unroll
        for (int matrix = 0; matrix < 4; ++matrix) {
          const int index = chunk * (kStoreRows / 2) + matrix * 2;
          values[matrix] = finish(i, index).bits | static_cast<uint32_t>(finish(i, index + 1).bits) << 16;
        }
        ptx::stmatrix_x4_trans(target, values);
      } else {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          uint8_t* target = buffer + (lane % 4 * 2 + v % 2) * kRowBytes;
          reinterpret_cast<T*>(target)[i * 64 + my_column + v / 2 * 8] = finish(i, chunk * 4 + v);
        }
      }
    }
    ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
    for (int pass = 0; pass < kStoreRows * kBlockN / kUnit / 128; ++pass) {
      const int index = pass * 128 + thread;
      const int local_row = index / (kBlockN / kUnit);
      const int local_column = index % (kBlockN / kUnit) * kUnit;
      const int row = row_begin + chunk * kStoreRows + local_row;
      const int column = column_begin + local_column;
      if (row < m && column < n) {
        T* target = y + static_cast<int64_t>(row) * ldy + column;
        const T* values = reinterpret_cast<const T*>(buffer + local_row * kRowBytes) + local_column;
        if (aligned && column + kUnit <= n) {
          store<true>(target, *reinterpret_cast<const Vector<T, kUnit>*>(values));
        } else {
#pragma unroll 1
          for (int i = 0; i < min(kUnit, n - column); ++i) target[i] = values[i];
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm_int8_sm90(const float* x_scale, const float* x_offset, const Product* x_sums, const uint8_t* weight,
                   const BIAS* bias, Y* y, const __grid_constant__ TensorMap x_map, int m, int n, int k, int block,
                   int rows, int columns, int ldy, int aligned, float low, float high) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  if (warp == kConsumerWarps && lane < kStages) {
    ptx::mbarrier_init(shared.full(lane), 1 + kParameterWarps);
    ptx::mbarrier_init(shared.empty(lane), kConsumerWarps * kCluster);
    ptx::fence_mbarrier_init();
  }
  begin_cluster<kCluster>();
  ptx::griddepcontrol_launch_dependents();
  if (warp < kConsumerWarps) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    // The same in all lanes, as the compiler shall know: operand B's address stays in uniform registers.
    const int warpgroup = __shfl_sync(0xffffffffu, warp / 4, 0);
    const int thread = threadIdx.x % 128;
    const int steps = ceil_div(k, kBlockK);
    const Epilogue<Y> epilogue{bias, nullptr, low, high, n, 0};

    auto record = [&](int stage, int tile) {
      return memory + kWeightBegin + stage * kWeightBytes + tile * kRecordBytes;
    };
    auto load_words = [&](uint32_t (&words)[kWords], int stage, int b, int tile) {
      constexpr int kLoad = kWords < 4 ? kWords : 4;
      const auto* codes = reinterpret_cast<const uint32_t*>(record(stage, tile)) + thread * 4;
#pragma unroll
      for (int i = 0; i < kWords; i += kLoad) {
        const int index = b * kWords + i;
        Vector<uint32_t, kLoad> values;
        load<true>(values, codes + index / 4 * (4 * 128) + index % 4);
#pragma unroll
        for (int v = 0; v < kLoad; ++v) words[i + v] = values.values[v];
      }
    };
    auto load_weight_part = [&](int stage, int b, int tile, int part) {
      const auto* parameters = reinterpret_cast<const float*>(record(stage, tile) + kCodeBytes);
      Vector<float, 2> values;
      load<true>(values, parameters + ((b * kParts + part) * 32 + thread / 4) * 2);
      return values;
    };
    auto load_x_part = [&](int stage, int b, int part, int j) {
      const auto* parameters = reinterpret_cast<const float*>(memory + kXParameterBegin + stage * kXParameterBytes);
      Vector<float, 2> values;
      load<true>(values, parameters + (b * kParts + part) * kBlockM + warpgroup * kRows + j * 8 + lane % 4 * 2);
      return values;
    };
    // The warpgroups take turns at starting products: else both would multiply at the same time, then both add up.
    auto take_turn = [&] {
      if constexpr (kTurns) ptx::barrier_sync(kTurnBarrier + warpgroup, kConsumerWarps * 32);
    };
    auto end_turn = [&] {
      if constexpr (kTurns) ptx::barrier_arrive(kTurnBarrier + 1 - warpgroup, kConsumerWarps * 32);
    };
    auto release = [&](int stage) {
      __syncwarp();
      if constexpr (kCluster == 1) {
        if (lane == 0) ptx::mbarrier_arrive(shared.empty(stage));
      } else {
        if (lane < kCluster) ptx::mbarrier_arrive_cluster(ptx::mapa(shared.empty(stage), lane));
      }
    };

    if (warpgroup == 1) end_turn();
    Position at{0, 0};
    for (Schedule schedule(rows, columns); schedule.is_there(); schedule.advance()) {
      float sums[kTiles][kSums] = {};
      Product products[kSums];
      Vector<float, 2> x_parts[kKeptParts][kSums / 4];
      for (int step = 0; step < steps; ++step) {
        wait(shared.full(at.stage), at.parity);
#pragma unroll 1
        for (int b = 0; b < kXBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            uint32_t words[kWords];
            load_words(words, at.stage, b, i);
            uint32_t a[kSteps][4];
#pragma unroll
            for (int s = 0; s < kSteps; ++s) unpack(a[s], words, s);
            const uint32_t x_begin = (shared.x(at.stage) + warpgroup * (kRows * kBlockK)) / 16 + b * kSteps * 2;
            take_turn();
            ptx::wgmma_fence();
            wgmma<false>(products, a[0], x_begin);
#pragma unroll
            for (int s = 1; s < kSteps; ++s) wgmma<true>(products, a[s], x_begin + s * 2);
            ptx::wgmma_commit_group();
            end_turn();
            if (i == 0) {
#pragma unroll
              for (int part = 0; part < kKeptParts; ++part) {
#pragma unroll
                for (int j = 0; j < kSums / 4; ++j) x_parts[part][j] = load_x_part(at.stage, b, part, j);
              }
            }
            ptx::wgmma_wait_group<0>();
            Vector<float, 2> weight_parts[kParts];
#pragma unroll
            for (int part = 0; part < kParts; ++part) weight_parts[part] = load_weight_part(at.stage, b, i, part);
            const bool is_last = i == kTiles - 1 && b == kXBlocks - 1;
            if (is_last && kKeptParts == kParts) release(at.stage);
#pragma unroll
            for (int v = 0; v < kSums; ++v) {
              const auto product = static_cast<float>(products[v]);
              const float scale = weight_parts[0].values[v / 2 % 2], of_x = x_parts[0][v / 4].values[v % 2];
              sums[i][v] = kFp8 ? fmaf(product, scale, sums[i][v]) : fmaf(product * scale, of_x, sums[i][v]);
            }
#pragma unroll
            for (int part = 1; part < kParts; ++part) {
#pragma unroll
              for (int j = 0; j < kSums / 4; ++j) {
                const Vector<float, 2> of_x = part < kKeptParts ? x_parts[part][j] : load_x_part(at.stage, b, part, j);
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                  float& sum = sums[i][j * 4 + v];
                  sum = fmaf(of_x.values[v % 2], weight_parts[part].values[v / 2], sum);
                }
              }
            }
            if (is_last && kKeptParts < kParts) release(at.stage);
          }
        }
        at = at.next();
      }
      if constexpr (kFp8) {
#pragma unroll
        for (int v = 0; v < kTiles * kSums; ++v) sums[v / kSums][v % kSums] *= x_parts[0][v % kSums / 4].values[v % 2];
      }
      store_tile(memory, sums, schedule.tile(), epilogue, y, m, n, ldy, aligned != 0);
    }
    if (warpgroup == 0) take_turn();
    end_cluster<kCluster>();
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == kConsumerWarps) {
      produce(shared, weight, &x_map, rows, columns, n, k);
    } else if (warp <= kConsumerWarps + kParameterWarps) {
      produce_parameters(shared, memory, x_scale, x_offset, x_sums, rows, columns, m, k, block);
    }
    end_cluster<kCluster>();
  }
}
