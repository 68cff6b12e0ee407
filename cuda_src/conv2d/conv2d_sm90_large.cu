// SPDX-License-Identifier: Apache-2.0
// The convolution of conv2d.cuh over many pixels, by wgmma on a weight that was dequantized once: [64 outputs, k] is
// operand A, pixels of x [k, pixels] are B, both in shared memory. K runs over units: a tap of the kernel and 64
// channels, the taps of a chunk of channels one after the other.
//
//   weight   X [unit][tile of 64 outputs][64][64 channels]; chunk c of 8 channels of output i lies at c ^ i % 8, as the
//            swizzle by 128 bytes wants it
//   bias     BIAS [outputs] or null
//   y        X, contiguous, NHWC, in rows of a multiple of 16 bytes
//   tiles    of WG_CO * 64 outputs and WG_PX * PARTS parts
//   co_blocks, parts_h, parts_w: tiles along the outputs, parts of an image along its height and its width
//   units    of K
//   x_map    tensor map of x as [batch][height][width][channels], in boxes of [TILE_N][BOX_H][BOX_W][64] swizzled by
//            128 bytes; what lies outside is the padding. The map steps over x as the convolution does.
//
// sm_90a. A block has WG_CO * WG_PX = 2 warpgroups, each with 64 outputs and PARTS parts of TILE_N * TILE_H * TILE_W
// pixels. An instruction takes PIXELS: a part, and maybe some behind it. With HALO the box of a part has a border and
// serves all taps of its channels: a tap is another first row of B, TILE_W = 8 rows at a time. Else each unit has a box
// of its own. Blocks are persistent: the producer fills stages for the next tile while the warpgroups store the last.
//
// A cluster of SPLIT_K blocks divides the units of a tile; its blocks make one tile alone. In the end each pushes its
// sums into the shared memory of the block that owns their pixels, and the owner adds them in a fixed order.
//
// Programmatic dependent launch: nothing is read before griddepcontrol.wait. With the weight begun before it, single
// layers took 2 to 20% longer.
//
// Measured on an H100: 3x3 layers of 64 to 512 channels take 13 to 16 microseconds for 32 images where conv2d_sm90
// takes 16 to 23 and cuDNN 17 to 26. A multiprocessor takes 53 bytes a clock from L2, so tiles of 128 outputs and 112
// pixels or more are bound by products only where a box serves several taps.
#include "conv2d/conv2d_sm90.cuh"
#include "common/epilogue.cuh"
#include "dequant/int4.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/fence_proxy.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_shared.cuh"
#include "common/warp.cuh"

static_assert(__CUDA_ARCH__ == 900, "conv2d_sm90_large needs sm_90a");

constexpr int kWgCo = WG_CO;
constexpr int kWgPx = WG_PX;
constexpr int kParts = PARTS;
constexpr int kPixels = PIXELS;
constexpr int kTileN = TILE_N;
constexpr int kTileH = TILE_H;
constexpr int kTileW = TILE_W;
constexpr int kBoxW = BOX_W;
constexpr int kSteps = STEPS;  // of 16 channels, in a unit
constexpr int kXStages = X_STAGES;
constexpr int kWeightStages = WEIGHT_STAGES;
constexpr int kSplits = SPLIT_K;

constexpr int kWarpgroups = kWgCo * kWgPx;
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kThreads = kConsumerWarps * 32 + 32;
constexpr int kBoxes = kWgPx * kParts;
constexpr int kTilePixels = kTileN * kTileH * kTileW;
constexpr int kBoxRows = kTileN * BOX_H * kBoxW;
constexpr int kStride = kHalo ? kBoxW * 128 : 1024;  // from 8 pixels to the next 8
constexpr int kSums = kPixels / 2;
constexpr int kGroups = kPixels / 8;
constexpr int kOwnedGroups = ceil_div(kParts * kGroups, kSplits);
constexpr bool kHalf = Codes<X>::kMagic == Codes<half_t>::kMagic;

