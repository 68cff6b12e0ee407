// SPDX-License-Identifier: Apache-2.0
// The repacked layout of a weight for sm_90: codes, scales and zero points in the order in which tensor cores consume
// them.
//
// A weight tile is 32 columns x 128 k, contiguous in memory. The weight tiles of the same columns (a tile column) are
// adjacent in the order of k, so one copy can load several k tiles of a tile column:
//
//   weight [ceil(n / 128) * 4 tile columns][ceil(k / 128)] weight tiles
//
// A weight tile is
//
//   codes   uint32 [2 of k64][2 of 16 columns][32 lanes][4 of k16]: 16 bytes per lane and k64. With g = lane / 4 and
//           t = lane % 4, a word holds register i of operand A of wgmma and mma (ptx/mma.cuh) as two codes, at bits 4 i
//           and 16 + 4 i:
//             i = 0: column g,     k 2t     and 2t + 1
//             i = 1: column g + 8, k 2t     and 2t + 1
//             i = 2: column g,     k 2t + 8 and 2t + 9
//             i = 3: column g + 8, k 2t + 8 and 2t + 9
//   groups  [GROUPS][2 of 16 columns]: SCALE [8 of g][2: columns g, g + 8], then, with packed zero points,
//           uint8 [8 of g][2: columns g, g + 8]; or then, with offsets (ZEROS = kOffset, SCALE = X), SCALE [8 of g][2]:
//           W[k, n] = (q[k, n] - 8) * s + o
//
// A weight of 8-bit codes (BITS = 8, offsets or no zero points, SCALE = X) has the same tiles and groups, and
//
//   codes   uint32 [2 of k64][2 of 16 columns][2 of k32][32 lanes][2 of k16][2]: the first word of a pair holds
//           registers i = 0 and 1, the second word i = 2 and 3. The bytes of a word are the first values of both
//           registers, then the second values, as unpack_bytes expects.
//           W[k, n] = (q[k, n] - 128) * s + o
//
// GROUPS is the number of groups per weight tile, 128 / group_size. If a group spans several weight tiles, GROUPS is 1
// and each of the tiles has a copy of the scales and zero points. Columns past n and rows past k have codes and scales
// of zero.
//
// The host's description is `FragmentLayout` in kernels/gemm/layouts.py.
#pragma once

#include "common/mma.cuh"
#include "dequantize/unpack_bytes.cuh"
#include "ptx/ld_shared.cuh"

// The zero point of codes with offsets. conv2d_gemm.py defines it: the codes of blocks are (q - 8) * s + o.
#ifndef OFFSET_ZERO
#define OFFSET_ZERO 0
#endif

constexpr int kWeightTileN = 32;
constexpr int kWeightTileK = 128;
constexpr int kCodeBytes = kWeightTileN * kWeightTileK / 2;

// The layout as constants of the host: RepackedLayout<SCALE, Zeros::ZEROS, GROUPS>. A kernel's Config inherits it.
template <class ScaleType, Zeros kZeroPoints, int kGroupCount, int kCodeBits = 4> struct RepackedLayout {
  using Scale = ScaleType;
  static constexpr int kBits = kCodeBits;
  static constexpr int kTileCodeBytes = kWeightTileN * kWeightTileK * kBits / 8;
  static constexpr Zeros kZeros = kZeroPoints;
  static constexpr int kGroups = kGroupCount;
  // The size in bytes of scales and zero points, or of scales and offsets, of 16 columns.
  static constexpr int kHalfGroupBytes = kZeros == Zeros::kPacked ? 48 : kZeros == Zeros::kOffset ? 64 : 32;
  static constexpr int kGroupBytes = 2 * kHalfGroupBytes;
  static constexpr int kWeightTileBytes = kTileCodeBytes + kGroups * kGroupBytes;

  static_assert(sizeof(Scale) == 2, "scales are 16-bit values");
  static_assert(kBits == 4 || (kBits == 8 && kZeros != Zeros::kPacked), "8-bit codes have offsets or no zero points");
};

// The global addresses of a CTA's weight tiles, indexed relative to the CTA's first tile column and k tile. An index
// past the last tile column is clamped: a CTA tile that extends past n copies the last tile column again and does not
// store the results.
template <class C> struct TileColumns {
  int last;              // index of the last tile column, relative to the CTA's first one
  int64_t column_bytes;  // size in bytes of a tile column, the weight tiles of the same 32 columns
  const uint8_t* begin;  // address of the CTA's first weight tile

  __device__ __forceinline__ TileColumns(const uint8_t* weight, int first_column, int first_k_tile, int n, int k)
      : last(ceil_div(n, kWeightTileN) - 1 - first_column),
        column_bytes(ceil_div(k, kWeightTileK) * C::kWeightTileBytes),
        begin(weight + first_column * column_bytes + first_k_tile * C::kWeightTileBytes) {}
  __device__ __forceinline__ const uint8_t* tile(int column, int k_tile) const {
    return begin + min(column, last) * column_bytes + k_tile * C::kWeightTileBytes;
  }
};

