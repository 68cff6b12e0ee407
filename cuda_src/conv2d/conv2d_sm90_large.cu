// SPDX-License-Identifier: Apache-2.0
// Convolution with wgmma on sm_90a for many output pixels, with a weight dequantized to device memory beforehand.
//
//   y[b, i, j, co] = activation(bias[co] + sum over taps and channels of x * w), as in conv2d.cuh
//
// The weight [64 outputs, k] is operand A, and x [k, pixels] is operand B, both in shared memory. K is processed in K
// chunks of one filter tap x 64 channels (conv2d_sm90.cuh).
//
//   weight   X [K chunk][64-output tile][64][64 channels], with the 128-byte swizzle: the vector v of 8 channels of
//            output i is stored as vector v ^ (i % 8)
//   bias     BIAS [outputs] or null
//   y        X, contiguous, NHWC, each pixel at a multiple of 16 bytes
//   x_map    tensor map of x, X [batch][height][width][channels], boxes of [TILE_N][BOX_H][BOX_W][64], 128-byte
//            swizzle; out-of-bounds elements are the zero padding, and the element strides are the strides of the
//            convolution
//   tiles    number of CTA tiles of WG_CO * 64 outputs and WG_PX * PIXEL_TILES pixel tiles
//   co_blocks          number of CTA tiles along the outputs
//   tiles_h, tiles_w   number of pixel tiles along the height and the width of an image
//   k_chunks           number of K chunks
//
// Limits: as for conv2d_sm90, and outputs % 8 == 0.
//
// A CTA has WG_CO * WG_PX consumer warpgroups, 1 to 4. Each computes 64 outputs of PIXEL_TILES pixel tiles; a pixel
// tile is TILE_N * TILE_H * TILE_W pixels. A wgmma reads PIXELS rows of B: a pixel tile and, if PIXELS is larger, rows
// of zeros. CTAs are persistent: the producer fills stages for the next CTA tile while the warpgroups store the current
// CTA tile.
//
// Without HALO, each K chunk has its own TMA box of x. With HALO, TILE_W = 8, and boxes with a border serve all taps of
// 64 channels. There is one box for each plane, which is the pixels of x with the same row % PLANES_H and the same
// column % PLANES_W, where PLANES_H and PLANES_W are the strides, 1 or 2. In its plane, a tap reads adjacent pixels for
// adjacent pixels of y, so each tap only starts at a different row of B.
//
// Split-K: the SPLIT_K CTAs of a cluster compute one CTA tile, each over a slice of the K chunks, and add their partial
// sums through DSMEM.
//
// Nothing is read before griddepcontrol.wait: prefetching the weight slows down single layers by 2 to 20% on an H100.
//
// An SM of an H100 copies 53 bytes per clock from L2. So tiles of 128 outputs and at least 112 pixels are limited by
// the tensor cores only if a box serves several taps.
#include "common/epilogue.cuh"
#include "common/tile_scheduler.cuh"
#include "common/warp.cuh"
#include "conv2d/conv2d_sm90.cuh"
#include "hopper/cluster.cuh"
#include "hopper/cluster_reduction.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"
#include "hopper/tma.cuh"
#include "hopper/transposed_store.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence_proxy.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_shared.cuh"

static_assert(__CUDA_ARCH__ == 900, "conv2d_sm90_large needs sm_90a");

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL> {
  using T = X;  // type of x and y
  static constexpr bool kHalo = HALO;
  static constexpr int kWgCo = WG_CO, kWgPx = WG_PX, kPixelTiles = PIXEL_TILES, kPixels = PIXELS, kTileN = TILE_N;
  static constexpr int kTileH = TILE_H, kTileW = TILE_W, kPlanesH = PLANES_H, kPlanesW = PLANES_W, kBoxH = BOX_H;
  static constexpr int kBoxW = BOX_W;
  static constexpr int kSteps = STEPS;  // number of wgmma instructions per K chunk, each of 16 channels
  static constexpr int kXStages = X_STAGES, kWeightStages = WEIGHT_STAGES, kSplitK = SPLIT_K, kCtasPerSm = CTAS_PER_SM;
  static constexpr int kSharedBytes = SHARED_BYTES;
};

