// SPDX-License-Identifier: Apache-2.0
// The order in which CTAs take the tiles of y, and the part of K that each computes.
//
// A scheduler tells a cluster (of one CTA, where there are no clusters) its work units; a work unit (`unit` in names)
// is one tile per CTA of the cluster:
//
//   StaticTileScheduler      one unit: the grid has a cluster per unit
//   PersistentTileScheduler  units round-robin, so that copies for the next unit overlap with the stores of this one
//   StreamKTileScheduler     the same, and clusters share the k tiles of the first units, so that no SM idles
//
// A scheduler of a grouped GEMM, whose units belong to several matrices, would return the matrix with the coordinates.
//
// Rasterization: tiles are numbered column by column within a band of kBandRows tile rows, and band after band. CTAs
// that run at the same time then share a few rows of x and a few columns of the weight, which stay in L2. With 3 x 3
// tiles and bands of 2 tile rows:
//
//             n_block 0  1  2
//   m_block 0         0  2  4
//           1         1  3  5
//           2         6  7  8    the last band may have fewer tile rows
#pragma once

#include "common/types.cuh"

// The number of tile rows per band; a multiple of the cluster size of gemm_int8_sm90, whose clusters have a tile row
// per CTA.
constexpr int kBandRows = 8;

struct TileCoordinates {
  int m_block, n_block;
};

// Returns the coordinates of tile `tile_idx` in a matrix of m_blocks x n_blocks tiles.
template <int kRows = kBandRows>
__device__ __forceinline__ TileCoordinates rasterize(int tile_idx, int m_blocks, int n_blocks) {
  const int band = tile_idx / (kRows * n_blocks);
  const int height = min(kRows, m_blocks - band * kRows);
  const int within = tile_idx - band * kRows * n_blocks;
  return {band * kRows + within % height, within / height};
}

// Returns the index of the first k tile (or step) of slice `index`, if `slices` CTAs or warps share `units` of them
// evenly. Units is an integer type that can hold units * slices.
template <class Units, class Index, class Slices>
__device__ __forceinline__ constexpr auto slice_begin(Units units, Index index, Slices slices) {
  return units * index / slices;
}

// The tile scheduler of a cluster of kClusterSize CTAs that computes one tile: tile() if the grid is (n_blocks *
// kClusterSize, m_blocks) CTAs. A kernel that may also be persistent uses `unit`, as with PersistentTileScheduler.
template <int kClusterSize> struct StaticTileScheduler {
  int unit;
  bool valid = true;

  explicit __device__ __forceinline__ StaticTileScheduler(int) : unit(blockIdx.x / kClusterSize) {}
  __device__ __forceinline__ bool is_valid() const { return valid; }
  __device__ __forceinline__ void advance() { valid = false; }
  static __device__ __forceinline__ TileCoordinates tile() {
    TileCoordinates at{0, static_cast<int>(blockIdx.x / kClusterSize)};
    if (gridDim.y > 1) {
      const int n_blocks = gridDim.x / kClusterSize;
      at = rasterize(blockIdx.y * n_blocks + at.n_block, gridDim.y, n_blocks);
    }
    return at;
  }
};

// The tile scheduler of a persistent cluster of kClusterSize CTAs, with units from 0 to units - 1. Usage:
//
//   for (PersistentTileScheduler<kClusterSize> scheduler(units); scheduler.is_valid(); scheduler.advance())
template <int kClusterSize> struct PersistentTileScheduler {
  int units;
  int unit;

  explicit __device__ __forceinline__ PersistentTileScheduler(int units)
      : units(units), unit(blockIdx.x / kClusterSize) {}
  __device__ __forceinline__ bool is_valid() const { return unit < units; }
  __device__ __forceinline__ void advance() { unit += gridDim.x / kClusterSize; }
};

// A persistent tile scheduler with stream-K: the k tiles of the first `stream_k_units` units are divided evenly among
// `stream_k_clusters` clusters, so that no SM idles in the last wave. Each of the other units is computed by a single
// cluster. Example with 2 units of 6 k tiles each and 3 clusters:
//
//   cluster   0         1         2           4 k tiles each; clusters 0 and 1 share unit 0, 1 and 2 share unit 1
//   unit      0 0 0 0 | 0 0 1 1 | 1 1 1 1
//   k tile    0 1 2 3 | 4 5 0 1 | 2 3 4 5
//
// A cluster processes its share from the last unit to the first. So the cluster starts with the unit that a later
// cluster finishes, and the partial sums of the earlier cluster are ready when the later one adds them.
template <int kClusterSize, bool kUseStreamK> struct StreamKTileScheduler {
  int m_blocks, n_blocks;  // numbers of work units along m and n
  int k_tiles;             // number of k tiles in a tile of y
  int cluster_idx;
  int stream_k_units, stream_k_clusters;
  int low, high;      // this cluster's remaining share of the stream-K units: (unit, k tile) pairs low .. high - 1
  int next_own_unit;  // the next unit that this cluster computes alone, after its share

  // The current work, set by advance(): k tiles [k_tile_begin, k_tile_end) of `unit`.
  int unit;
  int k_tile_begin, k_tile_end;

  __device__ __forceinline__ StreamKTileScheduler(int m_blocks, int n_blocks, int k_tiles, int stream_k_units,
                                                  int stream_k_clusters)
      : m_blocks(m_blocks),
        n_blocks(n_blocks),
        k_tiles(k_tiles),
        cluster_idx(blockIdx.x / kClusterSize),
        stream_k_units(stream_k_units),
        stream_k_clusters(stream_k_clusters),
        low(share_begin(cluster_idx)),
        high(share_begin(cluster_idx + 1)),
        next_own_unit(stream_k_units + cluster_idx) {}

  // Returns the index, unit * k_tiles + k tile, of the first pair in the stream-K share of a cluster.
  __device__ __forceinline__ int share_begin(int cluster) const {
    return stream_k_units * k_tiles * min(cluster, stream_k_clusters) / max(stream_k_clusters, 1);
  }
  // Advances to the cluster's next unit; returns false if there is none.
  __device__ __forceinline__ bool advance() {
    if (kUseStreamK && high > low) {
      unit = (high - 1) / k_tiles;
      k_tile_end = high - unit * k_tiles;
      high = max(low, unit * k_tiles);
      k_tile_begin = high - unit * k_tiles;
      return true;
    }
    unit = next_own_unit;
    k_tile_begin = 0;
    k_tile_end = k_tiles;
    next_own_unit += gridDim.x / kClusterSize;
    return unit < m_blocks * n_blocks;
  }
  __device__ __forceinline__ bool has_first_k_tile() const { return k_tile_begin == 0; }
  __device__ __forceinline__ bool has_last_k_tile() const { return k_tile_end == k_tiles; }
  // Returns whether this cluster computes the last k tiles of the current unit, and other clusters the k tiles before.
  __device__ __forceinline__ bool adds_partial_sums() const { return !has_first_k_tile() && has_last_k_tile(); }
  // Returns the first of the clusters that share the current unit.
  __device__ __forceinline__ int first_sharer() const {
    int first = cluster_idx - 1;
    while (share_begin(first) > unit * k_tiles) --first;
    return first;
  }
  // Returns the coordinates of the tile of CTA `rank` in the current unit; the tiles of a cluster are adjacent along n.
  __device__ __forceinline__ TileCoordinates tile(int rank) const {
    const TileCoordinates at = rasterize(unit, m_blocks, n_blocks);
    return {at.m_block, at.n_block * kClusterSize + rank};
  }
};
