// SPDX-License-Identifier: Apache-2.0
// The code shared by the decode_attention kernels. For one new token of each of m sequences, they compute:
//
//   q, k = RoPE(RMSNorm(q)), RoPE(RMSNorm(k))          rope.cuh; RMSNorm only with QK_NORM
//   k[b, position[b], :], v[b, position[b], :] = k, v    appends to the KV cache
//   out[b, head, :] = sum over p <= position[b] of softmax(scale * q[b, head, :] . k[b, p, :])[p] * v[b, p, :]
//
//   qkv             X [m, heads + 2 * kv_heads, HEAD_DIM]: q, k and v of the new tokens
//   q_norm, k_norm  float32 [HEAD_DIM], or null
//   cos, sin        float32 [capacity, HEAD_DIM / 2], the RoPE factors of every position
//   lengths, slots  not used
//   k, v            the KV cache (kv_cache.cuh). work is the list of key_ranges.cuh; a padding row has position -1 and
//                   is not appended, nor is a token at a position >= capacity
//   out             X [m, heads * HEAD_DIM]; with ORDER_OUT, column i of a row is stored at positions[i]
//   positions       int32 [heads * HEAD_DIM], a permutation; with ORDER_OUT only
//   partials        float32 [m, heads / HEADS, MAX_SPLITS, HEADS, HEAD_DIM + 2]: acc, row_max and row_sum of the splits
//   counters        uint32 [m, heads / HEADS], zero before and after the launch
//
// HEADS query heads, which share a KV head, are a block of heads; there are HEAD_BLOCKS, GROUP_BLOCKS per KV head.
//
// Grid (CTAs, 1, 1): CTAs take turns at the items of the work list, which begin_step writes, so a captured launch can
// be replayed for any lengths. An item is a range of keys of a row, a split, whose size (key_ranges.cuh) depends on the
// length of the row and on m, but not on other rows. So a long row does not delay short ones. Warps, then splits, are
// merged in a fixed order, so results are bit-identical from run to run. With APPENDED, rope_cache has appended k and v
// before, so several rows may be of one sequence; the launch is without PDL.
//
// PDL: `work`, `table` and the cached keys and values are read before griddepcontrol.wait. This is safe
// because a decode step starts with `embed`, which is launched without PDL after all preceding kernels have finished.
#pragma once

#include "decoder/key_ranges.cuh"
#include "decoder/kv_cache.cuh"
#include "decoder/softmax_merge.cuh"
#include "decoder/rope.cuh"
#include "common/kept.cuh"
#include "common/positions.cuh"
#include "ptx/atom.cuh"

constexpr bool kAppended = APPENDED;
constexpr int kHeadBlocks = HEAD_BLOCKS;
constexpr int kGroupBlocks = GROUP_BLOCKS;
constexpr int kKvHeads = kHeadBlocks / kGroupBlocks;
constexpr int kQkvWidth = (kHeadBlocks * kHeads + 2 * kKvHeads) * HEAD_DIM;  // number of values per row of qkv
constexpr int kWarps = THREADS / 32;
constexpr int kMaxSplits = MAX_SPLITS;
// The number of splits that a thread merges at a time: with more, kernels for sm_75 would spill registers.
constexpr int kFetchedSplits = __CUDA_ARCH__ >= 800 ? 16 : 8;
constexpr int kSplitFloats = kHeadDim + 2;  // number of floats per head and split in `partials`: acc, row_max, row_sum

static_assert(kMaxSplits <= 32, "one lane of a warp computes the factor of one split");
static_assert(kMaxSplits % kFetchedSplits == 0, "the last splits that a thread merges are within the bounds");

// The items of work of a CTA, one after the other: a range of the keys of a row, for one block of query heads.
struct Items {
  // `block` < kRangeBlocks is the block of each range whose entry of the block table the thread needs.
  __device__ __forceinline__ Items(const int4* work, int block) : work(work + kItemWords), block(block), i(blockIdx.x) {
    load(i);  // with the number of items: the list has room for one per CTA
    count = load_kept(&work->x) * kHeadBlocks;
    take();
  }

  // Returns whether the CTA has an item.
  __device__ __forceinline__ bool any() const { return i < count; }

