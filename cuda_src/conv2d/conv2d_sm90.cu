// SPDX-License-Identifier: Apache-2.0
// The convolution of conv2d.cuh by wgmma: weights [64 outputs, k], dequantized in registers, are operand A, pixels of x
// [k, pixels], as the tensor copy brings them, are B. K runs over units: a tap of the kernel and 64 channels, the taps
// of a chunk of channels one after the other.
//
//   codes       uint32 [unit][tile of 64 outputs][BITS / 4][128 threads][4]: with g = lane / 4, t = lane % 4 a thread
//   of
//               warp w has rows 16 w + g and 8 more. BITS 4: word s is for k16 s, and its bits 4 i and 16 + 4 i are
//                 i = 0: row g, k 2t and 2t + 1    i = 1: row g + 8, same k
//                 i = 2: row g, k 2t + 8, 2t + 9   i = 3: row g + 8, same k
//               BITS 8: words 2 s and 2 s + 1 are for k16 s, i = 0, 1 and i = 2, 3, the bytes in the order of two i's
//               low values, then their high ones; each plus 128.
//   parameters  uint32 [chunk][tile of 64 outputs][PARAMETER_GROUPS][64]: scale and, above it, offset of an output, both X
//   bias        BIAS [outputs] or null
//   y           X, contiguous, NHWC or NCHW; ALIGNED: outputs and the address are multiples of 8 values
//   parts       of an image, parts_w along its width; co_blocks: tiles along the outputs; units: of K
//   x_map       tensor map of x as [batch][height][width][channels] in boxes of [1][BOX_H][BOX_W][64], swizzled by 128
//               bytes; what lies outside is the padding
//
// sm_90a. A block has WG_CO * WG_PX warpgroups, each with 64 outputs and a part of TILE_H * TILE_W pixels. A box of x
// with a border (HALO) serves all taps of its channels: a tap is another first row of B. The rows that an instruction
// takes lie TILE_W = 8 at a time in the box's rows, or, TILE_H = 1, all after each other. Without HALO each unit has a
// box of its own, and the map steps over x as the convolution does.
//
// A cluster of SPLIT_K blocks divides the units of a tile. In the end each pushes its sums into the shared memory of the
// block that owns their pixels, and the owner adds them in a fixed order.
//
// Programmatic dependent launch: all that is read before griddepcontrol.wait is the weight.
//
// Measured on an H100, 3x3 with 64 channels of 56 x 56, 128 of 28 x 28, 256 of 14 x 14 and 512 of 7 x 7, in
// microseconds: 3.7 to 5.7 for one image, 16 to 24 for 32. Tensor cores would need 8 of the 16: a warpgroup issues its
// products, waits until they have begun, and only then converts the next unit, so that two of them on a multiprocessor
// leave the tensor cores idle for a third of the time. Three reach their rate, but 64 outputs and 112 pixels each are
// more than such layers have. Blocks of the next grid that come early lie where there is room, not evenly: 128 blocks
// of which two fit took 40 in place of about 24.
#include "conv2d/conv2d_sm90.cuh"
#include "common/epilogue.cuh"
#include "dequant/int4.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "dequant/unpack_bytes.cuh"
#include "common/warp.cuh"

static_assert(__CUDA_ARCH__ == 900, "conv2d_sm90 needs sm_90a");

constexpr bool kNhwc = NHWC;
constexpr bool kAligned = ALIGNED;
constexpr int kWgCo = WG_CO;
constexpr int kWgPx = WG_PX;
constexpr int kTileH = TILE_H;
constexpr int kTileW = TILE_W;
constexpr int kBoxW = BOX_W;
constexpr int kGroups = PARAMETER_GROUPS;
constexpr int kXStages = X_STAGES;
constexpr int kCodeStages = CODE_STAGES;
constexpr int kSplits = SPLIT_K;

