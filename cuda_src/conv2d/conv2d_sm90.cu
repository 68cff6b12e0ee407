// SPDX-License-Identifier: Apache-2.0
// Convolution with wgmma on sm_90a. The weight is dequantized in registers, or has been dequantized to device memory.
//
//   y[b, i, j, co] = activation(bias[co] + sum over taps and channels of x * w), as in conv2d.cuh
//
// Operand A is the weight [64 outputs, k]; operand B is x [k, pixels], in the order in which TMA copies pixels. K is
// processed in K chunks of one filter tap x 64 channels (conv2d_sm90.cuh).
//
//   weight      with BITS 4 or 8, codes: uint32 [K chunk][64-output tile][BITS / 4][128 threads][4]. With g = lane / 4
//               and t = lane % 4, a thread of warp w has outputs 16 w + g and 16 w + g + 8 of the tile. With BITS = 4,
//               word s holds the codes of k 16 s .. 16 s + 15 of the K chunk; its bits 4 i and 16 + 4 i are
//                 i = 0: output g, k 2t and 2t + 1       i = 1: output g + 8, same k
//                 i = 2: output g, k 2t + 8 and 2t + 9   i = 3: output g + 8, same k
//               With BITS = 8, word 2 s holds i = 0 and 1, word 2 s + 1 holds i = 2 and 3; the bytes of a word are the
//               lower k of both i, then the higher k of both i. A byte is the signed code + 128.
//               With BITS = 16, values: X [K chunk][64-output tile][64][64 channels], with the 128-byte swizzle
//               (hopper/swizzle.cuh)
//   parameters  uint32 [64 channels][64-output tile][PARAMETER_GROUPS][64 outputs]: the scale in the low half and the
//               offset in the high half, both of type X; null with BITS = 16
//   bias        BIAS [outputs] or null
//   y           X, contiguous, NHWC or NCHW; with ALIGNED, `outputs` and the address are multiples of 8 elements
//   x_map       tensor map of x, X [batch][height][width][channels], boxes of [TILE_N][BOX_H][BOX_W][64], 128-byte
//               swizzle; out-of-bounds elements are the zero padding, and the element strides are the strides of the
//               convolution
//   tiles       number of CTA tiles of WG_CO * 64 outputs and WG_PX * PIXEL_TILES pixel tiles
//   image_tiles number of pixel tiles per image, or per TILE_N images
//   tiles_w     number of pixel tiles along the width of an image
//   co_blocks   number of CTA tiles along the outputs
//   co_tiles    number of 64-output tiles of the stored weight
//   k_chunks    number of K chunks
//
// Limits: one channel group, at least 16 input channels, quantization blocks of a multiple of 16 channels, strides of
// at most 8 pixels; BITS = 16 with NHWC and ALIGNED only.
//
// A CTA has WG_CO * WG_PX consumer warpgroups, 1 to 4. Each computes 64 outputs of PIXEL_TILES pixel tiles; a pixel
// tile is TILE_N * TILE_H * TILE_W pixels. A wgmma reads PIXELS rows of B: a pixel tile and, if PIXELS is larger, rows
// of zeros.
//
// Without HALO, each K chunk has its own TMA box of x. With HALO, a box with a border serves all taps of 64 channels:
// each tap starts at a different row of B. wgmma reads the rows of B in groups of 8 pixels: 8 pixels of one row of the
// box (TILE_W = 8), or any 8 adjacent pixels (TILE_H = 1). There is one box for each plane, which is the pixels of x
// with the same row % PLANES_H and the same column % PLANES_W, where PLANES_H and PLANES_W are the strides, 1 or 2. In
// its plane, a tap reads adjacent pixels for adjacent pixels of y.
//
// Split-K: the SPLIT_K CTAs of a cluster compute one CTA tile, each over a slice of the K chunks, and add their partial
// sums through DSMEM.
//
// With codes, a CTA has one CTA tile, and only the weight is read before griddepcontrol.wait. With two warpgroups per
// SM, the tensor cores idle for a third of the time, because a warpgroup dequantizes the next K chunk only after it has
// issued its wgmmas (H100, 32 images, 3x3 layers of ResNet-50).
//
// With BITS = 16, for many output pixels, CTAs are persistent: the producer fills stages for the next CTA tile while
// the warpgroups store the current one. Nothing is read before griddepcontrol.wait: prefetching the weight slows down
// single layers by 2 to 20% on an H100. An SM of an H100 copies 53 bytes per clock from L2. So tiles of 128 outputs and
// at least 112 pixels are limited by the tensor cores only if a box serves several taps.
#include "common/epilogue.cuh"
#include "common/warp.cuh"
#include "conv2d/conv2d_sm90.cuh"
#include "conv2d/conv2d_sm90_weight.cuh"
#include "hopper/cluster.cuh"
#include "hopper/cluster_reduction.cuh"
#include "hopper/tma.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence_proxy.cuh"
#include "ptx/griddepcontrol.cuh"

