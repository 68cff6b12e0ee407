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

#include "int4.cuh"

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

// A lane's scales and zero points of one group: columns g and g + 8 of a tile of 16.
struct Group {
  uint32_t scales;  // two SCALE
  uint32_t zeros;   // two bytes

  static __device__ __forceinline__ Group load(const uint8_t* record, int index, int tile, int g) {
    const uint8_t* source = record + kCodeBytes + index * kGroupBytes + tile * kTileGroupBytes;
    const uint32_t zeros = kZeros == Zeros::kPacked ? reinterpret_cast<const uint16_t*>(source + 32)[g] : 0x0808u;
    return {reinterpret_cast<const uint32_t*>(source)[g], zeros};
  }
  __device__ __forceinline__ float scale(int column) const {
    return to_float(SCALE{static_cast<uint16_t>(scales >> (16 * column))});
  }
  __device__ __forceinline__ float zero(int column) const { return static_cast<float>((zeros >> (8 * column)) & 255u); }
};

// Codes to the registers of operand A as (q - z) / kUnit, exactly.
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

  // A byte z of `zeros` in both halves as (1024 + z) * -2^-9 + 2 = -z * 2^-9.
  template <int BYTE>
  static __device__ __forceinline__ uint32_t zero(uint32_t zeros) {
    return ptx::fma_f16x2(__byte_perm(zeros, 0x64u, BYTE == 0 ? 0x4040 : 0x4141), kMinus2PowMinus9, kTwo);
  }
  static __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word, const uint32_t (&zeros)[2]) {
    const uint32_t upper = word >> 8;
    a[0] = ptx::fma_f16x2(word & 0x000f000fu, k2Pow15, zeros[0]);
    a[1] = ptx::fma_f16x2(word & 0x00f000f0u, k2Pow11, zeros[1]);
    a[2] = ptx::fma_f16x2(upper & 0x000f000fu, k2Pow15, zeros[0]);
    a[3] = ptx::fma_f16x2(upper & 0x00f000f0u, k2Pow11, zeros[1]);
  }
};

template <>
struct ExactCodes<bfloat16_t> {
  // bfloat16 has no room for the shifted bits, and its subnormals are too small: 128 + q - (128 + z), see int4.cuh.
  static constexpr float kUnit = 1.0f;

  // A byte z of `zeros` in both halves as -(128 + z).
  template <int BYTE>
  static __device__ __forceinline__ uint32_t zero(uint32_t zeros) {
    return __byte_perm(zeros, 0xc3u, BYTE == 0 ? 0x4040 : 0x4141);
  }
  static __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word, const uint32_t (&zeros)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Codes<bfloat16_t>::low(word >> (4 * i), zeros[i % 2]);
  }
};

// Codes to the registers of operand A by masks alone, as kOffset + q in units of 1 / kUnits of their row (g, g + 8).
// The zero point is subtracted from the sums, in float32: sum x (offset + q) - (offset + z) sum x, where the second sum
// is a product with kOne. What cancels is exact but for the float32 sums themselves.
template <class T>
struct RawCodes;

template <>
struct RawCodes<half_t> {
  // Subnormal numbers, which tensor cores take as they are.
  static constexpr float kOffset = 0.0f;
  static constexpr float kUnits[2] = {16777216.0f, 1048576.0f};
  static constexpr uint32_t kOne = 0x3c003c00u;

  static __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) {
    const uint32_t upper = word >> 8;
    a[0] = word & 0x000f000fu;
    a[1] = word & 0x00f000f0u;
    a[2] = upper & 0x000f000fu;
    a[3] = upper & 0x00f000f0u;
  }
};

template <>
struct RawCodes<bfloat16_t> {
  static constexpr float kOffset = 128.0f;
  static constexpr float kUnits[2] = {1.0f, 1.0f};
  static constexpr uint32_t kOne = 0x3f803f80u;

  static __device__ __forceinline__ void convert(uint32_t (&a)[4], uint32_t word) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ptx::lop3_and_or(word >> (4 * i), 0x000f000fu, Codes<bfloat16_t>::kMagic);
  }
};
