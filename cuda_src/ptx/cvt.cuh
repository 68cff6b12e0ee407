// SPDX-License-Identifier: Apache-2.0
// Conversions between float types (PTX ISA, "Data Movement and Conversion Instructions: cvt").
#pragma once

namespace ptx {

// cvt.f32.f16: converts a float16 to float32, exactly.
__device__ __forceinline__ float cvt_f32_f16(unsigned short value) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
  return out;
}

// cvt.rn.f16.f32: converts a float32 to float16, rounded to nearest even; overflow gives infinity.
__device__ __forceinline__ unsigned short cvt_rn_f16_f32(float value) {
  unsigned short out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}

// cvt.rn.bf16.f32: converts a float32 to bfloat16, rounded to nearest even; sm_80 and newer.
__device__ __forceinline__ unsigned short cvt_rn_bf16_f32(float value) {
  unsigned short out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}

}
