// SPDX-License-Identifier: Apache-2.0
// Quantization of x to e4m3 with one scale per row:
//
//   scale[m] = max(max|x[m]|, 2^-100) / 448
//   codes[m, k] = x[m, k] * (448 / max(max|x[m]|, 2^-100)), rounded to the nearest e4m3, ties to even
//   sums[m, b] = sum of the values of the codes in block b of block_size columns
//
// Every operation is rounded to float32, without FMA. A row with a NaN or an infinity has scale NaN and codes 0.
//
//   x        X [m, k], row stride ldx, rows at multiples of 16 bytes; not __restrict__, since the preceding kernel may
//            write it while this kernel runs, and ld.global.nc need not see that
//   codes    e4m3 [m, k]
//   scale    float32 [m]
//   sums     float32 [m, ceil(k / block_size)]; sums below 2^15 are exact
//   half_sums  float16 [m, ld_half_sums], the sums rounded to float16; columns past the last block are not written
//
// Limits: sm_89 and newer; k % 8 == 0; block_size, BLOCK_SIZE, is 8, 16, 32, 64, 128 or 256.
//
// FRAGMENTS: the codes of each 16 columns are in the order of quantize_rows.cu. k and block_size are multiples of 16.
//
// A CTA quantizes one row in ROUNDS rounds of 8 elements per thread, in two passes: maximum, then codes. Between the
// passes the row stays in registers with KEEPS_ROW; otherwise it is read twice.
//
// DEPENDENT (sm_90 and newer): the GEMM that follows may start early, to copy its weight while x is quantized (PDL).
#include "common/types.cuh"
#include "ptx/cvt_e4m3.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/redux.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kValues = 8;
constexpr int kWords = kValues * sizeof(X) / 4;
constexpr int kStride = kThreads * kValues;
constexpr int kRounds = ROUNDS;
constexpr int kBlockSize = BLOCK_SIZE;
constexpr bool kKeepsRow = KEEPS_ROW;
constexpr int kKept = kKeepsRow ? kRounds : 1;
constexpr float kSmallest = 7.888609052210118e-31f;  // 2^-100; a smaller maximum counts as this
constexpr float kLargestCode = 448.0f;

static_assert(kThreads % 32 == 0 && kWarps <= 32, "a warp has a lane for the largest value of each warp");

// The words that hold kValues elements of x, the elements that a thread quantizes in a round.
using Words = Vector<uint32_t, kWords>;

// Loads the words of a thread that begins at column i; with FRAGMENTS, those of two groups of four columns.
__device__ __forceinline__ void load_words(Words& words, const X* row, int i) {
  if constexpr (FRAGMENTS) {
    const X* const source = row + i / 16 * 16 + i % 16 / 2;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      Vector<uint32_t, kWords / 2> half;
      load<true>(half, reinterpret_cast<const uint32_t*>(source + part * 8));
#pragma unroll
      for (int w = 0; w < kWords / 2; ++w) words.values[part * (kWords / 2) + w] = half.values[w];
    }
  } else {
    load<true>(words, reinterpret_cast<const uint32_t*>(row + i));
  }
}

// The largest magnitude, as bits of |x|: as integers they are ordered like the values, infinity and NaN last.
struct Largest {
  // Maxima of the 16-bit elements in low and high halves of words; 32-bit elements use `low` only.
  uint32_t low = 0, high = 0;

  __device__ __forceinline__ void add(const Words& words) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(X) == 2) {
        low = max(low, words.values[i] & 0x7fffu);
        high = max(high, words.values[i] & 0x7fff0000u);
      } else {
        low = max(low, words.values[i] & 0x7fffffffu);
      }
    }
  }
  __device__ __forceinline__ uint32_t bits() const { return max(low, high >> 16); }
};

// Returns the value of the element of x whose magnitude has these bits.
__device__ __forceinline__ float element(uint32_t bits) {
  if constexpr (sizeof(X) == 2) {
    return to_float(X{static_cast<uint16_t>(bits)});
  } else {
    return __uint_as_float(bits);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    quantize_fp8(const X* x, uint8_t* __restrict__ codes, float* __restrict__ scale, float* __restrict__ sums,
                 half_t* __restrict__ half_sums, int k, int ldx, int ld_half_sums) {
  __shared__ uint32_t shared_largest[kWarps];
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const X* const source = x + row * ldx;
  const int begin = threadIdx.x * kValues;

  if constexpr (DEPENDENT) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  // All loads precede the first use of a value, so that their latencies overlap.
  Words kept[kKept] = {};
  if constexpr (kKeepsRow) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (begin + round * kStride < k) load_words(kept[round], source, begin + round * kStride);
    }
  }
  Largest mine;
#pragma unroll(kKept)
  for (int round = 0; round < kRounds; ++round) {
    if constexpr (!kKeepsRow) {
      if (begin + round * kStride >= k) break;
      load_words(kept[0], source, begin + round * kStride);
    }
    mine.add(kept[kKeepsRow ? round : 0]);
  }
  const uint32_t warp_largest = ptx::redux_sync_max(mine.bits());
  if (lane == 0) shared_largest[threadIdx.x / 32] = warp_largest;
  __syncthreads();
  const float largest = element(ptx::redux_sync_max(lane < kWarps ? shared_largest[lane] : 0));

  const bool is_finite = __float_as_uint(largest) < 0x7f800000u;
  const float size = fmaxf(largest, kSmallest);
  const float factor = __fdiv_rn(kLargestCode, size);
  if (threadIdx.x == 0) scale[row] = is_finite ? __fdiv_rn(size, kLargestCode) : __uint_as_float(0x7fffffffu);
  const uint32_t code_mask = is_finite ? 0xffffffffu : 0;
  const int64_t sums_begin = row * ceil_div(k, kBlockSize);

#pragma unroll(kKept)
  for (int round = 0; round < kRounds; ++round) {
    const int i = begin + round * kStride;
    Words& words = kept[kKeepsRow ? round : 0];
    if constexpr (!kKeepsRow) {
      words = {};
      if (i < k) load_words(words, source, i);
    }
    float sum = 0.0f;
    Vector<uint32_t, kValues / 4> out;
#pragma unroll
    for (int word = 0; word < kValues / 4; ++word) {
      uint32_t pairs[2];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        float scaled[2];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int index = word * 4 + p * 2 + v;
          const uint32_t bits =
              sizeof(X) == 2 ? words.values[index / 2 % kWords] >> (index % 2 * 16) : words.values[index % kWords];
          scaled[v] = __fmul_rn(element(bits), factor);
        }
        pairs[p] = ptx::cvt_rn_satfinite_e4m3x2_f32(scaled[0], scaled[1]);
      }
      out.values[word] = (pairs[0] | pairs[1] << 16) & code_mask;
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(out.values[word] >> (p * 16)));
        sum += to_float(half_t{static_cast<uint16_t>(halves)});
        sum += to_float(half_t{static_cast<uint16_t>(halves >> 16)});
      }
    }
    if constexpr (FRAGMENTS) {
      out = {__byte_perm(out.values[0], out.values[1], 0x5140), __byte_perm(out.values[0], out.values[1], 0x7362)};
    }
    if (i < k) store<true>(reinterpret_cast<uint32_t*>(codes + row * k + i), out);
#pragma unroll
    for (int step = kBlockSize / kValues / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (i < k && i % kBlockSize == 0) {
      sums[sums_begin + i / kBlockSize] = sum;
      half_sums[row * ld_half_sums + i / kBlockSize] = from_float<half_t>(sum);
    }
  }
}