// The scales and zero points of one group for the two columns of a lane: g and g + 8 of 16 columns.
template <class C> struct Group {
  uint32_t scales;   // the scales of columns g and g + 8, two values of type Scale
  uint32_t zeros;    // the zero points of both columns, in the two lowest bytes
  uint32_t offsets;  // the offsets of both columns, of type Scale; 0 without offsets

  // The zero points of a weight without packed ones.
  static constexpr uint32_t kFixedZeros = C::kZeros == Zeros::kOffset ? OFFSET_ZERO * 0x0101u : 0x0808u;

  // Loads group `group` of a weight tile. `scales` and `zeros` are the shared addresses of this lane's values in the
  // first group of the tile.
  static __device__ __forceinline__ Group load_shared(uint32_t scales, uint32_t zeros, int group) {
    return {ptx::ld_shared_u32(scales + group * C::kGroupBytes),
            C::kZeros == Zeros::kPacked ? ptx::ld_shared_u16(zeros + group * C::kGroupBytes) : kFixedZeros,
            C::kZeros == Zeros::kOffset ? ptx::ld_shared_u32(scales + 32 + group * C::kGroupBytes) : 0u};
  }
  __device__ __forceinline__ float scale(int upper) const {
    return to_float(typename C::Scale{static_cast<uint16_t>(scales >> (16 * upper))});
  }
  __device__ __forceinline__ float zero(int upper) const { return static_cast<float>((zeros >> (8 * upper)) & 255u); }
};

// Converts codes to operand A without rounding: a value is (q - z) / kUnit. The zero points of a lane's two columns are
// passed as two values of type T in one register.
template <class T> struct ExactCodes;

template <> struct ExactCodes<half_t> {
  // As the bits of a float16, a code in the lowest four bits is the subnormal q * 2^-24, a code four bits higher is
  // q * 2^-20. One fma scales either of them to q * 2^-9 and subtracts z * 2^-9.
  static constexpr float kUnit = 512.0f;
  static constexpr uint32_t k2Pow15 = 0x78007800u, k2Pow11 = 0x68006800u, kMinus2PowMinus9 = 0x98009800u;
  static constexpr uint32_t kTwo = 0x40004000u;

  // Converts two zero points z (bytes) to float16 -z * 2^-9 = (1024 + z) * -2^-9 + 2.
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

template <> struct ExactCodes<bfloat16_t> {
  // The method of float16 fails for bfloat16: with 7 mantissa bits, a code at bits 4 .. 7 would reach into the
  // exponent. So q is OR-ed into the bits of 128, and 128 + z is subtracted: see int4.cuh.
  static constexpr float kUnit = 1.0f;

  // Converts two zero points z (bytes) to bfloat16 -(128 + z).
  static __device__ __forceinline__ uint32_t zeros(uint32_t bytes) { return __byte_perm(bytes, 0xc3u, 0x4140); }
  static __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word, uint32_t zeros) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      a[2 * upper] = Codes<bfloat16_t>::low(word >> (8 * upper), ptx::twice<0>(zeros));
      a[2 * upper + 1] = Codes<bfloat16_t>::low(word >> (8 * upper + 4), ptx::twice<1>(zeros));
    }
  }
};

// Converts codes to operand A with one rounding: a value is ((q - z) * scale + offset) * factor. `factor` is a power of
// two that moves all scales into T's normal range, at most 2^15 if the scales are float16.
template <class T, class C, bool kHasHalfOffsets = C::kZeros == Zeros::kOffset && kIsHalf<typename C::Scale>>
struct ScaledCodes;

template <class C, bool kHasHalfOffsets> struct ScaledCodes<half_t, C, kHasHalfOffsets> {
  static constexpr uint32_t kMinusOne = 0xbc00bc00u, k960 = 0x63806380u;

  struct Factor {
    float value;
    uint32_t pair;

    explicit __device__ __forceinline__ Factor(float factor)
        : value(factor), pair(from_float<half_t>(factor).bits * 0x10001u) {}
  };

  uint32_t lows, highs;  // pairs 1024 + z and -(64 + z) for the two ways in which int4.cuh converts codes
  uint32_t scales;
  uint32_t offsets;

  ScaledCodes() = default;
  __device__ __forceinline__ ScaledCodes(const Group<C>& group, const Factor& factor)
      : lows(__byte_perm(group.zeros, 0x64u, 0x4140)), highs(ptx::fma_f16x2(lows, kMinusOne, k960)) {
    scales = scaled(group.scales, factor);
    if constexpr (C::kZeros == Zeros::kOffset) offsets = scaled(group.offsets, factor);
  }
  __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const uint32_t part = word >> (8 * upper);
      a[2 * upper] = scale<0>(Codes<half_t>::low(part, ptx::twice<0>(lows)));
      a[2 * upper + 1] = scale<1>(Codes<half_t>::high(part, ptx::twice<1>(highs)));
    }
  }
  // Converts eight 8-bit codes.
  __device__ __forceinline__ void convert(uint32_t (&a)[4], const uint32_t (&words)[2]) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      uint32_t pairs[2];
      unpack_bytes<half_t>(pairs, words[upper]);
      a[2 * upper] = scale<0>(pairs[0]);
      a[2 * upper + 1] = scale<1>(pairs[1]);
    }
  }

 private:
  // Multiplies two scales or offsets by the factor.
  static __device__ __forceinline__ uint32_t scaled(uint32_t pair, const Factor& factor) {
    if constexpr (kIsHalf<typename C::Scale>) return ptx::mul_f16x2(pair, factor.pair);
    const float lower = to_float(typename C::Scale{static_cast<uint16_t>(pair)});
    const float upper = to_float(typename C::Scale{static_cast<uint16_t>(pair >> 16)});
    return from_float<half_t>(upper * factor.value).bits * 0x10000u + from_float<half_t>(lower * factor.value).bits;
  }
  template <int UPPER> __device__ __forceinline__ uint32_t scale(uint32_t pair) const {
    if constexpr (C::kZeros == Zeros::kOffset) {
      return ptx::fma_f16x2(pair, ptx::twice<UPPER>(scales), ptx::twice<UPPER>(offsets));
    } else {
      return ptx::mul_f16x2(pair, ptx::twice<UPPER>(scales));
    }
  }
};

