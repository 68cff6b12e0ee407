// SPDX-License-Identifier: Apache-2.0
// The integer GEMM of gemm_int8.cuh for up to ROWS rows of x; each weight is read once. Any architecture: the kernel
// uses mma on sm_75 and newer, dp4a on older ones.
//
// Limits: m <= ROWS; k % 16 == 0; block_size % 32 == 0 or block_size == k; xq starts at a multiple of 16 bytes.
//
// A CTA of WARPS warps computes 16 columns of y. K is divided into chunks of 128 k; each split of the grid has a
// contiguous range of chunks, at which the warps of the CTA take turns. With g = lane / 4 and t = lane % 4, a lane
// computes columns g and g + 8 over the t-th step (32 k) of a chunk. A step lies in one quantization block and has 16
// adjacent bytes of 4-bit codes. Lanes add up separate products until the final reduction, so blocks of 32 columns take
// no longer than larger ones.
//
// An mma, however, sums over the k of four lanes. To separate these sums, each column of operand B holds one row of x
// for the k of one lane: column 2 u + r holds row r for the k of lanes t = u, and zeros for the k of the other lanes.
// Then C gives each lane the products of its own k with two rows. Three quarters of the multiplications are by zero,
// but the tensor cores would be idle otherwise; with dp4a, 8 rows would take longer than the loads.
//
// Each warp prefetches PREFETCHED_CHUNKS chunks. Only the weight is read before griddepcontrol.wait (sm_90 and newer).
#include "int8/gemm_int8.cuh"
#include "ptx/griddepcontrol.cuh"
#include "common/reduce.cuh"
#include "common/warp.cuh"

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>,
                ProductOptions<FP8, X_OFFSET, WEIGHT_OFFSET> {};
constexpr int kBits = BITS;
constexpr int kRows = ROWS;
constexpr int kWarps = WARPS;
constexpr int kPrefetchedChunks = PREFETCHED_CHUNKS;

constexpr bool kTensor = __CUDA_ARCH__ >= 750;
constexpr bool kDependent = __CUDA_ARCH__ >= 900;
constexpr int kThreads = kWarps * 32;
constexpr int kColumns = 16;
constexpr int kStep = 32;  // extent along k of a lane's part of a chunk
constexpr int kChunk = 4 * kStep;
constexpr int kVectors = kBits / 4;  // number of 16-byte vectors of codes per column and step
constexpr int kWords = kStep / 4;
constexpr int kSteps = 4 * kPrefetchedChunks;  // number of steps in the prefetched chunks of a warp
constexpr int kOutputs = kRows * kColumns;

static_assert(kRows % 2 == 0, "an mma multiplies two rows");
static_assert(kOutputs <= kThreads, "a thread stores at most one output");

// The x of a warp's prefetched chunks; padding puts rows into different banks. `row` (see row_term) and `offset` are
// nonzero only in the first step of a quantization block, so that both are added once per block.
struct XChunks {
  alignas(16) uint8_t codes[kRows][kPrefetchedChunks * kChunk + 16];
  float scale[kRows][kSteps];
  float row[kRows][kSteps];
  float offset[kRows][kSteps];
};

// The codes and parameters of one chunk of the weight that a lane holds.
struct WeightChunk {
  Vector<uint32_t, 4> codes[2][kVectors];
  float scale[2];
  float offset[2];
  float column[2];
};

