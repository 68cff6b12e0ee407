// SPDX-License-Identifier: Apache-2.0
// Prepares a decode step on a paged KV cache from one int32 array of the host, so that a captured step can be replayed
// for any rows:
//
//   rows    int32 [m, 5]: sequence of the row as a row of the table, or -1 for a padding row; position of its token;
//           block of the cache before that of the position; block of the position; token, or -1 for the newest one
//   newest  int32 [sequences], the newest token of each sequence, which sample_token writes
//   table   int32 [sequences, width], written at the two blocks; row 0 is that of padding rows
//   tokens  int32 [m], the token of each row; 0 for padding rows
//   lengths int32 [m], the position of each row; -1 for padding rows
//   slots   int32 [m], the sequence of each row; 0 for padding rows
//   work    int4, what attention computes: with RANGES, the ranges of keys of decode_attention (key_ranges.cuh); else a
//           tile {row, 1, position, sequence} of each row for attention_mma
//
// Limits: m <= THREADS. Architectures: all. Grid (1, 1, 1), a thread per row; with RANGES then a warp per row, which
// writes its items.
// PDL: launched without it, so that the work list is complete before any kernel of the step starts.
#include "common/warp.cuh"
#include "decoder/key_ranges.cuh"

constexpr bool kHasRanges = RANGES;

static_assert(MAX_SPLITS <= 32, "a lane of a warp writes an item");

// Returns the number of keys per range of a row that attends to `keys` keys, a multiple of a block of the cache. A row
// has about SPLITS equal ranges of at least MIN_SPLIT_KEYS keys, more if they would have more than RANGE_KEYS keys, and
// at most MAX_SPLITS.
__device__ __forceinline__ int range_size(int keys) {
  constexpr int kBlock = 32;  // number of keys in a block of the cache
  if (keys <= UNSPLIT_KEYS) return UNSPLIT_KEYS;
  const int ranges = min(max(SPLITS, ceil_div(keys, RANGE_KEYS)), MAX_SPLITS);
  return max(ceil_div(ceil_div(keys, ranges), kBlock) * kBlock, MIN_SPLIT_KEYS);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    begin_step(const int32_t* rows, const int32_t* newest, int32_t* table, int32_t* tokens, int32_t* lengths,
               int32_t* slots, int4* work, int m, int width) {
  __shared__ int warp_sums[THREADS / 32];
  __shared__ int4 rows_items[kHasRanges ? THREADS : 1];  // of each row {first item, sizes, position, slot}
  const int r = threadIdx.x, lane = r % 32;
  int position = -1, slot = 0, ranges = 0, range_blocks = 0;
  if (r < m) {
    const int32_t* row = rows + 5 * r;
    int token = 0;
    if (row[0] >= 0) {
      slot = row[0], position = row[1];
      const int block = position / 32;
      int32_t* blocks = table + static_cast<int64_t>(slot) * width;
      if (block > 0) blocks[block - 1] = row[2];
      blocks[block] = row[3];
      token = row[4] >= 0 ? row[4] : newest[slot];
    }
    if constexpr (kHasRanges) {
      const int keys = max(position, 0) + 1, size = range_size(keys);
      ranges = ceil_div(keys, size);
      range_blocks = size / 32;
    }
    tokens[r] = token;
    lengths[r] = position;
    slots[r] = slot;
  }
  if constexpr (!kHasRanges) {
    if (r < m) work[r] = int4{r, 1, position, slot};
    return;
  }
  int end = ranges;  // the sum of the ranges of this row and of those before
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, end, step);
    if (lane >= step) end += before;
  }
  if (lane == 31) warp_sums[r / 32] = end;
  __syncthreads();
  for (int warp = 0; warp < r / 32; ++warp) end += warp_sums[warp];
  rows_items[r] = int4{end - ranges, ranges << 8 | range_blocks << 16, position, slot};
  if (r == m - 1) work[0] = int4{end, 0, 0, 0};
  __syncthreads();  // the items of all rows are counted, and the table is written
  for (int row = r / 32; row < m; row += THREADS / 32) {
    const int4 own = rows_items[row];
    if (lane >= (own.y >> 8 & 0xff)) continue;
    const int32_t* blocks = table + static_cast<int64_t>(own.w) * width;
    const int first = lane * (own.y >> 16), last = max(own.z, 0) / 32;
    int4* item = work + kItemWords * (1 + own.x + lane);
    auto place = [&](int i) { return blocks[min(first + i, last)]; };
    item[0] = int4{row, own.y | lane, own.z, own.w};
    item[1] = int4{blocks[last], 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kRangeBlocks; i += 4)
      item[2 + i / 4] = int4{place(i), place(i + 1), place(i + 2), place(i + 3)};
  }
}