static_assert(__CUDA_ARCH__ == 900, "conv2d_sm90 needs sm_90a");

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL> {
  using T = X;  // type of x and y
  static constexpr int kBits = BITS;
  static constexpr bool kNhwc = NHWC, kAligned = ALIGNED, kHalo = HALO;
  static constexpr int kWgCo = WG_CO, kWgPx = WG_PX, kPixelTiles = PIXEL_TILES, kPixels = PIXELS, kTileN = TILE_N;
  static constexpr int kTileH = TILE_H, kTileW = TILE_W, kPlanesH = PLANES_H, kPlanesW = PLANES_W, kBoxH = BOX_H;
  static constexpr int kBoxW = BOX_W, kParameterGroups = PARAMETER_GROUPS;
  static constexpr int kSteps = STEPS;  // number of wgmma instructions per K chunk of 64 channels, 16 channels each
  static constexpr int kXStages = X_STAGES, kWeightStages = WEIGHT_STAGES, kSplitK = SPLIT_K, kCtasPerSm = CTAS_PER_SM;
  static constexpr int kSharedBytes = SHARED_BYTES;
};
using Kernel = Conv2dSm90<Config>;

// The role of one lane of the producer warp: copies the K chunks from `begin` to `end` of all tiles of the CTA.
template <class C> __device__ __forceinline__ void produce(const typename C::SharedStorage& shared,
                                                           const Convolution<C>& sizes, const uint8_t* weight,
                                                           const uint32_t* parameters, const TensorMap* x_map,
                                                           const typename C::Chunk& first_chunk, int begin, int end) {
  const auto x_pipeline = shared.x_pipeline();
  const auto weight_pipeline = shared.weight_pipeline();
  auto x_state = PipelineState<C::kXStages>::producer();
  auto weight_state = PipelineState<C::kWeightStages>::producer();
  ptx::prefetch_tensormap(x_map);
  if constexpr (C::kDense) ptx::griddepcontrol_wait();
  typename C::Scheduler scheduler(sizes.tiles);
  do {
    const int tile = scheduler.unit;
    const int co_begin = sizes.co_begin(tile);
    auto copy_weight = [&](int index) {
      const uint32_t full_barrier = weight_pipeline.full_barrier(weight_state.stage_idx);
      const int64_t weight_tile = static_cast<int64_t>(index) * sizes.co_tiles + co_begin;
      weight_pipeline.producer_acquire(weight_state);
      ptx::mbarrier_arrive_expect_tx(full_barrier, C::kWeightBytes);
      ptx::cp_async_bulk(shared.weight(weight_state.stage_idx), weight + weight_tile * C::kWeightTileBytes,
                         C::kWeightBytes, full_barrier);
      weight_state.advance_by_branch();
    };
    auto copy_x = [&](const typename C::Chunk& k_chunk) {
      const uint32_t full_barrier = x_pipeline.full_barrier(x_state.stage_idx);
      x_pipeline.producer_acquire(x_state);
      ptx::mbarrier_arrive_expect_tx(full_barrier, C::kBoxes * C::kPlanes * C::kBoxRows * 128 + C::kParameterBytes);
#pragma unroll
      for (int i = 0; i < C::kBoxes * C::kPlanes; ++i) {
        const int3 from = sizes.pixel_tile_begin(tile, i / C::kPlanes);
        const int plane_h = i % C::kPlanes / C::kPlanesW, plane_w = i % C::kPlanesW;
        const int tap_h = C::kHalo ? plane_h - sizes.lead_h() : k_chunk.fy * sizes.dilation_h;
        const int tap_w = C::kHalo ? plane_w - sizes.lead_w() : k_chunk.fx * sizes.dilation_w;
        ptx::cp_async_bulk_tensor_4d(shared.x(x_state.stage_idx) + i * C::kBoxBytes, x_map, k_chunk.channel_chunk * 64,
                                     from.z * sizes.stride_w - sizes.pad_w + tap_w,
                                     from.y * sizes.stride_h - sizes.pad_h + tap_h, from.x, full_barrier);
      }
      if constexpr (!C::kDense) {
        const int weight_tile = k_chunk.channel_chunk * sizes.co_tiles + co_begin;
        ptx::cp_async_bulk(shared.parameters(x_state.stage_idx), parameters + weight_tile * (C::kParameterGroups * 64),
                           C::kParameterBytes, full_barrier);
      }
      x_state.advance_by_branch();
    };
    int prefetched = begin;
    if constexpr (!C::kDense) {
      prefetched = min(end, begin + C::kWeightStages);
      for (int index = begin; index < prefetched; ++index) copy_weight(index);
      ptx::griddepcontrol_wait();
      // With an earlier start, CTAs of three kernels could be resident at once, and two of one kernel share an SM.
      ptx::griddepcontrol_launch_dependents();
    }
    typename C::Chunk k_chunk = first_chunk;
    for (int index = begin; index < end; ++index) {
      if (index == begin || k_chunk.needs_box()) copy_x(k_chunk);
      if (C::kDense || index >= prefetched) copy_weight(index);
      k_chunk.advance(sizes.kernel_h, sizes.kernel_w);
    }
    scheduler.advance();
  } while (scheduler.is_valid());
}