// Two CTAs per SM, so that one loads weights while the other reduces. Without dp4a (below sm_61) a thread needs too
// many registers for two CTAs.
extern "C" __global__ void __launch_bounds__(kThreads, __CUDA_ARCH__ >= 610 ? 2 : 1)
    gemv_int8(const int8_t* xq, const float* x_scale, const float* x_offset, const int32_t* x_sums,
              const uint8_t* codes, const float* parameters, const BIAS* bias, Y* y, float* partials,
              uint32_t* counters, int m, int n, int k, int block_size, int n_padded, int ldy, float low, float high) {
  __shared__ XChunks x_chunks[kWarps];
  __shared__ float warp_sums[kWarps][kOutputs];
  if constexpr (kDependent) ptx::griddepcontrol_launch_dependents();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int t = lane % 4;
  const int n_begin = blockIdx.x * kColumns;
  const int blocks = ceil_div(k, block_size);
  const int steps = ceil_div(k, kStep);
  const int chunks = ceil_div(k, kChunk);
  const int chunk_begin = slice_begin<int64_t>(chunks, blockIdx.z, gridDim.z) + warp;
  const int chunk_end = slice_begin<int64_t>(chunks, blockIdx.z + 1, gridDim.z);
  const int64_t plane = static_cast<int64_t>(blocks) * n_padded;

  // Returns the index of the quantization block of a step without an integer division; exact for k < 2^27.
  const float blocks_per_step = __frcp_rn(static_cast<float>(ceil_div(block_size, kStep)));
  auto block_of = [&](int step) { return static_cast<int>((static_cast<float>(step) + 0.5f) * blocks_per_step); };

  // Lanes whose columns lie past n read the last column again; the results are not stored.
  const float* of_column = parameters + n_begin + lane / 4;
  uint32_t column_vectors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    column_vectors[half] = min(n_begin + half * 8 + lane / 4, n - 1) * steps * kVectors;
  auto fetch_weight = [&](WeightChunk& target, int chunk) {
    if (chunk >= chunk_end) return;
    // Past k the codes of x are zero. The parameters are set to zero as well: a step past k reads the parameters of the
    // last block, which may be infinite, and zero times infinity is NaN.
    const int step = chunk * 4 + t;
    const bool valid = step < steps;
    const int clamped_step = min(step, steps - 1);
    const float* of_block = of_column + static_cast<int64_t>(block_of(clamped_step)) * n_padded;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int64_t vector = column_vectors[half] + clamped_step * kVectors + i;
        load<true>(target.codes[half][i], reinterpret_cast<const uint32_t*>(codes + vector * 16));
      }
      target.scale[half] = valid ? of_block[half * 8] : 0.0f;
      if constexpr (Config::kWeightOffset) target.offset[half] = valid ? of_block[plane + half * 8] : 0.0f;
      if constexpr (Config::kXOffset) target.column[half] = valid ? of_block[2 * plane + half * 8] : 0.0f;
    }
  };

  // Rows past m are read from the last row; the results are not stored.
  auto fetch_x = [&](int first) {
    XChunks& target = x_chunks[warp];
    const int k_end = min(k, chunk_end * kChunk);
#pragma unroll
    for (int begin = 0; begin < kRows * kPrefetchedChunks * 8; begin += 32) {
      const int row = (begin + lane) / (kPrefetchedChunks * 8);
      const int vector = (begin + lane) % (kPrefetchedChunks * 8);
      if (row >= kRows) break;
      const int at = (first + vector / 8 * kWarps) * kChunk + vector % 8 * 16;
      Vector<uint32_t, 4> words = {};
      if (at < k_end) {
        load<true>(words, reinterpret_cast<const uint32_t*>(xq + static_cast<int64_t>(min(row, m - 1)) * k + at));
      }
      *reinterpret_cast<Vector<uint32_t, 4>*>(&target.codes[row][vector * 16]) = words;
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
        if (step * kStep == b * block_size) {
          if constexpr (Config::kXOffset) offset = x_offset[at];
          if constexpr (Config::kWeightOffset)
            row_sum = row_term<Config>(scale, x_sums[at], offset, min(block_size, k - b * block_size));
        }
      }
      target.scale[row][index] = scale;
      if constexpr (Config::kWeightOffset) target.row[row][index] = row_sum;
      if constexpr (Config::kXOffset) target.offset[row][index] = offset;
    }
  };

  float sums[2][kRows] = {};
  auto matmul = [&](const WeightChunk& weight, int depth) {
    const XChunks& x = x_chunks[warp];
    const int index = depth * 4 + t;
#pragma unroll
    for (int pair = 0; pair < kRows; pair += 2) {
      // Wait until the other lanes have stored their values of x. After the first barrier, the others (one per four
      // rows) only keep the compiler from hoisting loads of x, for which a thread has no registers.
      if (pair % 4 == 0) __syncwarp();
      // Words of four codes of x: with mma, from the column of operand B that this lane holds; with dp4a, from two
      // rows.
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
      // The sums of products of each half of a step and row of x, on top of kMagicBits (magic_to_float).
      int32_t products[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
#pragma unroll
      for (int word = 0; word < kWords / 2; ++word) {
        // Two words of each column, for four k each: from k 4 * word and from k 16 + 4 * word.
        uint32_t a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto& vectors = weight.codes[half];
          a[half] = kBits == 8 ? vectors[0].values[word] : low_nibbles<Config::kFp8>(vectors[0].values[word]);
          a[half + 2] =
              kBits == 8 ? vectors[kVectors - 1].values[word] : high_nibbles<Config::kFp8>(vectors[0].values[word]);
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
        sum = add_offsets<Config>(
            sum, Config::kWeightOffset ? x.row[row][index] : 0.0f, Config::kXOffset ? x.offset[row][index] : 0.0f,
            Config::kWeightOffset ? weight.offset[half] : 0.0f, Config::kXOffset ? weight.column[half] : 0.0f);
      }
    }
  };

  WeightChunk weight[kPrefetchedChunks];
#pragma unroll
  for (int i = 0; i < kPrefetchedChunks; ++i) fetch_weight(weight[i], chunk_begin + i * kWarps);
  if constexpr (kDependent) ptx::griddepcontrol_wait();
  for (int first = chunk_begin; first < chunk_end; first += kPrefetchedChunks * kWarps) {
    fetch_x(first);
#pragma unroll
    for (int i = 0; i < kPrefetchedChunks; ++i) {
      const int chunk = first + i * kWarps;
      if (chunk >= chunk_end) break;
      matmul(weight[i], i);
      fetch_weight(weight[i], chunk + kPrefetchedChunks * kWarps);
    }
    __syncwarp();
  }

  // Sum over the four lanes of a column, then over the warps, then over the splits. Thread i has the total of output i.
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

  const Epilogue<Y, Config> epilogue{bias, nullptr, low, high, n, 0};
  const int row = threadIdx.x / kColumns;
  const int column = n_begin + threadIdx.x % kColumns;
  if (threadIdx.x < kOutputs && row < m && column < n) {
    y[static_cast<int64_t>(row) * ldy + column] = epilogue.finish(total[0], row, column);
  }
}
