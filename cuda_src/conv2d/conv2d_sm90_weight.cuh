// SPDX-License-Identifier: Apache-2.0
// The main loops of conv2d_sm90: operand A is the weight, dequantized in registers or, if it is dequantized already, in
// shared memory. A main loop adds the products of K chunks to the accumulators of a warpgroup. multiply() may leave
// wgmmas in flight.
#pragma once

#include "common/types.cuh"
#include "conv2d/conv2d_sm90.cuh"
#include "dequantize/int4.cuh"
#include "dequantize/unpack_bytes.cuh"
#include "hopper/wgmma.cuh"
#include "ptx/wgmma_shared.cuh"

// The scales and offsets of a lane's outputs g and g + 8; each register holds the same value in both halves.
template <class C> struct Parameters {
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

// A thread's codes of one K chunk (a filter tap x 64 channels) of the weight.
template <class C> struct ChunkCodes {
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

// A warpgroup that dequantizes the weight of the next K chunk while the tensor cores multiply the current one.
template <class C> struct CodesMainLoop {
  using Operand = uint32_t[C::kSteps][4];

  typename C::SharedStorage shared;
  const Convolution<C>& sizes;
  const uint8_t* codes;        // shared address of this thread's codes in stage 0
  const uint32_t* parameters;  // the parameters of the lane's output g for stage 0
  uint32_t b_offset;           // byte offset of the warpgroup's first pixel in a stage of x
  int lane;
  PipelineState<C::kXStages> x_state = PipelineState<C::kXStages>::consumer();
  PipelineState<C::kWeightStages> weight_state = PipelineState<C::kWeightStages>::consumer();
  typename C::Chunk k_chunk;
  Parameters<C> chunk_parameters;
  ChunkCodes<C> chunk_codes;
  uint32_t b_begin;   // shared address of operand B for the current K chunk
  int last_box = -1;  // stage of the preceding box of x while it must still be released, else -1

  __device__ __forceinline__ CodesMainLoop(const typename C::SharedStorage& shared, const Convolution<C>& sizes,
                                           const uint8_t* memory, int wg_co, int wg_px)
      : shared(shared),
        sizes(sizes),
        codes(memory + C::SharedStorage::Weights::kBegin + wg_co * C::kWeightTileBytes + threadIdx.x % 128 * 16),
        parameters(reinterpret_cast<const uint32_t*>(memory + C::SharedStorage::Parameters::kBegin) +
                   wg_co * C::kParameterGroups * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        b_offset(wg_px * C::kBoxBytes),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void fetch(bool has_box) {
    if (has_box) {
      shared.x_pipeline().consumer_wait(x_state);
      chunk_parameters.load(parameters + x_state.stage_idx * (C::kParameterBytes / 4));
    }
    shared.weight_pipeline().consumer_wait(weight_state);
    chunk_codes.load(codes + weight_state.stage_idx * C::kWeightBytes);
    shared.weight_pipeline().consumer_release(weight_state.stage_idx, lane);
    weight_state.advance_by_branch();
    b_begin = shared.x(x_state.stage_idx) + b_offset + sizes.first_row(k_chunk) * 128;
  }
  __device__ __forceinline__ void dequantize(Operand& a) const {
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) chunk_codes.dequantize(a[step], step, chunk_parameters);
  }
  __device__ __forceinline__ void matmul(typename C::Accumulators& accumulators, const Operand& a) const {
    const uint64_t b = ptx::wgmma_descriptor<C::kGroupStrideBytes>(b_begin);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) wgmma<typename C::T, true>(accumulators[0], a[step], b + step * 2);
    ptx::wgmma_commit_group();
  }
  // Issues the wgmmas of a K chunk and dequantizes the next K chunk at the same time. After the first K chunk of a box,
  // wait_group<1> guarantees that all wgmmas on the preceding box have completed, so the stage of that box is released.
  __device__ __forceinline__ void advance(typename C::Accumulators& accumulators, const Operand& a, Operand& next) {
    matmul(accumulators, a);
    k_chunk.advance(sizes.kernel_h, sizes.kernel_w);
    const int free_box = last_box;
    const bool has_box = k_chunk.needs_box();
    last_box = has_box ? x_state.stage_idx : -1;
    if (has_box) x_state.advance_by_branch();
    fetch(has_box);
    ptx::wgmma_wait_group<1>();
    if (free_box >= 0) shared.x_pipeline().consumer_release(free_box, lane);
    dequantize(next);
  }
  // Nobody waits for the last stages, because a CTA has a single tile; so they are not released.
  __device__ __forceinline__ void multiply(typename C::Accumulators& accumulators, const typename C::Chunk& first_chunk,
                                           int chunks) {
    Operand a[2];
    k_chunk = first_chunk;
    fetch(true);
    dequantize(a[0]);
    for (; chunks > 2; chunks -= 2) {
      advance(accumulators, a[0], a[1]);
      advance(accumulators, a[1], a[0]);
    }
    if (chunks == 2) {
      advance(accumulators, a[0], a[1]);
      matmul(accumulators, a[1]);
    } else {
      matmul(accumulators, a[0]);
    }
  }
};

// A warpgroup that reads the dequantized weight from shared memory.
template <class C> struct DenseMainLoop {
  typename C::SharedStorage shared;
  const Convolution<C>& sizes;
  // Byte offsets: of the warpgroup's outputs in a stage of the weight, and its pixels in one of x.
  uint32_t a_offset, b_offset;
  int lane;
  PipelineState<C::kXStages> x_state = PipelineState<C::kXStages>::consumer();
  PipelineState<C::kWeightStages> weight_state = PipelineState<C::kWeightStages>::consumer();

  __device__ __forceinline__ DenseMainLoop(const typename C::SharedStorage& shared, const Convolution<C>& sizes,
                                           const uint8_t*, int wg_co, int wg_px)
      : shared(shared),
        sizes(sizes),
        a_offset(wg_co * C::kWeightTileBytes),
        b_offset(wg_px * C::kPixelTiles * C::kPlanes * C::kBoxBytes),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void multiply(typename C::Accumulators& accumulators, typename C::Chunk k_chunk,
                                           int chunks) {
    for (int index = 0; index < chunks; ++index) {
      const bool is_next_box = index > 0 && k_chunk.needs_box();
      if (is_next_box) x_state.advance_by_branch();
      if (is_next_box || index == 0) shared.x_pipeline().consumer_wait(x_state);
      shared.weight_pipeline().consumer_wait(weight_state);
      const uint64_t a = ptx::wgmma_descriptor(shared.weight(weight_state.stage_idx) + a_offset);
      const uint64_t b = ptx::wgmma_descriptor<C::kGroupStrideBytes>(shared.x(x_state.stage_idx) + b_offset +
                                                                     sizes.first_row(k_chunk) * 128);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
#pragma unroll
        for (int pixel_tile = 0; pixel_tile < C::kPixelTiles; ++pixel_tile) {
          const uint64_t at = b + pixel_tile * (C::kPlanes * C::kBoxBytes / 16) + step * 2;
          if constexpr (kIsHalf<typename C::T>) {
            ptx::wgmma_f16(accumulators[pixel_tile], a + step * 2, at);
          } else {
            ptx::wgmma_bf16(accumulators[pixel_tile], a + step * 2, at);
          }
        }
      }
      ptx::wgmma_commit_group();
      // All wgmmas on the preceding K chunk have completed, so its stages can be released.
      ptx::wgmma_wait_group<1>();
      if (index > 0) shared.weight_pipeline().consumer_release(weight_state.previous_stage(), lane);
      if (is_next_box) shared.x_pipeline().consumer_release(x_state.previous_stage(), lane);
      weight_state.advance_by_branch();
      k_chunk.advance(sizes.kernel_h, sizes.kernel_w);
    }
    ptx::wgmma_wait_group<0>();
    shared.weight_pipeline().consumer_release(weight_state.previous_stage(), lane);
    shared.x_pipeline().consumer_release(x_state.stage_idx, lane);
    x_state.advance_by_branch();
  }
};
