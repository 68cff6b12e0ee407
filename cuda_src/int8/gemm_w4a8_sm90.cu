// SPDX-License-Identifier: Apache-2.0
// GEMM of 8-bit rows A and a 4-bit weight W with wgmma on sm_90a, for one to hundreds of rows:
//
//   y[m, n] = activation(sum over k tiles t of A_t[m] . (q_t[n] - z_t[n]) * sW_t[n] * sA_t[m] + bias[n])
//
// A k tile is 128 k.
//
//   weight      [ceil(n / 64)][ceil(k / 128)] weight tiles. A tile has 64 columns and 128 k: codes q, then SCALE sW
//               [warp][8 g][2], then uint8 z [warp][8 g][2], for columns 16 warp + g and 16 warp + g + 8. The codes are
//               words [2 k64][warp][lane][2 k32][2]: byte i of a word of lane 4 g + t holds k = 64 k64 + 32 k32 + 4 t
//               + i in its low nibble and k + 16 in its high nibble, of column 16 warp + g or 16 warp + g + 8
//   offsets     with OFFSET_TILES float16 [ceil(n / 64)][ceil(k / 4096)] tiles of offsets: -z * sW / unit of 64 columns
//               and 32 k tiles, in the order of operand A of a wgmma of 16 bits (ptx/wgmma.cuh): [2 k16][warp][lane][8]
//   units       with OFFSET_TILES float32 {512 / unit, unit}: the accumulators hold y / unit. The unit is a power of two
//               for which the offsets are within the range of float16.
//   x_map       tensor map of A, int8 [1][m][k], boxes of [1][BLOCK_M / SHARE_X][128], 128-byte swizzle
//   x_row_scale float32 [m], the scale of each row, with ROW_SCALES; otherwise null
//   sums_map    with OFFSET_TILES tensor map of the sums of the values of A per k tile, float16 [1][m][ceil(k / 128)],
//               boxes of [1][BLOCK_M][64], 128-byte swizzle; otherwise not used
//   x_values    float32 [m, ceil(k / block_size)]: the scales sA, or with FP8 the sums of the values of A; null for
//               int8 with ROW_SCALES and with OFFSET_TILES
//   bias        BIAS [n] or null
//   y           Y [m, n], row stride ldy; `aligned`: whether the rows of y start at multiples of 16 bytes
//
// Limits: k % 16 == 0; block_size is a multiple of 128, or k.
//
// The kernel computes y^T = W^T A^T: W is operand A of wgmma, in registers, so 4-bit codes stay packed until a warp has
// loaded them; A is operand B. For int8, bytes hold q - z. FP8: a byte is the code q, which is q * 2^-9 as e4m3, and
// the term of z is -z * sW times the sum of A's values. The products of a k tile are scaled and added to float32
// accumulators.
//
// OFFSET_TILES (FP8): the terms of all z are a product of 16-bit matrices, whose k is the index of the k tile: offsets
// times the sums of A's values. wgmma adds it to the accumulators after the last k tile. Each tile of offsets takes the
// place of a k tile in the pipeline. Without OFFSET_TILES, an FMA per product adds the term; for few rows, this is
// cheaper than to read the offsets.
//
// SPLIT_K CTAs compute a tile of BLOCK_M rows and WARPGROUPS * M64_TILES * 64 columns, each over its slice of K. A
// cluster computes SHARE_X tiles with the same rows, and the CTAs of a slice share the copies of A by multicast. In a
// CTA, a producer warp copies the weight and A, another warp the values of A per row, to STAGES stages. CONSUMERS
// groups of WARPGROUPS warpgroups take turns at the stages. While one warpgroup dequantizes or scales, others keep the
// tensor cores busy.
#include "common/warp.cuh"
#include "hopper/tma.cuh"
#include "int8/gemm_w4a8_sm90.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/wgmma_8bit.cuh"

static_assert(__CUDA_ARCH__ == 900, "gemm_w4a8_sm90 needs sm_90a");

// The producer's copies to the stages.
struct Producer {
  const Tile& tile;
  const uint8_t* weight;
  const uint8_t* offsets;
  const TensorMap* x_map;
  const TensorMap* sums_map;
  int n, k;

