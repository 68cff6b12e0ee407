// SPDX-License-Identifier: Apache-2.0
// Convolution with wgmma on sm_90a; the weight is dequantized in registers.
//
//   y[b, i, j, co] = activation(bias[co] + sum over taps and channels of x * w), as in conv2d.cuh
//
// Operand A is the weight [64 outputs, k]; operand B is x [k, pixels], in the order in which TMA copies pixels. K is
// processed in K chunks of one filter tap x 64 channels (conv2d_sm90.cuh).
//
//   codes       uint32 [K chunk][64-output tile][BITS / 4][128 threads][4]. With g = lane / 4 and t = lane % 4, a
//               thread of warp w has outputs 16 w + g and 16 w + g + 8 of the tile. With BITS = 4, word s holds the
//               codes of k 16 s .. 16 s + 15 of the K chunk; its bits 4 i and 16 + 4 i are
//                 i = 0: output g, k 2t and 2t + 1       i = 1: output g + 8, same k
//                 i = 2: output g, k 2t + 8 and 2t + 9   i = 3: output g + 8, same k
//               With BITS = 8, word 2 s holds i = 0 and 1, word 2 s + 1 holds i = 2 and 3; the bytes of a word are the
//               lower k of both i, then the higher k of both i. A byte is the signed code + 128.
//   parameters  uint32 [64 channels][64-output tile][PARAMETER_GROUPS][64 outputs]: the scale in the low half and the
//               offset in the high half, both of type X
//   bias        BIAS [outputs] or null
//   y           X, contiguous, NHWC or NCHW; with ALIGNED, `outputs` and the address are multiples of 8 elements
//   x_map       tensor map of x, X [batch][height][width][channels], boxes of [1][BOX_H][BOX_W][64], 128-byte swizzle;
//               out-of-bounds elements are the zero padding
//   image_tiles number of pixel tiles per image
//   tiles_w     number of pixel tiles along the width of an image
//   co_blocks   number of tiles of WG_CO * 64 outputs
//   k_chunks    number of K chunks
//
// Limits: one channel group, at least 16 input channels, quantization blocks of a multiple of 16 channels, strides of
// at most 8 pixels.
//
// A CTA has WG_CO * WG_PX consumer warpgroups, each with 64 outputs and a pixel tile of TILE_H * TILE_W pixels. With
// HALO, one TMA box of x with a border serves all taps of 64 channels: each tap starts at a different row of B. wgmma
// reads the rows of B in groups of 8 pixels: 8 pixels of one row of the box (TILE_W = 8), or any 8 adjacent pixels
// (TILE_H = 1). Without HALO, each K chunk has its own box, and the tensor map has the stride of the convolution.
//
// Split-K: the SPLIT_K CTAs of a cluster compute one CTA tile, each over a slice of the K chunks, and add their partial
// sums through DSMEM.
//
// Only the weight is read before griddepcontrol.wait.
//
// With two warpgroups per SM, the tensor cores idle for a third of the time, because a warpgroup dequantizes the next K
// chunk only after it has issued its wgmmas (H100, 32 images, 3x3 layers of ResNet-50).
#include "common/epilogue.cuh"
#include "common/tile_scheduler.cuh"
#include "common/warp.cuh"
#include "conv2d/conv2d_sm90.cuh"
#include "dequantize/int4.cuh"
#include "dequantize/unpack_bytes.cuh"
#include "hopper/cluster.cuh"
#include "hopper/cluster_reduction.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/shared_storage.cuh"
#include "hopper/tma.cuh"
#include "hopper/transposed_store.cuh"
#include "hopper/wgmma.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"