constexpr int kWarpgroups = kWgCo * kWgPx;
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kThreads = kConsumerWarps * 32 + 32;
constexpr int kSteps = STEPS;             // of 16 channels, in a unit
constexpr int kPixels = kTileH * kTileW;  // of a warpgroup
constexpr int kPixelGroups = kPixels / 8;
constexpr int kOwnedGroups = ceil_div(kPixelGroups, kSplits);
constexpr int kSums = kPixels / 2;
constexpr int kStride = (kTileH == 1 ? 8 : kBoxW) * 128;  // from 8 pixels to the next 8
constexpr bool kHalf = Codes<X>::kMagic == Codes<half_t>::kMagic;

// Shared memory, from a multiple of 1024: x [stage][WG_PX][box], codes [stage][WG_CO][tile], parameters
// [x stage][WG_CO][PARAMETER_GROUPS][64], and over all of them what is on its way to y [warpgroup][pixel][kRowBytes]; sums float4
// [split][warpgroup][owned group][128]; barriers [full, empty][stage] of x, then of codes.
constexpr int kBoxBytes = ceil_div(BOX_H * kBoxW * 128, 1024) * 1024;
constexpr int kXBytes = kWgPx * kBoxBytes;
constexpr int kCodeTileBytes = 512 * BITS;
constexpr int kCodeBytes = kWgCo * kCodeTileBytes;
constexpr int kParameterBytes = kWgCo * kGroups * 256;
constexpr int kCodesBegin = kXStages * kXBytes;
constexpr int kParametersBegin = kCodesBegin + kCodeStages * kCodeBytes;
constexpr int kRowBytes = 64 * 2 + 16;  // 8 rows lie in different banks
constexpr int kStoreRows = ceil_div(kOwnedGroups, 2) * 16;
constexpr int kSumsBegin = PIPELINE_BYTES;
constexpr int kBarrierBegin = kSumsBegin + (kSplits == 1 ? 0 : kSplits * kWarpgroups * kOwnedGroups * 2048);

static_assert(kParametersBegin + kXStages * kParameterBytes <= PIPELINE_BYTES, "the stages fit");
static_assert(kWarpgroups * kStoreRows * kRowBytes <= PIPELINE_BYTES, "what is stored takes the place of the stages");
static_assert(kTileH == 1 || kTileW == 8, "one distance leads from 8 pixels to the next");
static_assert(sizeof(X) == 2, "tensor cores take 16-bit x");

struct Shared {
  uint32_t begin;

  __device__ __forceinline__ uint32_t x(int stage) const { return begin + stage * kXBytes; }
  __device__ __forceinline__ uint32_t codes(int stage) const { return begin + kCodesBegin + stage * kCodeBytes; }
  __device__ __forceinline__ uint32_t parameters(int stage) const {
    return begin + kParametersBegin + stage * kParameterBytes;
  }
  __device__ __forceinline__ uint32_t x_full(int stage) const { return begin + kBarrierBegin + stage * 8; }
  __device__ __forceinline__ uint32_t x_empty(int stage) const { return x_full(kXStages + stage); }
  __device__ __forceinline__ uint32_t codes_full(int stage) const { return x_full(2 * kXStages + stage); }
  __device__ __forceinline__ uint32_t codes_empty(int stage) const { return codes_full(kCodeStages + stage); }
};

// Scales and offsets of a lane's rows g and g + 8, twice each.
struct Parameters {
  uint32_t scales[kGroups][2];
  uint32_t offsets[kGroups][2];

  __device__ __forceinline__ void load(const uint32_t* source) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const uint32_t pair = source[group * 64 + upper * 8];
        scales[group][upper] = __byte_perm(pair, 0, 0x1010);
        offsets[group][upper] = __byte_perm(pair, 0, 0x3232);
      }
    }
  }
};

// A thread's codes of a unit.
struct Words {
  Vector<uint32_t, 4> parts[BITS / 4];

