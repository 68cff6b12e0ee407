// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (wgmma), with A in registers, B in
// shared memory with K contiguous, and float32 accumulators; sm_90a only.
//
// Warp w of the warpgroup holds rows 16 w .. 16 w + 15 of the 64 rows of A and D, in the fragments of mma m16n8k16
// (ptx/mma.cuh): a[0 .. 3], and d[4 j .. 4 j + 3] for columns 8 j .. 8 j + 7.
//
// B is N rows of 128 bytes (64 values along k) with the 128-byte swizzle of TMA. `b` is the matrix descriptor of B,
// plus 2 for each step of 16 along k within the 128 bytes. The hardware swizzles by address bits, so B may start at any
// row of a TMA box that starts at a multiple of 1024 bytes, and STRIDE may be any number of rows. A descriptor is a
// 64-bit integer, because an addition then takes one instruction on uniform registers; assembling a descriptor from two
// words takes three.
#pragma once

namespace ptx {

// wgmma.fence: orders this warpgroup's register accesses before those of the following wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: commits all wgmma instructions since the last call as one group.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: waits until at most the last PENDING groups are pending.
template <int PENDING> __device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Returns the matrix descriptor of a matrix at a shared address, which is a multiple of 16. STRIDE is the stride byte
// offset: the stride in bytes between adjacent groups of 8 rows. The fields are address / 16 in bits 0 .. 13,
// STRIDE / 16 in bits 32 .. 45, and 1 in bits 62 .. 63 for the 128-byte swizzle.
template <unsigned STRIDE = 1024> __device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned address) {
  return 1ull << 62 | static_cast<unsigned long long>(STRIDE / 16) << 32 | address / 16;
}

