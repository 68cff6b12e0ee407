// SPDX-License-Identifier: Apache-2.0
// GEMM of 8-bit rows x and a 4-bit weight W with wgmma on sm_90a, for one to hundreds of rows:
//
//   y[m, n] = activation(sum over k tiles t of x_t[m] . (q_t[n] - z_t[n]) * sW_t[n] * sX_t[m] + bias[n])
//
// A k tile is 128 k.
//
//   weight      [ceil(n / 64)][ceil(k / 128)] weight tiles. A tile has 64 columns and 128 k: codes q, then SCALE sW
//               [warp][8 g][2], then uint8 z [warp][8 g][2], for columns 16 warp + g and 16 warp + g + 8. The codes are
//               words [2 k64][warp][lane][2 k32][2]: byte i of a word of lane 4 g + t holds k = 64 k64 + 32 k32 + 4 t
//               + i in its low nibble and k + 16 in its high nibble, of column 16 warp + g or 16 warp + g + 8
//   offsets     with OFFSET_TILES float16 [ceil(n / 64)][ceil(k / 4096)] tiles of offsets: -z * sW / unit of 64 columns
//               and 32 k tiles, in the order of operand A of a wgmma of 16 bits (ptx/wgmma.cuh): [2 k16][warp][lane][8]
//   units       with OFFSET_TILES float32 {512 / unit, unit}: the accumulators hold y / unit. The unit is a power of
//               two for which the offsets are within the range of float16.
//   x_map       tensor map of x, int8 [1][m][k], boxes of [1][BLOCK_M / SHARE_X][128], 128-byte swizzle
//   x_row_scale float32 [m], the scale of each row, with ROW_SCALES; otherwise null
//   sums_map    with OFFSET_TILES tensor map of the sums of the values of x per k tile, float16 [1][m][ceil(k / 128)],
//               boxes of [1][BLOCK_M][64], 128-byte swizzle; otherwise not used
//   x_values    float32 [m, ceil(k / block_size)]: the scales sX, or with FP8 the sums of the values of x; null for
//               int8 with ROW_SCALES and with OFFSET_TILES
//   bias        BIAS [n] or null
//   y           Y [m, n], row stride ldy; `aligned`: whether the rows of y start at multiples of 16 bytes
//
// Limits: k % 16 == 0; block_size is a multiple of 128, or k.
//
// The kernel computes y^T = W^T x^T: W is operand A of wgmma, in registers, so 4-bit codes stay packed until a warp has
// loaded them; x is operand B. For int8, bytes hold q - z. FP8: a byte is the code q, which is q * 2^-9 as e4m3, and
// the term of z is -z * sW times the sum of x's values. The products of a k tile are scaled and added to float32
// accumulators.
//
// OFFSET_TILES (FP8): the terms of all z are a product of 16-bit matrices, whose k is the index of the k tile: offsets
// times the sums of x's values. wgmma adds it to the accumulators after the last k tile. Each tile of offsets takes the
// place of a k tile in the pipeline. Without OFFSET_TILES, an FMA per product adds the term; for few rows, this is
// cheaper than to read the offsets.
//
// SPLIT_K CTAs compute a tile of BLOCK_M rows and WARPGROUPS * M64_TILES * 64 columns, each over its slice of K. A
// cluster computes SHARE_X tiles with the same rows, and the CTAs of a slice share the copies of x by multicast. In a
// CTA, a producer warp copies the weight and x, another warp the values of x per row, to STAGES stages. CONSUMERS
// groups of WARPGROUPS warpgroups take turns at the stages. While one warpgroup dequantizes or scales, others keep the
// tensor cores busy.
#include "common/warp.cuh"
#include "hopper/tma.cuh"
#include "int8/gemm_w4a8_sm90.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/wgmma_8bit.cuh"

