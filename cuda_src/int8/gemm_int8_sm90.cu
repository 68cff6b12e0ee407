// SPDX-License-Identifier: Apache-2.0
// GEMM of 8-bit rows x and a weight W with one byte per code, with wgmma on sm_90a, for 64 rows and more:
//
//   y[m, n] = activation(sum over quantization blocks b of x_b[m] . W_b[n] + bias[n])
//
// The scales and offsets of a block are those of gemm_int8.cuh. The int32 products of each block are scaled and added
// to float32 accumulators in registers.
//
//   w_map       tensor map of the weight's codes, int8 [1][n][k], boxes of [1][64 * M64_TILES / CLUSTER][128], 128-byte
//               swizzle
//   parameters  float32 [ceil(n / 64)][ceil(k / 128)][X_BLOCKS][parameter][warp][8 g][2], for columns 16 warp + g and
//               16 warp + g + 8 of 64: the scale; with WEIGHT_OFFSET the offset; with X_OFFSET the sum of the
//               dequantized weights of the block. Offset and sum are zero except in the last 128 columns of a block.
//   x_map       tensor map of xq, int8 [1][m][k], boxes of [1][128][128], 128-byte swizzle
//   x_scale, x_offset, x_sums   as in gemm_int8.cuh; with ROW_SCALES x_scale is [m], one scale per row
//   bias        BIAS [n] or null
//   y           Y [m, n], row stride ldy; `aligned`: whether the rows of y start at multiples of 16 bytes
//
// Limits: k % 16 == 0; block_size is 32, 64, a multiple of 128, or k. X_BLOCKS is the number of blocks per 128 columns
// of x and W.
//
// W is operand A of wgmma and x is operand B, so the accumulators hold y^T: 64 columns by 64 rows of y. A 4-bit code
// takes one byte, because wgmma reads bytes from shared memory; operand A in registers would stall a warp until the
// preceding wgmma has started. A byte can hold code - zero point, so a weight whose offsets are integer multiples of
// its scales needs no WEIGHT_OFFSET.
//
// ROW_SCALES: x has one scale per row, which multiplies the final accumulators; this saves a multiplication per
// product. FP8: xq and the codes are e4m3, x_sums and the products are float32; implies ROW_SCALES.
//
// A CTA computes tiles of 128 rows and M64_TILES * 64 columns with WARPGROUPS consumer warpgroups. With HAS_ALL_ROWS,
// each has some of the m64 tiles (64 columns), and scales products while the tensor cores compute those of another
// warpgroup. Otherwise, each has 64 rows, and scales the products of one m64 tile while the tensor cores compute the
// next one. CTAs are persistent. The CLUSTER CTAs of a cluster have adjacent rows and share the copies of the weight by
// multicast. With SPLIT_K > 1, the CTAs of a cluster compute one tile instead, each over a slice of K, and add up their
// accumulators through distributed shared memory; a cluster then has a single tile.
//
// Programmatic dependent launch (PDL): before griddepcontrol.wait, a CTA copies only the weight.
#include "common/warp.cuh"
#include "hopper/cluster.cuh"
#include "int8/gemm_int8_sm90.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_8bit_shared.cuh"

static_assert(__CUDA_ARCH__ == 900, "gemm_int8_sm90 needs sm_90a");

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>,
                ProductOptions<FP8, X_OFFSET, WEIGHT_OFFSET> {
  using T = Y;  // type of y
  static constexpr bool kRowScales = ROW_SCALES;
  static constexpr int kXBlocks = X_BLOCKS, kStages = STAGES, kClusterSize = CLUSTER, kSplitK = SPLIT_K;
  static constexpr int kM64Tiles = M64_TILES;
  // True if the warpgroups divide the columns of a CTA tile, and each computes kBlockM rows; false if they divide the
  // rows, 64 per warpgroup. wgmma with N = 128 reads less shared memory than two with N = 64; int8 uses N = 64, as it
  // converts its accumulators to float32.
  static constexpr bool kHasAllRows = HAS_ALL_ROWS;
  static constexpr int kWarpgroups = WARPGROUPS;  // number of consumer warpgroups
  static constexpr int kSharedBytes = SHARED_BYTES;
};
using Kernel = GemmInt8Sm90<Config>;