// clang-format off
// The N / 2 accumulators of a wgmma in the text of an asm statement (WGMMA_TEXT_N) and among its operands, each with
// the constraint C (WGMMA_D_N). Each list extends the preceding one by the four accumulators of 8 columns.
#define WGMMA_4(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define WGMMA_TEXT_8 "%0, %1, %2, %3"
#define WGMMA_D_8(C) WGMMA_4(C, 0)
#define WGMMA_TEXT_16 WGMMA_TEXT_8 ", %4, %5, %6, %7"
#define WGMMA_D_16(C) WGMMA_D_8(C), WGMMA_4(C, 4)
#define WGMMA_TEXT_24 WGMMA_TEXT_16 ", %8, %9, %10, %11"
#define WGMMA_D_24(C) WGMMA_D_16(C), WGMMA_4(C, 8)
#define WGMMA_TEXT_32 WGMMA_TEXT_24 ", %12, %13, %14, %15"
#define WGMMA_D_32(C) WGMMA_D_24(C), WGMMA_4(C, 12)
#define WGMMA_TEXT_40 WGMMA_TEXT_32 ", %16, %17, %18, %19"
#define WGMMA_D_40(C) WGMMA_D_32(C), WGMMA_4(C, 16)
#define WGMMA_TEXT_48 WGMMA_TEXT_40 ", %20, %21, %22, %23"
#define WGMMA_D_48(C) WGMMA_D_40(C), WGMMA_4(C, 20)
#define WGMMA_TEXT_56 WGMMA_TEXT_48 ", %24, %25, %26, %27"
#define WGMMA_D_56(C) WGMMA_D_48(C), WGMMA_4(C, 24)
#define WGMMA_TEXT_64 WGMMA_TEXT_56 ", %28, %29, %30, %31"
#define WGMMA_D_64(C) WGMMA_D_56(C), WGMMA_4(C, 28)
#define WGMMA_TEXT_72 WGMMA_TEXT_64 ", %32, %33, %34, %35"
#define WGMMA_D_72(C) WGMMA_D_64(C), WGMMA_4(C, 32)
#define WGMMA_TEXT_80 WGMMA_TEXT_72 ", %36, %37, %38, %39"
#define WGMMA_D_80(C) WGMMA_D_72(C), WGMMA_4(C, 36)
#define WGMMA_TEXT_88 WGMMA_TEXT_80 ", %40, %41, %42, %43"
#define WGMMA_D_88(C) WGMMA_D_80(C), WGMMA_4(C, 40)
#define WGMMA_TEXT_96 WGMMA_TEXT_88 ", %44, %45, %46, %47"
#define WGMMA_D_96(C) WGMMA_D_88(C), WGMMA_4(C, 44)
#define WGMMA_TEXT_104 WGMMA_TEXT_96 ", %48, %49, %50, %51"
#define WGMMA_D_104(C) WGMMA_D_96(C), WGMMA_4(C, 48)
#define WGMMA_TEXT_112 WGMMA_TEXT_104 ", %52, %53, %54, %55"
#define WGMMA_D_112(C) WGMMA_D_104(C), WGMMA_4(C, 52)
#define WGMMA_TEXT_120 WGMMA_TEXT_112 ", %56, %57, %58, %59"
#define WGMMA_D_120(C) WGMMA_D_112(C), WGMMA_4(C, 56)
#define WGMMA_TEXT_128 WGMMA_TEXT_120 ", %60, %61, %62, %63"
#define WGMMA_D_128(C) WGMMA_D_120(C), WGMMA_4(C, 60)
#define WGMMA_TEXT_136 WGMMA_TEXT_128 ", %64, %65, %66, %67"
#define WGMMA_D_136(C) WGMMA_D_128(C), WGMMA_4(C, 64)
#define WGMMA_TEXT_144 WGMMA_TEXT_136 ", %68, %69, %70, %71"
#define WGMMA_D_144(C) WGMMA_D_136(C), WGMMA_4(C, 68)
#define WGMMA_TEXT_152 WGMMA_TEXT_144 ", %72, %73, %74, %75"
#define WGMMA_D_152(C) WGMMA_D_144(C), WGMMA_4(C, 72)
#define WGMMA_TEXT_160 WGMMA_TEXT_152 ", %76, %77, %78, %79"
#define WGMMA_D_160(C) WGMMA_D_152(C), WGMMA_4(C, 76)
#define WGMMA_TEXT_168 WGMMA_TEXT_160 ", %80, %81, %82, %83"
#define WGMMA_D_168(C) WGMMA_D_160(C), WGMMA_4(C, 80)
#define WGMMA_TEXT_176 WGMMA_TEXT_168 ", %84, %85, %86, %87"
#define WGMMA_D_176(C) WGMMA_D_168(C), WGMMA_4(C, 84)
#define WGMMA_TEXT_184 WGMMA_TEXT_176 ", %88, %89, %90, %91"
#define WGMMA_D_184(C) WGMMA_D_176(C), WGMMA_4(C, 88)
#define WGMMA_TEXT_192 WGMMA_TEXT_184 ", %92, %93, %94, %95"
#define WGMMA_D_192(C) WGMMA_D_184(C), WGMMA_4(C, 92)
#define WGMMA_TEXT_200 WGMMA_TEXT_192 ", %96, %97, %98, %99"
#define WGMMA_D_200(C) WGMMA_D_192(C), WGMMA_4(C, 96)
#define WGMMA_TEXT_208 WGMMA_TEXT_200 ", %100, %101, %102, %103"
#define WGMMA_D_208(C) WGMMA_D_200(C), WGMMA_4(C, 100)
#define WGMMA_TEXT_216 WGMMA_TEXT_208 ", %104, %105, %106, %107"
#define WGMMA_D_216(C) WGMMA_D_208(C), WGMMA_4(C, 104)
#define WGMMA_TEXT_224 WGMMA_TEXT_216 ", %108, %109, %110, %111"
#define WGMMA_D_224(C) WGMMA_D_216(C), WGMMA_4(C, 108)
#define WGMMA_TEXT_232 WGMMA_TEXT_224 ", %112, %113, %114, %115"
#define WGMMA_D_232(C) WGMMA_D_224(C), WGMMA_4(C, 112)
#define WGMMA_TEXT_240 WGMMA_TEXT_232 ", %116, %117, %118, %119"
#define WGMMA_D_240(C) WGMMA_D_232(C), WGMMA_4(C, 116)
#define WGMMA_TEXT_248 WGMMA_TEXT_240 ", %120, %121, %122, %123"
#define WGMMA_D_248(C) WGMMA_D_240(C), WGMMA_4(C, 120)
#define WGMMA_TEXT_256 WGMMA_TEXT_248 ", %124, %125, %126, %127"
#define WGMMA_D_256(C) WGMMA_D_248(C), WGMMA_4(C, 124)

