// SPDX-License-Identifier: Apache-2.0
// The layout of a kernel's dynamic shared memory, declared once as a struct named SharedStorage:
//
//   struct SharedStorage {
//     using XStages = SharedArray<0, kStages, kXStageBytes>;
//     using WeightStages = SharedArray<XStages::kEnd, kStages, kWeightStageBytes>;
//     using Barriers = SharedArray<WeightStages::kEnd, 2 * kStages, kBarrierBytes>;
//     static constexpr int kBytes = Barriers::kEnd;
//
//     uint32_t begin;  // the shared address of the first byte
//     __device__ __forceinline__ uint32_t x(int stage_idx) const { return XStages::at(begin, stage_idx); }
//     __device__ __forceinline__ Pipeline<kStages, Barriers::kBegin> pipeline() const { return {begin}; }
//   };
//   ASSERT_SHARED_BYTES(SharedStorage, Host::kSharedBytes);
//
// The host computes the size from the configuration and passes it as the constant SHARED_BYTES; the kernel does not
// compile if kBytes differs.
#pragma once

#include "common/types.cuh"

// An array in shared memory: kCount elements of kElementBytes bytes each, from byte offset kFirst; kEnd is its end.
template <int kFirst, int kCount, int kElementBytes> struct SharedArray {
  static constexpr int kBegin = kFirst;
  static constexpr int kBytes = kCount * kElementBytes;
  static constexpr int kEnd = kFirst + kBytes;

  // Returns the shared address of element `index`, if dynamic shared memory begins at `begin`.
  static __device__ __forceinline__ uint32_t at(uint32_t shared_begin, int index = 0) {
    return shared_begin + kFirst + index * kElementBytes;
  }
};

#define ASSERT_SHARED_BYTES(STORAGE, HOST_BYTES) \
  static_assert(STORAGE::kBytes == HOST_BYTES, "SharedStorage and shared_bytes of the host's configuration differ")
