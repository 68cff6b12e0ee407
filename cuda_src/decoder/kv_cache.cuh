// SPDX-License-Identifier: Apache-2.0
// The place of a KV head in the KV cache, which consists of blocks of 32 tokens:
//
//   k, v   X [blocks, kv_heads, 32, HEAD_DIM], stride between blocks: block_stride values
//   slots  int32 [rows], the sequence of each row, as a row of the table
//   work   int4 [..], what attention computes
//   table  int32 [slots, capacity / 32], the block of tokens 32 i .. 32 i + 31 of a sequence, for each i
#pragma once

#include "common/types.cuh"

constexpr int kBlockKeys = 32;

struct HeadCache {
  __device__ __forceinline__ HeadCache(const int32_t* table, int slot, int kv_head, int capacity, int64_t block_stride)
      : blocks(table + static_cast<int64_t>(slot) * (capacity / kBlockKeys)),
        block_stride(block_stride),
        begin(static_cast<int64_t>(kv_head) * kBlockKeys * HEAD_DIM) {}

  // Returns where a key lies in k, and its value in v, whose entry in the table is `place`.
  __device__ __forceinline__ int64_t offset(int key, int place) const {
    return begin + place * block_stride + key % kBlockKeys * HEAD_DIM;
  }

  // Returns where a key lies in k, and its value in v: at begin + block_offset(key) + key * HEAD_DIM.
  __device__ __forceinline__ int64_t offset(int key) const {
    return begin + block_offset(key) + static_cast<int64_t>(key) * HEAD_DIM;
  }

  // Returns how many elements further a key is than if blocks were consecutive; one result for all keys of a block.
  __device__ __forceinline__ int64_t block_offset(int key) const {
    const int block = key / kBlockKeys;
    return blocks[block] * block_stride - static_cast<int64_t>(block) * kBlockKeys * HEAD_DIM;
  }

  const int32_t* blocks;
  int64_t block_stride, begin;
};