// Defines wgmma.mma_async.m64nNk16: d = a * b (+ d if ACCUMULATE), where d has N / 2 accumulators. A0 .. A3, B and
// P are the operand numbers of a, b and ACCUMULATE in the asm statement, where the operands of d come first.
#define WGMMA(NAME, TYPE, N, A0, A1, A2, A3, B, P) \
  template <bool ACCUMULATE> \
  __device__ __forceinline__ void NAME(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P ", 0;" \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_TEXT_##N "}, " \
      "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0;}" \
      : WGMMA_D_##N("+f") \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACCUMULATE ? 1 : 0)); \
  }
#define WGMMA_TYPES(N, ...) \
  WGMMA(wgmma_f16, "f16", N, __VA_ARGS__) \
  WGMMA(wgmma_bf16, "bf16", N, __VA_ARGS__)

WGMMA_TYPES(8, 4, 5, 6, 7, 8, 9)
WGMMA_TYPES(16, 8, 9, 10, 11, 12, 13)
WGMMA_TYPES(24, 12, 13, 14, 15, 16, 17)
WGMMA_TYPES(32, 16, 17, 18, 19, 20, 21)
WGMMA_TYPES(40, 20, 21, 22, 23, 24, 25)
WGMMA_TYPES(48, 24, 25, 26, 27, 28, 29)
WGMMA_TYPES(56, 28, 29, 30, 31, 32, 33)
WGMMA_TYPES(64, 32, 33, 34, 35, 36, 37)
WGMMA_TYPES(72, 36, 37, 38, 39, 40, 41)
WGMMA_TYPES(80, 40, 41, 42, 43, 44, 45)
WGMMA_TYPES(88, 44, 45, 46, 47, 48, 49)
WGMMA_TYPES(96, 48, 49, 50, 51, 52, 53)
WGMMA_TYPES(104, 52, 53, 54, 55, 56, 57)
WGMMA_TYPES(112, 56, 57, 58, 59, 60, 61)
WGMMA_TYPES(120, 60, 61, 62, 63, 64, 65)
WGMMA_TYPES(128, 64, 65, 66, 67, 68, 69)
WGMMA_TYPES(136, 68, 69, 70, 71, 72, 73)
WGMMA_TYPES(144, 72, 73, 74, 75, 76, 77)
WGMMA_TYPES(152, 76, 77, 78, 79, 80, 81)
WGMMA_TYPES(160, 80, 81, 82, 83, 84, 85)
WGMMA_TYPES(168, 84, 85, 86, 87, 88, 89)
WGMMA_TYPES(176, 88, 89, 90, 91, 92, 93)
WGMMA_TYPES(184, 92, 93, 94, 95, 96, 97)
WGMMA_TYPES(192, 96, 97, 98, 99, 100, 101)
WGMMA_TYPES(200, 100, 101, 102, 103, 104, 105)
WGMMA_TYPES(208, 104, 105, 106, 107, 108, 109)
WGMMA_TYPES(216, 108, 109, 110, 111, 112, 113)
WGMMA_TYPES(224, 112, 113, 114, 115, 116, 117)
WGMMA_TYPES(232, 116, 117, 118, 119, 120, 121)
WGMMA_TYPES(240, 120, 121, 122, 123, 124, 125)
WGMMA_TYPES(248, 124, 125, 126, 127, 128, 129)
WGMMA_TYPES(256, 128, 129, 130, 131, 132, 133)

#undef WGMMA_TYPES
#undef WGMMA
// clang-format on

}
