// SPDX-License-Identifier: Apache-2.0
// The integer product of gemm_int8.cuh for up to ROWS rows, every weight read once. Any architecture: products by
// tensor cores from sm_75 on, by dp4a before. k a multiple of 16 and block a multiple of 32 (or k itself); xq starts at
// a multiple of 16 bytes.
//
// A block of WARPS warps makes 16 columns. Its warps, and the splits of the grid, deal K among themselves in chunks of
// 128. With g = lane / 4 and t = lane % 4 a lane has columns g and g + 8 and the t-th 32 k of a chunk, which are of one
// block: 16 bytes of 4-bit codes, adjacent in memory. What it multiplies is its own alone, until the sums of all lanes
// are added in the end; so blocks of 32 cost no more than others.
//
// A mma adds over the k of four lanes, though. So a column of its B stands for a row of x and a lane: column 2u + r
// holds row r for the k of lanes t = u and zeros for the others, and C gives each lane the products of its own k with
// two rows. Three quarters of the products are of zeros, of which tensor cores have enough; dp4a alone would take
// longer than the memory does for 8 rows.
//
// PREFETCHED_CHUNKS of a warp are in flight at any time. Programmatic dependent launch (sm_90 and newer): all that is
// read before griddepcontrol.wait is the weight.
#include "int8/gemm_int8.cuh"
#include "ptx/griddepcontrol.cuh"
#include "common/reduce.cuh"
#include "common/warp.cuh"

constexpr int kRows = ROWS;
constexpr int kWarps = WARPS;
constexpr int kDepth = PREFETCHED_CHUNKS;

constexpr bool kTensor = __CUDA_ARCH__ >= 750;
constexpr bool kDependent = __CUDA_ARCH__ >= 900;
constexpr int kThreads = kWarps * 32;
constexpr int kColumns = 16;
constexpr int kStep = 32;  // k of a lane in a chunk
constexpr int kChunk = 4 * kStep;
constexpr int kUnits = kBits / 4;  // 16-byte units of codes in a step of a column
constexpr int kWords = kStep / 4;
constexpr int kSteps = 4 * kDepth;  // that a warp takes between two looks at x
constexpr int kOutputs = kRows * kColumns;

static_assert(kRows % 2 == 0, "tensor cores take two rows at a time");
static_assert(kOutputs <= kThreads, "a thread finishes one output");

// What a warp needs of x for PREFETCHED_CHUNKS chunks. Rows begin in different banks. `row` is row_term, and it and
// `offset` stand with the first step of a block and are zero with the others, for that is done once.
struct XPart {
  alignas(16) uint8_t codes[kRows][kDepth * kChunk + 16];
  float scale[kRows][kSteps];
  float row[kRows][kSteps];
  float offset[kRows][kSteps];
};

// Of the weight: what a lane has of a chunk.
struct WeightPart {
  Vector<uint32_t, 4> codes[2][kUnits];
  float scale[2];
  float offset[2];
  float column[2];
};

