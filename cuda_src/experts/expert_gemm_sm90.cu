// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM of a mixture of experts on repacked weights, for many rows per expert, with wgmma: the main loop of
// gemm_sm90_large.cu with gathered rows of x. For each sorted pair p:
//
//   y[p, n] = activation(sum over k of x[p / x_divisor, k] * W[e, k, n] + bias[e, n]) * row_weights[p]
//
//   weight         the repacked layout of repacked_layout.cuh of each expert: uint8 [experts][expert_bytes]
//   bias           BIAS [experts, n] or null
//   row_weights    float32 [pairs], read if HAS_ROW_WEIGHTS
//   y              X [pairs, n] (gated: [pairs, n / 2]), row stride ldy values
//   sorted_pairs, expert_ids, sorted_count   the arrays of sort_tokens.cu with blocks of route_block pairs
//   partials       float32, with stream_k: accumulators of tiles that CTAs share, see reduce_shared_unit
//   counters       uint32, zero before and after the launch: the number of claimed tiles; with stream_k, those of
//                  reduce_shared_unit follow
//   x              X [rows, k], row stride ldx values; rows start at multiples of 16 bytes and lie within 2^31 values
//   scale_factor, result_factor   see gemm_sm90_large.cu
//
// Limits: k % 64 == 0; n % 8 == 0 (gated: n % 64 == 0); route_block % BLOCK_M == 0; sm_90a. Pairs of experts outside
// [0, experts) have no row of y.
//
// CTAs are persistent, as only the GPU knows the number of tiles: a tile is a unit (BLOCK_M rows of one expert) times
// WARPGROUPS * M64_TILES * 64 columns, or fewer rows: HEIGHTS are BLOCK_M and the other heights that have a main loop.
// With stream_k, CTAs share the k tiles of the first tiles (tile_scheduler.cuh), so that no SM idles where tiles are
// few. A CTA claims its other tiles, but for the first, one by one, as low tiles take less time. TMA cannot gather
// rows, so x is copied by cp.async. Behind the consumers,
//
//   three row warps   find out the tiles and their rows, copy x to the stages, and the weight by TMA
//   one signaler      waits for the copies of x and announces each stage to the consumers. Only its fence orders the
//                     copies before wgmma reads them; in the row warps, a fence would wait for copies in flight
//
//   barrier          a phase completes when                                                who waits
//   copied [stage]   cp.async of each thread of the row warps has landed, thread 0 arrived signaler
//   full [stage]     the signaler has arrived, the weight has landed                       consumers
//   empty [stage]    all consumer warps have released the stage                            row warps
#include "common/tile_scheduler.cuh"
#include "experts/expert_gemm_sm90.cuh"
#include "gemm/gemm_sm90_large_mainloop.cuh"
#include "hopper/swizzle.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence_proxy.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/redux.cuh"
#include "ptx/setmaxnreg.cuh"

static_assert(__CUDA_ARCH__ == 900, "expert_gemm_sm90 needs sm_90a");

struct Config : EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, false>,
                RepackedLayout<SCALE, Zeros::ZEROS, GROUPS> {
  using T = X;  // type of x and y
  static constexpr bool kStreamK = true, kHasRowWeights = HAS_ROW_WEIGHTS;
  static constexpr int kCluster = 1, kStoreRows = 16;
  static constexpr int kBlockM = BLOCK_M, kStages = STAGES, kWarpgroups = WARPGROUPS, kM64Tiles = M64_TILES;
  static constexpr int kTiles = TILES;  // number of tiles in shared memory: of those that have a stage, and one before
  static constexpr int kAllSharedBytes = SHARED_BYTES;
  static constexpr int kSharedBytes = SHARED_BYTES - TILES * (48 + 12 * BLOCK_M) - STAGES * 8;
};
using Kernel = ExpertGemmSm90<Config>;