template <class Host>
struct Conv2dSm90Large : Host {
  static constexpr int kWarpgroups = Host::kWgCo * Host::kWgPx;
  static constexpr int kConsumerWarps = kWarpgroups * 4;
  static constexpr int kThreads = kConsumerWarps * 32 + 32;
  static constexpr int kBoxes = Host::kWgPx * Host::kPixelTiles;
  static constexpr int kPlanes = Host::kPlanesH * Host::kPlanesW;  // number of TMA boxes per pixel tile
  static constexpr int kTilePixels = Host::kTileN * Host::kTileH * Host::kTileW;
  static constexpr int kBoxRows = Host::kTileN * Host::kBoxH * Host::kBoxW;
  // The stride in bytes between adjacent 8-pixel groups of B (the stride byte offset of the matrix descriptor).
  static constexpr int kGroupStrideBytes = Host::kHalo ? Host::kBoxW * 128 : 1024;
  static constexpr int kAccumulators = Host::kPixels / 2;
  static constexpr int kPixelGroups = Host::kPixels / 8;
  static constexpr int kOwnedGroups = ceil_div(Host::kPixelTiles * kPixelGroups, Host::kSplitK);

  static constexpr int kBoxBytes = ceil_div((Host::kPixels > kBoxRows ? Host::kPixels : kBoxRows) * 128, 1024) * 1024;
  static constexpr int kTileBytes = 64 * 128;
  static constexpr int kWeightBytes = Host::kWgCo * kTileBytes;
  static constexpr int kStoreRows = 32;
  static constexpr int kStoreRowBytes = kTransposedRowBytes<typename Host::T, 64>;

  static_assert(kTilePixels <= Host::kPixels, "a wgmma covers a pixel tile");
  static_assert(!Host::kHalo || (Host::kTileN == 1 && Host::kTileW == 8 && kTilePixels == Host::kPixels),
                "8-pixel groups have a constant distance in shared memory");
  static_assert(sizeof(typename Host::T) == 2, "tensor cores take 16-bit x");

  // After the main loop, the partial sums of split-K, float4 [rank][warpgroup][owned group][128], overwrite Boxes and
  // Weights.
  struct SharedStorage {
    using Boxes = SharedArray<0, Host::kXStages, kBoxes * kPlanes * kBoxBytes>;
    using Weights = SharedArray<Boxes::kEnd, Host::kWeightStages, kWeightBytes>;
    using Store = SharedArray<Weights::kEnd, kWarpgroups, kStoreRows * kStoreRowBytes>;
    using XBarriers = SharedArray<Store::kEnd, 2 * Host::kXStages, kBarrierBytes>;
    using WeightBarriers = SharedArray<XBarriers::kEnd, 2 * Host::kWeightStages, kBarrierBytes>;
    static constexpr int kBytes = WeightBarriers::kEnd;

    uint32_t begin;

