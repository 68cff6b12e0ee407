// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (wgmma), with e4m3 (8-bit float)
// operands and float32 accumulators; sm_90a only. Operands and fragments are those of ptx/wgmma_s8.cuh.
#pragma once

namespace ptx {

// clang-format off
// wgmma.mma_async.m64n64k32 with e4m3: computes d = a * b.
__device__ __forceinline__ void wgmma_e4m3_first(float (&d)[32], unsigned long long a, unsigned long long b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;"
    "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
    "%32, %33, p, 1, 1;}"
    : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]),
      "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), "=f"(d[16]),
      "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), "=f"(d[24]),
      "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
    : "l"(a), "l"(b));
}

// wgmma.mma_async.m64n64k32 with e4m3: computes d += a * b.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], unsigned long long a, unsigned long long b) {
  asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0;"
    "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
    "%32, %33, p, 1, 1;}"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
    : "l"(a), "l"(b));
}
// clang-format on

}  // namespace ptx
