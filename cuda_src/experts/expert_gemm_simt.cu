// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM of a mixture of experts on CUDA cores, for weights in the AWQ layout. For each sorted pair p:
//
//   y[p, n] = activation(sum over k of x[p / x_divisor, k] * W[e, k, n] + bias[e, n]) * row_weights[p]
//
//   qweight       uint32 [experts, k, n / 8]
//   scales        SCALE [experts, k / group_size, n]
//   zeros         uint32 [experts, k / group_size, n / 8], offsets SCALE [experts, k / group_size, n], or null
//   bias          BIAS [experts, n] or null
//   row_weights   float32 [pairs], read if HAS_ROW_WEIGHTS
//   y             X [pairs, n] (gated: [pairs, n / 2]), row stride ldy values
//   sorted_pairs, expert_ids, sorted_count   the arrays of sort_tokens.cu with blocks of route_block pairs
//   x             X [rows, k], row stride ldx values
//
// Limits: none; X may be float. Architectures: all. A thread computes the columns of one word for one pair; CTAs are
// persistent.
#include "common/epilogue.cuh"
#include "dequantize/int4.cuh"
#include "ptx/griddepcontrol.cuh"

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, false> {};
constexpr Zeros kZeros = Zeros::ZEROS;
using ZeroPoint = Select<kZeros == Zeros::kOffset, SCALE, uint32_t>;

// Adds the products of one row of x with the columns of word `word` of an expert's weight.
template <class Zero> __device__ __forceinline__ void multiply(float (&sums)[8], const X* x, const uint32_t* qweight,
                                                               const SCALE* scales, const Zero* zeros, int word, int n,
                                                               int k, int group_size) {
  const int words = n / 8;
  for (int group = 0; group < k / group_size; ++group) {
    float of_codes[8] = {};
    float of_x = 0.0f;
    uint32_t z = kSymmetricZeros;
    if constexpr (kZeros == Zeros::kPacked) z = zeros[static_cast<int64_t>(group) * words + word];
    for (int row = group * group_size; row < (group + 1) * group_size; ++row) {
      const float value = to_float(x[row]);
      const uint32_t q = qweight[static_cast<int64_t>(row) * words + word];
      of_x += value;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int zero = kZeros == Zeros::kOffset ? 0 : static_cast<int>(code(z, i));
        of_codes[i] = fmaf(value, static_cast<float>(static_cast<int>(code(q, i)) - zero), of_codes[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t at = static_cast<int64_t>(group) * n + word * 8 + i;
      sums[i] = fmaf(of_codes[i], to_float(scales[at]), sums[i]);
      if constexpr (kZeros == Zeros::kOffset) sums[i] = fmaf(of_x, to_float(zeros[at]), sums[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    expert_gemm_simt(const uint32_t* qweight, const SCALE* scales, const ZeroPoint* zeros, const BIAS* bias,
                     const float* row_weights, X* y, const int32_t* sorted_pairs, const int32_t* expert_ids,
                     const int32_t* sorted_count, const X* x, int pairs, int capacity, int experts, int n, int k,
                     int group_size, int x_divisor, int route_block, int ldx, int ldy) {
  if constexpr (DEPENDENT) ptx::griddepcontrol_wait();
  if constexpr (DEPENDENT) ptx::griddepcontrol_launch_dependents();
  const int n_out = GATED ? n / 2 : n;
  const int words = n_out / 8;
  const int64_t total = static_cast<int64_t>(min(*sorted_count, capacity)) * words;
  const int64_t groups = k / group_size;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; index < total;
       index += static_cast<int64_t>(gridDim.x) * THREADS) {
    const int at = static_cast<int>(index / words);
    const int word = static_cast<int>(index - static_cast<int64_t>(at) * words);
    const int pair = sorted_pairs[at];
    const int expert = expert_ids[at / route_block];
    if (static_cast<unsigned>(pair) >= static_cast<unsigned>(pairs)) continue;
    if (static_cast<unsigned>(expert) >= static_cast<unsigned>(experts)) continue;
    const uint32_t* codes = qweight + expert * (static_cast<int64_t>(k) * (n / 8));
    const SCALE* expert_scales = scales + expert * groups * n;
    const ZeroPoint* expert_zeros =
        kZeros == Zeros::kSymmetric ? nullptr : zeros + expert * groups * (kZeros == Zeros::kOffset ? n : n / 8);
    const X* row = x + static_cast<int64_t>(pair / x_divisor) * ldx;
    float sums[GATED + 1][8] = {};
#pragma unroll
    for (int half = 0; half <= GATED; ++half) {
      multiply(sums[half], row, codes, expert_scales, expert_zeros, word + half * words, n, k, group_size);
    }
    const Epilogue<X, Config> epilogue{
        HAS_BIAS ? bias + static_cast<int64_t>(expert) * n : nullptr, nullptr, 0, 0, n, 0};
    const float row_weight = HAS_ROW_WEIGHTS ? row_weights[pair] : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = word * 8 + i;
      const float value = GATED ? epilogue.product(sums[0][i], sums[GATED][i], column)
                                : epilogue.activate(epilogue.biased(sums[0][i], column));
      y[static_cast<int64_t>(pair) * ldy + column] = from_float<X>(value * row_weight);
    }
  }
}