  __device__ __forceinline__ void expect(int iteration, int stage_idx) const {
    ptx::mbarrier_arrive_expect_tx(tile.shared.pipeline().full_barrier(stage_idx),
                                   tile.k_tiles(iteration) * (kColumnTiles * kWeightTileBytes + kXTileBytes));
  }
  __device__ __forceinline__ void copy_weight(int iteration, int stage_idx) const {
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      // For column tiles past n, the last column tile is copied; the results are not stored.
      const int column_tile = min(tile.n_begin / 64 + i, ceil_div(n, 64) - 1);
      const int64_t weight_tile =
          static_cast<int64_t>(column_tile) * ceil_div(k, kBlockK) + tile.k_tile_begin + iteration * kKTiles;
      ptx::cp_async_bulk(tile.shared.weight(stage_idx) + i * kKTiles * kWeightTileBytes,
                         weight + weight_tile * kWeightTileBytes, tile.k_tiles(iteration) * kWeightTileBytes,
                         tile.shared.pipeline().full_barrier(stage_idx));
    }
  }
  __device__ __forceinline__ void copy_x(int iteration, int stage_idx) const {
    const uint32_t full_barrier = tile.shared.pipeline().full_barrier(stage_idx);
    for (int i = 0; i < tile.k_tiles(iteration); ++i) {
      const int k_begin = (tile.k_tile_begin + iteration * kKTiles + i) * kBlockK;
      const uint32_t target = tile.shared.x(stage_idx) + i * kXTileBytes + tile.share * (kXTileBytes / kShareX);
      const int row = tile.m_begin + tile.share * (kBlockM / kShareX);
      tma_multicast_3d<kShareX>(target, x_map, k_begin, row, 0, full_barrier, tile.split * kShareX);
    }
  }
  // Initializes the barriers and copies the weights of the first pass over the stages.
  __device__ __forceinline__ void begin() const {
    const auto pipeline = tile.shared.pipeline();
    ptx::prefetch_tensormap(x_map);
    pipeline.init(1 + kHasXParameters, kWarpgroups * 4 * kShareX);
    if constexpr (kSplitK > 1) tile.shared.received_barrier().init();
    ptx::fence_mbarrier_init();
    if constexpr (kSplitK > 1) tile.shared.received_barrier().expect(tile.received_bytes());
    for (int i = 0; i < min(tile.weight_iterations(), kStages); ++i) {
      expect(i, i);
      copy_weight(i, i);
    }
  }
  // Copies A for the first pass over the stages, then refills each stage that the consumers have released.
  __device__ __forceinline__ void run() const {
    const auto pipeline = tile.shared.pipeline();
    const int prologue = min(tile.weight_iterations(), kStages);
    for (int i = 0; i < prologue; ++i) copy_x(i, i);
    // The first pass has filled each stage without waiting, so the state starts one pass over the ring later.
    auto state = PipelineState<kStages>::producer();
    state.advance_by(kStages);
    for (int i = prologue; i < tile.weight_iterations(); ++i) {
      pipeline.producer_acquire(state);
      expect(i, state.stage_idx);
      copy_weight(i, state.stage_idx);
      copy_x(i, state.stage_idx);
      state.advance();
    }
  }
  // Copies the tiles of offsets and the sums of A's values, 32 k tiles per stage.
  __device__ __forceinline__ void copy_offsets() const {
    const auto pipeline = tile.shared.pipeline();
    const int offset_tiles = ceil_div(tile.weight_k_tiles, kOffsetTileGroups);
    for (int iteration = tile.weight_iterations(); iteration < tile.iterations(); ++iteration) {
      const PipelineState<kStages> state{iteration % kStages, (iteration / kStages & 1u) ^ 1u};
      const uint32_t full_barrier = pipeline.full_barrier(state.stage_idx);
      const int offset_tile = tile.k_tile_begin + iteration - tile.weight_k_tiles;
      pipeline.producer_acquire(state);
      ptx::mbarrier_arrive_expect_tx(full_barrier, kColumnTiles * kCodeBytes + kXTileBytes);
      ptx::cp_async_bulk_tensor_3d(tile.shared.x(state.stage_idx), sums_map, offset_tile * kOffsetTileGroups,
                                   tile.m_begin, 0, full_barrier);
      for (int i = 0; i < kColumnTiles; ++i) {
        const int64_t column_tile = min(tile.n_begin / 64 + i, ceil_div(n, 64) - 1);
        ptx::cp_async_bulk(tile.shared.weight(state.stage_idx) + i * kWeightTileBytes,
                           offsets + (column_tile * offset_tiles + offset_tile) * kCodeBytes, kCodeBytes, full_barrier);
      }
    }
  }
};