// Returns the biases of a lane's two outputs, `output` and `output` + 8; zeros without a bias.
template <class Epilogue>
__device__ __forceinline__ Vector<float, 2> output_biases(const Epilogue& epilogue, int output) {
  Vector<float, 2> biases = {};
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    if (output + upper * 8 < epilogue.n) biases.values[upper] = epilogue.biased(0.0f, output + upper * 8);
  }
  return biases;
}

// Stores the owned 8-pixel groups of a warpgroup, from group first_group: outputs `co` .. `co` + 63 of the pixel tiles
// that begin at `corners`. finish(index) returns the value of y for one of the totals; a group has 4 totals: in warp w,
// 0 and 1 belong to output 16 w + g, 2 and 3 to output 16 w + g + 8.
template <class C, class Finish>
__device__ __forceinline__ void store_groups(const Convolution<C>& sizes, typename C::T* y, uint8_t* buffer,
                                             const int3 (&corners)[C::kPixelTiles], int first_group, int co,
                                             int barrier, const Finish& finish) {
  using T = typename C::T;
  const int lane = threadIdx.x % 32;
  const int thread = threadIdx.x % 128;
  // Sets `at` to the coordinates in y of pixel `owned`, counted from the first pixel that this CTA owns. Returns false
  // if the pixel lies outside of y.
  auto find_pixel = [&](int owned, int3& at) {
    const int index = first_group * 8 + owned;
    const int pixel = index % C::kPixels;
    int3 corner = corners[0];
#pragma unroll
    for (int pixel_tile = 1; pixel_tile < C::kPixelTiles; ++pixel_tile) {
      if (index >= pixel_tile * C::kPixels) corner = corners[pixel_tile];
    }
    const int image = C::kTileN == 1 ? 0 : pixel / (C::kTileH * C::kTileW);
    const int row = C::kTileN == 1 ? pixel / C::kTileW : pixel / C::kTileW % C::kTileH;
    at = {corner.x + image, corner.y + row, corner.z + pixel % C::kTileW};
    return owned < C::kOwnedGroups * 8 && index < C::kPixelTiles * C::kPixels && pixel < C::kTilePixels &&
           at.x < sizes.batch && at.y < sizes.out_h && at.z < sizes.out_w;
  };
  if constexpr (C::kNhwc) {
    const uint32_t target = transposed_address<C::kStoreRowBytes>(buffer, thread / 32, lane);
    const int output = co + thread % 8 * 8;
#pragma unroll
    for (int chunk = 0; chunk < ceil_div(C::kOwnedGroups * 8, C::kStoreRows); ++chunk) {
      if constexpr (C::kDense) ptx::barrier_sync(barrier, 128);
#pragma unroll
      for (int rows = 0; rows < C::kStoreRows; rows += 16) {
        const int values_begin = (chunk * C::kStoreRows + rows) / 2;
        if (values_begin >= C::kOwnedGroups * 4) continue;
        store_transposed<C::kOwnedGroups * 4>(target + rows * C::kStoreRowBytes, values_begin, finish);
      }
      ptx::barrier_sync(barrier, 128);
#pragma unroll
      for (int row = thread / 8; row < C::kStoreRows; row += 16) {
        int3 at;
        if (!find_pixel(chunk * C::kStoreRows + row, at) || output >= sizes.outputs) continue;
        T* to = y + ((static_cast<int64_t>(at.x) * sizes.out_h + at.y) * sizes.out_w + at.z) * sizes.outputs + output;
        const auto values = *reinterpret_cast<const Vector<T, 8>*>(buffer + row * C::kStoreRowBytes + thread % 8 * 16);
        if constexpr (C::kAligned) {
          store<true>(to, values);
        } else {
#pragma unroll
          for (int v = 0; v < 8; ++v) {
            if (output + v < sizes.outputs) to[v] = values.values[v];
          }
        }
      }
    }
  } else {
#pragma unroll
    for (int index = 0; index < C::kOwnedGroups * 4; ++index) {
      const int output = co + thread / 32 * 16 + lane / 4 + index / 2 % 2 * 8;
      int3 at;
      if (!find_pixel(index / 4 * 8 + lane % 4 * 2 + index % 2, at) || output >= sizes.outputs) continue;
      y[((static_cast<int64_t>(at.x) * sizes.outputs + output) * sizes.out_h + at.y) * sizes.out_w + at.z] =
          finish(index);
    }
  }
}