  // Goes to the next item; returns false after the last one. It reuses the shared memory: a CTA barrier is between the
  // last reads of each array by an item and the writes of the next one.
  __device__ __forceinline__ bool next() {
    i += gridDim.x;
    if (i >= count) return false;
    take();
    return true;
  }

  // Returns the index of the row and its block of heads in `partials` and `counters`.
  __device__ __forceinline__ int index() const { return row * kHeadBlocks + head_block; }

  int row, head_block, split, splits, split_keys, position, slot;
  int block_place, new_place;  // the entries of the block table for the thread's block, and for the position

 private:
  // Takes the item that has been loaded, and loads the one after it while this one is computed.
  __device__ __forceinline__ void take() {
    row = next_item.x, position = next_item.z, slot = next_item.w;
    block_place = next_block_place, new_place = next_new_place;
    split = next_item.y & 0xff, splits = next_item.y >> 8 & 0xff, split_keys = (next_item.y >> 16) * kBlockKeys;
    head_block = i % kHeadBlocks;
    if (i + gridDim.x < count) load(i + gridDim.x);
  }
  __device__ __forceinline__ void load(uint32_t i) {
    const int4* item = work + i / kHeadBlocks * kItemWords;
    next_item = load_kept(item);
    next_new_place = load_kept(&item[1].x);
    next_block_place = load_kept(reinterpret_cast<const int32_t*>(item + 2) + block);
  }

  const int4* work;
  int block;
  uint32_t i, count;
  int4 next_item;
  int next_block_place, next_new_place;
};

// What a lane needs to rotate and normalize the new token: RoPE factors and RMSNorm weights, loaded before the PDL
// wait.
struct TokenFactors {
  Pairs rotation, q_weight = {}, k_weight = {};

  __device__ __forceinline__ TokenFactors(const float* cos, const float* sin, const float* q_norm, const float* k_norm)
      : rotation(Pairs::load(cos, sin)) {
    if constexpr (kNorm) {
      q_weight = Pairs::load(q_norm, q_norm + kHalf);
      k_weight = Pairs::load(k_norm, k_norm + kHalf);
    }
  }

  // Applies RMSNorm and RoPE to the query heads of this CTA, each warp to one head at a time, and passes the results to
  // take(head, pairs). If `appends`, also writes the new key and value to shared memory (new_key, new_value) and,
  // unless the row `is_padding`, to the cache.
  template <class Take> __device__ __forceinline__ void rotate_and_append(const X* qkv, int head_block, float eps,
                                                                          bool appends, bool is_padding, X* new_key,
                                                                          X* new_value, X* k, X* v, Take take) const {
    for (int unit = threadIdx.x / 32; unit < kHeads + (appends ? 2 : 0); unit += kWarps) {
      const bool is_q = unit < kHeads, is_v = unit == kHeads + 1;
      const int kv_row = kHeadBlocks * kHeads + (is_v ? kKvHeads : 0) + head_block / kGroupBlocks;
      const X* in = qkv + (is_q ? head_block * kHeads + unit : kv_row) * kHeadDim;
      Pairs pairs = Pairs::load(in, in + kHalf);
      if (is_q) {
        pairs.norm_and_rotate(q_weight, rotation, eps);
        take(unit, pairs);
      } else {
        if (!is_v) pairs.norm_and_rotate(k_weight, rotation, eps);
        pairs.store(is_v ? new_value : new_key);
        if (!is_padding) pairs.store(is_v ? v : k);
      }
    }
  }
};

// Increments `counter` and returns the number of CTAs that arrived earlier. One thread calls this function between two
// CTA barriers. Writes of the CTA before the first barrier become visible to CTAs that arrive later; writes of CTAs
// that arrived earlier are visible to this CTA after the second barrier.
__device__ __forceinline__ uint32_t count_arrival(uint32_t* counter) {
#if __CUDA_ARCH__ >= 750
  return ptx::atom_add_acq_rel(counter, 1u);
#else
  __threadfence();
  const uint32_t earlier = atomicAdd(counter, 1u);
  __threadfence();
  return earlier;
#endif
}