// The role of the producer warp, which copies xq and the codes and parameters of the weight.
template <class C> __device__ __forceinline__ void produce(const typename C::SharedStorage& shared,
                                                           const TensorMap* w_map, const uint8_t* parameters,
                                                           const TensorMap* x_map, int m_blocks, int n_blocks, int m,
                                                           int n, int k) {
  const auto pipeline = shared.pipeline();
  const int lane = threadIdx.x % 32;
  const int rank = cluster_rank<C::kClusterSize>();
  const int k_tiles = ceil_div(k, C::kBlockK);
  const KTiles<C> mine(k);
  if (lane == 0) {
    ptx::prefetch_tensormap(x_map);
    ptx::prefetch_tensormap(w_map);
  }
  // Copies one k tile (128 k) of the weight to a stage: its codes and the parameters of its blocks.
  auto copy_weight = [&](const TileCoordinates& tile, int k_tile, int stage_idx) {
    const uint32_t full_barrier = pipeline.full_barrier(stage_idx);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full_barrier, C::SharedStorage::X::kBytes / C::kStages +
                                                       C::SharedStorage::Codes::kBytes / C::kStages +
                                                       C::SharedStorage::Parameters::kBytes / C::kStages);
    }
    __syncwarp();
    if (lane < C::kM64Tiles) {
      // For m64 tiles past n, the parameters of the last m64 tile are copied; the results are not stored.
      const int64_t n64_block = min(tile.n_block * C::kM64Tiles + lane, ceil_div(n, 64) - 1);
      ptx::cp_async_bulk(shared.parameters(stage_idx) + lane * C::kParameterTileBytes,
                         parameters + (n64_block * k_tiles + k_tile) * C::kParameterTileBytes, C::kParameterTileBytes,
                         full_barrier);
    } else if (lane == C::kM64Tiles) {
      tma_multicast_3d<C::kClusterSize>(
          shared.codes(stage_idx) + rank * (C::kBlockN * C::kBlockK / C::kClusterSize), w_map, k_tile * C::kBlockK,
          tile.n_block * C::kBlockN + rank * (C::kBlockN / C::kClusterSize), 0, full_barrier);
    }
  };
  auto state = C::State::producer();
  TileScheduler<C> scheduler(m_blocks, n_blocks);
  // The weight does not depend on the preceding kernel, so these copies start before the wait for it.
  const int early = scheduler.is_valid() ? min(C::kStages, mine.end - mine.begin) : 0;
  for (int i = 0; i < early; ++i) copy_weight(scheduler.tile(), mine.begin + i, i);
  ptx::griddepcontrol_wait();
  int copied = early;  // number of k tiles, from the current one on, whose weight is copied already
  for (; scheduler.is_valid(); scheduler.advance()) {
    const TileCoordinates tile = scheduler.tile();
    for (int k_tile = mine.begin; k_tile < mine.end; ++k_tile) {
      pipeline.producer_acquire(state);
      if (copied > 0) {
        --copied;
      } else {
        copy_weight(tile, k_tile, state.stage_idx);
      }
      if (lane == 0) {
        ptx::cp_async_bulk_tensor_3d(shared.x(state.stage_idx), x_map, k_tile * C::kBlockK,
                                     tile_row_begin<C::kBlockM>(tile.m_block, m), 0,
                                     pipeline.full_barrier(state.stage_idx));
      }
      state.advance();
    }
  }
  __syncwarp();
}