static_assert(__CUDA_ARCH__ == 900, "conv2d_sm90 needs sm_90a");

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL> {
  using T = X;  // type of x and y
  static constexpr int kBits = BITS;
  static constexpr bool kNhwc = NHWC, kAligned = ALIGNED, kHalo = HALO;
  static constexpr int kWgCo = WG_CO, kWgPx = WG_PX, kTileH = TILE_H, kTileW = TILE_W, kBoxH = BOX_H, kBoxW = BOX_W;
  static constexpr int kParameterGroups = PARAMETER_GROUPS;
  static constexpr int kSteps = STEPS;  // number of wgmma instructions per K chunk, each of 16 channels
  static constexpr int kXStages = X_STAGES, kCodeStages = CODE_STAGES, kSplitK = SPLIT_K, kCtasPerSm = CTAS_PER_SM;
  static constexpr int kSharedBytes = SHARED_BYTES;
};

template <class Host>
struct Conv2dSm90 : Host {
  static constexpr int kWarpgroups = Host::kWgCo * Host::kWgPx;
  static constexpr int kConsumerWarps = kWarpgroups * 4;
  static constexpr int kThreads = kConsumerWarps * 32 + 32;
  static constexpr int kPixels = Host::kTileH * Host::kTileW;  // number of output pixels per warpgroup
  static constexpr int kPixelGroups = kPixels / 8;
  static constexpr int kOwnedGroups = ceil_div(kPixelGroups, Host::kSplitK);
  static constexpr int kAccumulators = kPixels / 2;
  // The stride in bytes between adjacent 8-pixel groups of B (the stride byte offset of the matrix descriptor).
  static constexpr int kGroupStrideBytes = (Host::kTileH == 1 ? 8 : Host::kBoxW) * 128;

  static constexpr int kBoxBytes = ceil_div(Host::kBoxH * Host::kBoxW * 128, 1024) * 1024;
  static constexpr int kCodeTileBytes = 512 * Host::kBits;
  static constexpr int kCodeBytes = Host::kWgCo * kCodeTileBytes;
  static constexpr int kParameterBytes = Host::kWgCo * Host::kParameterGroups * 256;
  static constexpr int kStoreRowBytes = kTransposedRowBytes<typename Host::T, 64>;
  static constexpr int kStoreRows = ceil_div(kOwnedGroups, 2) * 16;
  static constexpr int kStoreBytes = kWarpgroups * kStoreRows * kStoreRowBytes;

  static_assert(Host::kTileH == 1 || Host::kTileW == 8, "8-pixel groups have a constant distance in shared memory");
  static_assert(sizeof(typename Host::T) == 2, "tensor cores take 16-bit x");

  // After the main loop, the output tile, [warpgroup][pixel][kStoreRowBytes], overwrites the stages.
  struct SharedStorage {
    using Boxes = SharedArray<0, Host::kXStages, Host::kWgPx * kBoxBytes>;
    using Codes = SharedArray<Boxes::kEnd, Host::kCodeStages, kCodeBytes>;
    using Parameters = SharedArray<Codes::kEnd, Host::kXStages, kParameterBytes>;
    static constexpr int kStagesEnd = Parameters::kEnd > kStoreBytes ? Parameters::kEnd : kStoreBytes;
    using PartialSums =
        SharedArray<kStagesEnd, Host::kSplitK == 1 ? 0 : Host::kSplitK, kWarpgroups * kOwnedGroups * 2048>;
    using XBarriers = SharedArray<PartialSums::kEnd, 2 * Host::kXStages, kBarrierBytes>;
    using CodeBarriers = SharedArray<XBarriers::kEnd, 2 * Host::kCodeStages, kBarrierBytes>;
    static constexpr int kBytes = CodeBarriers::kEnd;

    uint32_t begin;

    __device__ __forceinline__ uint32_t x(int stage_idx) const { return Boxes::at(begin, stage_idx); }
    __device__ __forceinline__ uint32_t codes(int stage_idx) const { return Codes::at(begin, stage_idx); }
    __device__ __forceinline__ uint32_t parameters(int stage_idx) const { return Parameters::at(begin, stage_idx); }
    __device__ __forceinline__ Pipeline<Host::kXStages, XBarriers::kBegin> x_pipeline() const { return {begin}; }
    __device__ __forceinline__ Pipeline<Host::kCodeStages, CodeBarriers::kBegin> code_pipeline() const {
      return {begin};
    }
  };
  ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);
};

