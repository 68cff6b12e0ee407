// SPDX-License-Identifier: Apache-2.0
// The convolution of conv2d.cuh with mma.sync, for sm_75 and newer: an implicit GEMM of pixels [batch * out_h * out_w,
// K] and weights [outputs, K]. K is processed in vectors: a vector is one filter tap x 8 channels (16 bytes of x).
// The pixels of each tap are copied from x by cp.async (ASYNC) or through registers; weights are dequantized in
// registers, rounded once to X, and stored to shared memory. On sm_75, X is float16.
//
//   x       X [batch, height, width, groups * channels], contiguous channels, strides that are multiples of 8 elements
//   codes   uint32 [groups * outputs, taps, vectors per tap, BITS / 4]. BITS = 4: the nibbles are in AWQ order
//           (int4.cuh), each the signed code + 8. BITS = 8: the bytes of a word are in the order 0, 2, 1, 3, each the
//           signed code + 128.
//   scales, offsets  X [groups * outputs, blocks]; offsets are null without WEIGHT_OFFSET
//   block_vectors    number of vectors per quantization block
//   bias    BIAS [groups * outputs] or null
//   y       X, contiguous, NHWC or NCHW
//   partials, counters   the split-K workspace (common/reduce.cuh)
//
// A CTA has WARPS_M x WARPS_N warps, each with WARP_M pixels and 32 outputs. Shared memory holds STAGES stages of
// pixels [BLOCK_M][64], then two buffers of weights [BLOCK_N][64]; vector v of row r is stored as vector v ^ (r % 8).
#include "conv2d/conv2d.cuh"
#include "common/epilogue.cuh"
#include "common/mma.cuh"
#include "dequantize/int4.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "common/reduce.cuh"
#include "dequantize/unpack_bytes.cuh"

static_assert(__CUDA_ARCH__ >= (ASYNC ? 800 : 750), "conv2d_mma needs sm_75, and sm_80 for cp.async");

using Options = EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>;
constexpr bool kWeightOffset = WEIGHT_OFFSET;
constexpr bool kAsync = ASYNC;
constexpr int kWords = BITS / 4;  // number of 32-bit words that hold the codes of a vector (8 channels)
constexpr int kTilesM = WARP_M / 16;
constexpr int kTilesN = 4;
constexpr int kStages = STAGES;
constexpr int kThreads = WARPS_M * WARPS_N * 32;
constexpr int kBlockM = WARPS_M * WARP_M;
constexpr int kBlockN = WARPS_N * kTilesN * 8;
constexpr int kVectors = 8;  // number of 16-byte vectors (8 channels of one tap) along K per stage
constexpr int kRowStep = kThreads / kVectors;
constexpr int kXCopies = kBlockM / kRowStep;
constexpr int kWeightCopies = kBlockN / kRowStep;
constexpr int kXBytes = kBlockM * kVectors * 16;
constexpr int kWeightBytes = kBlockN * kVectors * 16;
constexpr int kAccumulators = kTilesM * kTilesN * 4;

static_assert(kAsync || kStages == 2, "copies through registers fill the other one of two stages");
static_assert(kBlockM % kRowStep == 0 && kBlockN % kRowStep == 0, "the copies divide evenly");

// What a thread loads of the weight for one output: the codes of one vector of K, with their scale and offset.
struct WeightVector {
  uint32_t words[kWords];
  X scale;
  X offset;

  __device__ __forceinline__ Vector<uint32_t, 4> dequantize() const {
    Vector<uint32_t, 4> out;
    if constexpr (BITS == 4) {
      const uint32_t low = Codes<X>::zero_low(kSymmetricZeros);
      const uint32_t high = Codes<X>::zero_high(kSymmetricZeros);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = words[0] >> (i / 2 * 8);
        out.values[i] = i % 2 ? Codes<X>::high(word, high) : Codes<X>::low(word, low);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        uint32_t pairs[2];
        unpack_bytes<X>(pairs, words[i]);
        out.values[i * 2] = pairs[0];
        out.values[i * 2 + 1] = pairs[1];
      }
    }
    const uint32_t scales = scale.bits * 0x00010001u;
    const uint32_t offsets = offset.bits * 0x00010001u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out.values[i] = kWeightOffset ? Codes<X>::multiply_add(out.values[i], scales, offsets)
                                    : Codes<X>::multiply(out.values[i], scales);
    }
    return out;
  }
};

// A position along K: the index of a vector, the filter tap (fy, fx) that it belongs to, and its first channel / 8.
struct KPosition {
  int vector, channel, fy, fx;

