// SPDX-License-Identifier: Apache-2.0
// The integer product of gemm_int8.cuh by wgmma, for hundreds of rows and more: all blocks in one launch, each block's
// int32 products scaled and added up in registers. sm_90a. The product is made transposed, y^T = W x^T: the weight is
// operand A, x is B.
//
//   w_map       tensor map of the weight's codes, int8 [1][n][k], in boxes of [1][256 / CLUSTER][128], swizzled by 128
//               bytes
//   parameters  float32 [ceil(n / 64)][ceil(k / 128)][X_BLOCKS][part][warp][8 of g][2], of columns 16 warp + g and
//               16 warp + g + 8: the scale, then with WEIGHT_OFFSET the offset, then with X_OFFSET the sum over the
//               block of what the codes stand for. The last two are zero but in the last step of 128 k of a block.
//   x_map       tensor map of xq as [1][m][k] in boxes of [1][128][128], swizzled by 128 bytes
//   x_scale, x_offset, x_sums   as in gemm_int8.cuh; with ROW_SCALES, x_scale [m] has one scale a row
//   rows, columns   of units
//   bias        BIAS [n] or null; y  Y [m, n], row stride ldy values; aligned: rows start at multiples of 16 bytes
// k a multiple of 16; block a multiple of 128, or 64 or 32, or one block for all of k. X_BLOCKS: blocks in 128 k.
//
// Codes of 4 bits are bytes here, too: a warp that gives operand A out of its registers waits at each instruction until
// the one before has begun, and in shared memory, where it goes on, a code is a byte. That leaves room for whole zeros:
// weights whose offsets are multiples of their scales have none here.
//
// FP8: xq and the codes are e4m3, with ROW_SCALES; x_sums are float32, of its values. Products are float32.
// ROW_SCALES: the scale of x comes last. That is a multiplication less for each product.
//
// A block makes tiles of 128 rows and 256 columns: two warpgroups with 64 rows each, whose four tiles of 64 columns
// share the scales of x in registers. Each adds up one tile's products while the next tile's are made. Blocks are
// persistent, and CLUSTER of them, with the same columns of neighbouring rows, share what they bring of the weight.
#include "hopper/copied.cuh"
#include "common/epilogue.cuh"
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
#include "common/warp.cuh"

static_assert(__CUDA_ARCH__ == 900, "gemm_int8_sm90 needs sm_90a");

#if FP8
using Product = float;
#else
using Product = int32_t;
#endif

constexpr bool kFp8 = FP8;
constexpr bool kRowScales = ROW_SCALES;
constexpr bool kXOffset = X_OFFSET;
constexpr bool kWeightOffset = WEIGHT_OFFSET;
constexpr int kXBlocks = X_BLOCKS;
constexpr int kStages = STAGES;
constexpr int kCluster = CLUSTER;
// Rows of units in a band: blocks that run at the same time share rows of x and columns of the weight in L2.
constexpr int kBandRows = 8 / kCluster;

constexpr int kWarpgroups = 2;
constexpr int kTiles = 4;
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kParameterWarps = 2;
// Parts of k whose parameters a lane asks for at once, as many as its registers hold: one alone takes as long as the
// memory's answer.
constexpr int kAtOnce = X_OFFSET ? 1 : 2;
constexpr int kThreads = (kConsumerWarps + 4) * 32;
constexpr int kConsumerRegisters = 232;
constexpr int kProducerRegisters = 40;
constexpr int kBlockM = 128;
constexpr int kRows = kBlockM / kWarpgroups;
constexpr int kBlockN = kTiles * 64;
constexpr int kBlockK = 128;
constexpr int kSums = kRows / 2;

// What is multiplied at once: 64 columns and the k of one block, or all 128.
constexpr int kSteps = kBlockK / 32 / kXBlocks;

constexpr int kParts = 1 + kWeightOffset + kXOffset;
constexpr int kOffsetPart = 1;
constexpr int kColumnPart = 1 + kWeightOffset;
constexpr int kRecordBytes = kXBlocks * kParts * 64 * 4;