// The role of the row warps.
template <class C> struct RowWarps {
  using T = typename C::T;
  static constexpr int kThreads = C::kRowThreads;
  static constexpr int kBarrier = 1 + C::kWarpgroups;
  static constexpr int kMine = ceil_div(C::kBlockM, kThreads);  // number of rows of a tile that a thread announces

  typename C::SharedStorage shared;
  const int32_t* sorted_pairs;
  const int32_t* expert_ids;
  const float* row_weights;
  const T* x;
  int pairs, experts, x_divisor, ldx, k;
  uint32_t* claims;
  int units_per_id;  // number of units for each element of expert_ids
  typename C::Scheduler scheduler;
  unsigned reciprocal = 0xffffffffu / x_divisor;
  int thread = threadIdx.x % 128;
  int warp = uniform_warp() % 4;  // warp-uniform to the compiler, unlike thread / 32
  bool is_leader = ptx::elect();
  // The expert, pairs and row weights of the scheduler's tile, the next to announce, loaded early.
  bool has_next = false;
  int claimed = 0;  // in thread 0
  int expert = -1;
  int my_pairs[kMine];
  float my_weights[kMine];

  __device__ __forceinline__ bool exists(int pair) const {
    return static_cast<unsigned>(pair) < static_cast<unsigned>(pairs);
  }
  // Returns pair / x_divisor, with fewer registers than a division.
  __device__ __forceinline__ int x_row(int pair) const {
    const int quotient = __umulhi(pair, reciprocal);  // exact or 1 less
    return quotient + (pair - quotient * x_divisor >= x_divisor);
  }
  __device__ __forceinline__ void load_next() {
    has_next = scheduler.advance();
    if (!has_next) return;
    const int unit = scheduler.tile(0).m_block;
    expert = expert_ids[unit / units_per_id];
    const int32_t* source = sorted_pairs + unit * C::kBlockM;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int row = thread + i * kThreads;
      my_pairs[i] = row < C::kBlockM ? source[row] : -1;
    }
  }
  __device__ __forceinline__ void load_weights() {
    if (!C::kHasRowWeights || !has_next) return;
#pragma unroll
    for (int i = 0; i < kMine; ++i) my_weights[i] = exists(my_pairs[i]) ? row_weights[my_pairs[i]] : 0.0f;
  }

  // Writes what other warps need of the next tile, and returns the end of its rows.
  __device__ __forceinline__ int announce(typename C::Tile& tile) const {
    unsigned end = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int row = thread + i * kThreads;
      if (row >= C::kBlockM) break;
      const bool is_pair = exists(my_pairs[i]) && static_cast<unsigned>(expert) < static_cast<unsigned>(experts);
      if (is_pair) end = row + 1;
      tile.pairs[row] = is_pair ? my_pairs[i] : -1;
      tile.x[row / 8 * 8 + row % 2 * 4 + row / 2 % 4] = is_pair ? x_row(my_pairs[i]) * (2u * ldx) : 0;
      if constexpr (C::kHasRowWeights) tile.weights[row] = my_weights[i];
    }
    end = ptx::redux_sync_max(end);
    if (thread % 32 == 0) tile.ends[thread / 32] = end;
    if (thread == 0) {
      tile.n_block = scheduler.tile(0).n_block;
      tile.expert = expert;
      tile.k_tile_begin = scheduler.k_tile_begin;
      tile.k_tile_end = scheduler.k_tile_end;
      tile.unit = scheduler.unit;
      tile.first_cta = -1;
      if (scheduler.has_last_k_tile()) {
        tile.first_cta = scheduler.adds_partial_sums() ? scheduler.first_sharer() : scheduler.cluster_idx;
      }
    }
    sync();
    return tile.end();
  }
  // Claims the next tile of this CTA, if none that is its own is left; share_claim() tells all row warps which one.
  __device__ __forceinline__ void claim() {
    const int claimable = scheduler.m_blocks * scheduler.n_blocks - scheduler.stream_k_units;
    if (thread == 0 && is_claiming()) claimed = atomicInc(claims, claimable - 1);
  }
  __device__ __forceinline__ void share_claim(typename C::Tile& tile) {
    if (thread == 0) tile.claimed = claimed;
    sync();
    if (is_claiming()) scheduler.next_own_unit = scheduler.stream_k_units + gridDim.x + tile.claimed;
  }
  __device__ __forceinline__ bool is_claiming() const { return scheduler.unit >= scheduler.stream_k_units; }
  static __device__ __forceinline__ void sync() { ptx::barrier_sync(kBarrier, kThreads); }

  // Copies a k tile of the weight; one lane of each row warp issues a part of the copies.
  __device__ __forceinline__ void copy_weight(const TileColumns<C>& columns, int n, int stage_idx, int k_tile) const {
    const uint32_t full_barrier = shared.pipeline().full_barrier(stage_idx);
    if (warp == 0) ptx::mbarrier_arrive_expect_tx(full_barrier, C::kWeightStageBytes);
#pragma unroll
    for (int first = 0; first < C::kWeightTiles; first += C::kRowWarps) {
      const int i = first + warp;
      if (i >= C::kWeightTiles) break;
      // In a gated problem, a warpgroup computes 64 columns of the gate and the matching 64 of the up projection.
      const int column = C::kGated ? i / 2 % 2 * (n / 2 / kWeightTileN) + i / 4 * 2 + i % 2 : i;
      ptx::cp_async_bulk(shared.weight(stage_idx) + i * C::kWeightTileBytes, columns.tile(column, k_tile),
                         C::kWeightTileBytes, full_barrier);
    }
  }

  // Copies 128 k of the rows of a tile, 16 lanes those of a row. Zeros take the place of blocks of 8 rows without
  // pairs, from `end_block` to `blocks`, and of k past the end; of padding among the pairs, row 0 of x does. These
  // warps share the schedulers with the consumers, so the loop must have few instructions: it is unrolled, so that
  // addresses in shared memory differ by constants.
  __device__ __forceinline__ void copy_x(const typename C::Tile& tile, int end_block, int blocks, int stage_idx,
                                         int k_tile) const {
    const int chunk = thread % 16;
    const int odd = thread / 16 % 2;
    const uint32_t target = shared.x(stage_idx) + warp * 1024 + chunk / 8 * C::kXHalfBytes + odd * 128 +
                            (chunk % 8 ^ swizzle_bits(odd)) * 16;
    const uint8_t* source = reinterpret_cast<const uint8_t*>(x) + k_tile * (kWeightTileK * 2) + chunk * 16;
    if (k_tile * kWeightTileK + chunk * 8 >= k) end_block = 0;
    const uint32_t begins_at = static_cast<uint32_t>(__cvta_generic_to_shared(tile.x + warp * 8 + odd * 4));
    uint32_t targets[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) targets[i] = ptx::opaque((target ^ swizzle_bits(2 * i) * 16) + i * 256);
#pragma unroll
    for (int first = 0; first < C::kBlockM / 8; first += C::kRowWarps) {
      const int block = first + warp;
      if (block >= blocks) break;
      uint32_t begins[4];
      ptx::ld_shared(begins, begins_at + first * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::cp_async_16(targets[i] + first * 1024, source + begins[i], block < end_block ? 16 : 0);
      }
    }
  }

  __device__ __forceinline__ void run(const uint8_t* weight, int64_t expert_bytes, typename C::Tile* announced, int n) {
    const auto pipeline = shared.pipeline();
    const auto copied = [&](int stage_idx) { return C::Copied::at(shared.begin, stage_idx); };
    auto state = PipelineState<C::kStages>::producer();
    int slot = 0;
    load_next();
    load_weights();
    while (has_next) {
      pipeline.producer_acquire(state);  // so no other warp reads the tile that had this slot
      typename C::Tile& tile = announced[slot];
      const int end = announce(tile);
      claim();
      if (end == 0) {
        share_claim(tile);  // from here on, only what it shares is read of the slot
        load_next();
        load_weights();
        continue;
      }
      const TileColumns<C> columns(weight + tile.expert * expert_bytes,
                                   tile.n_block * (C::kGated ? C::kWeightTiles / 2 : C::kWeightTiles), 0, n, k);
      const int k_tile_begin = tile.k_tile_begin, k_tile_end = tile.k_tile_end;
      const int blocks = lowest_height<HEIGHTS>(end) / 8;
      for (int k_tile = k_tile_begin; k_tile < k_tile_end; ++k_tile) {
        if (k_tile > k_tile_begin) pipeline.producer_acquire(state);
        if (is_leader) copy_weight(columns, n, state.stage_idx, k_tile);
        copy_x(tile, ceil_div(end, 8), blocks, state.stage_idx, k_tile);
        ptx::cp_async_mbarrier_arrive_noinc(copied(state.stage_idx));
        if (thread == 0) ptx::mbarrier_arrive(copied(state.stage_idx));  // orders `tile` before the signal
        state.advance();
        if (k_tile == k_tile_begin) {
          share_claim(tile);
          load_next();
        }
        if (k_tile == min(k_tile_begin + 1, k_tile_end - 1)) load_weights();
      }
      slot = slot + 1 == C::kTiles ? 0 : slot + 1;
    }
    pipeline.producer_acquire(state);
    ptx::cp_async_mbarrier_arrive_noinc(copied(state.stage_idx));
    if (thread == 0) {
      announced[slot].n_block = -1;
      ptx::mbarrier_arrive(copied(state.stage_idx));
      ptx::mbarrier_arrive(pipeline.full_barrier(state.stage_idx));
    }
  }
};

