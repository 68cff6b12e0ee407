// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Data Movement and Conversion Instructions: cvt", 8-bit floats of type e4m3; sm_89 and newer.
#pragma once

namespace ptx {

// cvt.rn.satfinite.e4m3x2.f32: converts two float32 to e4m3, rounded to nearest even and saturated at +-448; NaN stays
// NaN. `low` becomes the low byte.
__device__ __forceinline__ unsigned short cvt_rn_satfinite_e4m3x2_f32(float low, float high) {
  unsigned short out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}

// cvt.rn.f16x2.e4m3x2: converts two e4m3 to two float16, exactly.
__device__ __forceinline__ unsigned cvt_rn_f16x2_e4m3x2(unsigned short pair) {
  unsigned out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(pair));
  return out;
}

}