// Shared memory, from a multiple of 1024: x [stage][row][128 k], codes [stage][column][128 k], parameters of the weight
// [stage][record], of x float32 [stage][X_BLOCKS][part: scale, scale * sum, offset][row], what is on its way to y
// [warpgroup][kStoreRows][kRowBytes], barriers [full, empty][stage].
constexpr int kXBytes = kBlockM * kBlockK;
constexpr int kCodeBytes = kBlockN * kBlockK;
constexpr int kWeightParameterBytes = kTiles * kRecordBytes;
constexpr int kXParameterBytes = kXBlocks * kParts * kBlockM * 4;
constexpr int kCodeBegin = kStages * kXBytes;
constexpr int kWeightParameterBegin = kCodeBegin + kStages * kCodeBytes;
constexpr int kXParameterBegin = kWeightParameterBegin + kStages * kWeightParameterBytes;
constexpr int kStoreRows = sizeof(Y) == 2 ? 16 : 8;
constexpr int kRowBytes = kBlockN * sizeof(Y) + 16;  // 8 rows lie in different banks
constexpr int kStoreBegin = kXParameterBegin + kStages * kXParameterBytes;
constexpr int kBarrierBegin = kStoreBegin + kWarpgroups * kStoreRows * kRowBytes;

static_assert(kRowScales || !kFp8, "what FP8 takes");
static_assert(!kRowScales || !(kXOffset || (kWeightOffset && !kFp8)), "what one scale a row takes");
static_assert(kCluster == 1 || kCluster == 2, "a stage of codes has two parts");
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

// The units of a cluster, tiles that are neighbours along the rows, one after the other, in bands of rows.
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
    return {(band * kBandRows + within % height) * kCluster + rank(), within / height};
  }
  static __device__ __forceinline__ int rank() { return kCluster == 1 ? 0 : ptx::cluster_ctarank(); }
};

struct Shared {
  uint32_t begin;

  __device__ __forceinline__ uint32_t x(int stage) const { return begin + stage * kXBytes; }
  __device__ __forceinline__ uint32_t codes(int stage) const { return begin + kCodeBegin + stage * kCodeBytes; }
  __device__ __forceinline__ uint32_t parameters(int stage) const {
    return begin + kWeightParameterBegin + stage * kWeightParameterBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return begin + kBarrierBegin + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kStages + stage); }
};

