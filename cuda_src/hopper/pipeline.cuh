// SPDX-License-Identifier: Apache-2.0
// The pipeline between a producer warp, which issues copies to shared memory, and its consumer warps.
//
// kNumStages stages form a ring. Each stage has two mbarriers (only `full` in gemm_sm90_raw, see below); shared memory
// holds full [kNumStages], then empty [kNumStages]:
//
//   barrier  a phase completes when                                       who arrives       who waits
//   full     each producer warp has arrived, all expected bytes landed    producer warps    consumers
//   empty    every consumer warp has released the stage                   consumer warps    producer warps
//
// In gemm_int8_sm90 two more warps, and in gemm_w4a8_sm90 up to one, fill the stages with their own stores. The
// producer of gemm_sm90 also waits on the full barriers if it limits the copies in flight to fewer than all stages;
// each of these waits precedes the next copies to the stage.
//
// Phases. The hardware counts the phases of a barrier from 0 and starts the next phase when one completes. A wait names
// the parity of the phase that it expects, and returns once this phase has completed. The expected parity is a variable
// of the waiting warp (`phase` of PipelineState), which flips with each pass over the ring:
//
//   use of the stage      1st   2nd   3rd
//   full: consumers wait   0     1     0     ...  the copies of this use have landed
//   empty: producer waits  1     0     1     ...  the previous use has been released
//
// A wait on a fresh barrier with parity 1 returns at once: phase 0 is in progress, and mbarrier.try_wait.parity takes
// the other parity for the preceding phase, which is complete by definition. So a producer starts with phase 1 and the
// first pass over the ring finds all stages empty; a consumer starts with phase 0 and blocks until copies have landed.
//
// No wait passes early. Phases i and i - 2 have the same parity, so a wait for phase i returns at once, wrongly, while
// phase i - 1 is in progress. That cannot happen: every waiting warp waits for each phase of its stage in turn, so it
// has seen phase i - 1 complete. This requires that each stage has a fixed set of consumer warps; kernels whose
// consumers take turns at the stages static_assert kNumStages % CONSUMERS == 0. A producer whose prologue fills every
// stage without a wait (gemm_sm90, gemm_w4a8_sm90) skips only the wait for the phase before phase 0,
// which is complete by definition.
//
// No wait misses its phase: phase i + 1 of a full barrier completes only after the producer has arrived. Before this
// arrival, the producer waits for a release of the stage by every consumer warp, and a consumer warp releases the stage
// only after its wait for phase i of the full barrier.
//
// gemm_sm90_raw has full barriers only, because each warp is the producer and the consumer of its own ring. Both
// arguments hold without empty barriers: only the warp that waits for phase i starts the copies of phase i + 1, after
// this wait and after a __syncwarp. So phase i + 1 cannot complete before all lanes have seen phase i complete.
//
// The expected parity flips only in this file: in the advance functions of PipelineState and PipelineAddresses, and
// PipelineState::producer_at computes it. The only mbarrier that belongs to no ring is that of PartialSumBarrier
// (cluster_reduction.cuh), which completes a single phase, phase 0.
//
// Usage:
//
//   Pipeline<kStages, Barriers::kBegin> pipeline{shared_begin};
//
//   producer warp                                        consumer warps
//   auto state = PipelineState<kStages>::producer();     auto state = PipelineState<kStages>::consumer();
//   for each k tile:                                     for each k tile:
//     pipeline.producer_acquire(state);                    pipeline.consumer_wait(state);
//     if (is_leader) {                                     ... read stage state.stage_idx ...
//       const uint32_t full_barrier =                      pipeline.consumer_release(state.stage_idx, lane);
//           pipeline.full_barrier(state.stage_idx);        state.advance();
//       ptx::mbarrier_arrive_expect_tx(full_barrier, bytes);
//       ... copies that signal full_barrier ...
//     }
//     state.advance();
//
// Template parameters in this folder are named kLikeThis, because the kernels' constants (STAGES, ...) are macros.
#pragma once

#include "common/types.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// Blocks until the phase with parity `phase` (0 or 1) of the mbarrier at shared address `barrier` has completed.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t phase) {
  while (!ptx::mbarrier_try_wait_parity(barrier, phase)) {
  }
}

