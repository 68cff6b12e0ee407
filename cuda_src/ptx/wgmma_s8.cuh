// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (wgmma), with both int8 operands in
// shared memory with K contiguous, and int32 accumulators; sm_90a only. ptx/wgmma.cuh has the fences and groups.
//
// A has 64 rows and B has N rows, each of 128 bytes (128 values along k) with the 128-byte swizzle of TMA. `a` and `b`
// are the matrix descriptors (wgmma_descriptor) of A and B, plus 2 for each step of 32 along k within the 128 bytes.
// Warp w of the warpgroup holds rows 16 w .. 16 w + 15 of D: d[4 j .. 4 j + 3] for columns 8 j .. 8 j + 7, as in mma
// m16n8k32 (ptx/mma_s8.cuh).
#pragma once

namespace ptx {

// clang-format off
// wgmma.mma_async.m64n64k32 with int8: computes d = a * b.
__device__ __forceinline__ void wgmma_s8_first(int (&d)[32], unsigned long long a, unsigned long long b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;"
    "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
    "%32, %33, p;}"
    : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]), "=r"(d[4]), "=r"(d[5]), "=r"(d[6]), "=r"(d[7]), "=r"(d[8]),
      "=r"(d[9]), "=r"(d[10]), "=r"(d[11]), "=r"(d[12]), "=r"(d[13]), "=r"(d[14]), "=r"(d[15]), "=r"(d[16]),
      "=r"(d[17]), "=r"(d[18]), "=r"(d[19]), "=r"(d[20]), "=r"(d[21]), "=r"(d[22]), "=r"(d[23]), "=r"(d[24]),
      "=r"(d[25]), "=r"(d[26]), "=r"(d[27]), "=r"(d[28]), "=r"(d[29]), "=r"(d[30]), "=r"(d[31])
    : "l"(a), "l"(b));
}

// wgmma.mma_async.m64n64k32 with int8: computes d += a * b.
__device__ __forceinline__ void wgmma_s8(int (&d)[32], unsigned long long a, unsigned long long b) {
  asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0;"
    "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
    "%32, %33, p;}"
    : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),
      "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]),
      "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]),
      "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
    : "l"(a), "l"(b));
}
// clang-format on

}  // namespace ptx