  __device__ __forceinline__ void load(const uint8_t* source) {
#pragma unroll
    for (int part = 0; part < BITS / 4; ++part) {
      parts[part] = reinterpret_cast<const Vector<uint32_t, 4>*>(source)[part * 128];
    }
  }
  // The values of k16 `step`, each rounded once.
  __device__ __forceinline__ void convert(uint32_t (&a)[4], int step, const Parameters& parameters) const {
    if constexpr (BITS == 4) {
      // zero_low and zero_high of Codes for 8, which the compiler would compute each time.
      constexpr uint32_t kLow = kHalf ? 0x64086408u : 0xc308c308u;
      constexpr uint32_t kHigh = kHalf ? 0xd480d480u : 0xc308c308u;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = parts[0].values[step] >> (i / 2 * 8);
        a[i] = i % 2 ? Codes<X>::high(word, kHigh) : Codes<X>::low(word, kLow);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[2];
        unpack_bytes<X>(pairs, parts[step / 2].values[step % 2 * 2 + half]);
        a[half * 2] = pairs[0];
        a[half * 2 + 1] = pairs[1];
      }
    }
    const int group = step * kGroups / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = Codes<X>::multiply_add(a[i], parameters.scales[group][i % 2], parameters.offsets[group][i % 2]);
    }
  }
};

