// SPDX-License-Identifier: Apache-2.0
// The private layout of a weight for sm_90: everything in the order in which tensor cores consume it.
//
// A block holds 32 columns and 128 k as one contiguous record; the records of the same columns follow each other along
// k, so what a thread block reads is one run. A record is
//
//   codes  uint32 [2 of k64][2 of 16 columns][32 lanes][4 of k16]: 16 bytes a lane. With g = lane / 4, t = lane % 4 a
//   word
//          holds, at bits 4 i and 16 + 4 i, the codes of operand A's register i (ptx/mma.cuh):
//            i = 0: column g, k 2t and 2t + 1    i = 1: column g + 8, same k
//            i = 2: column g, k 2t + 8 and 2t + 9    i = 3: column g + 8, same k
//   groups [GROUPS][2 of 16 columns]: SCALE [8 of g][2 of g, g + 8], and with packed zeros uint8 [8 of g][2 of g, g +
//   8]
//
// GROUPS is 128 / group_size, or 1 where a group spans several records, each of which then has its scales. Columns from
// n and rows from k on have codes and scales of zero.
#pragma once

#include "ptx/ld_shared.cuh"
#include "dequant/raw_codes.cuh"

constexpr int kGroups = GROUPS;
constexpr Zeros kZeros = Zeros::ZEROS;
constexpr int kRecordColumns = 32;
constexpr int kRecordK = 128;
constexpr int kCodeBytes = kRecordColumns * kRecordK / 2;
constexpr int kTileGroupBytes = kZeros == Zeros::kPacked ? 48 : 32;  // of 16 columns
constexpr int kGroupBytes = 2 * kTileGroupBytes;
constexpr int kRecordBytes = kCodeBytes + kGroups * kGroupBytes;

static_assert(kZeros != Zeros::kOffset, "offsets cannot be repacked");
static_assert(sizeof(SCALE) == 2, "scales are 16-bit values");

// The columns of records from `first` on, each a run of all K, from a step of 128 k on. The last tile may reach beyond
// the weight: it reads some records there, and stores nothing of them.
struct Runs {
  int last;       // column of the weight, counted from the first
  int64_t bytes;  // of a run
  const uint8_t* begin;

  __device__ __forceinline__ Runs(const uint8_t* weight, int first, int step, int n, int k)
      : last(ceil_div(n, kRecordColumns) - 1 - first),
        bytes(ceil_div(k, kRecordK) * kRecordBytes),
        begin(weight + first * bytes + step * kRecordBytes) {}
  // A column's record, `step` steps on.
  __device__ __forceinline__ const uint8_t* record(int column, int step) const {
    return begin + min(column, last) * bytes + step * kRecordBytes;
  }
};

// A lane's scales and zero points of one group: columns g and g + 8 of a tile of 16.
struct Group {
  uint32_t scales;  // two SCALE
  uint32_t zeros;   // two bytes

  // `scales` and `zeros` are addresses in shared memory, of this lane's of the record's first group.
  static __device__ __forceinline__ Group load_shared(uint32_t scales, uint32_t zeros, int index) {
    return {ptx::ld_shared_u32(scales + index * kGroupBytes),
            kZeros == Zeros::kPacked ? ptx::ld_shared_u16(zeros + index * kGroupBytes) : 0x0808u};
  }
  __device__ __forceinline__ float scale(int column) const {
    return to_float(SCALE{static_cast<uint16_t>(scales >> (16 * column))});
  }
  __device__ __forceinline__ float zero(int column) const { return static_cast<float>((zeros >> (8 * column)) & 255u); }
};

// Codes to the registers of operand A as (q - z) / kUnit, exactly. What belongs to a lane's two columns is a pair.
template <class T>
struct ExactCodes;

template <>
struct ExactCodes<half_t> {
  // Four bits alone are a subnormal number: q * 2^-24 in the lowest bits, q * 2^-20 four bits higher. One multiply-add
  // brings them to q * 2^-9 and subtracts the zero point.
  static constexpr float kUnit = 512.0f;
  static constexpr uint32_t k2Pow15 = 0x78007800u;
  static constexpr uint32_t k2Pow11 = 0x68006800u;
  static constexpr uint32_t kMinus2PowMinus9 = 0x98009800u;
  static constexpr uint32_t kTwo = 0x40004000u;

  // Two bytes z as (1024 + z) * -2^-9 + 2 = -z * 2^-9.
  static __device__ __forceinline__ uint32_t zeros(uint32_t bytes) {
    return ptx::fma_f16x2(__byte_perm(bytes, 0x64u, 0x4140), kMinus2PowMinus9, kTwo);
  }
  static __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word, uint32_t zeros) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const uint32_t part = word >> (8 * upper);
      a[2 * upper] = ptx::fma_f16x2(part & 0x000f000fu, k2Pow15, ptx::twice<0>(zeros));
      a[2 * upper + 1] = ptx::fma_f16x2(part & 0x00f000f0u, k2Pow11, ptx::twice<1>(zeros));
    }
  }
};