// The scales and offsets of a lane's outputs g and g + 8; each register holds the same value in both halves.
template <class C>
struct Parameters {
  uint32_t scales[C::kParameterGroups][2];
  uint32_t offsets[C::kParameterGroups][2];

  __device__ __forceinline__ void load(const uint32_t* source) {
#pragma unroll
    for (int group = 0; group < C::kParameterGroups; ++group) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const uint32_t pair = source[group * 64 + upper * 8];
        scales[group][upper] = __byte_perm(pair, 0, 0x1010);
        offsets[group][upper] = __byte_perm(pair, 0, 0x3232);
      }
    }
  }
};

// The codes of one K chunk that a thread holds.
template <class C>
struct ChunkCodes {
  using T = typename C::T;

  Vector<uint32_t, 4> vectors[C::kBits / 4];

  __device__ __forceinline__ void load(const uint8_t* source) {
#pragma unroll
    for (int i = 0; i < C::kBits / 4; ++i) {
      vectors[i] = reinterpret_cast<const Vector<uint32_t, 4>*>(source)[i * 128];
    }
  }
  // Dequantizes operand A for k 16 * step .. 16 * step + 15 of the K chunk, with one rounding per weight.
  __device__ __forceinline__ void dequantize(uint32_t (&a)[4], int step, const Parameters<C>& parameters) const {
    if constexpr (C::kBits == 4) {
      // The results of Codes::zero_low and Codes::zero_high for zero point 8. They are constants because the compiler
      // would otherwise compute them in every call.
      constexpr uint32_t kLow = kIsHalf<T> ? 0x64086408u : 0xc308c308u;
      constexpr uint32_t kHigh = kIsHalf<T> ? 0xd480d480u : 0xc308c308u;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = vectors[0].values[step] >> (i / 2 * 8);
        a[i] = i % 2 ? Codes<T>::high(word, kHigh) : Codes<T>::low(word, kLow);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[2];
        unpack_bytes<T>(pairs, vectors[step / 2].values[step % 2 * 2 + half]);
        a[half * 2] = pairs[0];
        a[half * 2 + 1] = pairs[1];
      }
    }
    const int group = step * C::kParameterGroups / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = Codes<T>::multiply_add(a[i], parameters.scales[group][i % 2], parameters.offsets[group][i % 2]);
    }
  }
};

