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
// The accumulators of a wgmma in the text of an asm statement (WGMMA_TEXT_N) and among its operands (WGMMA_LIST_N), for
// N / 2 accumulators. Each list extends the preceding one by the four accumulators of 8 columns.
#define WGMMA_TEXT_8 "%0, %1, %2, %3"
#define WGMMA_LIST_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_TEXT_16 WGMMA_TEXT_8 ", %4, %5, %6, %7"
#define WGMMA_LIST_16 WGMMA_LIST_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define WGMMA_TEXT_24 WGMMA_TEXT_16 ", %8, %9, %10, %11"
#define WGMMA_LIST_24 WGMMA_LIST_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_TEXT_32 WGMMA_TEXT_24 ", %12, %13, %14, %15"
#define WGMMA_LIST_32 WGMMA_LIST_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define WGMMA_TEXT_40 WGMMA_TEXT_32 ", %16, %17, %18, %19"
#define WGMMA_LIST_40 WGMMA_LIST_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define WGMMA_TEXT_48 WGMMA_TEXT_40 ", %20, %21, %22, %23"
#define WGMMA_LIST_48 WGMMA_LIST_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WGMMA_TEXT_56 WGMMA_TEXT_48 ", %24, %25, %26, %27"
#define WGMMA_LIST_56 WGMMA_LIST_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define WGMMA_TEXT_64 WGMMA_TEXT_56 ", %28, %29, %30, %31"
#define WGMMA_LIST_64 WGMMA_LIST_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WGMMA_TEXT_72 WGMMA_TEXT_64 ", %32, %33, %34, %35"
#define WGMMA_LIST_72 WGMMA_LIST_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_TEXT_80 WGMMA_TEXT_72 ", %36, %37, %38, %39"
#define WGMMA_LIST_80 WGMMA_LIST_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WGMMA_TEXT_88 WGMMA_TEXT_80 ", %40, %41, %42, %43"
#define WGMMA_LIST_88 WGMMA_LIST_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define WGMMA_TEXT_96 WGMMA_TEXT_88 ", %44, %45, %46, %47"
#define WGMMA_LIST_96 WGMMA_LIST_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WGMMA_TEXT_104 WGMMA_TEXT_96 ", %48, %49, %50, %51"
#define WGMMA_LIST_104 WGMMA_LIST_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define WGMMA_TEXT_112 WGMMA_TEXT_104 ", %52, %53, %54, %55"
#define WGMMA_LIST_112 WGMMA_LIST_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define WGMMA_TEXT_120 WGMMA_TEXT_112 ", %56, %57, %58, %59"
#define WGMMA_LIST_120 WGMMA_LIST_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define WGMMA_TEXT_128 WGMMA_TEXT_120 ", %60, %61, %62, %63"
#define WGMMA_LIST_128 WGMMA_LIST_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define WGMMA_TEXT_136 WGMMA_TEXT_128 ", %64, %65, %66, %67"
#define WGMMA_LIST_136 WGMMA_LIST_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WGMMA_TEXT_144 WGMMA_TEXT_136 ", %68, %69, %70, %71"
#define WGMMA_LIST_144 WGMMA_LIST_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define WGMMA_TEXT_152 WGMMA_TEXT_144 ", %72, %73, %74, %75"
#define WGMMA_LIST_152 WGMMA_LIST_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define WGMMA_TEXT_160 WGMMA_TEXT_152 ", %76, %77, %78, %79"
#define WGMMA_LIST_160 WGMMA_LIST_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define WGMMA_TEXT_168 WGMMA_TEXT_160 ", %80, %81, %82, %83"
#define WGMMA_LIST_168 WGMMA_LIST_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define WGMMA_TEXT_176 WGMMA_TEXT_168 ", %84, %85, %86, %87"
#define WGMMA_LIST_176 WGMMA_LIST_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define WGMMA_TEXT_184 WGMMA_TEXT_176 ", %88, %89, %90, %91"
#define WGMMA_LIST_184 WGMMA_LIST_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define WGMMA_TEXT_192 WGMMA_TEXT_184 ", %92, %93, %94, %95"
#define WGMMA_LIST_192 WGMMA_LIST_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define WGMMA_TEXT_200 WGMMA_TEXT_192 ", %96, %97, %98, %99"
#define WGMMA_LIST_200 WGMMA_LIST_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define WGMMA_TEXT_208 WGMMA_TEXT_200 ", %100, %101, %102, %103"
#define WGMMA_LIST_208 WGMMA_LIST_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define WGMMA_TEXT_216 WGMMA_TEXT_208 ", %104, %105, %106, %107"
#define WGMMA_LIST_216 WGMMA_LIST_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define WGMMA_TEXT_224 WGMMA_TEXT_216 ", %108, %109, %110, %111"
#define WGMMA_LIST_224 WGMMA_LIST_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define WGMMA_TEXT_232 WGMMA_TEXT_224 ", %112, %113, %114, %115"
#define WGMMA_LIST_232 WGMMA_LIST_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define WGMMA_TEXT_240 WGMMA_TEXT_232 ", %116, %117, %118, %119"
#define WGMMA_LIST_240 WGMMA_LIST_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define WGMMA_TEXT_248 WGMMA_TEXT_240 ", %120, %121, %122, %123"
#define WGMMA_LIST_248 WGMMA_LIST_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define WGMMA_TEXT_256 WGMMA_TEXT_248 ", %124, %125, %126, %127"
#define WGMMA_LIST_256 WGMMA_LIST_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// Defines wgmma.mma_async.m64nNk16: d = a * b (+ d if ACCUMULATE), where d has N / 2 accumulators. A0 .. A3, B and
// P are the operand numbers of a, b and ACCUMULATE in the asm statement, where the operands of d come first.
#define WGMMA(NAME, TYPE, N, A0, A1, A2, A3, B, P) \
  template <bool ACCUMULATE> \
  __device__ __forceinline__ void NAME(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P ", 0;" \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_TEXT_##N "}, " \
      "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0;}" \
      : WGMMA_LIST_##N \
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

}  // namespace ptx