  __device__ __forceinline__ void advance(int count, int channel_vectors, int kernel_w) {
    vector += count;
    channel += count;
    while (channel >= channel_vectors) {
      channel -= channel_vectors;
      if (++fx == kernel_w) {
        fx = 0;
        ++fy;
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    conv2d_mma(const X* x, const uint32_t* codes, const X* scales, const X* offsets, const BIAS* bias, X* y,
               float* partials, uint32_t* counters, int64_t x_batch, int64_t x_row, int64_t x_pixel, int block_vectors,
               SIZES, float low, float high) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Sizes s SIZES_GIVEN;
  const uint32_t shared_begin = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t weight_begin = shared_begin + kStages * kXBytes;
  const int lane = threadIdx.x % 32;
  const int warp_m = threadIdx.x / 32 % WARPS_M * WARP_M;
  const int warp_n = threadIdx.x / 32 / WARPS_M * kTilesN * 8;
  const int pixels = s.out_h * s.out_w;
  const int m = s.batch * pixels;
  const int m_begin = blockIdx.x * kBlockM;
  const int tiles_n = ceil_div(s.outputs, kBlockN);
  const int group = blockIdx.y / tiles_n;
  const int n_begin = blockIdx.y % tiles_n * kBlockN;
  const int channel_vectors = ceil_div(s.channels, 8);
  const int blocks = ceil_div(channel_vectors, block_vectors);
  const int vectors = s.kernel_h * s.kernel_w * channel_vectors;
  const int tiles = ceil_div(vectors, kVectors);
  const int tile_begin = slice_begin<int64_t>(tiles, blockIdx.z, gridDim.z);
  const int tile_end = slice_begin<int64_t>(tiles, blockIdx.z + 1, gridDim.z);

  // A thread copies vector `vector` of rows `row`, `row` + kRowStep, ... of both operands.
  const int vector = threadIdx.x % kVectors;
  const int row = threadIdx.x / kVectors;
  const uint32_t target = (row * kVectors + (vector ^ (row % 8))) * 16;
  static_assert(kRowStep % 8 == 0, "all rows of a thread have the same swizzle");
  int top[kXCopies];
  int left[kXCopies];
  const X* corner[kXCopies];
#pragma unroll
  for (int i = 0; i < kXCopies; ++i) {
    const int index = m_begin + row + i * kRowStep;
    const int pixel = index % pixels;
    // Rows of the tile past the last pixel get coordinates outside of x, so that zeros are copied for them.
    top[i] = index < m ? pixel / s.out_w * s.stride_h - s.pad_h : s.height;
    left[i] = pixel % s.out_w * s.stride_w - s.pad_w;
    corner[i] = x + index / pixels * x_batch + top[i] * x_row + left[i] * x_pixel + group * s.channels;
  }
  const int64_t weight_row = group * s.outputs + n_begin + row;

  KPosition x_position{0, 0, 0, 0};
  x_position.advance(tile_begin * kVectors + vector, channel_vectors, s.kernel_w);
  KPosition weight_position = x_position;

  // Without cp.async, the pixels stay in registers until `store_pixels`.
  Vector<uint32_t, 4> loaded[kAsync ? 1 : kXCopies];
  auto start_pixels = [&](int stage) {
    const int dy = x_position.fy * s.dilation_h;
    const int dx = x_position.fx * s.dilation_w;
    const int64_t step = dy * x_row + dx * x_pixel + x_position.channel * 8;
#pragma unroll
    for (int i = 0; i < kXCopies; ++i) {
      const bool valid = x_position.vector < vectors &&
                         static_cast<unsigned>(top[i] + dy) < static_cast<unsigned>(s.height) &&
                         static_cast<unsigned>(left[i] + dx) < static_cast<unsigned>(s.width);
      if constexpr (kAsync) {
        ptx::cp_async_16(shared_begin + stage * kXBytes + target + i * kRowStep * kVectors * 16,
                         valid ? corner[i] + step : x, valid ? 16 : 0);
      } else {
        loaded[i] = {};
        if (valid) loaded[i] = *reinterpret_cast<const Vector<uint32_t, 4>*>(corner[i] + step);
      }
    }
    x_position.advance(kVectors, channel_vectors, s.kernel_w);
  };

  auto commit_pixels = [] {
    if constexpr (kAsync) ptx::cp_async_commit_group();
  };
  auto store_pixels = [&](int stage) {
    if constexpr (!kAsync) {
#pragma unroll
      for (int i = 0; i < kXCopies; ++i) {
        const int at = stage * kXBytes + target + i * kRowStep * kVectors * 16;
        *reinterpret_cast<Vector<uint32_t, 4>*>(shared + at) = loaded[i];
      }
    }
  };

  WeightVector fetched[kWeightCopies];
  auto fetch_weight = [&] {
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) {
      const bool valid = weight_position.vector < vectors && n_begin + row + i * kRowStep < s.outputs;
      const int64_t from = valid ? weight_row + i * kRowStep : 0;
      const int64_t at = from * vectors + (valid ? weight_position.vector : 0);
      const int64_t parameter = from * blocks + (valid ? weight_position.channel / block_vectors : 0);
#pragma unroll
      for (int word = 0; word < kWords; ++word) fetched[i].words[word] = codes[at * kWords + word];
      // Past the last output or the end of K, scale and offset are zero, and so are the weights.
      fetched[i].scale = valid ? scales[parameter] : X{0};
      fetched[i].offset = kWeightOffset && valid ? offsets[parameter] : X{0};
    }
    weight_position.advance(kVectors, channel_vectors, s.kernel_w);
  };
  auto store_weight = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) {
      const int at = kStages * kXBytes + buffer * kWeightBytes + target + i * kRowStep * kVectors * 16;
      *reinterpret_cast<Vector<uint32_t, 4>*>(shared + at) = fetched[i].dequantize();
    }
  };