// The warp that brings xq and the weight.
__device__ __forceinline__ void produce(const Shared& shared, const TensorMap* w_map, const uint8_t* parameters,
                                        const TensorMap* x_map, int rows, int columns, int n, int k) {
  const int lane = threadIdx.x % 32;
  const int rank = Schedule::rank();
  const int steps = ceil_div(k, kBlockK);
  if (lane == 0) {
    ptx::prefetch_tensormap(x_map);
    ptx::prefetch_tensormap(w_map);
  }
  ptx::griddepcontrol_wait();
  Position at{0, 1};
  for (Schedule schedule(rows, columns); schedule.is_there(); schedule.advance()) {
    const int2 tile = schedule.tile();
    // The last tile may reach beyond the weight: it reads some parameters there, and stores nothing of them.
    const int64_t column = min(tile.y * kTiles + lane % kTiles, ceil_div(n, 64) - 1);
    const uint8_t* source = parameters + column * steps * kRecordBytes;
    for (int step = 0; step < steps; ++step) {
      const uint32_t full = shared.full(at.stage);
      wait(shared.empty(at.stage), at.parity);
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, kXBytes + kCodeBytes + kWeightParameterBytes);
      __syncwarp();
      if (lane < kTiles) {
        ptx::cp_async_bulk(shared.parameters(at.stage) + lane * kRecordBytes, source, kRecordBytes, full);
        source += kRecordBytes;
      } else if (lane == kTiles) {
        ptx::cp_async_bulk_tensor_3d(shared.x(at.stage), x_map, step * kBlockK, tile.x * kBlockM, 0, full);
      } else if (lane == kTiles + 1) {
        if constexpr (kCluster == 1) {
          ptx::cp_async_bulk_tensor_3d(shared.codes(at.stage), w_map, step * kBlockK, tile.y * kBlockN, 0, full);
        } else {
          ptx::cp_async_bulk_tensor_3d_multicast(shared.codes(at.stage) + rank * (kCodeBytes / kCluster), w_map,
                                                 step * kBlockK, tile.y * kBlockN + rank * (kBlockN / kCluster), 0,
                                                 full, (1 << kCluster) - 1);
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
  const int blocks = ceil_div(k, block);
  const int parts = ceil_div(k, kBlockK) * kXBlocks;             // of k
  const int span = kXBlocks == 1 ? max(block / kBlockK, 1) : 1;  // of a block, in parts
  ptx::griddepcontrol_wait();
  Position at{0, 1};
  for (Schedule schedule(rows, columns); schedule.is_there(); schedule.advance()) {
    const int row = schedule.tile().x * kBlockM + local_row;
    const int source_rows[2] = {min(row, m - 1), min(row + 1, m - 1)};
    float row_scales[2];
    if constexpr (kRowScales) {
#pragma unroll
      for (int v = 0; v < 2; ++v) row_scales[v] = x_scale[source_rows[v]];
    }
    int index = 0;
    int within = 0;
    for (int begin = 0; begin < parts; begin += kAtOnce) {
      Vector<float, 2> values[kAtOnce][kParts];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int64_t source = static_cast<int64_t>(source_rows[v]) * blocks + min(index, blocks - 1);
          values[i][0].values[v] = kRowScales ? row_scales[v] : x_scale[source];
          if constexpr (kWeightOffset) values[i][kOffsetPart].values[v] = static_cast<float>(x_sums[source]);
          if constexpr (kXOffset) values[i][kColumnPart].values[v] = x_offset[source];
        }
        if (++within == span) {
          within = 0;
          ++index;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i == parts) break;
        const int b = (begin + i) % kXBlocks;
        auto* target = reinterpret_cast<float*>(memory + kXParameterBegin + at.stage * kXParameterBytes) + local_row;
        if (b == 0) wait(shared.empty(at.stage), at.parity);
        if constexpr (kWeightOffset && !kFp8) {
#pragma unroll
          for (int v = 0; v < 2; ++v) values[i][kOffsetPart].values[v] *= values[i][0].values[v];
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          store<true>(target + (b * kParts + part) * kBlockM, values[i][part]);
        }
        if (b == kXBlocks - 1) {
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(shared.full(at.stage));
          at = at.next();
        }
      }
    }
  }
  __syncwarp();
}

template <bool FIRST, class T>
__device__ __forceinline__ void wgmma(T (&d)[kSums], uint64_t a, uint64_t b) {
  if constexpr (kFp8) {
    FIRST ? ptx::wgmma_e4m3_first(d, a, b) : ptx::wgmma_e4m3(d, a, b);
  } else {
    FIRST ? ptx::wgmma_s8_first(d, a, b) : ptx::wgmma_s8(d, a, b);
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
    gemm_int8_sm90(const float* x_scale, const float* x_offset, const Product* x_sums, const uint8_t* parameters,
                   const BIAS* bias, Y* y, const __grid_constant__ TensorMap x_map,
                   const __grid_constant__ TensorMap w_map, int m, int n, int k, int block, int rows, int columns,
                   int ldy, int aligned, float low, float high) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  if (warp == kConsumerWarps && lane < kStages) {
    ptx::mbarrier_init(shared.full(lane), 1 + kParameterWarps);
    ptx::mbarrier_init(shared.empty(lane), kConsumerWarps * kCluster);
    ptx::fence_mbarrier_init();
  }
  begin_cluster<kCluster>();
  ptx::griddepcontrol_launch_dependents();
  if (warp < kConsumerWarps) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int warpgroup = warp / 4;
    const int thread = threadIdx.x % 128;
    const int steps = ceil_div(k, kBlockK);
    const Epilogue<Y> epilogue{bias, nullptr, low, high, n, 0};

    auto load_weight_part = [&](int stage, int b, int tile, int part) {
      const auto* values_begin = reinterpret_cast<const float*>(memory + kWeightParameterBegin +
                                                                stage * kWeightParameterBytes + tile * kRecordBytes);
      Vector<float, 2> values;
      load<true>(values, values_begin + ((b * kParts + part) * 32 + thread / 4) * 2);
      return values;
    };
    auto load_x_part = [&](int stage, int b, int part, int j) {
      const auto* parameters = reinterpret_cast<const float*>(memory + kXParameterBegin + stage * kXParameterBytes);
      Vector<float, 2> values;
      load<true>(values, parameters + (b * kParts + part) * kBlockM + warpgroup * kRows + j * 8 + lane % 4 * 2);
      return values;
    };
    auto release = [&](int stage) {
      __syncwarp();
      if constexpr (kCluster == 1) {
        if (lane == 0) ptx::mbarrier_arrive(shared.empty(stage));
      } else {
        if (lane < kCluster) ptx::mbarrier_arrive_cluster(ptx::mapa(shared.empty(stage), lane));
      }
    };

    Position at{0, 0};
    for (Schedule schedule(rows, columns); schedule.is_there(); schedule.advance()) {
      float sums[kTiles][kSums] = {};
      Product products[2][kSums];
      Vector<float, 2> x_scales[kSums / 4];  // where registers suffice
      int b = 0;                             // of the blocks in a stage
      auto start = [&](int tile) {
        const uint64_t w_begin = ptx::wgmma_descriptor(shared.codes(at.stage) + tile * (64 * kBlockK)) + b * kSteps * 2;
        const uint64_t x_begin =
            ptx::wgmma_descriptor(shared.x(at.stage) + warpgroup * (kRows * kBlockK)) + b * kSteps * 2;
        ptx::wgmma_fence();
        wgmma<true>(products[tile % 2], w_begin, x_begin);
#pragma unroll
        for (int s = 1; s < kSteps; ++s) wgmma<false>(products[tile % 2], w_begin + s * 2, x_begin + s * 2);
        ptx::wgmma_commit_group();
      };
      auto load_x_scales = [&] {
#pragma unroll
        for (int j = 0; j < kSums / 4; ++j) x_scales[j] = load_x_part(at.stage, b, 0, j);
      };
      wait(shared.full(at.stage), at.parity);
      start(0);
      load_x_scales();
      ptx::wgmma_wait_group<0>();
      for (int left = steps * kXBlocks; left > 0; --left) {
        const int stage = at.stage;
        const int block_at = b;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const bool is_last = i == kTiles - 1;
          Vector<float, 2> weight_parts[kParts];
#pragma unroll
          for (int part = 0; part < kParts; ++part) weight_parts[part] = load_weight_part(stage, block_at, i, part);
          if (is_last && ++b == kXBlocks) {
            b = 0;
            at = at.next();
          }
          if (!is_last || left > 1) {
            if (is_last && b == 0) wait(shared.full(at.stage), at.parity);
            start((i + 1) % kTiles);
          }
          // Always so. What is in a branch stays before the wait: the compiler would move half of it behind.
          if (m > 0) {
#pragma unroll
            for (int j = 0; j < kSums / 4; ++j) {
              const Vector<float, 2> of_x = kXOffset ? load_x_part(stage, block_at, 0, j) : x_scales[j];
#pragma unroll
              for (int v = 0; v < 4; ++v) {
                const auto product = static_cast<float>(products[i % 2][j * 4 + v]);
                const float scale = weight_parts[0].values[v / 2];
                float& sum = sums[i][j * 4 + v];
                sum = kRowScales ? fmaf(product, scale, sum) : fmaf(product * scale, of_x.values[v % 2], sum);
              }
            }
#pragma unroll
            for (int part = 1; part < kParts; ++part) {
#pragma unroll
              for (int j = 0; j < kSums / 4; ++j) {
                const Vector<float, 2> of_x = load_x_part(stage, block_at, part, j);
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                  float& sum = sums[i][j * 4 + v];
                  sum = fmaf(of_x.values[v % 2], weight_parts[part].values[v / 2], sum);
                }
              }
            }
          }
          if (is_last && b == 0) release(stage);
          if (!kRowScales && is_last && left > 1) load_x_scales();
          ptx::wgmma_wait_group<0>();
        }
      }
      if constexpr (kRowScales) {
#pragma unroll
        for (int v = 0; v < kTiles * kSums; ++v) sums[v / kSums][v % kSums] *= x_scales[v % kSums / 4].values[v % 2];
      }
      store_tile(memory, sums, schedule.tile(), epilogue, y, m, n, ldy, aligned != 0);
    }
    end_cluster<kCluster>();
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == kConsumerWarps) {
      produce(shared, &w_map, parameters, &x_map, rows, columns, n, k);
    } else if (warp <= kConsumerWarps + kParameterWarps) {
      produce_parameters(shared, memory, x_scale, x_offset, x_sums, rows, columns, m, k, block);
    }
    end_cluster<kCluster>();
  }
}
