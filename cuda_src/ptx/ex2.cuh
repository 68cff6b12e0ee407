// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Floating Point Instructions: ex2".
#pragma once

namespace ptx {

// ex2.approx.ftz.f32: returns 2^x to 2 ulp; 0 where the result is subnormal. exp2f takes three more instructions.
__device__ __forceinline__ float ex2(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

}