// The role of the warps that copy the parameters of x: each lane copies those of two adjacent rows.
template <class C> __device__ __forceinline__ void produce_x_parameters(const typename C::SharedStorage& shared,
                                                                        uint8_t* memory, const float* x_scale,
                                                                        const float* x_offset,
                                                                        const typename C::Product* x_sums, int m_blocks,
                                                                        int n_blocks, int m, int k, int block_size) {
  const auto pipeline = shared.pipeline();
  const int lane = threadIdx.x % 32;
  const int local_row = (threadIdx.x / 32 - C::kConsumerWarps - 1) * (C::kBlockM / C::kXParameterWarps) + lane * 2;
  const int blocks = ceil_div(k, block_size);
  // A span is the part of a stage that shares one set of parameters: all 128 k, or one quantization block if a stage
  // holds several.
  const KTiles<C> mine(k);
  const int spans = mine.end * C::kXBlocks;
  const int block_spans = C::kXBlocks == 1 ? max(block_size / C::kBlockK, 1) : 1;
  ptx::griddepcontrol_wait();
  auto state = C::State::producer();
  for (TileScheduler<C> scheduler(m_blocks, n_blocks); scheduler.is_valid(); scheduler.advance()) {
    const int row = tile_row_begin<C::kBlockM>(scheduler.tile().m_block, m) + local_row;
    const int rows[2] = {min(row, m - 1), min(row + 1, m - 1)};
    float row_scales[2];
    if constexpr (C::kRowScales) {
#pragma unroll
      for (int v = 0; v < 2; ++v) row_scales[v] = x_scale[rows[v]];
    }
    int block = mine.begin * C::kXBlocks / block_spans;
    int span_in_block = mine.begin * C::kXBlocks % block_spans;
    for (int begin = mine.begin * C::kXBlocks; begin < spans; begin += C::kLoadedSpans) {
      Vector<float, 2> values[C::kLoadedSpans][C::kParameters];
#pragma unroll
      for (int i = 0; i < C::kLoadedSpans; ++i) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int64_t source = static_cast<int64_t>(rows[v]) * blocks + min(block, blocks - 1);
          values[i][0].values[v] = C::kRowScales ? row_scales[v] : x_scale[source];
          if constexpr (C::kWeightOffset) values[i][C::kOffsetParameter].values[v] = static_cast<float>(x_sums[source]);
          if constexpr (C::kXOffset) values[i][C::kSumParameter].values[v] = x_offset[source];
        }
        if (++span_in_block == block_spans) {
          span_in_block = 0;
          ++block;
        }
      }
#pragma unroll
      for (int i = 0; i < C::kLoadedSpans; ++i) {
        if (begin + i == spans) break;
        const int b = (begin + i) % C::kXBlocks;
        auto* target = reinterpret_cast<float*>(memory + C::SharedStorage::XParameters::kBegin +
                                                state.stage_idx * C::kXParameterBytes) +
                       local_row;
        if (b == 0) pipeline.producer_acquire(state);
        if constexpr (C::kWeightOffset && !C::kFp8) {
#pragma unroll
          for (int v = 0; v < 2; ++v) values[i][C::kOffsetParameter].values[v] *= values[i][0].values[v];
        }
#pragma unroll
        for (int parameter = 0; parameter < C::kParameters; ++parameter) {
          store<true>(target + (b * C::kParameters + parameter) * C::kBlockM, values[i][parameter]);
        }
        if (b == C::kXBlocks - 1) {
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(pipeline.full_barrier(state.stage_idx));
          state.advance();
        }
      }
    }
  }
  __syncwarp();
}

template <class C, bool FIRST, class T>
__device__ __forceinline__ void wgmma(T (&d)[C::kAccumulators], uint64_t a, uint64_t b) {
  if constexpr (C::kFp8) {
    FIRST ? ptx::wgmma_e4m3_first(d, a, b) : ptx::wgmma_e4m3(d, a, b);
  } else {
    FIRST ? ptx::wgmma_s8_first(d, a, b) : ptx::wgmma_s8(d, a, b);
  }
}