static_assert(__CUDA_ARCH__ == 900, "gemm_w4a8_sm90 needs sm_90a");

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>,
                ProductOptions<FP8, X_OFFSET, WEIGHT_OFFSET> {
  using T = Y;  // type of y
  using Scale = SCALE;
  static constexpr bool kRowScales = ROW_SCALES;
  static constexpr int kBlockM = BLOCK_M;
  static constexpr int kWarpgroups = WARPGROUPS;  // number of warpgroups per consumer
  static constexpr int kM64Tiles = M64_TILES;     // number of m64 tiles per warpgroup
  static constexpr int kConsumers = CONSUMERS;    // number of consumers, which take turns at the stages
  static constexpr int kStages = STAGES;
  static constexpr int kKTiles = K_TILES;  // number of k tiles per stage
  static constexpr int kSplitK = SPLIT_K;  // number of CTAs per tile; each computes the tile over its slice of K
  static constexpr int kShareX =
      SHARE_X;  // number of CTAs with adjacent columns that share the copies of x by multicast
  static constexpr bool kHasOffsetTiles = OFFSET_TILES;  // FP8: whether zero points are applied by tiles of offsets
  // Whether the dependent kernel may start only when the preceding kernel has finished; see gemm_sm90_tile.cuh.
  static constexpr bool kStartsNextLate = START_NEXT_LATE;
  static constexpr int kCtasPerSm = CTAS_PER_SM, kSharedBytes = SHARED_BYTES;
};
using Kernel = GemmW4A8Sm90<Config>;

// The producer's copies of the weight and x to the stages.
template <class C> struct Producer {
  const Tile<C>& tile;
  const uint8_t* weight;
  const uint8_t* offsets;
  const TensorMap* x_map;
  const TensorMap* sums_map;
  int n, k;

  __device__ __forceinline__ void expect(int iteration, int stage_idx) const {
    ptx::mbarrier_arrive_expect_tx(tile.shared.pipeline().full_barrier(stage_idx),
                                   tile.k_tiles(iteration) * (C::kColumnTiles * C::kWeightTileBytes + C::kXTileBytes));
  }
  __device__ __forceinline__ void copy_weight(int iteration, int stage_idx) const {
#pragma unroll
    for (int i = 0; i < C::kColumnTiles; ++i) {
      // Past n, the last column tile of the weight is copied again; the results are not stored.
      const int column_tile = min(tile.n_begin / 64 + i, ceil_div(n, 64) - 1);
      const int64_t weight_tile =
          static_cast<int64_t>(column_tile) * ceil_div(k, C::kBlockK) + tile.k_tile_begin + iteration * C::kKTiles;
      ptx::cp_async_bulk(tile.shared.weight(stage_idx) + i * C::kKTiles * C::kWeightTileBytes,
                         weight + weight_tile * C::kWeightTileBytes, tile.k_tiles(iteration) * C::kWeightTileBytes,
                         tile.shared.pipeline().full_barrier(stage_idx));
    }
  }
  __device__ __forceinline__ void copy_x(int iteration, int stage_idx) const {
    const uint32_t full_barrier = tile.shared.pipeline().full_barrier(stage_idx);
    for (int i = 0; i < tile.k_tiles(iteration); ++i) {
      const int k_begin = (tile.k_tile_begin + iteration * C::kKTiles + i) * C::kBlockK;
      const uint32_t target =
          tile.shared.x(stage_idx) + i * C::kXTileBytes + tile.share * (C::kXTileBytes / C::kShareX);
      const int row = tile.m_begin + tile.share * (C::kBlockM / C::kShareX);
      tma_multicast_3d<C::kShareX>(target, x_map, k_begin, row, 0, full_barrier, tile.split * C::kShareX);
    }
  }
  // Initializes the barriers and copies the weights of the first pass over the stages.
  __device__ __forceinline__ void begin() const {
    const auto pipeline = tile.shared.pipeline();
    ptx::prefetch_tensormap(x_map);
    pipeline.init(1 + C::kHasXParameters, C::kWarpgroups * 4 * C::kShareX);
    if constexpr (C::kSplitK > 1) tile.shared.received_barrier().init();
    ptx::fence_mbarrier_init();
    if constexpr (C::kSplitK > 1) tile.shared.received_barrier().expect(tile.received_bytes());
    for (int i = 0; i < min(tile.weight_iterations(), C::kStages); ++i) {
      expect(i, i);
      copy_weight(i, i);
    }
  }
  // Copies x for the first pass over the stages, then refills each stage that the consumers have released.
  __device__ __forceinline__ void run() const {
    const auto pipeline = tile.shared.pipeline();
    const int prologue = min(tile.weight_iterations(), C::kStages);
    for (int i = 0; i < prologue; ++i) copy_x(i, i);
    // The first pass has filled each stage without waiting, so the state starts one pass over the ring later.
    auto state = PipelineState<C::kStages>::producer();
    state.advance_by(C::kStages);
    for (int i = prologue; i < tile.weight_iterations(); ++i) {
      pipeline.producer_acquire(state);
      expect(i, state.stage_idx);
      copy_weight(i, state.stage_idx);
      copy_x(i, state.stage_idx);
      state.advance();
    }
  }
  // Copies the tiles of offsets and the sums of x's values, 32 k tiles per stage.
  __device__ __forceinline__ void copy_offsets() const {
    const auto pipeline = tile.shared.pipeline();
    const int offset_tiles = ceil_div(tile.weight_k_tiles, C::kOffsetTileGroups);
    for (int iteration = tile.weight_iterations(); iteration < tile.iterations(); ++iteration) {
      const auto state = PipelineState<C::kStages>::producer_at(iteration);
      const uint32_t full_barrier = pipeline.full_barrier(state.stage_idx);
      const int offset_tile = tile.k_tile_begin + iteration - tile.weight_k_tiles;
      pipeline.producer_acquire(state);
      ptx::mbarrier_arrive_expect_tx(full_barrier, C::kColumnTiles * C::kCodeBytes + C::kXTileBytes);
      ptx::cp_async_bulk_tensor_3d(tile.shared.x(state.stage_idx), sums_map, offset_tile * C::kOffsetTileGroups,
                                   tile.m_begin, 0, full_barrier);
      for (int i = 0; i < C::kColumnTiles; ++i) {
        const int64_t column_tile = min(tile.n_begin / 64 + i, ceil_div(n, 64) - 1);
        ptx::cp_async_bulk(tile.shared.weight(state.stage_idx) + i * C::kWeightTileBytes,
                           offsets + (column_tile * offset_tiles + offset_tile) * C::kCodeBytes, C::kCodeBytes,
                           full_barrier);
      }
    }
  }
};

