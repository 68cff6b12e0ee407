// SPDX-License-Identifier: Apache-2.0
// PTX ISA: "Miscellaneous Instructions: setmaxnreg". sm_90a alone; the whole warpgroup calls it.
#pragma once

namespace ptx {

// setmaxnreg.inc: waits until the warps may have COUNT registers a thread.
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// setmaxnreg.dec: gives back all but COUNT registers a thread.
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

}  // namespace ptx
