// SPDX-License-Identifier: Apache-2.0
// The ranges of keys that decode attention on a paged KV cache computes separately and then merges.
#pragma once

#include "common/types.cuh"

// Returns the number of keys per range of a row that attends to `keys` keys, a multiple of a block of the cache. A row
// has about SPLITS equal ranges of at least MIN_SPLIT_KEYS keys, more if they would have more than RANGE_KEYS keys, and
// at most MAX_SPLITS.
__device__ __forceinline__ int range_size(int keys) {
  constexpr int kBlock = 32;
  if (keys <= UNSPLIT_KEYS) return UNSPLIT_KEYS;
  const int ranges = min(max(SPLITS, ceil_div(keys, RANGE_KEYS)), MAX_SPLITS);
  return max(ceil_div(ceil_div(keys, ranges), kBlock) * kBlock, MIN_SPLIT_KEYS);
}