template <>
struct ExactCodes<bfloat16_t> {
  // bfloat16 has no room for the shifted bits, and its subnormals are too small: 128 + q - (128 + z), see int4.cuh.
  static constexpr float kUnit = 1.0f;

  // Two bytes z as -(128 + z).
  static __device__ __forceinline__ uint32_t zeros(uint32_t bytes) { return __byte_perm(bytes, 0xc3u, 0x4140); }
  static __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word, uint32_t zeros) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      a[2 * upper] = Codes<bfloat16_t>::low(word >> (8 * upper), ptx::twice<0>(zeros));
      a[2 * upper + 1] = Codes<bfloat16_t>::low(word >> (8 * upper + 4), ptx::twice<1>(zeros));
    }
  }
};

// Codes to the registers of operand A as (q - z) * scale * factor, rounded once. The factor is a power of two that
// brings all scales to where T holds them in full, for scales of float16 at most 2^15.
template <class T>
struct ScaledCodes;

constexpr bool kHalfScales = Codes<SCALE>::kMagic == Codes<half_t>::kMagic;

template <>
struct ScaledCodes<half_t> {
  static constexpr uint32_t kMinusOne = 0xbc00bc00u;
  static constexpr uint32_t k960 = 0x63806380u;

  struct Factor {
    float whole;
    uint32_t pair;

    explicit __device__ __forceinline__ Factor(float factor)
        : whole(factor), pair(from_float<half_t>(factor).bits * 0x10001u) {}
  };

  uint32_t lows, highs;  // 1024 + z, -(64 + z): see int4.cuh
  uint32_t scales;

  ScaledCodes() = default;
  __device__ __forceinline__ ScaledCodes(const Group& group, const Factor& factor)
      : lows(__byte_perm(group.zeros, 0x64u, 0x4140)), highs(ptx::fma_f16x2(lows, kMinusOne, k960)) {
    if constexpr (kHalfScales) {
      scales = ptx::mul_f16x2(group.scales, factor.pair);
    } else {
      scales = from_float<half_t>(group.scale(1) * factor.whole).bits * 0x10000u +
               from_float<half_t>(group.scale(0) * factor.whole).bits;
    }
  }
  __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const uint32_t part = word >> (8 * upper);
      a[2 * upper] = ptx::mul_f16x2(Codes<half_t>::low(part, ptx::twice<0>(lows)), ptx::twice<0>(scales));
      a[2 * upper + 1] = ptx::mul_f16x2(Codes<half_t>::high(part, ptx::twice<1>(highs)), ptx::twice<1>(scales));
    }
  }
};

template <>
struct ScaledCodes<bfloat16_t> {
  struct Factor {
    float whole;
    uint32_t pair;

    explicit __device__ __forceinline__ Factor(float factor)
        : whole(factor), pair(from_float<bfloat16_t>(factor).bits * 0x10001u) {}
  };

  uint32_t zeros;
  uint32_t scales;
  uint32_t rests;

  ScaledCodes() = default;
  __device__ __forceinline__ ScaledCodes(const Group& group, const Factor& factor)
      : zeros(ExactCodes<bfloat16_t>::zeros(group.zeros)) {
    if constexpr (kHalfScales) {
      // The first eight bits of a scale, and the other three: q - z times these is exact, so that the sum of both
      // products is rounded once.
      uint32_t first[2], rest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = group.scale(i) * factor.whole;
        first[i] = __float_as_uint(scale);
        rest[i] = __float_as_uint(scale - __uint_as_float(first[i] & 0xffff0000u));
      }
      scales = __byte_perm(first[0], first[1], 0x7632);
      rests = __byte_perm(rest[0], rest[1], 0x7632);
    } else {
      scales = Codes<bfloat16_t>::multiply(group.scales, factor.pair);
    }
  }
  __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) const {
    ExactCodes<bfloat16_t>::convert(a, word, zeros);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      scale<0>(a[2 * upper]);
      scale<1>(a[2 * upper + 1]);
    }
  }

 private:
  template <int COLUMN>
  __device__ __forceinline__ void scale(uint32_t& pair) const {
    if constexpr (kHalfScales) {
      const uint32_t rest = Codes<bfloat16_t>::multiply(pair, ptx::twice<COLUMN>(rests));
      pair = Codes<bfloat16_t>::multiply_add(pair, ptx::twice<COLUMN>(scales), rest);
    } else {
      pair = Codes<bfloat16_t>::multiply(pair, ptx::twice<COLUMN>(scales));
    }
  }
};
