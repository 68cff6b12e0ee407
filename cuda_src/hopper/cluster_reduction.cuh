// SPDX-License-Identifier: Apache-2.0
// Split-K over DSMEM: the CTAs of a cluster compute one tile, each over a slice of K, and exchange partial sums through
// each other's shared memory. Partial sums are added in a fixed order, so results are bit-identical from run to run.
//
//   send_partial_sums, add_all   accumulators of several consumers, in shared memory; an mbarrier of the receiving CTA
//                                counts the bytes, and only this CTA waits
//   reduce_scatter_groups        accumulators in registers; the whole cluster synchronizes after all writes
//
// common/reduce.cuh is the third reduction, through global memory, for CTAs that are not in a cluster.
#pragma once

#include "common/types.cuh"
#include "hopper/cluster.cuh"
#include "hopper/pipeline.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// An mbarrier that counts the bytes of partial sums that CTAs of the cluster write to this CTA's shared memory. It
// completes one phase per launch, phase 0, so waits always expect parity 0.
struct PartialSumBarrier {
  uint32_t barrier;  // shared address of the mbarrier

  // Initialization by one thread: init, fence_mbarrier_init, then expect with the number of bytes that will be written
  // to this CTA. The cluster must synchronize before the first write.
  __device__ __forceinline__ void init() const { ptx::mbarrier_init(barrier, 1); }
  __device__ __forceinline__ void expect(int bytes) const { ptx::mbarrier_arrive_expect_tx(barrier, bytes); }
  // Writes four values to the shared memory of CTA `rank`, at the address that corresponds to `shared_address` in this
  // CTA, and completes their 16 bytes on the barrier of CTA `rank`.
  __device__ __forceinline__ void write(uint32_t rank, uint32_t shared_address, const float (&values)[4]) const {
    ptx::st_async(ptx::mapa(shared_address, rank), values, ptx::mapa(barrier, rank));
  }
  // Blocks until all expected bytes have landed. A CTA must not exit before this wait, because other CTAs still write
  // to its shared memory.
  __device__ __forceinline__ void wait_for_all() const {
    while (!ptx::mbarrier_try_wait_parity_cluster(barrier, 0)) {
    }
  }
};

// How accumulators lie in shared memory, for send_partial_sums and add_all. A layout L has
//
//   kConsumers, kConsumerFloats  number of consumers; floats from one consumer's accumulators to those of the next
//   kSplitK, kReceivedFloats     number of CTAs; floats from the partial sums of one CTA to those of the next
//   kSendsEach                   whether a CTA sends the accumulators of each consumer, not their sum
//   kRankOrder                   whether partial sums are added by rank of the CTA; otherwise, a CTA adds its own first
//   kOwnedRows, kRows            CTA i owns the rows from i * kOwnedRows on, of kRows in all
//   kUnits                       number of float4 of accumulators in the owned rows
//   kRankStep                    distance of the ranks of two CTAs with adjacent slices of K
//   kThreads                     number of threads that call the functions
//   row, column (unit)           the row among the owned rows and the column of the first value of a float4
//   Consumer, Received           the arrangement of a consumer's accumulators, and of a CTA's partial sums:
//                                index(row, column) of the float4 that begins there, and add(out, sums, row, column),
//                                which adds the values of a row, from `column` on, to `out`

// An arrangement of accumulators as rows of kWidth columns; adjacent rows are kRowFloats floats apart.
template <int kWidth, int kRowFloats> struct RowMajorSums {
  using Consumer = RowMajorSums;
  using Received = RowMajorSums;
  static __device__ __forceinline__ uint32_t row(uint32_t unit) { return unit / (kWidth / 4); }
  static __device__ __forceinline__ uint32_t column(uint32_t unit) { return unit % (kWidth / 4) * 4; }
  static __device__ __forceinline__ uint32_t index(uint32_t row, uint32_t column) { return row * kRowFloats + column; }
  template <int kCount>
  static __device__ __forceinline__ void add(float (&out)[kCount], const float* sums, uint32_t row, uint32_t column) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      Vector<float, 4> values;
      load<true>(values, sums + index(row, column + i));
#pragma unroll
      for (int v = 0; v < 4; ++v) out[i + v] += values.values[v];
    }
  }
};

