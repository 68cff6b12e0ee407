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
//   work    int4 [1 + items], what attention computes: with RANGES, {items, 0, 0, 0} and then {row, range, position,
//           sequence} of each range of keys (key_ranges.cuh), the work list of decode_attention; else a tile {row, 1,
//           position, sequence} of each row for attention_mma
//
// Limits: m <= THREADS. Architectures: all. Grid (1, 1, 1), a thread per row.
// PDL: launched without it, so that the work list is complete before any kernel of the step starts.
#include "common/warp.cuh"
#include "decoder/key_ranges.cuh"

constexpr bool kHasRanges = RANGES;

extern "C" __global__ void __launch_bounds__(THREADS)
    begin_step(const int32_t* rows, const int32_t* newest, int32_t* table, int32_t* tokens, int32_t* lengths,
               int32_t* slots, int4* work, int m, int width) {
  __shared__ int warp_sums[THREADS / 32];
  const int r = threadIdx.x, lane = r % 32;
  int position = -1, slot = 0, ranges = 0;
  if (r < m) {
    const int32_t* row = rows + 5 * r;
    ranges = 1;
    int token = 0;
    if (row[0] >= 0) {
      slot = row[0], position = row[1];
      const int block = position / 32;
      int32_t* blocks = table + static_cast<int64_t>(slot) * width;
      if (block > 0) blocks[block - 1] = row[2];
      blocks[block] = row[3];
      token = row[4] >= 0 ? row[4] : newest[slot];
      if constexpr (kHasRanges) ranges = ceil_div(position + 1, range_size(position + 1));
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
  for (int i = 0; i < ranges; ++i) work[1 + end - ranges + i] = int4{r, i, position, slot};
  if (r == m - 1) work[0] = int4{end, 0, 0, 0};
}