__device__ __forceinline__ void wgmma(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kHalf) {
    ptx::wgmma_f16<true>(d, a, b);
  } else {
    ptx::wgmma_bf16<true>(d, a, b);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS_PER_SM)
    conv2d_sm90(const uint8_t* codes, const uint32_t* parameters, const BIAS* bias, X* y,
                const __grid_constant__ TensorMap x_map, int parts, int parts_w, int co_blocks, int units, int batch,
                int outputs, int kernel_h, int kernel_w, int out_h, int out_w, int stride_h, int stride_w, int pad_h,
                int pad_w, int dilation_h, int dilation_w, float low, float high) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  const int warp = uniform_warp();
  const int lane = threadIdx.x % 32;
  const int split = kSplits == 1 ? 0 : ptx::cluster_ctarank();
  const int co_tiles = co_blocks * kWgCo;
  const int begin = kSplits == 1 ? 0 : units * split / kSplits;
  const int end = kSplits == 1 ? units : units * (split + 1) / kSplits;
  const int taps = kernel_h * kernel_w;
  const Unit first_unit = kSplits == 1 ? Unit{0, 0, 0} : Unit{begin / taps, begin % taps / kernel_w, begin % kernel_w};

  // Tiles of the same pixels follow each other.
  auto co_begin = [&] { return blockIdx.x / kSplits % co_blocks * kWgCo; };  // in tiles of 64 outputs
  // Where a part of the block's tile lies in y: image, row, column.
  auto place = [&](int index) {
    const int part = blockIdx.x / kSplits / co_blocks * kWgPx + index;
    return int3{part / parts, part % parts / parts_w * kTileH, part % parts_w * kTileW};
  };

  if (warp == kConsumerWarps) {
    for (int stage = lane; stage < kXStages + kCodeStages; stage += 32) {
      const bool is_x = stage < kXStages;
      ptx::mbarrier_init(is_x ? shared.x_full(stage) : shared.codes_full(stage - kXStages), 1);
      ptx::mbarrier_init(is_x ? shared.x_empty(stage) : shared.codes_empty(stage - kXStages), kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  synchronize_cluster<kSplits>();
  ptx::griddepcontrol_launch_dependents();

  if (warp == kConsumerWarps) {
    if (lane == 0) {
      ptx::prefetch_tensormap(&x_map);
      Position<kXStages> x_at{0, 1};
      Position<kCodeStages> codes_at{0, 1};
      auto start_codes = [&](int index) {
        const uint32_t full = shared.codes_full(codes_at.stage);
        const int64_t from = static_cast<int64_t>(index) * co_tiles + co_begin();
        wait(shared.codes_empty(codes_at.stage), codes_at.parity);
        ptx::mbarrier_arrive_expect_tx(full, kCodeBytes);
        ptx::cp_async_bulk(shared.codes(codes_at.stage), codes + from * kCodeTileBytes, kCodeBytes, full);
        codes_at.advance();
      };
      auto start_x = [&](const Unit& unit) {
        const uint32_t full = shared.x_full(x_at.stage);
        const int from = unit.chunk * co_tiles + co_begin();
        wait(shared.x_empty(x_at.stage), x_at.parity);
        ptx::mbarrier_arrive_expect_tx(full, kWgPx * BOX_H * kBoxW * 128 + kParameterBytes);
#pragma unroll
        for (int i = 0; i < kWgPx; ++i) {
          const int3 at = place(i);
          const int row = at.y * stride_h - pad_h + (kHalo ? 0 : unit.fy * dilation_h);
          const int column = at.z * stride_w - pad_w + (kHalo ? 0 : unit.fx * dilation_w);
          ptx::cp_async_bulk_tensor_4d(shared.x(x_at.stage) + i * kBoxBytes, &x_map, unit.chunk * 64, column, row, at.x,
                                       full);
        }
        ptx::cp_async_bulk(shared.parameters(x_at.stage), parameters + from * (kGroups * 64), kParameterBytes, full);
        x_at.advance();
      };
      const int ahead = min(end, begin + kCodeStages);
      for (int index = begin; index < ahead; ++index) start_codes(index);
      ptx::griddepcontrol_wait();
      Unit unit = first_unit;
      for (int index = begin; index < end; ++index) {
        if (index == begin || unit.begins_box()) start_x(unit);
        if (index >= ahead) start_codes(index);
        unit.advance(kernel_h, kernel_w);
      }
    }
    __syncwarp();
    if constexpr (kSplits > 1) synchronize_cluster<kSplits>();
    return;
  }

  const int warpgroup = kWarpgroups == 1 ? 0 : warp / 4;
  const int wg_co = warpgroup % kWgCo;
  const int wg_px = warpgroup / kWgCo;
  const int thread = threadIdx.x % 128;
  const int row = warp % 4 * 16 + lane / 4;
  Position<kXStages> x_at{0, 0};
  Position<kCodeStages> codes_at{0, 0};
  Unit unit = first_unit;
  Parameters mine;
  Words words;
  uint32_t b;  // address of the unit's
  float sums[kSums] = {};

  auto release = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  auto fetch = [&](bool has_box) {
    if (has_box) {
      wait(shared.x_full(x_at.stage), x_at.parity);
      mine.load(reinterpret_cast<const uint32_t*>(memory + kParametersBegin + x_at.stage * kParameterBytes) +
                wg_co * kGroups * 64 + row);
    }
    wait(shared.codes_full(codes_at.stage), codes_at.parity);
    words.load(memory + kCodesBegin + codes_at.stage * kCodeBytes + wg_co * kCodeTileBytes + thread * 16);
    release(shared.codes_empty(codes_at.stage));
    codes_at.advance();
    const int first = kHalo ? unit.fy * dilation_h * kBoxW + unit.fx * dilation_w : 0;
    b = shared.x(x_at.stage) + wg_px * kBoxBytes + first * 128;
  };
  auto convert = [&](uint32_t (&a)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) words.convert(a[step], step, mine);
  };
  auto multiply = [&](const uint32_t (&a)[kSteps][4]) {
    const uint64_t x_begin = ptx::wgmma_descriptor<kStride>(b);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) wgmma(sums, a[step], x_begin + step * 2);
    ptx::wgmma_commit_group();
  };
  // Tensor cores multiply a unit while the next is converted. A box is free once the first product of the next box
  // waits for nothing before it.
  int last_box = -1;
  auto advance = [&](const uint32_t (&a)[kSteps][4], uint32_t (&next)[kSteps][4]) {
    multiply(a);
    unit.advance(kernel_h, kernel_w);
    const int free_box = last_box;
    const bool has_box = unit.begins_box();
    last_box = has_box ? x_at.stage : -1;
    if (has_box) x_at.advance();
    fetch(has_box);
    ptx::wgmma_wait_group<1>();
    if (free_box >= 0) release(shared.x_empty(free_box));
    convert(next);
  };

  uint32_t a[2][kSteps][4];
  fetch(true);
  convert(a[0]);
  int left = end - begin;
  for (; left > 2; left -= 2) {
    advance(a[0], a[1]);
    advance(a[1], a[0]);
  }
  if (left == 2) {
    advance(a[0], a[1]);
    multiply(a[1]);
  } else {
    multiply(a[0]);
  }
  const int co = (co_begin() + wg_co) * 64;
  float biases[2] = {};
  const Epilogue<X> epilogue{bias, nullptr, low, high, outputs, 0};
  if constexpr (kHasBias) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int output = co + row + upper * 8;
      if (output < outputs) biases[upper] = epilogue.biased(0.0f, output);
    }
  }
  ptx::wgmma_wait_group<0>();

  // The sums of the pixels that this block stores, from group first_group on.
  float total[kOwnedGroups * 4];
  const int first_group = split * kOwnedGroups;
  if constexpr (kSplits == 1) {
#pragma unroll
    for (int i = 0; i < kOwnedGroups * 4; ++i) total[i] = sums[i];
    // Nobody reads the stages any more.
    ptx::barrier_sync(1, kConsumerWarps * 32);
  } else {
    exchange_sums<kSplits, kWarpgroups, kPixelGroups, kOwnedGroups>(total, sums, memory + kSumsBegin,
                                                                    shared.begin + kSumsBegin, split, warpgroup);
  }
  // Of a group, values 0, 1 belong to this output, 2, 3 to the one 8 further.
  auto finish = [&](int index) { return from_float<X>(epilogue.activate(total[index] + biases[index / 2 % 2])); };
  const int3 begin_at = place(wg_px);
  // Where an owned pixel lies in y; false if nowhere.
  auto find = [&](int pixel, int3& at) {
    const int index = first_group * 8 + pixel;
    at = {begin_at.x, begin_at.y + index / kTileW, begin_at.z + index % kTileW};
    return index < kPixels && at.x < batch && at.y < out_h && at.z < out_w;
  };
  if constexpr (kNhwc) {
    uint8_t* buffer = memory + warpgroup * kStoreRows * kRowBytes;
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(buffer)) +
                            (lane / 16 * 8 + lane % 8) * kRowBytes + (warp % 4 * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int group = 0; group < kOwnedGroups; group += 2) {
      uint32_t values[4] = {};
#pragma unroll
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int index = group * 4 + matrix * 2;
        if (index < kOwnedGroups * 4) {
          values[matrix] = uint32_t{finish(index).bits} | uint32_t{finish(index + 1).bits} << 16;
        }
      }
      ptx::stmatrix_x4_trans(target + group * 8 * kRowBytes, values);
    }
    ptx::barrier_sync(2 + warpgroup, 128);
    const int output = co + thread % 8 * 8;
#pragma unroll
    for (int pixel = thread / 8; pixel < kOwnedGroups * 8; pixel += 16) {
      int3 at;
      if (!find(pixel, at) || output >= outputs) continue;
      X* to = y + ((static_cast<int64_t>(at.x) * out_h + at.y) * out_w + at.z) * outputs + output;
      const auto values = *reinterpret_cast<const Vector<X, 8>*>(buffer + pixel * kRowBytes + thread % 8 * 16);
      if constexpr (kAligned) {
        store<true>(to, values);
      } else {
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          if (output + v < outputs) to[v] = values.values[v];
        }
      }
    }
  } else {
#pragma unroll
    for (int index = 0; index < kOwnedGroups * 4; ++index) {
      const int output = co + row + index / 2 % 2 * 8;
      int3 at;
      if (!find(index / 4 * 8 + lane % 4 * 2 + index % 2, at) || output >= outputs) continue;
      y[((static_cast<int64_t>(at.x) * outputs + output) * out_h + at.y) * out_w + at.z] = finish(index);
    }
  }
}