// The role of the warp that copies the values of x per row (x_values).
template <class C> __device__ __forceinline__ void produce_x_parameters(const Tile<C>& tile, uint8_t* memory,
                                                                        const float* x_values, int m, int k,
                                                                        int block_size) {
  constexpr int kRows = ceil_div(C::kBlockM, 32);  // number of rows of the tile whose values a lane copies
  constexpr int kLoaded = kRows <= 2 ? 8 : 4;      // number of k tiles whose values are loaded together
  const auto pipeline = tile.shared.pipeline();
  const int lane = threadIdx.x % 32;
  const int blocks = ceil_div(k, block_size);
  const int block_k_tiles = max(block_size / C::kBlockK, 1);
  const int k_tiles = tile.k_tile_end - tile.k_tile_begin;
  auto state = PipelineState<C::kStages>::producer();
  for (int begin = 0; begin < k_tiles; begin += kLoaded) {
    float values[kLoaded][kRows];
#pragma unroll
    for (int i = 0; i < kLoaded; ++i) {
      const int block = min((tile.k_tile_begin + begin + i) / block_k_tiles, blocks - 1);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = min(tile.m_begin + r * 32 + lane, m - 1);
        values[i][r] = x_values[static_cast<int64_t>(row) * blocks + block];
      }
    }
#pragma unroll
    for (int i = 0; i < kLoaded; ++i) {
      const int k_tile = begin + i;
      if (k_tile >= k_tiles) break;
      if (k_tile % C::kKTiles == 0) pipeline.producer_acquire(state);
      auto* target = reinterpret_cast<float*>(memory + C::SharedStorage::XParameters::kBegin) +
                     (state.stage_idx * C::kKTiles + k_tile % C::kKTiles) * C::kBlockM;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r * 32 + lane < C::kBlockM) target[r * 32 + lane] = values[i][r];
      }
      if (k_tile % C::kKTiles == C::kKTiles - 1 || k_tile == k_tiles - 1) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(pipeline.full_barrier(state.stage_idx));
        state.advance();
      }
    }
  }
}