// Where the heads of a CTA lie in a row of `out`.
struct Output {
  __device__ __forceinline__ Output(X* out, const int32_t* positions, int row, int head_block)
      : begin(out + (static_cast<int64_t>(row) * kHeadBlocks + (ORDER_OUT ? 0 : head_block)) * kHeads * kHeadDim),
        positions(positions + head_block * kHeads * kHeadDim) {}

  // Stores two adjacent values, columns i and i + 1 of this CTA's heads, to `out`.
  __device__ __forceinline__ void store_pair(int i, float first, float second) const {
    if constexpr (ORDER_OUT) {
      begin[positions[i]] = from_float<X>(first);
      begin[positions[i + 1]] = from_float<X>(second);
    } else {
      store<true>(begin + i, Vector<X, 2>{from_float<X>(first), from_float<X>(second)});
    }
  }

  X* begin;
  const int32_t* positions;
};

// Merges the softmaxes of the warps. With a single split, writes the results of the CTA's heads to `out`. Otherwise
// writes the softmaxes of the split to `partials`, and the last CTA of the `item` (Items::index) merges all splits.
__device__ __forceinline__ void merge_splits(const WarpSoftmaxes& warp_softmaxes, int split, int splits,
                                             const Output& out, float* partials, uint32_t* counters, int item) {
  __shared__ float factors[kHeads][kMaxSplits];
  __shared__ bool is_last;
  partials += static_cast<int64_t>(item) * kMaxSplits * kHeads * kSplitFloats;
  uint32_t* const counter = counters + item;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 2 * threadIdx.x; i < kHeads * kHeadDim; i += 2 * THREADS) {
    const int head = i / kHeadDim, d = i % kHeadDim;
    float row_max, row_sum;
    const Vector<float, 2> acc = warp_softmaxes.merge(head, d, row_max, row_sum);
    if (splits == 1) {
      out.store_pair(i, acc.values[0] / row_sum, acc.values[1] / row_sum);
      continue;
    }
    float* partial = partials + (split * kHeads + head) * kSplitFloats;
    __stcg(reinterpret_cast<float2*>(partial + d), float2{acc.values[0], acc.values[1]});
    if (d == 0) __stcg(reinterpret_cast<float2*>(partial + kHeadDim), float2{row_max, row_sum});
  }
  if (splits == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = count_arrival(counter) == splits - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  if (!is_last) return;
  float2 acc[kFetchedSplits];
  auto fetch_acc = [&](int i, int begin) {
#pragma unroll
    for (int j = 0; j < kFetchedSplits; ++j) {
      const float* partial = partials + ((begin + j) * kHeads + i / kHeadDim) * kSplitFloats + i % kHeadDim;
      acc[j] = begin + j < splits ? __ldcg(reinterpret_cast<const float2*>(partial)) : float2{0.0f, 0.0f};
    }
  };
  const int first = 2 * threadIdx.x;
  if (first < kHeads * kHeadDim) fetch_acc(first, 0);
  for (int head = warp; head < kHeads; head += kWarps) {
    float2 softmax = {kMinScore, 0.0f};  // row_max and row_sum of the split that this lane merges
    if (lane < splits) {
      softmax = __ldcg(reinterpret_cast<const float2*>(partials + (lane * kHeads + head) * kSplitFloats + kHeadDim));
    }
    const float factor = exp2f(softmax.x - warp_max(softmax.x));
    const float row_sum = warp_sum(factor * softmax.y);
    if (lane < kMaxSplits) factors[head][lane] = factor / row_sum;
  }
  __syncthreads();
  for (int i = first; i < kHeads * kHeadDim; i += 2 * THREADS) {
    if (i != first) fetch_acc(i, 0);
    float2 merged = {0.0f, 0.0f};
    for (int begin = 0; begin < splits; begin += kFetchedSplits) {
      if (begin > 0) fetch_acc(i, begin);
#pragma unroll
      for (int j = 0; j < kFetchedSplits; ++j) {
        const float factor = factors[i / kHeadDim][begin + j];
        merged.x += factor * acc[j].x;
        merged.y += factor * acc[j].y;
      }
    }
    out.store_pair(i, merged.x, merged.y);
  }
}