    __device__ __forceinline__ uint32_t x(int stage_idx) const { return Boxes::at(begin, stage_idx); }
    __device__ __forceinline__ uint32_t weight(int stage_idx) const { return Weights::at(begin, stage_idx); }
    __device__ __forceinline__ Pipeline<Host::kXStages, XBarriers::kBegin> x_pipeline() const { return {begin}; }
    __device__ __forceinline__ Pipeline<Host::kWeightStages, WeightBarriers::kBegin> weight_pipeline() const {
      return {begin};
    }
  };
  ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);

  static_assert(Host::kSplitK == 1 || Host::kSplitK * kWarpgroups * kOwnedGroups * 2048 <= SharedStorage::Weights::kEnd,
                "the partial sums fit in the memory of the stages");
};
// The arguments are those of the kernel.
template <class C>
__device__ __forceinline__ void conv2d_sm90_large_tiles(const uint8_t* weight, const typename C::Bias* bias,
                                                        typename C::T* y, const TensorMap* x_map, int tiles,
                                                        int co_blocks, int tiles_h, int tiles_w, int k_chunks,
                                                        int batch, int outputs, int kernel_h, int kernel_w, int out_h,
                                                        int out_w, int stride_h, int stride_w, int pad_h, int pad_w,
                                                        int dilation_h, int dilation_w, float low, float high) {
  using T = typename C::T;
  extern __shared__ __align__(1024) uint8_t memory[];
  const typename C::SharedStorage shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  const auto x_pipeline = shared.x_pipeline();
  const auto weight_pipeline = shared.weight_pipeline();
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  const int rank = cluster_rank<C::kSplitK>();
  const int begin = slice_begin(k_chunks, rank, C::kSplitK);
  const int end = slice_begin(k_chunks, rank + 1, C::kSplitK);

  const int taps = kernel_h * kernel_w;
  const KChunk<C::kHalo> first_chunk{begin / taps, begin % taps / kernel_w, begin % kernel_w};
  // The number of pixels of x by which plane 0 starts before the first pixel that filter taps read.
  const int lead_h = C::kPlanes == 1 ? 0 : pad_h % C::kPlanesH;
  const int lead_w = C::kPlanes == 1 ? 0 : pad_w % C::kPlanesW;

  // Returns the coordinates (image, row, column of y) of the first pixel of pixel tile `index` of CTA tile `tile`.
  auto pixel_tile_begin = [&](int tile, int index) {
    const int at = tile / co_blocks * C::kBoxes + index;
    return int3{at / (tiles_h * tiles_w) * C::kTileN, at / tiles_w % tiles_h * C::kTileH, at % tiles_w * C::kTileW};
  };

  if (warp == C::kConsumerWarps) {
    init_pipelines<C::kXStages, C::kWeightStages>(x_pipeline, weight_pipeline, C::kConsumerWarps, lane);
    ptx::fence_mbarrier_init();
  }
  if constexpr (C::kTilePixels < C::kPixels) {
    // Zero the rows of B past each pixel tile: TMA does not write them, but wgmma reads them.
    constexpr int kLeft = C::kTilePixels < C::kPixels ? (C::kPixels - C::kTilePixels) * 8 : 1;
    for (int i = threadIdx.x; i < C::kXStages * C::kBoxes * kLeft; i += C::kThreads) {
      const int at = i / kLeft * C::kBoxBytes + C::kTilePixels * 128 + i % kLeft * 16;
      *reinterpret_cast<Vector<uint32_t, 4>*>(memory + at) = {};
    }
    ptx::fence_proxy_async();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();

  if (warp == C::kConsumerWarps) {
    if (lane == 0) {
      ptx::prefetch_tensormap(x_map);
      ptx::griddepcontrol_wait();
      auto x_state = PipelineState<C::kXStages>::producer();
      auto weight_state = PipelineState<C::kWeightStages>::producer();
      for (PersistentTileScheduler<C::kSplitK> scheduler(tiles); scheduler.is_valid(); scheduler.advance()) {
        const int tile = scheduler.unit;
        const int co_tiles = outputs <= 64 ? 1 : ceil_div(outputs, 128) * 2;  // of the stored weight
        const uint8_t* source =
            weight + static_cast<int64_t>(begin * co_tiles + tile % co_blocks * C::kWgCo) * C::kTileBytes;
        KChunk<C::kHalo> k_chunk = first_chunk;
        for (int index = begin; index < end; ++index) {
          if (index == begin || k_chunk.needs_box()) {
            const uint32_t full_barrier = x_pipeline.full_barrier(x_state.stage_idx);
            x_pipeline.producer_acquire(x_state);
            ptx::mbarrier_arrive_expect_tx(full_barrier, C::kBoxes * C::kPlanes * C::kBoxRows * 128);
#pragma unroll
            for (int i = 0; i < C::kBoxes * C::kPlanes; ++i) {
              const int3 from = pixel_tile_begin(tile, i / C::kPlanes);
              const int plane_h = i % C::kPlanes / C::kPlanesW, plane_w = i % C::kPlanesW;
              const int row = from.y * stride_h - pad_h + (C::kHalo ? plane_h - lead_h : k_chunk.fy * dilation_h);
              const int column = from.z * stride_w - pad_w + (C::kHalo ? plane_w - lead_w : k_chunk.fx * dilation_w);
              ptx::cp_async_bulk_tensor_4d(shared.x(x_state.stage_idx) + i * C::kBoxBytes, x_map,
                                           k_chunk.channel_chunk * 64, column, row, from.x, full_barrier);
            }
            x_state.advance_by_branch();
          }
          const uint32_t full_barrier = weight_pipeline.full_barrier(weight_state.stage_idx);
          weight_pipeline.producer_acquire(weight_state);
          ptx::mbarrier_arrive_expect_tx(full_barrier, C::kWeightBytes);
          ptx::cp_async_bulk(shared.weight(weight_state.stage_idx), source, C::kWeightBytes, full_barrier);
          source += static_cast<int64_t>(co_tiles) * C::kTileBytes;
          weight_state.advance_by_branch();
          k_chunk.advance(kernel_h, kernel_w);
        }
      }
    }
    __syncwarp();
    if constexpr (C::kSplitK > 1) {
      cluster_sync<C::kSplitK>();
      cluster_sync<C::kSplitK>();
    }
    return;
  }

  const int warpgroup = C::kWarpgroups == 1 ? 0 : warp / 4;
  const int wg_co = warpgroup % C::kWgCo;
  const int wg_px = warpgroup / C::kWgCo;
  const int thread = threadIdx.x % 128;
  uint8_t* buffer = memory + C::SharedStorage::Store::kBegin + warpgroup * C::kStoreRows * C::kStoreRowBytes;
  const uint32_t target = transposed_address<C::kStoreRowBytes>(buffer, warp % 4, lane);
  const Epilogue<T, C> epilogue{bias, nullptr, low, high, outputs, 0};

  auto x_state = PipelineState<C::kXStages>::consumer();
  auto weight_state = PipelineState<C::kWeightStages>::consumer();
  for (PersistentTileScheduler<C::kSplitK> scheduler(tiles); scheduler.is_valid(); scheduler.advance()) {
    const int tile = scheduler.unit;
    float accumulators[C::kPixelTiles][C::kAccumulators] = {};
    KChunk<C::kHalo> k_chunk = first_chunk;
    for (int index = begin; index < end; ++index) {
      const bool is_next_box = index > begin && k_chunk.needs_box();
      if (is_next_box) x_state.advance_by_branch();
      if (is_next_box || index == begin) x_pipeline.consumer_wait(x_state);
      weight_pipeline.consumer_wait(weight_state);
      int first_row = 0;
      if constexpr (C::kHalo) {
        const int y_shift = k_chunk.fy * dilation_h + lead_h, x_shift = k_chunk.fx * dilation_w + lead_w;
        const int plane = y_shift % C::kPlanesH * C::kPlanesW + x_shift % C::kPlanesW;
        first_row = plane * (C::kBoxBytes / 128) + y_shift / C::kPlanesH * C::kBoxW + x_shift / C::kPlanesW;
      }
      const uint64_t a = ptx::wgmma_descriptor(shared.weight(weight_state.stage_idx) + wg_co * C::kTileBytes);
      const uint64_t b = ptx::wgmma_descriptor<C::kGroupStrideBytes>(
          shared.x(x_state.stage_idx) + wg_px * C::kPixelTiles * C::kPlanes * C::kBoxBytes + first_row * 128);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
#pragma unroll
        for (int pixel_tile = 0; pixel_tile < C::kPixelTiles; ++pixel_tile) {
          const uint64_t at = b + pixel_tile * (C::kPlanes * C::kBoxBytes / 16) + step * 2;
          if constexpr (kIsHalf<T>) {
            ptx::wgmma_f16(accumulators[pixel_tile], a + step * 2, at);
          } else {
            ptx::wgmma_bf16(accumulators[pixel_tile], a + step * 2, at);
          }
        }
      }
      ptx::wgmma_commit_group();
      // All wgmmas on the preceding K chunk have completed, so its stages can be released.
      ptx::wgmma_wait_group<1>();
      if (index > begin) weight_pipeline.consumer_release(weight_state.previous_stage(), lane);
      if (is_next_box) x_pipeline.consumer_release(x_state.previous_stage(), lane);
      weight_state.advance_by_branch();
      k_chunk.advance(kernel_h, kernel_w);
    }
    ptx::wgmma_wait_group<0>();
    weight_pipeline.consumer_release(weight_state.previous_stage(), lane);
    x_pipeline.consumer_release(x_state.stage_idx, lane);
    x_state.advance_by_branch();

    // The accumulators of the 8-pixel groups that this CTA owns (first_group, first_group + 1, ...), reduced over the
    // CTAs of the cluster.
    float totals[C::kOwnedGroups * 4];
    const int first_group = rank * C::kOwnedGroups;
    if constexpr (C::kSplitK == 1) {
#pragma unroll
      for (int i = 0; i < C::kOwnedGroups * 4; ++i)
        totals[i] = accumulators[i / C::kAccumulators][i % C::kAccumulators];
    } else {
      // All CTAs have finished reading their stages, so the partial sums can overwrite them.
      cluster_sync<C::kSplitK>();
      reduce_scatter_groups<C::kSplitK, C::kWarpgroups, C::kPixelTiles * C::kPixelGroups, C::kOwnedGroups>(
          totals, &accumulators[0][0], memory, shared.begin, rank, warpgroup);
    }

    // A group has 4 accumulators: in warp w, 0 and 1 belong to output 16 w + g, 2 and 3 to output 16 w + g + 8.
    const int co = (tile % co_blocks * C::kWgCo + wg_co) * 64;
    const Vector<float, 2> biases = output_biases(epilogue, co + warp % 4 * 16 + lane / 4);
    auto finish = [&](int index) {
      return from_float<T>(epilogue.activate(totals[index] + biases.values[index / 2 % 2]));
    };
    int3 corners[C::kPixelTiles];
#pragma unroll
    for (int i = 0; i < C::kPixelTiles; ++i) corners[i] = pixel_tile_begin(tile, wg_px * C::kPixelTiles + i);
    const int output = co + thread % 8 * 8;
#pragma unroll
    for (int chunk = 0; chunk < ceil_div(C::kOwnedGroups * 8, C::kStoreRows); ++chunk) {
      ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
      for (int rows = 0; rows < C::kStoreRows; rows += 16) {
        const int values_begin = (chunk * C::kStoreRows + rows) / 2;
        if (values_begin >= C::kOwnedGroups * 4) continue;
        store_transposed<C::kOwnedGroups * 4>(target + rows * C::kStoreRowBytes, values_begin, finish);
      }
      ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
      for (int row = thread / 8; row < C::kStoreRows; row += 16) {
        const int owned = chunk * C::kStoreRows + row;
        const int index = first_group * 8 + owned;
        const int pixel = index % C::kPixels;
        if (owned >= C::kOwnedGroups * 8 || index >= C::kPixelTiles * C::kPixels || pixel >= C::kTilePixels ||
            output >= outputs)
          continue;
        int3 corner = corners[0];
#pragma unroll
        for (int pixel_tile = 1; pixel_tile < C::kPixelTiles; ++pixel_tile) {
          if (index >= pixel_tile * C::kPixels) corner = corners[pixel_tile];
        }
        const int image = corner.x + pixel / (C::kTileH * C::kTileW);
        const int y_row = corner.y + pixel / C::kTileW % C::kTileH;
        const int column = corner.z + pixel % C::kTileW;
        if (image >= batch || y_row >= out_h || column >= out_w) continue;
        store<true>(y + ((static_cast<int64_t>(image) * out_h + y_row) * out_w + column) * outputs + output,
                    *reinterpret_cast<const Vector<T, 8>*>(buffer + row * C::kStoreRowBytes + thread % 8 * 16));
      }
    }
  }
}

using Kernel = Conv2dSm90Large<Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    conv2d_sm90_large(const uint8_t* weight, const BIAS* bias, X* y, const __grid_constant__ TensorMap x_map, int tiles,
                      int co_blocks, int tiles_h, int tiles_w, int k_chunks, int batch, int outputs, int kernel_h,
                      int kernel_w, int out_h, int out_w, int stride_h, int stride_w, int pad_h, int pad_w,
                      int dilation_h, int dilation_w, float low, float high) {
  conv2d_sm90_large_tiles<Kernel>(weight, bias, y, &x_map, tiles, co_blocks, tiles_h, tiles_w, k_chunks, batch, outputs,
                                  kernel_h, kernel_w, out_h, out_w, stride_h, stride_w, pad_h, pad_w, dilation_h,
                                  dilation_w, low, high);
}