// The scale and the zero point of this lane's two columns of a weight tile.
template <class C> struct Columns {
  float scales[2];
  float offsets[2];    // FP8: -z * sW, by which the sum of x's values is multiplied
  uint32_t biases[2];  // int8: 128 - z in each byte, which is added to codes

  __device__ __forceinline__ Columns(const uint8_t* weight_tile, int warp, int lane, float code_scale) {
    const int pair = (warp * 8 + lane / 4) * 2;
    Vector<typename C::Scale, 2> scale;
    Vector<uint8_t, 2> zero;
    load<true>(scale, reinterpret_cast<const typename C::Scale*>(weight_tile + C::kCodeBytes) + pair);
    load<true>(zero, weight_tile + C::kCodeBytes + C::kScaleBytes + pair);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float value = to_float(scale.values[i]);
      scales[i] = C::kFp8 ? value * code_scale : value;
      offsets[i] = -value * static_cast<float>(zero.values[i]);
      biases[i] = 0x80808080u - zero.values[i] * 0x01010101u;
    }
  }

  // Dequantizes the 32 k of one wgmma: `words` holds column g, then column g + 8.
  __device__ __forceinline__ void convert(uint32_t (&a)[4], const uint32_t* words) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = (words[i % 2] >> (i / 2 * 4)) & 0x0f0f0f0fu;
      // q + 128 - z does not carry into the next byte; flipping the highest bit subtracts 128.
      a[i] = C::kFp8 ? codes : (codes + biases[i % 2]) ^ 0x80808080u;
    }
  }
};

template <class C, bool ACCUMULATE>
__device__ __forceinline__ void wgmma(typename C::Product (&d)[C::kAccumulators], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (C::kFp8) {
    ptx::wgmma_e4m3<ACCUMULATE>(d, a, b);
  } else {
    ptx::wgmma_s8<ACCUMULATE>(d, a, b);
  }
}

