// SPDX-License-Identifier: Apache-2.0
// The convolution of conv2d.cuh over many pixels, by wgmma on a weight that was dequantized once: [64 outputs, k] is
// operand A, pixels of x [k, pixels] are B, both in shared memory. K runs over units: a tap of the kernel and 64
// channels, the taps of a chunk of channels one after the other.
//
//   weight   X [unit][tile of 64 outputs][64][64 channels], where chunk c of 8 channels of output i lies at c ^ i % 8,
//   as
//            the swizzle by 128 bytes wants it
//   bias     BIAS [outputs] or null
//   y        X, contiguous, NHWC, in rows of a multiple of 16 bytes
//   tiles    of WG_CO * 64 outputs and WG_PX boxes; co_blocks: tiles along the outputs; parts_h, parts_w: boxes of an
//            image along its height and its width; units: of K
//   x_map    tensor map of x as [batch][height][width][channels] in boxes of [BOX_N][BOX_H][BOX_W][64], swizzled by 128
//            bytes; what lies outside is the padding. The map steps over x as the convolution does.
//
// sm_90a. A block has WG_CO * WG_PX = 2 warpgroups, each with 64 outputs and a box of pixels, of which an instruction
// takes PIXELS: the last of them may be none of the box. Blocks are persistent: the producer fills stages for the next
// tile while the warpgroups store the last.
//
// A cluster of SPLITS blocks divides the units of a tile; its blocks make one tile alone. In the end each pushes its
// sums into the shared memory of the block that owns their pixels, and the owner adds them in a fixed order.
#include "copied.cuh"
#include "epilogue.cuh"
#include "int4.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/fence_proxy.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_shared.cuh"

static_assert(__CUDA_ARCH__ == 900, "conv2d_sm90_large needs sm_90a");

constexpr int kWgCo = WG_CO;
constexpr int kWgPx = WG_PX;
constexpr int kPixels = PIXELS;
constexpr int kBoxN = BOX_N;
constexpr int kBoxH = BOX_H;
constexpr int kBoxW = BOX_W;
constexpr int kSteps = STEPS;  // of 16 channels, in a unit
constexpr int kStages = STAGES;
constexpr int kSplits = SPLITS;

constexpr int kWarpgroups = kWgCo * kWgPx;
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kThreads = kConsumerWarps * 32 + 32;
constexpr int kBoxPixels = kBoxN * kBoxH * kBoxW;
constexpr int kSums = kPixels / 2;
constexpr int kGroups = kPixels / 8;
constexpr int kOwnedGroups = ceil_div(kGroups, kSplits);
constexpr bool kHalf = Codes<X>::kMagic == Codes<half_t>::kMagic;

// Shared memory, from a multiple of 1024: x [stage][WG_PX][kPixels], the weight [stage][WG_CO][tile], what is on its
// way to y [warpgroup][kStoreRows][kRowBytes], barriers [full, empty][stage]. The sums for other blocks, float4
// [split][warpgroup][owned group][128], take the place of the stages.
constexpr int kBoxBytes = ceil_div(kPixels * 128, 1024) * 1024;
constexpr int kTileBytes = 64 * 128;
constexpr int kStageBytes = kWgPx * kBoxBytes + kWgCo * kTileBytes;
constexpr int kStoreRows = 32;
constexpr int kRowBytes = 64 * 2 + 16;  // 8 rows lie in different banks
constexpr int kStoreBegin = kStages * kStageBytes;
constexpr int kBarrierBegin = kStoreBegin + kWarpgroups * kStoreRows * kRowBytes;

static_assert(kWarpgroups == 2, "two warpgroups share the tensor cores");
static_assert(kBoxPixels <= kPixels, "an instruction takes a box");
static_assert(kSplits == 1 || kSplits * kWarpgroups * kOwnedGroups * 2048 <= kStoreBegin, "sums fit in the stages");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");

struct Shared {
  uint32_t begin;

