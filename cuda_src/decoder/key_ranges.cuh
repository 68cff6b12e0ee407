// SPDX-License-Identifier: Apache-2.0
// The work list of decode attention, which begin_step writes: the ranges of keys that are computed separately and then
// merged. The list begins with the number of items, in place of an item. An item is int4 [kItemWords]:
//
//   [0]     row, range | ranges of the row << 8 | blocks of keys per range << 16, position, slot
//   [1]     the entry of the block table for the position, and nothing else
//   [2, 3]  the entries for the first kRangeBlocks blocks of the range
//
// So a CTA finds its keys without divisions, and without reading the table after the item.
#pragma once

#include "common/types.cuh"

constexpr int kRangeBlocks = 8;                   // number of blocks whose entries of the table are in an item
constexpr int kItemWords = 2 + kRangeBlocks / 4;  // number of int4 of an item