// The body of the kernel, for one configuration; `gemm_w4a8_sm90` below passes its arguments on.
template <class C> __device__ __forceinline__ void gemm_w4a8_sm90_tile(
    const float* x_row_scale, const float* x_values, const uint8_t* weight, const uint8_t* offsets, const float* units,
    const typename C::Bias* bias, typename C::T* y, const TensorMap* x_map, const TensorMap* sums_map, int m, int n,
    int k, int block_size, int m_blocks, int ldy, int aligned, float low, float high) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Tile<C> tile(ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(memory))), k, m_blocks);
  const auto pipeline = tile.shared.pipeline();
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  const Producer<C> producer{tile, weight, offsets, x_map, sums_map, n, k};
  if (warp == C::kProducerWarp && lane == 0) producer.begin();
  cluster_sync_after_init<C::kClusterSize>();
  if constexpr (!C::kStartsNextLate) ptx::griddepcontrol_launch_dependents();
  if (warp == C::kProducerWarp) {
    if (lane == 0) {
      ptx::griddepcontrol_wait();
      if constexpr (C::kStartsNextLate) ptx::griddepcontrol_launch_dependents();
      producer.run();
      if constexpr (C::kHasOffsetTiles) producer.copy_offsets();
    }
  } else if (warp > C::kProducerWarp) {
    ptx::griddepcontrol_wait();
    produce_x_parameters<C>(tile, memory, x_values, m, k, block_size);
  } else {
    const int consumer = warp / (C::kWarpgroups * 4);
    const int warpgroup = warp / 4 % C::kWarpgroups;
    float accumulators[C::kM64Tiles][C::kAccumulators] = {};
    // The empty barriers at which this lane arrives: those of each CTA that shares x.
    const uint32_t empty_barriers = pipeline.template cluster_empty_barriers<C::kShareX>(lane, tile.split * C::kShareX);
    const float code_scale = C::kHasOffsetTiles ? units[0] : 512.0f;
    auto state = PipelineState<C::kStages>::consumer(consumer);
    int iteration = consumer;
    for (; iteration < tile.weight_iterations(); iteration += C::kConsumers) {
      pipeline.consumer_wait(state);
      const int k_tiles = tile.k_tiles(iteration);
#pragma unroll 1
      for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        const uint64_t x = ptx::wgmma_descriptor(tile.shared.x(state.stage_idx) + k_tile * C::kXTileBytes);
        const auto* x_parameters = reinterpret_cast<const float*>(memory + C::SharedStorage::XParameters::kBegin) +
                                   (state.stage_idx * C::kKTiles + k_tile) * C::kBlockM + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < C::kM64Tiles; ++i) {
          const int tile_offset =
              ((state.stage_idx * C::kColumnTiles + i * C::kWarpgroups + warpgroup) * C::kKTiles + k_tile) *
              C::kWeightTileBytes;
          Vector<uint32_t, 4> words[2];
#pragma unroll
          for (int k64 = 0; k64 < 2; ++k64) {
            ptx::ld_shared(words[k64].values, tile.shared.weight(0) + tile_offset + k64 * (C::kCodeBytes / 2) +
                                                  (warp % 4 * 32 + lane) * 16);
          }
          const Columns<C> columns(memory + C::SharedStorage::Weight::kBegin + tile_offset, warp % 4, lane, code_scale);
          uint32_t a[4][4];
#pragma unroll
          for (int k32 = 0; k32 < 4; ++k32) columns.convert(a[k32], words[k32 / 2].values + k32 % 2 * 2);
          typename C::Product products[C::kAccumulators];
          ptx::wgmma_fence();
          wgmma<C, false>(products, a[0], x);
#pragma unroll
          for (int k32 = 1; k32 < 4; ++k32) wgmma<C, true>(products, a[k32], x + k32 * 2);
          ptx::wgmma_commit_group();
          ptx::wgmma_wait_group<0>();
#pragma unroll
          for (int j = 0; j < C::kAccumulators / 4; ++j) {
            Vector<float, 2> values = {};
            if constexpr (C::kHasXParameters) load<true>(values, x_parameters + j * 8);
#pragma unroll
            for (int v = 0; v < 4; ++v) {
              float& sum = accumulators[i][j * 4 + v];
              const auto product = static_cast<float>(products[j * 4 + v]);
              const float scale = columns.scales[v / 2];
              if constexpr (C::kFp8 && C::kHasXParameters)
                sum = fmaf(values.values[v % 2], columns.offsets[v / 2], sum);
              sum = C::kRowScales ? fmaf(product, scale, sum) : fmaf(product * scale, values.values[v % 2], sum);
            }
          }
        }
      }
      pipeline.template release<C::kShareX>(empty_barriers + state.stage_idx * kBarrierBytes, lane);
      state.advance_by(C::kConsumers);
    }
    // The remaining iterations are those for tiles of offsets.
    for (; C::kHasOffsetTiles && iteration < tile.iterations(); iteration += C::kConsumers) {
      pipeline.consumer_wait(state);
      const uint64_t x = ptx::wgmma_descriptor(tile.shared.x(state.stage_idx));
#pragma unroll
      for (int i = 0; i < C::kM64Tiles; ++i) {
        const int tile_offset =
            (state.stage_idx * C::kColumnTiles + i * C::kWarpgroups + warpgroup) * C::kWeightTileBytes;
        Vector<uint32_t, 4> pairs[2];
#pragma unroll
        for (int k16 = 0; k16 < 2; ++k16) {
          ptx::ld_shared(pairs[k16].values,
                         tile.shared.weight(0) + tile_offset + k16 * (C::kCodeBytes / 2) + (warp % 4 * 32 + lane) * 16);
        }
        // With the accumulators as operand D of wgmma, ptxas would need 16 more registers.
        float products[C::kAccumulators];
        ptx::wgmma_fence();
        ptx::wgmma_f16<false>(products, pairs[0].values, x);
        ptx::wgmma_f16<true>(products, pairs[1].values, x + 2);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int v = 0; v < C::kAccumulators; ++v) accumulators[i][v] += products[v];
      }
      pipeline.template release<C::kShareX>(empty_barriers + state.stage_idx * kBarrierBytes, lane);
      state.advance_by(C::kConsumers);
    }
    ptx::griddepcontrol_wait();
    const Epilogue<typename C::T, C> epilogue{bias, nullptr, low, high, n, 0};
    store_tile<C>(tile, memory, accumulators, consumer, warpgroup, x_row_scale, C::kHasOffsetTiles ? units[1] : 1.0f,
                  epilogue, y, m, n, ldy, aligned != 0);
  }
  // Do not exit while other CTAs signal this CTA's barriers.
  if constexpr (C::kShareX > 1) {
    __syncwarp();
    cluster_sync_before_exit<C::kClusterSize>();
  }
}

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    gemm_w4a8_sm90(const float* x_row_scale, const float* x_values, const uint8_t* weight, const uint8_t* offsets,
                   const float* units, const BIAS* bias, Y* y, const __grid_constant__ TensorMap x_map,
                   const __grid_constant__ TensorMap sums_map, int m, int n, int k, int block_size, int m_blocks,
                   int ldy, int aligned, float low, float high) {
  gemm_w4a8_sm90_tile<Kernel>(x_row_scale, x_values, weight, offsets, units, bias, y, &x_map, &sums_map, m, n, k,
                              block_size, m_blocks, ldy, aligned, low, high);
}