  // The accumulators, [mma tile along m][mma tile along n][value of the fragment].
  float accumulators[kTilesM][kTilesN][4] = {};
  auto matmul = [&](int stage, int buffer, int step) {
    uint32_t b[kTilesN][2];
#pragma unroll
    for (int pair = 0; pair < kTilesN / 2; ++pair) {
      // ldmatrix loads matrices 0 and 1 from outputs 0 .. 7 at k 0 .. 7 and k 8 .. 15, and matrices 2 and 3 from
      // outputs 8 .. 15 at the same k.
      const int from = warp_n + pair * 16 + lane / 16 * 8 + lane % 8;
      const int at = step * 2 + lane / 8 % 2;
      uint32_t words[4];
      ptx::ldmatrix_x4(words, weight_begin + buffer * kWeightBytes + (from * kVectors + (at ^ (from % 8))) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[pair * 2 + i / 2][i % 2] = words[i];
    }
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      // ldmatrix loads matrices 0 and 1 from pixels 0 .. 7 and 8 .. 15 at k 0 .. 7, and matrices 2 and 3 from the same
      // pixels at k 8 .. 15.
      const int from = warp_m + i * 16 + lane % 16;
      const int at = step * 2 + lane / 16;
      uint32_t a[4];
      ptx::ldmatrix_x4(a, shared_begin + stage * kXBytes + (from * kVectors + (at ^ (from % 8))) * 16);
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) mma<X>(accumulators[i][j], a, b[j][0], b[j][1]);
    }
  };

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (tile_begin + stage < tile_end) start_pixels(stage);
    commit_pixels();
  }
  fetch_weight();
  store_weight(0);
  store_pixels(0);
  int stage = 0;
  int buffer = 0;
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    if constexpr (kAsync) ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    // All warps have read the preceding stage and weight buffer: both can be filled again.
    const int refilled = stage == 0 ? kStages - 1 : stage - 1;
    if (tile + kStages - 1 < tile_end) start_pixels(refilled);
    commit_pixels();
    const bool has_next = tile + 1 < tile_end;
    if (has_next) fetch_weight();
#pragma unroll
    for (int step = 0; step < kVectors / 2; ++step) matmul(stage, buffer, step);
    buffer ^= 1;
    if (has_next) {
      store_weight(buffer);
      store_pixels(refilled);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  const int tile = blockIdx.y * gridDim.x + blockIdx.x;
  auto& flat = reinterpret_cast<float (&)[kAccumulators]>(accumulators);
  if (!reduce_split_k<kAccumulators, kThreads>(flat, partials, counters, tile, blockIdx.z, gridDim.z)) return;

  const int all = s.outputs * s.groups;
  const Epilogue<X, Options> epilogue{bias, nullptr, low, high, all, 0};
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = m_begin + warp_m + i * 16 + half * 8 + lane / 4;
      if (index >= m) continue;
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        const int within = n_begin + warp_n + j * 8 + lane % 4 * 2;
        const int co = group * s.outputs + within;
        const float* values = &accumulators[i][j][half * 2];
        if constexpr (NHWC) {
          X* to = y + static_cast<int64_t>(index) * all + co;
          if (EVEN && within < s.outputs) {
            const Vector<X, 2> out = {epilogue.finish(values[0], 0, co), epilogue.finish(values[1], 0, co + 1)};
            store<true>(to, out);
          } else {
#pragma unroll
            for (int v = 0; v < 2; ++v) {
              if (within + v < s.outputs) to[v] = epilogue.finish(values[v], 0, co + v);
            }
          }
        } else {
          X* to = y + (static_cast<int64_t>(index / pixels) * all + co) * pixels + index % pixels;
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            if (within + v < s.outputs) to[static_cast<int64_t>(v) * pixels] = epilogue.finish(values[v], 0, co + v);
          }
        }
      }
    }
  }
}
