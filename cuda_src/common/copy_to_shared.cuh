// SPDX-License-Identifier: Apache-2.0
// Copies of 16 or 4 bytes from global to shared memory, for pipeline stages. If `valid` is false, zeros are written and
// nothing is read.
#pragma once

#include "ptx/cp_async.cuh"
#include "common/types.cuh"

// Copies through registers, for architectures without cp.async. The data is visible after the next CTA barrier.
struct CopyDirect {
  template <class T>
  __device__ __forceinline__ void start(uint32_t shared_address, const void* source, bool valid) const {
    T value = {};
    if (valid) value = *static_cast<const T*>(source);
    *static_cast<T*>(__cvta_shared_to_generic(shared_address)) = value;
  }
  __device__ __forceinline__ void start_16(uint32_t shared_address, const void* source, bool valid) const {
    start<Vector<uint32_t, 4>>(shared_address, source, valid);
  }
  __device__ __forceinline__ void start_4(uint32_t shared_address, const void* source, bool valid) const {
    start<uint32_t>(shared_address, source, valid);
  }
  __device__ __forceinline__ void commit() const {}
  template <int PENDING> __device__ __forceinline__ void wait() const {}
};

// Copies with cp.async; sm_80 and newer.
struct CopyAsync {
  __device__ __forceinline__ void start_16(uint32_t shared_address, const void* source, bool valid) const {
    ptx::cp_async_16(shared_address, source, valid ? 16 : 0);
  }
  __device__ __forceinline__ void start_4(uint32_t shared_address, const void* source, bool valid) const {
    ptx::cp_async_4(shared_address, source, valid ? 4 : 0);
  }
  __device__ __forceinline__ void commit() const { ptx::cp_async_commit_group(); }
  template <int PENDING> __device__ __forceinline__ void wait() const { ptx::cp_async_wait_group<PENDING>(); }
};