// Two blocks an SM, so that one's weights come while the other ends; without dp4a there are too few registers.
extern "C" __global__ void __launch_bounds__(kThreads, __CUDA_ARCH__ >= 610 ? 2 : 1)
    gemv_int8(const int8_t* xq, const float* x_scale, const float* x_offset, const int32_t* x_sums,
              const uint8_t* codes, const float* parameters, const BIAS* bias, Y* y, float* partials,
              uint32_t* counters, int m, int n, int k, int block, int n_padded, int ldy, float low, float high) {
  __shared__ XPart x_parts[kWarps];
  __shared__ float warp_sums[kWarps][kOutputs];
  if constexpr (kDependent) ptx::griddepcontrol_launch_dependents();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int t = lane % 4;
  const int n_begin = blockIdx.x * kColumns;
  const int blocks = ceil_div(k, block);
  const int steps = ceil_div(k, kStep);
  const int chunks = ceil_div(k, kChunk);
  const int chunk_begin = static_cast<int>(static_cast<int64_t>(chunks) * blockIdx.z / gridDim.z) + warp;
  const int chunk_end = static_cast<int>(static_cast<int64_t>(chunks) * (blockIdx.z + 1) / gridDim.z);
  const int64_t plane = static_cast<int64_t>(blocks) * n_padded;

  // The block of a step: exact for k below 2^27, and far quicker than a division.
  const float blocks_per_step = __frcp_rn(static_cast<float>(ceil_div(block, kStep)));
  auto block_of = [&](int step) { return static_cast<int>((static_cast<float>(step) + 0.5f) * blocks_per_step); };

  // Columns past n repeat the last one, and nobody stores them.
  const float* of_column = parameters + n_begin + lane / 4;
  uint32_t column_units[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) column_units[half] = min(n_begin + half * 8 + lane / 4, n - 1) * steps * kUnits;
  auto fetch_weight = [&](WeightPart& part, int chunk) {
    if (chunk >= chunk_end) return;
    // Past the end of k x is zero, and so must be what is multiplied by a scale.
    const int step = chunk * 4 + t;
    const bool valid = step < steps;
    const int there = min(step, steps - 1);
    const float* of_block = of_column + static_cast<int64_t>(block_of(there)) * n_padded;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int64_t unit = column_units[half] + there * kUnits + i;
        load<true>(part.codes[half][i], reinterpret_cast<const uint32_t*>(codes + unit * 16));
      }
      part.scale[half] = valid ? of_block[half * 8] : 0.0f;
      if constexpr (kWeightOffset) part.offset[half] = valid ? of_block[plane + half * 8] : 0.0f;
      if constexpr (kXOffset) part.column[half] = valid ? of_block[2 * plane + half * 8] : 0.0f;
    }
  };

  // Rows that x lacks repeat its last one: nobody stores them, either.
  auto fetch_x = [&](int first) {
    XPart& part = x_parts[warp];
    const int k_end = min(k, chunk_end * kChunk);
#pragma unroll
    for (int begin = 0; begin < kRows * kDepth * 8; begin += 32) {
      const int row = (begin + lane) / (kDepth * 8);
      const int unit = (begin + lane) % (kDepth * 8);
      if (row >= kRows) break;
      const int at = (first + unit / 8 * kWarps) * kChunk + unit % 8 * 16;
      Vector<uint32_t, 4> words = {};
      if (at < k_end) {
        load<true>(words, reinterpret_cast<const uint32_t*>(xq + static_cast<int64_t>(min(row, m - 1)) * k + at));
      }
      *reinterpret_cast<Vector<uint32_t, 4>*>(&part.codes[row][unit * 16]) = words;
    }
#pragma unroll
    for (int begin = 0; begin < kRows * kSteps; begin += 32) {
      const int row = (begin + lane) / kSteps;
      const int index = (begin + lane) % kSteps;
      if (row >= kRows) break;
      const int step = (first + index / 4 * kWarps) * 4 + index % 4;
      float scale = 0.0f;
      float row_sum = 0.0f;
      float offset = 0.0f;
      if (step * kStep < k_end) {
        const int b = block_of(step);
        const int64_t at = static_cast<int64_t>(min(row, m - 1)) * blocks + b;
        scale = x_scale[at];
        if (step * kStep == b * block) {
          if constexpr (kXOffset) offset = x_offset[at];
          if constexpr (kWeightOffset) row_sum = row_term(scale, x_sums[at], offset, min(block, k - b * block));
        }
      }
      part.scale[row][index] = scale;
      if constexpr (kWeightOffset) part.row[row][index] = row_sum;
      if constexpr (kXOffset) part.offset[row][index] = offset;
    }
  };

  float sums[2][kRows] = {};
  auto matmul = [&](const WeightPart& weight, int depth) {
    const XPart& x = x_parts[warp];
    const int index = depth * 4 + t;
#pragma unroll
    for (int pair = 0; pair < kRows; pair += 2) {
      // The other lanes have brought x. Again every four rows: else the compiler loads x sooner than registers allow.
      if (pair % 4 == 0) __syncwarp();
      // Four codes of x a word: of the column of B that this lane holds, or of two rows.
      constexpr int kXRows = kTensor ? 1 : 2;
      Vector<uint32_t, kWords / 2> x_words[kXRows][2] = {};
      if (!kTensor || lane / 8 == t) {
#pragma unroll
        for (int r = 0; r < kXRows; ++r) {
          const uint8_t* source = &x.codes[pair + (kTensor ? lane / 4 % 2 : r)][index * kStep];
#pragma unroll
          for (int i = 0; i < 2; ++i) load<true>(x_words[r][i], reinterpret_cast<const uint32_t*>(source + i * 16));
        }
      }
      int32_t products[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};  // [half][row]
#pragma unroll
      for (int word = 0; word < kWords / 2; ++word) {
        // Two words of each column: k from 4 * word and from 16 + 4 * word on.
        uint32_t a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto& units = weight.codes[half];
          a[half] = kBits == 8 ? units[0].values[word] : low_nibbles(units[0].values[word]);
          a[half + 2] = kBits == 8 ? units[kUnits - 1].values[word] : high_nibbles(units[0].values[word]);
        }
        if constexpr (kTensor) {
          mma(products, a, x_words[0][0].values[word], x_words[0][1].values[word]);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int half = i / 2 % 2;
            products[i % 4] = dot(a[half + i / 4 * 2], x_words[i % 2][i / 4].values[word], products[i % 4]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2;
        const int row = pair + i % 2;
        float& sum = sums[half][row];
        sum = add_block(sum, magic_to_float(products[i]), x.scale[row][index], weight.scale[half]);
        sum = add_offsets(sum, kWeightOffset ? x.row[row][index] : 0.0f, kXOffset ? x.offset[row][index] : 0.0f,
                          kWeightOffset ? weight.offset[half] : 0.0f, kXOffset ? weight.column[half] : 0.0f);
      }
    }
  };

  WeightPart weight[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; ++i) fetch_weight(weight[i], chunk_begin + i * kWarps);
  if constexpr (kDependent) ptx::griddepcontrol_wait();
  for (int first = chunk_begin; first < chunk_end; first += kDepth * kWarps) {
    fetch_x(first);
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int chunk = first + i * kWarps;
      if (chunk >= chunk_end) break;
      matmul(weight[i], i);
      fetch_weight(weight[i], chunk + kDepth * kWarps);
    }
    __syncwarp();
  }

  // The four lanes of a column, the warps, the splits: thread i ends with output i.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float sum = sums[half][row];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (t == row % 4) warp_sums[warp][row * kColumns + half * 8 + lane / 4] = sum;
    }
  }
  __syncthreads();
  float total[1] = {};
  if (threadIdx.x < kOutputs) {
#pragma unroll
    for (int other = 0; other < kWarps; ++other) total[0] += warp_sums[other][threadIdx.x];
  }
  if (!reduce_split_k<1, kThreads>(total, partials, counters, blockIdx.x, blockIdx.z, gridDim.z)) return;

  const Epilogue<Y> epilogue{bias, nullptr, low, high, n, 0};
  const int row = threadIdx.x / kColumns;
  const int column = n_begin + threadIdx.x % kColumns;
  if (threadIdx.x < kOutputs && row < m && column < n) {
    y[static_cast<int64_t>(row) * ldy + column] = epilogue.finish(total[0], row, column);
  }
}