template <class C> struct ScaledCodes<bfloat16_t, C, false> {
  struct Factor {
    float value;
    uint32_t pair;

    explicit __device__ __forceinline__ Factor(float factor)
        : value(factor), pair(from_float<bfloat16_t>(factor).bits * 0x10001u) {}
  };

  uint32_t zeros;
  uint32_t scales;
  uint32_t scale_tails;
  uint32_t offsets;

  ScaledCodes() = default;
  __device__ __forceinline__ ScaledCodes(const Group<C>& group, const Factor& factor)
      : zeros(ExactCodes<bfloat16_t>::zeros(group.zeros)) {
    if constexpr (kIsHalf<typename C::Scale>) {
      // A float16 scale has 11 significant bits: one bfloat16 holds the upper eight, a second one the lower three. Both
      // products with q - z are exact, so only their sum is rounded.
      uint32_t heads[2], tails[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = group.scale(i) * factor.value;
        heads[i] = __float_as_uint(scale);
        tails[i] = __float_as_uint(scale - __uint_as_float(heads[i] & 0xffff0000u));
      }
      scales = __byte_perm(heads[0], heads[1], 0x7632);
      scale_tails = __byte_perm(tails[0], tails[1], 0x7632);
    } else {
      scales = Codes<bfloat16_t>::multiply(group.scales, factor.pair);
    }
    if constexpr (C::kZeros == Zeros::kOffset) offsets = Codes<bfloat16_t>::multiply(group.offsets, factor.pair);
  }
  __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) const {
    ExactCodes<bfloat16_t>::convert(a, word, zeros);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      scale<0>(a[2 * upper]);
      scale<1>(a[2 * upper + 1]);
    }
  }
  // Converts eight 8-bit codes.
  __device__ __forceinline__ void convert(uint32_t (&a)[4], const uint32_t (&words)[2]) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      uint32_t pairs[2];
      unpack_bytes<bfloat16_t>(pairs, words[upper]);
      scale<0>(pairs[0]);
      scale<1>(pairs[1]);
      a[2 * upper] = pairs[0];
      a[2 * upper + 1] = pairs[1];
    }
  }

 private:
  template <int UPPER> __device__ __forceinline__ void scale(uint32_t& pair) const {
    if constexpr (kIsHalf<typename C::Scale>) {
      const uint32_t tail = Codes<bfloat16_t>::multiply(pair, ptx::twice<UPPER>(scale_tails));
      pair = Codes<bfloat16_t>::multiply_add(pair, ptx::twice<UPPER>(scales), tail);
    } else if constexpr (C::kZeros == Zeros::kOffset) {
      pair = Codes<bfloat16_t>::multiply_add(pair, ptx::twice<UPPER>(scales), ptx::twice<UPPER>(offsets));
    } else {
      pair = Codes<bfloat16_t>::multiply(pair, ptx::twice<UPPER>(scales));
    }
  }
};

// With float16 scales and offsets, a weight is rounded to float16, eight times finer than to bfloat16, before.
template <class C> struct ScaledCodes<bfloat16_t, C, true> : ScaledCodes<half_t, C> {
  using ScaledCodes<half_t, C>::ScaledCodes;

  template <class Words> __device__ __forceinline__ void convert(uint32_t (&a)[4], const Words& words) const {
    ScaledCodes<half_t, C>::convert(a, words);
#pragma unroll
    for (uint32_t& pair : a) {
      const float lower = to_float(half_t{static_cast<uint16_t>(pair)});
      const float upper = to_float(half_t{static_cast<uint16_t>(pair >> 16)});
      pair = from_float<bfloat16_t>(upper).bits * 0x10000u + from_float<bfloat16_t>(lower).bits;
    }
  }
};