  __device__ __forceinline__ uint32_t x(int stage) const { return begin + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const { return x(stage) + kWgPx * kBoxBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return begin + kBarrierBegin + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kStages + stage); }
};

// The walk over the stages, on over all tiles of a block.
struct Position {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

// A tap of the kernel and a chunk of channels.
struct Unit {
  int chunk, fy, fx;

  __device__ __forceinline__ void advance(int kernel_h, int kernel_w) {
    if (++fx < kernel_w) return;
    fx = 0;
    if (++fy < kernel_h) return;
    fy = 0;
    ++chunk;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    conv2d_sm90_large(const uint8_t* weight, const BIAS* bias, X* y, const __grid_constant__ TensorMap x_map, int tiles,
                      int co_blocks, int parts_h, int parts_w, int units, int batch, int outputs, int kernel_h,
                      int kernel_w, int out_h, int out_w, int stride_h, int stride_w, int pad_h, int pad_w,
                      int dilation_h, int dilation_w, float low, float high) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  const int lane = threadIdx.x % 32;
  // Known to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int split = kSplits == 1 ? 0 : ptx::cluster_ctarank();
  const int begin = units * split / kSplits;
  const int end = units * (split + 1) / kSplits;

  // Where a box of a tile lies in y: image, row, column.
  auto place = [&](int tile, int index) {
    const int part = tile / co_blocks * kWgPx + index;
    return int3{part / (parts_h * parts_w) * kBoxN, part / parts_w % parts_h * kBoxH, part % parts_w * kBoxW};
  };

  if (warp == kConsumerWarps && lane < kStages) {
    ptx::mbarrier_init(shared.full(lane), 1);
    ptx::mbarrier_init(shared.empty(lane), kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
  if constexpr (kBoxPixels < kPixels) {
    // What is behind a box is multiplied, too.
    constexpr int kLeft = (kPixels - kBoxPixels) * 8;
    for (int i = threadIdx.x; i < kStages * kWgPx * kLeft; i += kThreads) {
      const int at = i / (kWgPx * kLeft) * kStageBytes + i / kLeft % kWgPx * kBoxBytes + kBoxPixels * 128;
      *reinterpret_cast<Vector<uint32_t, 4>*>(memory + at + i % kLeft * 16) = {};
    }
    ptx::fence_proxy_async();
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();

  if (warp == kConsumerWarps) {
    if (lane == 0) {
      ptx::prefetch_tensormap(&x_map);
      ptx::griddepcontrol_wait();
      Position at{0, 1};
      for (int tile = blockIdx.x / kSplits; tile < tiles; tile += gridDim.x / kSplits) {
        const int co_tiles = co_blocks * kWgCo;
        const uint8_t* source = weight + static_cast<int64_t>(begin * co_tiles + tile % co_blocks * kWgCo) * kTileBytes;
        const int taps = kernel_h * kernel_w;
        Unit unit{begin / taps, begin % taps / kernel_w, begin % kernel_w};
        for (int index = begin; index < end; ++index) {
          const uint32_t full = shared.full(at.stage);
          wait(shared.empty(at.stage), at.parity);
          ptx::mbarrier_arrive_expect_tx(full, kWgPx * kBoxPixels * 128 + kWgCo * kTileBytes);
          ptx::cp_async_bulk(shared.weight(at.stage), source, kWgCo * kTileBytes, full);
#pragma unroll
          for (int i = 0; i < kWgPx; ++i) {
            const int3 from = place(tile, i);
            ptx::cp_async_bulk_tensor_4d(shared.x(at.stage) + i * kBoxBytes, &x_map, unit.chunk * 64,
                                         from.z * stride_w - pad_w + unit.fx * dilation_w,
                                         from.y * stride_h - pad_h + unit.fy * dilation_h, from.x, full);
          }
          source += static_cast<int64_t>(co_tiles) * kTileBytes;
          unit.advance(kernel_h, kernel_w);
          at.advance();
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
  auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(shared.empty(stage));
  };

  Position at{0, 0};
  for (int tile = blockIdx.x / kSplits; tile < tiles; tile += gridDim.x / kSplits) {
    float sums[kSums] = {};
    int last = -1;
    for (int index = begin; index < end; ++index) {
      wait(shared.full(at.stage), at.parity);
      const uint32_t a = __shfl_sync(0xffffffffu, (shared.weight(at.stage) + wg_co * kTileBytes) / 16, 0);
      const uint32_t b = __shfl_sync(0xffffffffu, (shared.x(at.stage) + wg_px * kBoxBytes) / 16, 0);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if constexpr (kHalf) {
          ptx::wgmma_f16(sums, a + step * 2, b + step * 2);
        } else {
          ptx::wgmma_bf16(sums, a + step * 2, b + step * 2);
        }
      }
      ptx::wgmma_commit_group();
      // The unit before is done.
      ptx::wgmma_wait_group<1>();
      if (last >= 0) release(last);
      last = at.stage;
      at.advance();
    }
    ptx::wgmma_wait_group<0>();
    release(last);

    // The sums of the pixels that this block stores, from group first_group on.
    float total[kOwnedGroups * 4];
    const int first_group = split * kOwnedGroups;
    if constexpr (kSplits == 1) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] = sums[i];
    } else {
      auto slot = [&](int from, int group) {
        return ((from * kWarpgroups + warpgroup) * kOwnedGroups + group) * 2048 + thread * 16;
      };
      // Nobody needs the stages any more.
      synchronize_cluster<kSplits>();
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const uint32_t to = ptx::mapa(shared.begin + slot(split, group % kOwnedGroups), group / kOwnedGroups);
        ptx::st_shared_cluster(to, {sums[group * 4], sums[group * 4 + 1], sums[group * 4 + 2], sums[group * 4 + 3]});
      }
      synchronize_cluster<kSplits>();
#pragma unroll
      for (int group = 0; group < kOwnedGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[group * 4 + i] = 0.0f;
        if (first_group + group >= kGroups) continue;
#pragma unroll
        for (int from = 0; from < kSplits; ++from) {
          const auto some = *reinterpret_cast<const Vector<float, 4>*>(memory + slot(from, group));
#pragma unroll
          for (int i = 0; i < 4; ++i) total[group * 4 + i] += some.values[i];
        }
      }
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
    const int3 corner = place(tile, wg_px);
    const int output = co + thread % 8 * 8;
#pragma unroll
    for (int chunk = 0; chunk < ceil_div(kOwnedGroups * 8, kStoreRows); ++chunk) {
      ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
      for (int rows = 0; rows < kStoreRows; rows += 16) {
        const int first = (chunk * kStoreRows + rows) / 2;
        if (first >= kOwnedGroups * 4) continue;
        uint32_t values[4] = {};
#pragma unroll
        for (int matrix = 0; matrix < 4; ++matrix) {
          const int index = first + matrix * 2;
          if (index < kOwnedGroups * 4) values[matrix] = finish(index) | finish(index + 1) << 16;
        }
        ptx::stmatrix_x4_trans(target + rows * kRowBytes, values);
      }
      ptx::barrier_sync(1 + warpgroup, 128);
#pragma unroll
      for (int row = thread / 8; row < kStoreRows; row += 16) {
        const int owned = chunk * kStoreRows + row;
        const int pixel = first_group * 8 + owned;
        const int image = corner.x + pixel / (kBoxH * kBoxW);
        const int y_row = corner.y + pixel / kBoxW % kBoxH;
        const int column = corner.z + pixel % kBoxW;
        if (owned >= kOwnedGroups * 8 || pixel >= kBoxPixels || output >= outputs) continue;
        if (image >= batch || y_row >= out_h || column >= out_w) continue;
        store<true>(y + ((static_cast<int64_t>(image) * out_h + y_row) * out_w + column) * outputs + output,
                    *reinterpret_cast<const Vector<X, 8>*>(buffer + row * kRowBytes + thread % 8 * 16));
      }
    }
  }
}