// The role of the warp that copies the values of A per row (x_values).
__device__ __forceinline__ void produce_x_parameters(const Tile& tile, uint8_t* memory, const float* x_values, int m,
                                                     int k, int block_size) {
  constexpr int kRows = ceil_div(kBlockM, 32);  // number of rows per lane
  constexpr int kLoaded = kRows <= 2 ? 8 : 4;   // number of k tiles whose values are loaded together
  const auto pipeline = tile.shared.pipeline();
  const int lane = threadIdx.x % 32;
  const int blocks = ceil_div(k, block_size);
  const int block_k_tiles = max(block_size / kBlockK, 1);
  const int k_tiles = tile.k_tile_end - tile.k_tile_begin;
  auto state = PipelineState<kStages>::producer();
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
      if (k_tile % kKTiles == 0) pipeline.producer_acquire(state);
      auto* target = reinterpret_cast<float*>(memory + SharedStorage::XParameters::kBegin) +
                     (state.stage_idx * kKTiles + k_tile % kKTiles) * kBlockM;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r * 32 + lane < kBlockM) target[r * 32 + lane] = values[i][r];
      }
      if (k_tile % kKTiles == kKTiles - 1 || k_tile == k_tiles - 1) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(pipeline.full_barrier(state.stage_idx));
        state.advance();
      }
    }
  }
}

// The parameters of this lane's two columns of a weight tile.
struct Columns {
  float scales[2];
  float offsets[2];    // FP8: the factor of the sum of A's values
  uint32_t biases[2];  // int8: 128 - z in each byte

  __device__ __forceinline__ Columns(const uint8_t* weight_tile, int warp, int lane, float code_scale) {
    const int pair = (warp * 8 + lane / 4) * 2;
    Vector<SCALE, 2> scale;
    Vector<uint8_t, 2> zero;
    load<true>(scale, reinterpret_cast<const SCALE*>(weight_tile + kCodeBytes) + pair);
    load<true>(zero, weight_tile + kCodeBytes + kScaleBytes + pair);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float value = to_float(scale.values[i]);
      scales[i] = kFp8 ? value * code_scale : value;
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
      a[i] = kFp8 ? codes : (codes + biases[i % 2]) ^ 0x80808080u;
    }
  }
};