// The role of the signaler.
template <class C> __device__ __forceinline__ void signal_stages(const typename C::SharedStorage& shared,
                                                                 const typename C::Tile* announced) {
  auto state = PipelineState<C::kStages>::consumer();
  bool has_ended = false;
  for (int slot = 0; !has_ended; slot = slot + 1 == C::kTiles ? 0 : slot + 1) {
    int left = 0;  // number of further stages of the tile
    do {
      wait(C::Copied::at(shared.begin, state.stage_idx), state.phase);
      ptx::fence_proxy_async();
      if (left == 0) {
        has_ended = announced[slot].n_block < 0;
        left = has_ended ? 1 : announced[slot].k_tile_end - announced[slot].k_tile_begin;
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.pipeline().full_barrier(state.stage_idx));
      state.advance();
    } while (--left > 0);
  }
}

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
    expert_gemm_sm90(const uint8_t* weight, const BIAS* bias, const float* row_weights, X* y,
                     const int32_t* sorted_pairs, const int32_t* expert_ids, const int32_t* sorted_count, const X* x,
                     float* partials, uint32_t* counters, int64_t expert_bytes, int pairs, int capacity, int experts,
                     int n, int k, int x_divisor, int route_block, int ldx, int ldy, float scale_factor,
                     float result_factor, int stream_k) {
  using C = Kernel;
  extern __shared__ __align__(1024) uint8_t memory[];
  const C::SharedStorage shared{ptx::opaque(static_cast<uint32_t>(__cvta_generic_to_shared(memory)))};
  auto* announced = reinterpret_cast<C::Tile*>(memory + C::Tiles::kBegin);
  const auto pipeline = shared.pipeline();
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();
  if (warp == C::kConsumerWarps && ptx::elect()) {
    pipeline.init(2, C::kConsumerWarps);
    for (int i = 0; i < C::kStages; ++i) ptx::mbarrier_init(C::Copied::at(shared.begin, i), C::kRowThreads + 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warp < C::kConsumerWarps) {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    WgmmaMainLoop<C> loop(shared, warp, lane, scale_factor);
    auto state = PipelineState<C::kStages>::consumer();
    for (int slot = 0;; slot = slot + 1 == C::kTiles ? 0 : slot + 1) {
      pipeline.consumer_wait(state);
      const C::Tile& tile = announced[slot];
      if (uniform(tile.n_block) < 0) break;
      C::Accumulators accumulators = {};
      run_lowest<HEIGHTS>(loop, accumulators, state, uniform(tile.end()), uniform(tile.k_tile_end - tile.k_tile_begin),
                          lane);
      const int warpgroup = uniform_warp() / 4;  // not in a register during the main loop, which has none left
      const AnnouncedShare<C::Tile> share{tile};
      if (!reduce_shared_unit<C>(accumulators, share, warpgroup, partials, counters + 1)) continue;
      const BIAS* expert_bias = C::kHasBias ? bias + static_cast<int64_t>(tile.expert) * n : nullptr;
      const Epilogue<X, C> epilogue{expert_bias, nullptr, 0, 0, n, 0};
      uint8_t* buffer = memory + C::SharedStorage::StoreBuffers::kBegin + warpgroup * C::kStoreRows * C::kStoreRowBytes;
      store_pairs<C>(accumulators, buffer, tile, warpgroup, epilogue, y, n, ldy, result_factor);
    }
  } else {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (warp < C::kConsumerWarps + C::kRowWarps) {
      ptx::griddepcontrol_wait();
      // The next kernel may read the sorted pairs ahead of its own wait, so it starts after this one.
      ptx::griddepcontrol_launch_dependents();
      const int units = min(*sorted_count, capacity) / C::kBlockM;
      const int n_blocks = ceil_div(C::kGated ? n / 2 : n, C::kWarpgroups * C::kStoreN);
      RowWarps<C> warps{shared,
                        sorted_pairs,
                        expert_ids,
                        row_weights,
                        x,
                        pairs,
                        experts,
                        x_divisor,
                        ldx,
                        k,
                        counters,
                        route_block / C::kBlockM,
                        C::make_scheduler(units, n_blocks, ceil_div(k, kWeightTileK), stream_k)};
      warps.run(weight, expert_bytes, announced, n);
    } else {
      signal_stages<C>(shared, announced);
    }
  }
}