// Shared memory, from a multiple of 1024: x [stage][box], the weight [stage][WG_CO][tile], what is on its way to y
// [warpgroup][kStoreRows][kRowBytes], barriers [full, empty][stage] of x, then of the weight. The sums for other
// blocks, float4 [split][warpgroup][owned group][128], take the place of the stages.
constexpr int kBoxBytes = ceil_div((kPixels > kBoxRows ? kPixels : kBoxRows) * 128, 1024) * 1024;
constexpr int kXBytes = kBoxes * kBoxBytes;
constexpr int kTileBytes = 64 * 128;
constexpr int kWeightBytes = kWgCo * kTileBytes;
constexpr int kWeightBegin = kXStages * kXBytes;
constexpr int kStoreRows = 32;
constexpr int kRowBytes = 64 * 2 + 16;  // 8 rows lie in different banks
constexpr int kStoreBegin = kWeightBegin + kWeightStages * kWeightBytes;
constexpr int kBarrierBegin = kStoreBegin + kWarpgroups * kStoreRows * kRowBytes;

static_assert(kWarpgroups == 2, "two warpgroups share the tensor cores");
static_assert(kTilePixels <= kPixels, "an instruction takes a part");
static_assert(!kHalo || (kTileN == 1 && kTileW == 8 && kTilePixels == kPixels), "a distance leads from 8 pixels to 8");
static_assert(kSplits == 1 || kSplits * kWarpgroups * kOwnedGroups * 2048 <= kStoreBegin, "sums fit in the stages");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");

struct Shared {
  uint32_t begin;