template <bool ACCUMULATE>
__device__ __forceinline__ void wgmma(Product (&d)[kAccumulators], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kFp8) {
    ptx::wgmma_e4m3<ACCUMULATE>(d, a, b);
  } else {
    ptx::wgmma_s8<ACCUMULATE>(d, a, b);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM)
    gemm_w4a8_sm90(const float* x_row_scale, const float* x_values, const uint8_t* weight, const uint8_t* offsets,
                   const float* units, const BIAS* bias, Y* y, const __grid_constant__ TensorMap x_map,
                   const __grid_constant__ TensorMap sums_map, int m, int n, int k, int block_size, int m_blocks,
                   int ldy, int aligned, float low, float high) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Tile tile(ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(memory))), k, m_blocks);
  const auto pipeline = tile.shared.pipeline();
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  const Producer producer{tile, weight, offsets, &x_map, &sums_map, n, k};
  if (warp == kProducerWarp && lane == 0) producer.begin();
  cluster_sync_after_init<kClusterSize>();
  if constexpr (!kStartsNextLate) ptx::griddepcontrol_launch_dependents();
  if (warp == kProducerWarp) {
    if (lane == 0) {
      ptx::griddepcontrol_wait();
      if constexpr (kStartsNextLate) ptx::griddepcontrol_launch_dependents();
      producer.run();
      if constexpr (kHasOffsetTiles) producer.copy_offsets();
    }
  } else if (warp > kProducerWarp) {
    ptx::griddepcontrol_wait();
    produce_x_parameters(tile, memory, x_values, m, k, block_size);
  } else {
    const int consumer = warp / (kWarpgroups * 4);
    const int warpgroup = warp / 4 % kWarpgroups;
    float accumulators[kM64Tiles][kAccumulators] = {};
    // The empty barriers at which this lane arrives: those of each CTA that shares A.
    const uint32_t empty_barriers = pipeline.cluster_empty_barriers<kShareX>(lane, tile.split * kShareX);
    const float code_scale = kHasOffsetTiles ? units[0] : 512.0f;
    auto state = PipelineState<kStages>::consumer(consumer);
    int iteration = consumer;
    for (; iteration < tile.weight_iterations(); iteration += kConsumers) {
      pipeline.consumer_wait(state);
      const int k_tiles = tile.k_tiles(iteration);
#pragma unroll 1
      for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        const uint64_t x = ptx::wgmma_descriptor(tile.shared.x(state.stage_idx) + k_tile * kXTileBytes);
        const auto* x_parameters = reinterpret_cast<const float*>(memory + SharedStorage::XParameters::kBegin) +
                                   (state.stage_idx * kKTiles + k_tile) * kBlockM + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kM64Tiles; ++i) {
          const int tile_offset =
              ((state.stage_idx * kColumnTiles + i * kWarpgroups + warpgroup) * kKTiles + k_tile) * kWeightTileBytes;
          Vector<uint32_t, 4> words[2];
#pragma unroll
          for (int k64 = 0; k64 < 2; ++k64) {
            ptx::ld_shared(words[k64].values,
                           tile.shared.weight(0) + tile_offset + k64 * (kCodeBytes / 2) + (warp % 4 * 32 + lane) * 16);
          }
          const Columns columns(memory + SharedStorage::Weight::kBegin + tile_offset, warp % 4, lane, code_scale);
          uint32_t a[4][4];
#pragma unroll
          for (int k32 = 0; k32 < 4; ++k32) columns.convert(a[k32], words[k32 / 2].values + k32 % 2 * 2);
          Product products[kAccumulators];
          ptx::wgmma_fence();
          wgmma<false>(products, a[0], x);
#pragma unroll
          for (int k32 = 1; k32 < 4; ++k32) wgmma<true>(products, a[k32], x + k32 * 2);
          ptx::wgmma_commit_group();
          ptx::wgmma_wait_group<0>();
#pragma unroll
          for (int j = 0; j < kAccumulators / 4; ++j) {
            Vector<float, 2> values = {};
            if constexpr (kHasXParameters) load<true>(values, x_parameters + j * 8);
#pragma unroll
            for (int v = 0; v < 4; ++v) {
              float& sum = accumulators[i][j * 4 + v];
              const auto product = static_cast<float>(products[j * 4 + v]);
              const float scale = columns.scales[v / 2];
              if constexpr (kFp8 && kHasXParameters) sum = fmaf(values.values[v % 2], columns.offsets[v / 2], sum);
              sum = kRowScales ? fmaf(product, scale, sum) : fmaf(product * scale, values.values[v % 2], sum);
            }
          }
        }
      }
      pipeline.release<kShareX>(empty_barriers + state.stage_idx * kBarrierBytes, lane);
      state.advance_by(kConsumers);
    }
    // The remaining iterations are those for tiles of offsets.
    for (; kHasOffsetTiles && iteration < tile.iterations(); iteration += kConsumers) {
      pipeline.consumer_wait(state);
      const uint64_t x = ptx::wgmma_descriptor(tile.shared.x(state.stage_idx));
#pragma unroll
      for (int i = 0; i < kM64Tiles; ++i) {
        const int tile_offset = (state.stage_idx * kColumnTiles + i * kWarpgroups + warpgroup) * kWeightTileBytes;
        Vector<uint32_t, 4> pairs[2];
#pragma unroll
        for (int k16 = 0; k16 < 2; ++k16) {
          ptx::ld_shared(pairs[k16].values,
                         tile.shared.weight(0) + tile_offset + k16 * (kCodeBytes / 2) + (warp % 4 * 32 + lane) * 16);
        }
        // With the accumulators as operand D of wgmma, ptxas would need 16 more registers.
        float products[kAccumulators];
        ptx::wgmma_fence();
        ptx::wgmma_f16<false>(products, pairs[0].values, x);
        ptx::wgmma_f16<true>(products, pairs[1].values, x + 2);
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int v = 0; v < kAccumulators; ++v) accumulators[i][v] += products[v];
      }
      pipeline.release<kShareX>(empty_barriers + state.stage_idx * kBarrierBytes, lane);
      state.advance_by(kConsumers);
    }
    ptx::griddepcontrol_wait();
    const Epilogue<Y> epilogue{bias, nullptr, low, high, n, 0};
    store_tile(tile, memory, accumulators, consumer, warpgroup, x_row_scale, kHasOffsetTiles ? units[1] : 1.0f,
               epilogue, y, m, n, ldy, aligned != 0);
  }
  // Do not exit while other CTAs signal this CTA's barriers.
  if constexpr (kShareX > 1) {
    __syncwarp();
    cluster_sync_before_exit<kClusterSize>();
  }
}