// A position in the ring: the stage, and `phase`, the expected parity of the stage's barrier.
template <int kNumStages> struct PipelineState {
  int stage_idx;
  uint32_t phase;

  // Returns the initial state of a warp that waits on empty barriers: the warp does not block in the first pass over
  // the ring.
  static __device__ constexpr PipelineState producer() { return {0, 1}; }
  // Returns the initial state of a warp that waits on full barriers: it blocks until the first copies have landed.
  static __device__ constexpr PipelineState consumer(int stage_idx = 0) { return {stage_idx, 0}; }

  // Returns the state of a producer that has advanced `iteration` times.
  static __device__ __forceinline__ constexpr PipelineState producer_at(int iteration) {
    return {iteration % kNumStages, (iteration / kNumStages & 1u) ^ 1u};
  }

  // In advance, advance_by_branch and advance_by, after the last stage the index wraps to 0 and the expected parity
  // flips. ptxas allocates different numbers of registers for the three, so each kernel uses the one that suits its
  // main loop.
  //
  // Advances to the next stage.
  __device__ __forceinline__ constexpr void advance() {
    *this = stage_idx + 1 == kNumStages ? PipelineState{0, phase ^ 1u} : PipelineState{stage_idx + 1, phase};
  }
  // Advances to the next stage with a branch instead of a select, which needs fewer registers in the convolutions.
  __device__ __forceinline__ void advance_by_branch() {
    if (++stage_idx == kNumStages) {
      stage_idx = 0;
      phase ^= 1u;
    }
  }
  // Advances by `count` stages, at most kNumStages, for consumers that take turns at the stages.
  __device__ __forceinline__ constexpr void advance_by(int count) {
    stage_idx += count;
    if (stage_idx >= kNumStages) {
      stage_idx -= kNumStages;
      phase ^= 1u;
    }
  }

  __device__ __forceinline__ int previous_stage() const { return stage_idx == 0 ? kNumStages - 1 : stage_idx - 1; }
};

constexpr int kBarrierBytes = 8;

// The PipelineState of a consumer with the byte offset of the stage and the address of its full barrier in place of the
// stage index, for loops without registers to compute these addresses.
template <int kNumStages, int kStageBytes> struct PipelineAddresses {
  uint32_t stage_offset;
  uint32_t full_barrier;
  uint32_t phase;

  // Advances to the next stage. `full_barriers` is the address of the full barrier of stage 0.
  __device__ __forceinline__ void advance(uint32_t full_barriers) {
    stage_offset += kStageBytes;
    full_barrier += kBarrierBytes;
    if (stage_offset == kNumStages * kStageBytes) {
      stage_offset = 0;
      full_barrier = full_barriers;
      phase ^= 1u;
    }
  }
};

// The full and empty barriers of a ring: 2 * kNumStages * kBarrierBytes bytes at byte offset kOffset of shared memory.
template <int kNumStages, int kOffset> struct Pipeline {
  using State = PipelineState<kNumStages>;

  uint32_t shared_begin;  // shared address of the first byte of dynamic shared memory, where offsets begin

  __device__ __forceinline__ uint32_t full_barrier(int stage_idx) const {
    return shared_begin + kOffset + stage_idx * kBarrierBytes;
  }
  __device__ __forceinline__ uint32_t empty_barrier(int stage_idx) const {
    return full_barrier(kNumStages + stage_idx);
  }

  // Initializes the barriers of one stage. `full_arrivals` is 1 for the producer, plus 1 for each warp that fills
  // the stage with its own stores. `empty_arrivals` is the number of consumer warps in all CTAs that receive this
  // CTA's copies. Before the first use, fence_mbarrier_init must follow and the CTA must synchronize; the whole
  // cluster if other CTAs signal these barriers.
  __device__ __forceinline__ void init_stage(int stage_idx, int full_arrivals, int empty_arrivals) const {
    ptx::mbarrier_init(full_barrier(stage_idx), full_arrivals);
    ptx::mbarrier_init(empty_barrier(stage_idx), empty_arrivals);
  }
  // Initializes the barriers of all stages; one thread calls this before any warp waits.
  __device__ __forceinline__ void init(int full_arrivals, int empty_arrivals) const {
#pragma unroll
    for (int stage_idx = 0; stage_idx < kNumStages; ++stage_idx) init_stage(stage_idx, full_arrivals, empty_arrivals);
  }

  // Blocks until the consumers have released the stage.
  __device__ __forceinline__ void producer_acquire(const State& state) const {
    wait(empty_barrier(state.stage_idx), state.phase);
  }

  // Blocks until the copies of the stage have landed.
  __device__ __forceinline__ void consumer_wait(const State& state) const {
    wait(full_barrier(state.stage_idx), state.phase);
  }
  // Releases a stage once all lanes of the warp have read it.
  __device__ __forceinline__ void consumer_release(int stage_idx, int lane) const {
    release(empty_barrier(stage_idx), lane);
  }

  // Returns the address of the empty barriers [kNumStages] at which lane `lane` arrives if kClusterSize CTAs fill the
  // stages by multicast: lane i arrives at the barriers of CTA first_rank + i of the cluster.
  template <int kClusterSize>
  __device__ __forceinline__ uint32_t cluster_empty_barriers(int lane, int first_rank = 0) const {
    return kClusterSize == 1 ? empty_barrier(0) : ptx::mapa(empty_barrier(0), first_rank + lane % kClusterSize);
  }
  // Arrives at an empty barrier once all lanes of the warp have read the stage. With kClusterSize > 1, lane i arrives
  // in CTA i, and `barrier` is an address from cluster_empty_barriers.
  template <int kClusterSize = 1> static __device__ __forceinline__ void release(uint32_t barrier, int lane) {
    __syncwarp();
    if constexpr (kClusterSize == 1) {
      if (lane == 0) ptx::mbarrier_arrive(barrier);
    } else {
      if (lane < kClusterSize) ptx::mbarrier_arrive_cluster(barrier);
    }
  }
};