  __device__ __forceinline__ uint32_t x(int stage) const { return begin + stage * kXBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const { return begin + kWeightBegin + stage * kWeightBytes; }
  __device__ __forceinline__ uint32_t x_full(int stage) const { return begin + kBarrierBegin + stage * 8; }
  __device__ __forceinline__ uint32_t x_empty(int stage) const { return x_full(kXStages + stage); }
  __device__ __forceinline__ uint32_t weight_full(int stage) const { return x_full(2 * kXStages + stage); }
  __device__ __forceinline__ uint32_t weight_empty(int stage) const { return weight_full(kWeightStages + stage); }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    conv2d_sm90_large(const uint8_t* weight, const BIAS* bias, X* y, const __grid_constant__ TensorMap x_map, int tiles,
                      int co_blocks, int parts_h, int parts_w, int units, int batch, int outputs, int kernel_h,
                      int kernel_w, int out_h, int out_w, int stride_h, int stride_w, int pad_h, int pad_w,
                      int dilation_h, int dilation_w, float low, float high) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  const int split = kSplits == 1 ? 0 : ptx::cluster_ctarank();
  const int begin = units * split / kSplits;
  const int end = units * (split + 1) / kSplits;

  const int first_tile = blockIdx.x / kSplits;
  const int taps = kernel_h * kernel_w;
  const Unit first_unit{begin / taps, begin % taps / kernel_w, begin % kernel_w};

  // Where a part of a tile lies in y: image, row, column.
  auto place = [&](int tile, int index) {
    const int part = tile / co_blocks * kBoxes + index;
    return int3{part / (parts_h * parts_w) * kTileN, part / parts_w % parts_h * kTileH, part % parts_w * kTileW};
  };

  if (warp == kConsumerWarps) {
    for (int stage = lane; stage < kXStages + kWeightStages; stage += 32) {
      const bool is_x = stage < kXStages;
      ptx::mbarrier_init(is_x ? shared.x_full(stage) : shared.weight_full(stage - kXStages), 1);
      ptx::mbarrier_init(is_x ? shared.x_empty(stage) : shared.weight_empty(stage - kXStages), kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (kTilePixels < kPixels) {
    // What is behind a part is multiplied, too.
    constexpr int kLeft = kTilePixels < kPixels ? (kPixels - kTilePixels) * 8 : 1;
    for (int i = threadIdx.x; i < kXStages * kBoxes * kLeft; i += kThreads) {
      const int at = i / kLeft * kBoxBytes + kTilePixels * 128 + i % kLeft * 16;
      *reinterpret_cast<Vector<uint32_t, 4>*>(memory + at) = {};
    }
    ptx::fence_proxy_async();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();

  if (warp == kConsumerWarps) {
    if (lane == 0) {
      ptx::prefetch_tensormap(&x_map);
      ptx::griddepcontrol_wait();
      Position<kXStages> x_at{0, 1};
      Position<kWeightStages> weight_at{0, 1};
      for (int tile = first_tile; tile < tiles; tile += gridDim.x / kSplits) {
        const int co_tiles = co_blocks * kWgCo;
        const uint8_t* source = weight + static_cast<int64_t>(begin * co_tiles + tile % co_blocks * kWgCo) * kTileBytes;
        Unit unit = first_unit;
        for (int index = begin; index < end; ++index) {
          if (index == begin || unit.begins_box()) {
            const uint32_t full = shared.x_full(x_at.stage);
            wait(shared.x_empty(x_at.stage), x_at.parity);
            ptx::mbarrier_arrive_expect_tx(full, kBoxes * kBoxRows * 128);
#pragma unroll
            for (int i = 0; i < kBoxes; ++i) {
              const int3 from = place(tile, i);
              const int row = from.y * stride_h - pad_h + (kHalo ? 0 : unit.fy * dilation_h);
              const int column = from.z * stride_w - pad_w + (kHalo ? 0 : unit.fx * dilation_w);
              ptx::cp_async_bulk_tensor_4d(shared.x(x_at.stage) + i * kBoxBytes, &x_map, unit.chunk * 64, column, row,
                                           from.x, full);
            }
            x_at.advance();
          }
          const uint32_t full = shared.weight_full(weight_at.stage);
          wait(shared.weight_empty(weight_at.stage), weight_at.parity);
          ptx::mbarrier_arrive_expect_tx(full, kWeightBytes);
          ptx::cp_async_bulk(shared.weight(weight_at.stage), source, kWeightBytes, full);
          source += static_cast<int64_t>(co_tiles) * kTileBytes;
          weight_at.advance();
          unit.advance(kernel_h, kernel_w);
        }
      }
    }
    __syncwarp();
    if constexpr (kSplits > 1) {
      synchronize_cluster<kSplits>();
      synchronize_cluster<kSplits>();
    }
    return;
  }

  const int warpgroup = warp / 4;
  const int wg_co = warpgroup % kWgCo;
  const int wg_px = warpgroup / kWgCo;
  const int thread = threadIdx.x % 128;
  uint8_t* buffer = memory + kStoreBegin + warpgroup * kStoreRows * kRowBytes;
  const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(buffer)) +
                          (lane / 16 * 8 + lane % 8) * kRowBytes + (warp % 4 * 16 + lane / 8 % 2 * 8) * 2;
  const Epilogue<X> epilogue{bias, nullptr, low, high, outputs, 0};
  auto release = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };

  Position<kXStages> x_at{0, 0};
  Position<kWeightStages> weight_at{0, 0};
  for (int tile = first_tile; tile < tiles; tile += gridDim.x / kSplits) {
    float sums[kParts][kSums] = {};
    Unit unit = first_unit;
    for (int index = begin; index < end; ++index) {
      const bool is_next_box = index > begin && unit.begins_box();
      if (is_next_box) x_at.advance();
      if (is_next_box || index == begin) wait(shared.x_full(x_at.stage), x_at.parity);
      wait(shared.weight_full(weight_at.stage), weight_at.parity);
      const int first = kHalo ? unit.fy * dilation_h * kBoxW + unit.fx * dilation_w : 0;
      const uint64_t a = ptx::wgmma_descriptor(shared.weight(weight_at.stage) + wg_co * kTileBytes);
      const uint64_t b =
          ptx::wgmma_descriptor<kStride>(shared.x(x_at.stage) + wg_px * kParts * kBoxBytes + first * 128);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint64_t at = b + part * (kBoxBytes / 16) + step * 2;
          if constexpr (kHalf) {
            ptx::wgmma_f16(sums[part], a + step * 2, at);
          } else {
            ptx::wgmma_bf16(sums[part], a + step * 2, at);
          }
        }
      }
      ptx::wgmma_commit_group();
      // The unit before is done.
      ptx::wgmma_wait_group<1>();
      if (index > begin) release(shared.weight_empty(weight_at.before()));
      if (is_next_box) release(shared.x_empty(x_at.before()));
      weight_at.advance();
      unit.advance(kernel_h, kernel_w);
    }
    ptx::wgmma_wait_group<0>();
    release(shared.weight_empty(weight_at.before()));
    release(shared.x_empty(x_at.stage));
    x_at.advance();

    // The sums of the pixels that this block stores, from group first_group on.
    float total[kOwnedGroups * 4];
    const int first_group = split * kOwnedGroups;
    if constexpr (kSplits == 1) {
#pragma unroll
      for (int i = 0; i < kOwnedGroups * 4; ++i) total[i] = sums[i / kSums][i % kSums];
    } else {
      // Nobody needs the stages any more.
      synchronize_cluster<kSplits>();
      exchange_sums<kSplits, kWarpgroups, kParts * kGroups, kOwnedGroups>(total, &sums[0][0], memory, shared.begin,
                                                                          split, warpgroup);
    }

    // Of a group, values 0, 1 belong to one output, 2, 3 to the one 8 further.
    const int co = (tile % co_blocks * kWgCo + wg_co) * 64;
    float biases[2] = {};
    if constexpr (kHasBias) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int output = co + warp % 4 * 16 + lane / 4 + upper * 8;
        if (output < outputs) biases[upper] = epilogue.biased(0.0f, output);
      }
    }
    auto finish = [&](int index) {
      return uint32_t{from_float<X>(epilogue.activate(total[index] + biases[index / 2 % 2])).bits};
    };
    int3 corners[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) corners[part] = place(tile, wg_px * kParts + part);
    const int output = co + thread % 8 * 8;
#pragma unroll
    for (int chunk = 0; chunk < ceil_div(kOwnedGroups * 8, kStoreRows); ++chunk) {
      ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
      for (int rows = 0; rows < kStoreRows; rows += 16) {
        const int begin_at = (chunk * kStoreRows + rows) / 2;
        if (begin_at >= kOwnedGroups * 4) continue;
        uint32_t values[4] = {};
#pragma unroll
        for (int matrix = 0; matrix < 4; ++matrix) {
          const int index = begin_at + matrix * 2;
          if (index < kOwnedGroups * 4) values[matrix] = finish(index) | finish(index + 1) << 16;
        }
        ptx::stmatrix_x4_trans(target + rows * kRowBytes, values);
      }
      ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
      for (int row = thread / 8; row < kStoreRows; row += 16) {
        const int owned = chunk * kStoreRows + row;
        const int index = first_group * 8 + owned;
        const int pixel = index % kPixels;
        if (owned >= kOwnedGroups * 8 || index >= kParts * kPixels || pixel >= kTilePixels || output >= outputs)
          continue;
        int3 corner = corners[0];
#pragma unroll
        for (int part = 1; part < kParts; ++part) {
          if (index >= part * kPixels) corner = corners[part];
        }
        const int image = corner.x + pixel / (kTileH * kTileW);
        const int y_row = corner.y + pixel / kTileW % kTileH;
        const int column = corner.z + pixel % kTileW;
        if (image >= batch || y_row >= out_h || column >= out_w) continue;
        store<true>(y + ((static_cast<int64_t>(image) * out_h + y_row) * out_w + column) * outputs + output,
                    *reinterpret_cast<const Vector<X, 8>*>(buffer + row * kRowBytes + thread % 8 * 16));
      }
    }
  }
}
