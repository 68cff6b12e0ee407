// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Miscellaneous Instructions: setmaxnreg". sm_90a only; all warps of a warpgroup call it.
#pragma once

namespace ptx {

// setmaxnreg.inc: waits until the CTA's pool has enough registers, then raises this warp to COUNT registers per thread.
template <int COUNT> __device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// setmaxnreg.dec: returns all but COUNT registers per thread to the CTA's pool.
template <int COUNT> __device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

}
