// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions": wgmma as in ptx/wgmma.cuh, but with
// both operands in shared memory; sm_90a only. A has 64 rows and B has N rows, each of 128 bytes (64 values along k)
// with the 128-byte swizzle of TMA. `a` and `b` are the matrix descriptors of A and B, plus 2 for each step of 16 along
// k within the 128 bytes.
#pragma once

#include "ptx/wgmma.cuh"

namespace ptx {

// clang-format off
// The names %0, %1, ... of COUNT accumulators.
#define PTX_NAMES_28 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27"
#define PTX_NAMES_32 PTX_NAMES_28 ", " \
  "%28, %29, %30, %31"
#define PTX_NAMES_56 PTX_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55"
#define PTX_NAMES_64 PTX_NAMES_56 ", " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define PTX_NAMES_100 PTX_NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99"
#define PTX_NAMES_128 PTX_NAMES_100 ", " \
  "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, " \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The accumulators as operands of the asm statement.
#define PTX_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PTX_12(i) PTX_4(i), PTX_4(i + 4), PTX_4(i + 8)
#define PTX_D28 PTX_4(0), PTX_12(4), PTX_12(16)
#define PTX_D32 PTX_D28, PTX_4(28)
#define PTX_D56 PTX_D32, PTX_12(32), PTX_12(44)
#define PTX_D64 PTX_D56, PTX_4(56), PTX_4(60)
#define PTX_D100 PTX_D64, PTX_12(64), PTX_12(76), PTX_12(88)
#define PTX_D128 PTX_D100, PTX_12(100), PTX_12(112), PTX_4(124)

// wgmma.mma_async.m64nNk16: computes d += a * b. COUNT is the number of accumulators per thread, so N = 2 * COUNT; A
// and B are the asm names of the two descriptors, which follow the accumulators.
#define PTX_WGMMA(TYPE, N, COUNT, A, B)                                                                            \
  __device__ __forceinline__ void wgmma_##TYPE(float (&d)[COUNT], unsigned long long a, unsigned long long b) {    \
    asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0;"                                                             \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE " {"                                       \
      PTX_NAMES_##COUNT "}, " A ", " B ", p, 1, 1, 0, 0;}"                                                         \
      : PTX_D##COUNT : "l"(a), "l"(b));                                                                            \
  }
#define PTX_WGMMA_TYPES(N, COUNT, A, B) PTX_WGMMA(f16, N, COUNT, A, B) PTX_WGMMA(bf16, N, COUNT, A, B)
PTX_WGMMA_TYPES(56, 28, "%28", "%29")
PTX_WGMMA_TYPES(64, 32, "%32", "%33")
PTX_WGMMA_TYPES(112, 56, "%56", "%57")
PTX_WGMMA_TYPES(128, 64, "%64", "%65")
PTX_WGMMA_TYPES(200, 100, "%100", "%101")
PTX_WGMMA_TYPES(256, 128, "%128", "%129")
#undef PTX_WGMMA_TYPES
#undef PTX_WGMMA
// clang-format on

}  // namespace ptx