// The body of the kernel, for one configuration; `conv2d_sm90` below passes its arguments on.
template <class C> __device__ __forceinline__ void conv2d_sm90_tiles(const uint8_t* weight, const uint32_t* parameters,
                                                                     const typename C::Bias* bias, typename C::T* y,
                                                                     const TensorMap* x_map,
                                                                     const Convolution<C>& sizes, float low,
                                                                     float high) {
  using T = typename C::T;
  extern __shared__ __align__(1024) uint8_t memory[];
  const typename C::SharedStorage shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  const int warp = uniform_warp();
  const int lane = threadIdx.x % 32;
  const int rank = cluster_rank<C::kSplitK>();
  const int begin = slice_begin(sizes.k_chunks, rank, C::kSplitK);
  const int end = slice_begin(sizes.k_chunks, rank + 1, C::kSplitK);
  const typename C::Chunk first_chunk = sizes.k_chunk(begin);

  if (warp == C::kConsumerWarps) {
    for (int stage_idx = lane; stage_idx < C::kXStages + C::kWeightStages; stage_idx += 32) {
      if (stage_idx < C::kXStages) {
        shared.x_pipeline().init_stage(stage_idx, 1, C::kConsumerWarps);
      } else {
        shared.weight_pipeline().init_stage(stage_idx - C::kXStages, 1, C::kConsumerWarps);
      }
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (C::kTilePixels < C::kPixels) {
    // Zero the rows of B past each pixel tile: TMA does not write them, but wgmma reads them.
    constexpr int kLeft = (C::kPixels - C::kTilePixels) * 8;
    for (int i = threadIdx.x; i < C::kXStages * C::kBoxes * kLeft; i += C::kThreads) {
      const int at = i / kLeft * C::kBoxBytes + C::kTilePixels * 128 + i % kLeft * 16;
      *reinterpret_cast<Vector<uint32_t, 4>*>(memory + at) = {};
    }
    ptx::fence_proxy_async();
  }
  cluster_sync<C::kDense ? 1 : C::kSplitK>();
  if constexpr (C::kDense) ptx::griddepcontrol_launch_dependents();

  if (warp == C::kConsumerWarps) {
    if (lane == 0) produce<C>(shared, sizes, weight, parameters, x_map, first_chunk, begin, end);
    __syncwarp();
    // The cluster synchronizes before partial sums overwrite stages, and after they have been written.
    if constexpr (C::kDense) cluster_sync_before_exit<C::kSplitK>();
    cluster_sync_before_exit<C::kSplitK>();
    return;
  }

  const int warpgroup = C::kWarpgroups == 1 ? 0 : warp / 4;
  const int wg_co = warpgroup % C::kWgCo;
  const int wg_px = warpgroup / C::kWgCo;
  const Epilogue<T, C> epilogue{bias, nullptr, low, high, sizes.outputs, 0};
  uint8_t* buffer = memory + C::SharedStorage::Store::kBegin + warpgroup * C::kStoreRows * C::kStoreRowBytes;
  Select<C::kDense, DenseMainLoop<C>, CodesMainLoop<C>> main_loop(shared, sizes, memory, wg_co, wg_px);
  typename C::Scheduler scheduler(sizes.tiles);
  do {
    const int tile = scheduler.unit;
    typename C::Accumulators accumulators = {};
    main_loop.multiply(accumulators, first_chunk, end - begin);
    const int co = (sizes.co_begin(tile) + wg_co) * 64;
    const Vector<float, 2> biases = output_biases(epilogue, co + warp % 4 * 16 + lane / 4);
    ptx::wgmma_wait_group<0>();

    // The accumulators of the 8-pixel groups that this CTA owns (first_group, first_group + 1, ...), reduced over the
    // CTAs of the cluster.
    float totals[C::kOwnedGroups * 4];
    const int first_group = rank * C::kOwnedGroups;
    if constexpr (C::kSplitK == 1) {
#pragma unroll
      for (int i = 0; i < C::kOwnedGroups * 4; ++i)
        totals[i] = accumulators[i / C::kAccumulators][i % C::kAccumulators];
      // Wait until all warps have finished reading the stages, which the store buffers overwrite.
      if constexpr (!C::kDense) ptx::barrier_sync(1, C::kConsumerWarps * 32);
    } else {
      // All CTAs have finished reading their stages, so the partial sums can overwrite them.
      if constexpr (C::kDense) cluster_sync<C::kSplitK>();
      constexpr int kBegin = C::SharedStorage::PartialSums::kBegin;
      reduce_scatter_groups<C::kSplitK, C::kWarpgroups, C::kPixelGroups, C::kOwnedGroups>(
          totals, &accumulators[0][0], memory + kBegin, shared.begin + kBegin, rank, warpgroup);
    }
    auto finish = [&](int index) {
      return from_float<T>(epilogue.activate(totals[index] + biases.values[index / 2 % 2]));
    };
    int3 corners[C::kPixelTiles];
#pragma unroll
    for (int i = 0; i < C::kPixelTiles; ++i) corners[i] = sizes.pixel_tile_begin(tile, wg_px * C::kPixelTiles + i);
    store_groups<C>(sizes, y, buffer, corners, first_group, co, 2 + warpgroup, finish);
    scheduler.advance();
  } while (scheduler.is_valid());
}

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    conv2d_sm90(const uint8_t* weight, const uint32_t* parameters, const BIAS* bias, X* y,
                const __grid_constant__ TensorMap x_map, int tiles, int image_tiles, int tiles_w, int co_blocks,
                int co_tiles, int k_chunks, int batch, int outputs, int kernel_h, int kernel_w, int out_h, int out_w,
                int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, float low,
                float high) {
  const Convolution<Kernel> sizes{tiles,    image_tiles, tiles_w,  co_blocks, co_tiles,   k_chunks,
                                  batch,    outputs,     kernel_h, kernel_w,  out_h,      out_w,
                                  stride_h, stride_w,    pad_h,    pad_w,     dilation_h, dilation_w};
  conv2d_sm90_tiles<Kernel>(weight, parameters, bias, y, &x_map, sizes, low, high);
}
