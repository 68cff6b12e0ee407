// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Parallel Synchronization and Communication Instructions: elect.sync". sm_90 and newer.
#pragma once

namespace ptx {

// elect.sync: returns true in exactly one lane of the warp, the same lane in every call; all lanes must call it. In a
// branch on the result, ptxas emits a TMA copy without a loop over the lanes.
__device__ __forceinline__ bool elect() {
  unsigned out;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  elect.sync _|p, 0xffffffff;\n"
      "  selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(out));
  return out;
}

}