// The body of the kernel, for one configuration; `gemm_int8_sm90` below passes its arguments on.
template <class C> __device__ __forceinline__ void gemm_int8_sm90_tiles(
    const float* x_scale, const float* x_offset, const typename C::Product* x_sums, const uint8_t* parameters,
    const typename C::Bias* bias, typename C::T* y, const TensorMap* x_map, const TensorMap* w_map, int m, int n, int k,
    int block_size, int m_blocks, int n_blocks, int ldy, int aligned, float low, float high) {
  using T = typename C::T;
  extern __shared__ __align__(1024) uint8_t memory[];
  const typename C::SharedStorage shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  const auto pipeline = shared.pipeline();
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  if (warp == C::kConsumerWarps && lane < C::kStages) {
    pipeline.init_stage(lane, 1 + C::kXParameterWarps, C::kConsumerWarps * C::kClusterSize);
    ptx::fence_mbarrier_init();
  }
  cluster_sync_after_init<C::kClusterSize * C::kSplitK>();
  ptx::griddepcontrol_launch_dependents();
  if (warp < C::kConsumerWarps) {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    const int warpgroup = warp / 4;
    const int thread = threadIdx.x % 128;
    const int first_row = C::kHasAllRows ? 0 : warpgroup * C::kWarpgroupM;  // first row of this warpgroup in the tile
    // First m64 tile (64 columns of y) of this warpgroup in the tile.
    const int first_m64_tile = C::kHasAllRows ? warpgroup * C::kWarpgroupTiles : 0;
    const KTiles<C> mine(k);
    const Epilogue<T, C> epilogue{bias, nullptr, low, high, n, 0};

    auto load_weight_parameter = [&](int stage_idx, int b, int tile, int parameter) {
      const auto* source =
          reinterpret_cast<const float*>(memory + C::SharedStorage::Parameters::kBegin +
                                         (stage_idx * C::kM64Tiles + first_m64_tile + tile) * C::kParameterTileBytes);
      Vector<float, 2> values;
      load<true>(values, source + ((b * C::kParameters + parameter) * 32 + thread / 4) * 2);
      return values;
    };
    auto load_x_parameter = [&](int stage_idx, int b, int parameter, int j) {
      const auto* source = reinterpret_cast<const float*>(memory + C::SharedStorage::XParameters::kBegin +
                                                          stage_idx * C::kXParameterBytes);
      Vector<float, 2> values;
      load<true>(values, source + (b * C::kParameters + parameter) * C::kBlockM + first_row + j * 8 + lane % 4 * 2);
      return values;
    };
    // Releases a stage in every CTA of the cluster, because multicast copies from all CTAs have filled the stage.
    auto release = [&](int stage_idx) {
      __syncwarp();
      if constexpr (C::kClusterSize == 1) {
        if (lane == 0) ptx::mbarrier_arrive(pipeline.empty_barrier(stage_idx));
      } else {
        if (lane < C::kClusterSize) ptx::mbarrier_arrive_cluster(ptx::mapa(pipeline.empty_barrier(stage_idx), lane));
      }
    };

    auto state = C::State::consumer();
    for (TileScheduler<C> scheduler(m_blocks, n_blocks); scheduler.is_valid(); scheduler.advance()) {
      float accumulators[C::kWarpgroupTiles][C::kAccumulators] = {};
      typename C::Product products[C::kProductSets][C::kAccumulators];
      Vector<float, 2> x_scales[C::kAccumulators / 4];
      int b = 0;  // index of the quantization block within the stage
      auto start = [&](int tile) {
        const uint64_t w_begin =
            ptx::wgmma_descriptor(shared.codes(state.stage_idx) + (first_m64_tile + tile) * (64 * C::kBlockK)) +
            b * C::kBlockSteps * 2;
        const uint64_t x_begin =
            ptx::wgmma_descriptor(shared.x(state.stage_idx) + first_row * C::kBlockK) + b * C::kBlockSteps * 2;
        ptx::wgmma_fence();
        wgmma<C, true>(products[tile % C::kProductSets], w_begin, x_begin);
#pragma unroll
        for (int s = 1; s < C::kBlockSteps; ++s) {
          wgmma<C, false>(products[tile % C::kProductSets], w_begin + s * 2, x_begin + s * 2);
        }
        ptx::wgmma_commit_group();
      };
      auto load_x_scales = [&](int stage_idx, int block) {
#pragma unroll
        for (int j = 0; j < C::kAccumulators / 4; ++j) x_scales[j] = load_x_parameter(stage_idx, block, 0, j);
      };
      pipeline.consumer_wait(state);
      start(0);
      if constexpr (!C::kRowScales) load_x_scales(state.stage_idx, b);
      ptx::wgmma_wait_group<0>();
      for (int blocks_left = (mine.end - mine.begin) * C::kXBlocks; blocks_left > 0; --blocks_left) {
        const int stage_idx = state.stage_idx;
        const int block = b;
#pragma unroll
        for (int i = 0; i < C::kWarpgroupTiles; ++i) {
          const bool is_last = i == C::kWarpgroupTiles - 1;
          Vector<float, 2> weight_parameters[C::kParameters];
#pragma unroll
          for (int parameter = 0; parameter < C::kParameters; ++parameter) {
            weight_parameters[parameter] = load_weight_parameter(stage_idx, block, i, parameter);
          }
          auto start_next = [&] {
            if (is_last && ++b == C::kXBlocks) {
              b = 0;
              state.advance();
            }
            if (!is_last || blocks_left > 1) {
              if (is_last && b == 0) pipeline.consumer_wait(state);
              start((i + 1) % C::kWarpgroupTiles);
            }
          };
          if constexpr (C::kProductSets > 1) start_next();
          // This condition is always true. The branch keeps all scaling before the wait for the next products; without
          // it, the compiler moves half of the scaling after the wait.
          if (m > 0) {
#pragma unroll
            for (int j = 0; j < C::kAccumulators / 4; ++j) {
              const Vector<float, 2> x_scale = C::kXOffset ? load_x_parameter(stage_idx, block, 0, j) : x_scales[j];
#pragma unroll
              for (int v = 0; v < 4; ++v) {
                const auto product = static_cast<float>(products[i % C::kProductSets][j * 4 + v]);
                const float scale = weight_parameters[0].values[v / 2];
                float& sum = accumulators[i][j * 4 + v];
                sum = C::kRowScales ? fmaf(product, scale, sum) : fmaf(product * scale, x_scale.values[v % 2], sum);
              }
            }
#pragma unroll
            for (int parameter = 1; parameter < C::kParameters; ++parameter) {
#pragma unroll
              for (int j = 0; j < C::kAccumulators / 4; ++j) {
                const Vector<float, 2> x_values = load_x_parameter(stage_idx, block, parameter, j);
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                  float& sum = accumulators[i][j * 4 + v];
                  sum = fmaf(x_values.values[v % 2], weight_parameters[parameter].values[v / 2], sum);
                }
              }
            }
          }
          if constexpr (C::kProductSets == 1) start_next();
          if (is_last && b == 0 && (!C::kRowScales || blocks_left > 1)) release(stage_idx);
          if (!C::kRowScales && is_last && blocks_left > 1) load_x_scales(state.stage_idx, b);
          ptx::wgmma_wait_group<0>();
        }
      }
      if constexpr (C::kRowScales) {
        // Every stage has the scales of the rows, which are the same for all k.
        load_x_scales(state.previous_stage(), 0);
        release(state.previous_stage());
#pragma unroll
        for (int v = 0; v < C::kWarpgroupTiles * C::kAccumulators; ++v) {
          accumulators[v / C::kAccumulators][v % C::kAccumulators] *= x_scales[v % C::kAccumulators / 4].values[v % 2];
        }
      }
      if constexpr (C::kSplitK == 1) {
        store_tile<C>(memory, reinterpret_cast<const typename C::OwnedAccumulators&>(accumulators), scheduler.tile(),
                      epilogue, y, m, n, ldy, aligned != 0, 0);
      } else {
        // The accumulators in the order [owner][m64 tile][octet]; an octet is 8 rows of y.
        float ordered[C::kWarpgroupTiles * C::kAccumulators];
#pragma unroll
        for (int v = 0; v < C::kWarpgroupTiles * C::kAccumulators; ++v) {
          const int owner = v / (C::kWarpgroupTiles * C::kOwnedOctets * 4);
          const int i = v / (C::kOwnedOctets * 4) % C::kWarpgroupTiles;
          ordered[v] = accumulators[i][owner * C::kOwnedOctets * 4 + v % (C::kOwnedOctets * 4)];
        }
        // All CTAs have finished reading their stages, so the partial sums can overwrite them.
        cluster_sync<C::kSplitK>();
        typename C::OwnedAccumulators totals;
        const int rank = cluster_rank<C::kSplitK>();
        reduce_scatter_groups<C::kSplitK, C::kWarpgroups, C::kWarpgroupTiles * C::kOctets,
                              C::kWarpgroupTiles * C::kOwnedOctets>(
            reinterpret_cast<float (&)[C::kWarpgroupTiles * C::kOwnedOctets * 4]>(totals), ordered, memory,
            shared.begin, rank, warpgroup);
        store_tile<C>(memory, totals, scheduler.tile(), epilogue, y, m, n, ldy, aligned != 0, rank * C::kOwnedOctets);
      }
    }
    cluster_sync_before_exit<C::kClusterSize>();
  } else {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (warp == C::kConsumerWarps) {
      produce<C>(shared, w_map, parameters, x_map, m_blocks, n_blocks, m, n, k);
    } else if (warp <= C::kConsumerWarps + C::kXParameterWarps) {
      produce_x_parameters<C>(shared, memory, x_scale, x_offset, x_sums, m_blocks, n_blocks, m, k, block_size);
    }
    if constexpr (C::kSplitK > 1) {
      cluster_sync<C::kSplitK>();
      cluster_sync<C::kSplitK>();
    }
    cluster_sync_before_exit<C::kClusterSize>();
  }
}

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_int8_sm90(const float* x_scale, const float* x_offset, const Config::Product* x_sums,
                   const uint8_t* parameters, const BIAS* bias, Y* y, const __grid_constant__ TensorMap x_map,
                   const __grid_constant__ TensorMap w_map, int m, int n, int k, int block_size, int m_blocks,
                   int n_blocks, int ldy, int aligned, float low, float high) {
  gemm_int8_sm90_tiles<Kernel>(x_scale, x_offset, x_sums, parameters, bias, y, &x_map, &w_map, m, n, k, block_size,
                               m_blocks, n_blocks, ldy, aligned, low, high);
}
