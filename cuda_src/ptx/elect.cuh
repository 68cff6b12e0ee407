// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Parallel Synchronization and Communication Instructions: elect.sync". sm_90 and newer.
#pragma once

namespace ptx {

// elect.sync: true in one lane, always the same, of a warp whose lanes are all here. Where a copy is asked for behind
// it, ptxas makes no loop over the lanes.
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

}  // namespace ptx