// Sends this CTA's partial sums to the CTAs that own the rows. `split` is the index of its slice of K, and `first_rank`
// the rank of the CTA with the first slice. Rows from `rows` on are not sent. Storage is a SharedStorage with the array
// Received of the partial sums that a CTA receives, and received_barrier().
template <class L, class Storage>
__device__ __forceinline__ void send_partial_sums(const Storage& shared, const float* accumulators, uint32_t split,
                                                  uint32_t first_rank = 0, uint32_t rows = L::kRows) {
  constexpr bool kOneOwner = L::kOwnedRows == L::kRows;
  constexpr bool kSendsAll = L::kOwnedRows * L::kSplitK == L::kRows;
  constexpr uint32_t kUnits = L::kUnits;
  constexpr uint32_t kAll = kOneOwner ? kUnits : (L::kSplitK - 1) * kUnits;
  if constexpr (kOneOwner) {
    if (split == 0) return;
  }
#pragma unroll 4
  for (uint32_t begin = 0; begin < kAll; begin += L::kThreads) {
    const uint32_t index = begin + threadIdx.x;
    if (kAll % L::kThreads != 0 && index >= kAll) break;
    const uint32_t owner = kOneOwner ? 0 : (split + 1 + index / kUnits) % L::kSplitK;
    const uint32_t unit = index % kUnits;
    const uint32_t row = L::row(unit);
    if (!kSendsAll && owner * L::kOwnedRows + row >= rows) continue;
    const uint32_t column = L::column(unit);
    const float* source = accumulators + L::Consumer::index(owner * L::kOwnedRows + row, column);
    float total[4] = {};
    auto send = [&](uint32_t parts, uint32_t part) {
      const uint32_t slot = (split < owner ? split : split - 1) * parts + part;
      const uint32_t target =
          shared.begin + Storage::Received::kBegin + (slot * L::kReceivedFloats + L::Received::index(row, column)) * 4;
      shared.received_barrier().write(first_rank + owner * L::kRankStep, target, total);
    };
#pragma unroll
    for (int consumer = 0; consumer < L::kConsumers; ++consumer) {
      Vector<float, 4> values;
      load<true>(values, source + consumer * L::kConsumerFloats);
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] = L::kSendsEach ? values.values[i] : total[i] + values.values[i];
      if constexpr (L::kSendsEach) send(L::kConsumers, consumer);
    }
    if constexpr (!L::kSendsEach) send(1, 0);
  }
}

// Sets `out` to the sums over all consumers and CTAs, for the columns from `column` of an owned row; called by the
// owner after all of its consumers have stored their accumulators. `received` are the partial sums of the other CTAs.
template <class L, class Storage, int kCount>
__device__ __forceinline__ void add_all(float (&out)[kCount], const Storage& shared, const float* accumulators,
                                        const float* received, uint32_t split, uint32_t row, uint32_t column) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = 0.0f;
#pragma unroll
  for (int consumer = 0; consumer < L::kConsumers; ++consumer) {
    L::Consumer::add(out, accumulators + consumer * L::kConsumerFloats, split * L::kOwnedRows + row, column);
  }
  if constexpr (L::kSplitK > 1) shared.received_barrier().wait_for_all();
  if constexpr (L::kRankOrder) {
    float mine[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      mine[i] = out[i];
      out[i] = 0.0f;
    }
#pragma unroll
    for (int rank = 0; rank < L::kSplitK; ++rank) {
      if (rank == split) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) out[i] += mine[i];
      } else {
        const int other = rank < split ? rank : rank - 1;
        L::Received::add(out, received + other * L::kReceivedFloats, row, column);
      }
    }
  } else {
#pragma unroll
    for (int other = 0; other < (L::kSplitK - 1) * (L::kSendsEach ? L::kConsumers : 1); ++other) {
      L::Received::add(out, received + other * L::kReceivedFloats, row, column);
    }
  }
}

// Sums the accumulators of the kClusterSize CTAs of a cluster. Each thread has kNumGroups groups of 4 accumulators.
// Afterwards CTA `rank` has the totals of kOwnedGroups groups, from group rank * kOwnedGroups. `memory` is shared
// memory float4 [kClusterSize][kNumWarpgroups][kOwnedGroups][128], at the shared address `begin` in every CTA.
template <int kClusterSize, int kNumWarpgroups, int kNumGroups, int kOwnedGroups>
__device__ __forceinline__ void reduce_scatter_groups(float (&totals)[kOwnedGroups * 4], const float* accumulators,
                                                      uint8_t* memory, uint32_t begin, int rank, int warpgroup) {
  auto slot = [&](int from, int group) {
    return ((from * kNumWarpgroups + warpgroup) * kOwnedGroups + group) * 2048 + threadIdx.x % 128 * 16;
  };
#pragma unroll
  for (int group = 0; group < kNumGroups; ++group) {
    const float* mine = accumulators + group * 4;
    const uint32_t target = ptx::mapa(begin + slot(rank, group % kOwnedGroups), group / kOwnedGroups);
    ptx::st_shared_cluster(target, {mine[0], mine[1], mine[2], mine[3]});
  }
  cluster_sync<kClusterSize>();
#pragma unroll
  for (int group = 0; group < kOwnedGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) totals[group * 4 + i] = 0.0f;
    if (rank * kOwnedGroups + group >= kNumGroups) continue;
#pragma unroll
    for (int from = 0; from < kClusterSize; ++from) {
      const auto partial = *reinterpret_cast<const Vector<float, 4>*>(memory + slot(from, group));
#pragma unroll
      for (int i = 0; i < 4; ++i) totals[group * 4 + i] += partial.values[i];
    }
  }
}
