// SPDX-License-Identifier: Apache-2.0
// Exact conversion of packed integers to float16:
//
//   s4_to_fp16x2:  out[8 i + c] = code of column c in words[i], 0 .. 15
//   int8_to_fp16:  out[4 i + e] = value of element e in words[i], -128 .. 127
//
//   words  uint32 [count]: eight codes in AWQ order (int4.cuh), or the bytes value + 128 of elements 0, 2, 1, 3
//   out    half_t [8 * count] or [4 * count]
//
// Any count, any architecture. ALIGNED: out starts at a multiple of 16 bytes. PTX_PATH: pairs of values are converted
// through the mantissa of 1024 (int4.cuh); otherwise each value is converted through float32, with the same result.
// Each thread converts one word.
#include "dequantize/int4.cuh"

constexpr bool kAligned = ALIGNED;
constexpr bool kPtxPath = PTX_PATH;

template <int COUNT, class Convert>
__device__ __forceinline__ void convert(const uint32_t* words, half_t* out, int64_t count, Convert convert_word) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= count) return;
  Vector<half_t, COUNT> values;
  convert_word(values, words[i]);
  store<kAligned>(out + i * COUNT, values);
}

extern "C" __global__ void __launch_bounds__(THREADS) s4_to_fp16x2(const uint32_t* words, half_t* out, int64_t count) {
  auto codes = [](Vector<half_t, 8>& values, uint32_t word) {
    if constexpr (kPtxPath) {
      using C = Codes<half_t>;
      // The float16 1024, which removes the exponent: codes have no zero point here.
      constexpr uint32_t kZeroLow = C::kMagic;
      // The float16 -64: (1024 + 16 q) / 16 - 64 = q for codes four bits higher.
      constexpr uint32_t kZeroHigh = 0xd400d400u;
      auto* pairs = reinterpret_cast<uint32_t*>(&values);
      pairs[0] = C::low(word, kZeroLow);
      pairs[1] = C::high(word, kZeroHigh);
      pairs[2] = C::low(word >> 8, kZeroLow);
      pairs[3] = C::high(word >> 8, kZeroHigh);
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c) values.values[c] = from_float<half_t>(static_cast<float>(code(word, c)));
    }
  };
  convert<8>(words, out, count, codes);
}

extern "C" __global__ void __launch_bounds__(THREADS) int8_to_fp16(const uint32_t* words, half_t* out, int64_t count) {
  auto elements = [](Vector<half_t, 4>& values, uint32_t word) {
    if constexpr (kPtxPath) {
      // The bytes 0x64, b form the float16 1024 + b, where b = value + 128. The selectors pair bytes 0 and 2 of the
      // word (digits 0, 2), then bytes 1 and 3 (digits 1, 3), each below a byte 0x64 of kMagic (digit 5).
      constexpr uint32_t kMagic = 0x64646464u;
      constexpr uint32_t kBias = 0x64806480u;  // float16 1152 = 1024 + 128: removes exponent and sign bias
      auto* pairs = reinterpret_cast<uint32_t*>(&values);
      pairs[0] = ptx::sub_f16x2(__byte_perm(word, kMagic, 0x5250), kBias);
      pairs[1] = ptx::sub_f16x2(__byte_perm(word, kMagic, 0x5351), kBias);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int byte = (e & 1) * 2 + (e >> 1);  // index of the byte that holds element e
        const int biased = static_cast<int>(word >> (byte * 8) & 255u);
        values.values[e] = from_float<half_t>(static_cast<float>(biased - 128));
      }
    }
  };
  convert<4>(words, out, count, elements);
}
