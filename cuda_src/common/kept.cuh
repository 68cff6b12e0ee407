// SPDX-License-Identifier: Apache-2.0
// Loads of small data that every layer of a decode step reads: L2 keeps the data, from sm_80 on, while the weights of a
// layer pass through it.
#pragma once

#include "common/types.cuh"
#include "ptx/cache_hint.cuh"

__device__ __forceinline__ int32_t load_kept(const int32_t* source) {
#if __CUDA_ARCH__ >= 800
  return static_cast<int32_t>(ptx::ld_global_cache_hint(source, ptx::createpolicy_evict_last()));
#else
  return *source;
#endif
}

__device__ __forceinline__ int4 load_kept(const int4* source) {
#if __CUDA_ARCH__ >= 800
  uint32_t words[4];
  ptx::ld_global_cache_hint(words, source, ptx::createpolicy_evict_last());
  return reinterpret_cast<const int4&>(words);
#else
  return *source;
#endif
}
