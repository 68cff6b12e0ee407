// SPDX-License-Identifier: Apache-2.0
// The tiles, the K chunks and the shared memory of conv2d_sm90.
#pragma once

#include "common/tile_scheduler.cuh"
#include "common/types.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"
#include "hopper/transposed_store.cuh"

// A K chunk: one filter tap (fy, fx) x 64 input channels, from channel 64 * channel_chunk. K chunks are ordered by
// channels first, so all taps of the same channels are adjacent.
template <bool kHalo> struct KChunk {
  int channel_chunk, fy, fx;

  __device__ __forceinline__ void advance(int kernel_h, int kernel_w) {
    if (++fx < kernel_w) return;
    fx = 0;
    if (++fy < kernel_h) return;
    fy = 0;
    ++channel_chunk;
  }
  // Returns whether the K chunk needs a new TMA box of x: with HALO, one box serves all taps of 64 channels.
  __device__ __forceinline__ bool needs_box() const { return !kHalo || (fy | fx) == 0; }
};

// The constants that follow from the host's constants, which are in Host (the Config of conv2d_sm90.cu).
template <class Host> struct Conv2dSm90 : Host {
  static constexpr bool kDense = Host::kBits == 16;
  static constexpr int kWarpgroups = Host::kWgCo * Host::kWgPx;
  static constexpr int kConsumerWarps = kWarpgroups * 4;
  static constexpr int kThreads = kConsumerWarps * 32 + 32;
  static constexpr int kBoxes = Host::kWgPx * Host::kPixelTiles;
  // Number of TMA boxes of x per pixel tile: one per residue of row and column by the strides.
  static constexpr int kPlanes = Host::kPlanesH * Host::kPlanesW;
  static constexpr int kTilePixels = Host::kTileN * Host::kTileH * Host::kTileW;
  static constexpr int kBoxRows = Host::kTileN * Host::kBoxH * Host::kBoxW;
  // The stride in bytes between adjacent 8-pixel groups of B (the stride byte offset of the matrix descriptor).
  static constexpr int kGroupStrideBytes = Host::kHalo && Host::kTileH > 1 ? Host::kBoxW * 128 : 1024;
  static constexpr int kAccumulators = Host::kPixels / 2;
  static constexpr int kPixelGroups = Host::kPixelTiles * Host::kPixels / 8;
  static constexpr int kOwnedGroups = ceil_div(kPixelGroups, Host::kSplitK);

  static constexpr int kBoxBytes = ceil_div((Host::kPixels > kBoxRows ? Host::kPixels : kBoxRows) * 128, 1024) * 1024;
  static constexpr int kWeightTileBytes = 512 * Host::kBits;  // bytes of 64 outputs x 64 channels
  static constexpr int kWeightBytes = Host::kWgCo * kWeightTileBytes;
  static constexpr int kParameterBytes = kDense ? 0 : Host::kWgCo * Host::kParameterGroups * 256;
  static constexpr int kStoreRows = kDense ? 32 : ceil_div(kOwnedGroups, 2) * 16;  // number of pixels per store buffer
  static constexpr int kStoreRowBytes = kTransposedRowBytes<typename Host::T, 64>;

  static_assert(kTilePixels <= Host::kPixels, "a wgmma covers a pixel tile");
  static_assert(!Host::kHalo || Host::kTileH == 1 || Host::kTileW == 8,
                "8-pixel groups have a constant distance in shared memory");
  static_assert(!Host::kHalo || (Host::kTileN == 1 && kTilePixels == Host::kPixels), "no rows of zeros within a box");
  static_assert(kDense || (Host::kPixelTiles == 1 && kPlanes == 1), "codes are dequantized for one pixel tile");
  static_assert(sizeof(typename Host::T) == 2, "tensor cores take 16-bit x");

  using Chunk = KChunk<Host::kHalo>;
  using Accumulators = float[Host::kPixelTiles][kAccumulators];
  using Scheduler = Select<kDense, PersistentTileScheduler<Host::kSplitK>, StaticTileScheduler<Host::kSplitK>>;

  // After the main loop, the store buffers, [warpgroup][pixel][kStoreRowBytes], overwrite the stages of a static tile,
  // and the partial sums of split-K, float4 [rank][warpgroup][owned group][128], those of a persistent CTA.
  struct SharedStorage {
    using Boxes = SharedArray<0, Host::kXStages, kBoxes * kPlanes * kBoxBytes>;
    using Weights = SharedArray<Boxes::kEnd, Host::kWeightStages, kWeightBytes>;
    using Parameters = SharedArray<Weights::kEnd, Host::kXStages, kParameterBytes>;
    using Store = SharedArray<kDense ? Parameters::kEnd : 0, kWarpgroups, kStoreRows * kStoreRowBytes>;
    static constexpr int kStoreEnd = Store::kEnd > Parameters::kEnd ? Store::kEnd : Parameters::kEnd;
    using PartialSums =
        SharedArray<kDense ? 0 : kStoreEnd, Host::kSplitK == 1 ? 0 : Host::kSplitK, kWarpgroups * kOwnedGroups * 2048>;
    using XBarriers = SharedArray<kDense ? kStoreEnd : PartialSums::kEnd, 2 * Host::kXStages, kBarrierBytes>;
    using WeightBarriers = SharedArray<XBarriers::kEnd, 2 * Host::kWeightStages, kBarrierBytes>;
    static constexpr int kBytes = WeightBarriers::kEnd;
    static_assert(!kDense || PartialSums::kEnd <= Parameters::kEnd, "the partial sums fit in the stages");

    uint32_t begin;

    __device__ __forceinline__ uint32_t x(int stage_idx) const { return Boxes::at(begin, stage_idx); }
    __device__ __forceinline__ uint32_t weight(int stage_idx) const { return Weights::at(begin, stage_idx); }
    __device__ __forceinline__ uint32_t parameters(int stage_idx) const { return Parameters::at(begin, stage_idx); }
    __device__ __forceinline__ Pipeline<Host::kXStages, XBarriers::kBegin> x_pipeline() const { return {begin}; }
    __device__ __forceinline__ Pipeline<Host::kWeightStages, WeightBarriers::kBegin> weight_pipeline() const {
      return {begin};
    }
  };
  ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);
};