// The arguments are those of the kernel.
template <class C>
__device__ __forceinline__ void conv2d_sm90_tiles(const uint8_t* codes, const uint32_t* parameters,
                                                  const typename C::Bias* bias, typename C::T* y,
                                                  const TensorMap* x_map, int image_tiles, int tiles_w, int co_blocks,
                                                  int k_chunks, int batch, int outputs, int kernel_h, int kernel_w,
                                                  int out_h, int out_w, int stride_h, int stride_w, int pad_h,
                                                  int pad_w, int dilation_h, int dilation_w, float low, float high) {
  using T = typename C::T;
  extern __shared__ __align__(1024) uint8_t memory[];
  const typename C::SharedStorage shared{static_cast<uint32_t>(__cvta_generic_to_shared(memory))};
  const int warp = uniform_warp();
  const int lane = threadIdx.x % 32;
  const int rank = cluster_rank<C::kSplitK>();
  const int co_tiles = co_blocks * C::kWgCo;
  const int begin = C::kSplitK == 1 ? 0 : slice_begin(k_chunks, rank, C::kSplitK);
  const int end = C::kSplitK == 1 ? k_chunks : slice_begin(k_chunks, rank + 1, C::kSplitK);
  const int taps = kernel_h * kernel_w;
  const KChunk<C::kHalo> first_chunk = C::kSplitK == 1
                                           ? KChunk<C::kHalo>{0, 0, 0}
                                           : KChunk<C::kHalo>{begin / taps, begin % taps / kernel_w, begin % kernel_w};

  // Returns the index of this CTA's first tile of 64 output channels. CTAs with the same pixels are adjacent in the
  // grid.
  auto co_begin = [&] { return blockIdx.x / C::kSplitK % co_blocks * C::kWgCo; };
  // Returns the coordinates (image, row, column of y) of the first pixel of the CTA's pixel tile `index`.
  auto pixel_tile_begin = [&](int index) {
    const int at = blockIdx.x / C::kSplitK / co_blocks * C::kWgPx + index;
    return int3{at / image_tiles, at % image_tiles / tiles_w * C::kTileH, at % tiles_w * C::kTileW};
  };

  if (warp == C::kConsumerWarps) {
    init_pipelines<C::kXStages, C::kCodeStages>(shared.x_pipeline(), shared.code_pipeline(), C::kConsumerWarps, lane);
    ptx::fence_mbarrier_init();
  }
  cluster_sync<C::kSplitK>();

  if (warp == C::kConsumerWarps) {
    if (lane == 0) {
      ptx::prefetch_tensormap(x_map);
      auto x_state = PipelineState<C::kXStages>::producer();
      auto code_state = PipelineState<C::kCodeStages>::producer();
      auto copy_codes = [&](int index) {
        const uint32_t full_barrier = shared.code_pipeline().full_barrier(code_state.stage_idx);
        const int64_t tile = static_cast<int64_t>(index) * co_tiles + co_begin();
        shared.code_pipeline().producer_acquire(code_state);
        ptx::mbarrier_arrive_expect_tx(full_barrier, C::kCodeBytes);
        ptx::cp_async_bulk(shared.codes(code_state.stage_idx), codes + tile * C::kCodeTileBytes, C::kCodeBytes,
                           full_barrier);
        code_state.advance_by_branch();
      };
      auto copy_x = [&](const KChunk<C::kHalo>& k_chunk) {
        const uint32_t full_barrier = shared.x_pipeline().full_barrier(x_state.stage_idx);
        const int tile = k_chunk.channel_chunk * co_tiles + co_begin();
        shared.x_pipeline().producer_acquire(x_state);
        ptx::mbarrier_arrive_expect_tx(full_barrier, C::kWgPx * C::kBoxH * C::kBoxW * 128 + C::kParameterBytes);
#pragma unroll
        for (int i = 0; i < C::kWgPx; ++i) {
          const int3 at = pixel_tile_begin(i);
          const int row = at.y * stride_h - pad_h + (C::kHalo ? 0 : k_chunk.fy * dilation_h);
          const int column = at.z * stride_w - pad_w + (C::kHalo ? 0 : k_chunk.fx * dilation_w);
          ptx::cp_async_bulk_tensor_4d(shared.x(x_state.stage_idx) + i * C::kBoxBytes, x_map,
                                       k_chunk.channel_chunk * 64, column, row, at.x, full_barrier);
        }
        ptx::cp_async_bulk(shared.parameters(x_state.stage_idx), parameters + tile * (C::kParameterGroups * 64),
                           C::kParameterBytes, full_barrier);
        x_state.advance_by_branch();
      };
      const int prefetched = min(end, begin + C::kCodeStages);
      for (int index = begin; index < prefetched; ++index) copy_codes(index);
      ptx::griddepcontrol_wait();
      // With an earlier start, CTAs of three kernels could be resident at once, and two of one kernel share an SM.
      ptx::griddepcontrol_launch_dependents();
      KChunk<C::kHalo> k_chunk = first_chunk;
      for (int index = begin; index < end; ++index) {
        if (index == begin || k_chunk.needs_box()) copy_x(k_chunk);
        if (index >= prefetched) copy_codes(index);
        k_chunk.advance(kernel_h, kernel_w);
      }
    }
    __syncwarp();
    if constexpr (C::kSplitK > 1) cluster_sync<C::kSplitK>();
    return;
  }

  const int warpgroup = C::kWarpgroups == 1 ? 0 : warp / 4;
  const int wg_co = warpgroup % C::kWgCo;
  const int wg_px = warpgroup / C::kWgCo;
  const int thread = threadIdx.x % 128;
  const int row = warp % 4 * 16 + lane / 4;
  auto x_state = PipelineState<C::kXStages>::consumer();
  auto code_state = PipelineState<C::kCodeStages>::consumer();
  KChunk<C::kHalo> k_chunk = first_chunk;
  Parameters<C> chunk_parameters;
  ChunkCodes<C> chunk_codes;
  uint32_t b_begin;  // shared address of operand B of the current K chunk
  float accumulators[C::kAccumulators] = {};

  auto fetch = [&](bool has_box) {
    if (has_box) {
      shared.x_pipeline().consumer_wait(x_state);
      chunk_parameters.load(reinterpret_cast<const uint32_t*>(memory + C::SharedStorage::Parameters::kBegin +
                                                              x_state.stage_idx * C::kParameterBytes) +
                            wg_co * C::kParameterGroups * 64 + row);
    }
    shared.code_pipeline().consumer_wait(code_state);
    chunk_codes.load(memory + C::SharedStorage::Codes::kBegin + code_state.stage_idx * C::kCodeBytes +
                     wg_co * C::kCodeTileBytes + thread * 16);
    shared.code_pipeline().consumer_release(code_state.stage_idx, lane);
    code_state.advance_by_branch();
    const int first_row = C::kHalo ? k_chunk.fy * dilation_h * C::kBoxW + k_chunk.fx * dilation_w : 0;
    b_begin = shared.x(x_state.stage_idx) + wg_px * C::kBoxBytes + first_row * 128;
  };
  auto dequantize = [&](uint32_t (&a)[C::kSteps][4]) {
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) chunk_codes.dequantize(a[step], step, chunk_parameters);
  };
  auto matmul = [&](const uint32_t (&a)[C::kSteps][4]) {
    const uint64_t b = ptx::wgmma_descriptor<C::kGroupStrideBytes>(b_begin);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) wgmma<T, true>(accumulators, a[step], b + step * 2);
    ptx::wgmma_commit_group();
  };
  // Issues the wgmmas of a K chunk and dequantizes the next K chunk at the same time. After the first K chunk of a box,
  // wait_group<1> guarantees that all wgmmas on the preceding box have completed, so the stage of that box is released.
  int last_box = -1;
  auto advance = [&](const uint32_t (&a)[C::kSteps][4], uint32_t (&next)[C::kSteps][4]) {
    matmul(a);
    k_chunk.advance(kernel_h, kernel_w);
    const int free_box = last_box;
    const bool has_box = k_chunk.needs_box();
    last_box = has_box ? x_state.stage_idx : -1;
    if (has_box) x_state.advance_by_branch();
    fetch(has_box);
    ptx::wgmma_wait_group<1>();
    if (free_box >= 0) shared.x_pipeline().consumer_release(free_box, lane);
    dequantize(next);
  };

  uint32_t a[2][C::kSteps][4];
  fetch(true);
  dequantize(a[0]);
  int left = end - begin;
  for (; left > 2; left -= 2) {
    advance(a[0], a[1]);
    advance(a[1], a[0]);
  }
  if (left == 2) {
    advance(a[0], a[1]);
    matmul(a[1]);
  } else {
    matmul(a[0]);
  }
  const int co = (co_begin() + wg_co) * 64;
  const Epilogue<T, C> epilogue{bias, nullptr, low, high, outputs, 0};
  const Vector<float, 2> biases = output_biases(epilogue, co + row);
  ptx::wgmma_wait_group<0>();

  // The accumulators of the 8-pixel groups that this CTA owns (first_group, first_group + 1, ...), reduced over the
  // CTAs of the cluster.
  float totals[C::kOwnedGroups * 4];
  const int first_group = rank * C::kOwnedGroups;
  if constexpr (C::kSplitK == 1) {
#pragma unroll
    for (int i = 0; i < C::kOwnedGroups * 4; ++i) totals[i] = accumulators[i];
    // Wait until all warps have finished reading the stages, which the output tile overwrites.
    ptx::barrier_sync(1, C::kConsumerWarps * 32);
  } else {
    reduce_scatter_groups<C::kSplitK, C::kWarpgroups, C::kPixelGroups, C::kOwnedGroups>(
        totals, accumulators, memory + C::SharedStorage::PartialSums::kBegin,
        shared.begin + C::SharedStorage::PartialSums::kBegin, rank, warpgroup);
  }
  // A group has 4 accumulators: in warp w, 0 and 1 belong to output 16 w + g, 2 and 3 to output 16 w + g + 8.
  auto finish = [&](int index) {
    return from_float<T>(epilogue.activate(totals[index] + biases.values[index / 2 % 2]));
  };
  const int3 tile_begin = pixel_tile_begin(wg_px);
  // Sets `at` to the coordinates in y of pixel `pixel`, counted from the first pixel that this CTA owns. Returns false
  // if the pixel lies outside of y.
  auto find_pixel = [&](int pixel, int3& at) {
    const int index = first_group * 8 + pixel;
    at = {tile_begin.x, tile_begin.y + index / C::kTileW, tile_begin.z + index % C::kTileW};
    return index < C::kPixels && at.x < batch && at.y < out_h && at.z < out_w;
  };
  if constexpr (C::kNhwc) {
    uint8_t* buffer = memory + warpgroup * C::kStoreRows * C::kStoreRowBytes;
    const uint32_t target = transposed_address<C::kStoreRowBytes>(buffer, warp % 4, lane);
#pragma unroll
    for (int group = 0; group < C::kOwnedGroups; group += 2) {
      store_transposed<C::kOwnedGroups * 4>(target + group * 8 * C::kStoreRowBytes, group * 4, finish);
    }
    ptx::barrier_sync(2 + warpgroup, 128);
    const int output = co + thread % 8 * 8;
#pragma unroll
    for (int pixel = thread / 8; pixel < C::kOwnedGroups * 8; pixel += 16) {
      int3 at;
      if (!find_pixel(pixel, at) || output >= outputs) continue;
      T* to = y + ((static_cast<int64_t>(at.x) * out_h + at.y) * out_w + at.z) * outputs + output;
      const auto values = *reinterpret_cast<const Vector<T, 8>*>(buffer + pixel * C::kStoreRowBytes + thread % 8 * 16);
      if constexpr (C::kAligned) {
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
    for (int index = 0; index < C::kOwnedGroups * 4; ++index) {
      const int output = co + row + index / 2 % 2 * 8;
      int3 at;
      if (!find_pixel(index / 4 * 8 + lane % 4 * 2 + index % 2, at) || output >= outputs) continue;
      y[((static_cast<int64_t>(at.x) * outputs + output) * out_h + at.y) * out_w + at.z] = finish(index);
    }
  }
}

using Kernel = Conv2dSm90<Config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    conv2d_sm90(const uint8_t* codes, const uint32_t* parameters, const BIAS* bias, X* y,
                const __grid_constant__ TensorMap x_map, int image_tiles, int tiles_w, int co_blocks, int k_chunks,
                int batch, int outputs, int kernel_h, int kernel_w, int out_h, int out_w, int stride_h, int stride_w,
                int pad_h, int pad_w, int dilation_h, int dilation_w, float low, float high) {
  conv2d_sm90_tiles<Kernel>(codes, parameters, bias, y, &x_map, image_tiles, tiles_w, co_blocks, k_chunks, batch,
                            outputs, kernel_h, kernel_w, out_h, out_w, stride_h, stride_w, pad_h, pad_w, dilation_h,
                            dilation_w, low, high);
}
