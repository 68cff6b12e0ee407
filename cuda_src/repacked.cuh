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

// Codes to the registers of operand A: (q - z) / kUnit, exactly.
template <class T>
struct RepackedCodes;

template <>
struct RepackedCodes<half_t> {
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
struct RepackedCodes<bfloat16_t> {
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