// The sizes of a convolution as kernel arguments, and the positions of tiles in it.
template <class C> struct Convolution {
  int tiles, image_tiles, tiles_w, co_blocks, co_tiles, k_chunks;
  int batch, outputs, kernel_h, kernel_w, out_h, out_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;

  // Returns the index of the first tile of 64 outputs of a CTA tile. CTA tiles with the same pixels are adjacent.
  __device__ __forceinline__ int co_begin(int tile) const { return tile % co_blocks * C::kWgCo; }
  // Returns the coordinates (image, row, column of y) of the first pixel of pixel tile `index` of a CTA tile.
  __device__ __forceinline__ int3 pixel_tile_begin(int tile, int index) const {
    const int at = tile / co_blocks * C::kBoxes + index;
    return {at / image_tiles * C::kTileN, at % image_tiles / tiles_w * C::kTileH, at % tiles_w * C::kTileW};
  }
  __device__ __forceinline__ typename C::Chunk k_chunk(int index) const {
    const int taps = kernel_h * kernel_w;
    return {index / taps, index % taps / kernel_w, index % kernel_w};
  }
  // By how many rows and columns of x the box of plane 0 starts before the first pixel that filter taps read.
  __device__ __forceinline__ int lead_h() const { return C::kPlanes == 1 ? 0 : pad_h % C::kPlanesH; }
  __device__ __forceinline__ int lead_w() const { return C::kPlanes == 1 ? 0 : pad_w % C::kPlanesW; }
  // Returns the row of a stage of x at which a filter tap begins to read a pixel tile.
  __device__ __forceinline__ int first_row(const typename C::Chunk& k_chunk) const {
    if constexpr (!C::kHalo) return 0;
    const int y = k_chunk.fy * dilation_h + lead_h(), x = k_chunk.fx * dilation_w + lead_w();
    const int plane = y % C::kPlanesH * C::kPlanesW + x % C::kPlanesW;
    return plane * (C::kBoxBytes / 128) + y / C::kPlanesH * C::kBoxW + x / C::kPlanesW;
  }
};
