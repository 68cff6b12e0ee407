// SPDX-License-Identifier: Apache-2.0
// The order in which CTAs take the tiles of y.
//
// Rasterization: tiles are numbered column by column within a band of rows of tiles, band after band. CTAs that run at
// the same time then share few rows of x and few columns of the weight, which stay in L2. For a band of 2 rows:
//
//             n_block 0  1  2
//   m_block 0         0  2  4
//           1         1  3  5
//           2         6  7  8    the last band may have fewer rows
#pragma once

#include "common/types.cuh"
#include "ptx/cluster.cuh"

// The number of rows of tiles in a band, summed over the CTAs of a cluster; a multiple of the cluster size.
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

// Returns the rank of this CTA in a cluster of kClusterSize CTAs.
template <int kClusterSize>
__device__ __forceinline__ int cluster_rank() {
  return kClusterSize == 1 ? 0 : static_cast<int>(ptx::cluster_ctarank());
}

// The tile scheduler of a persistent cluster of kClusterSize CTAs. A unit is one tile for each CTA of the cluster;
// units are distributed round robin over the clusters.
//
//   for (PersistentTileScheduler<kClusterSize> scheduler(units); scheduler.is_valid(); scheduler.advance())
template <int kClusterSize>
struct PersistentTileScheduler {
  int units;
  int unit;

  explicit __device__ __forceinline__ PersistentTileScheduler(int units)
      : units(units), unit(blockIdx.x / kClusterSize) {}
  __device__ __forceinline__ bool is_valid() const { return unit < units; }
  __device__ __forceinline__ void advance() { unit += gridDim.x / kClusterSize; }
};

// A persistent tile scheduler with stream-K: `stream_k_clusters` clusters divide the k tiles of the first
// `stream_k_units` units evenly, so that no SM idles in the last wave. Each other unit is computed by one cluster.
//
//   cluster   0         1         2           each gets 4 of the 2 * 6 k tiles; clusters 0 and 1 share unit 0
//   k tiles   0 1 2 3 | 4 5 0 1 | 2 3 4 5     k tile of unit 0, then of unit 1
//
// A cluster processes its share from the last unit to the first. It so begins with the first k tiles of a unit that
// another cluster finishes, and their partial sums are ready early.
template <int kClusterSize, bool kUseStreamK>
struct StreamKTileScheduler {
  int m_blocks, n_blocks;  // the matrix of units
  int k_tiles;
  int cluster_idx;
  int stream_k_units, stream_k_clusters;
  int low, high;        // the rest of this cluster's share, [low, high) of all shared (unit, k tile) pairs
  int next_whole_unit;  // the next unit that this cluster computes alone

  // The current work, set by advance(): k tiles [k_tile_begin, k_tile_end) of a unit.
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
        next_whole_unit(stream_k_units + cluster_idx) {}

  // Returns the first (unit, k tile) pair of a cluster's share.
  __device__ __forceinline__ int share_begin(int cluster) const {
    return stream_k_units * k_tiles * min(cluster, stream_k_clusters) / max(stream_k_clusters, 1);
  }
  // Advances to the next work; returns false if there is none.
  __device__ __forceinline__ bool advance() {
    if (kUseStreamK && high > low) {
      unit = (high - 1) / k_tiles;
      k_tile_end = high - unit * k_tiles;
      high = max(low, unit * k_tiles);
      k_tile_begin = high - unit * k_tiles;
      return true;
    }
    unit = next_whole_unit;
    k_tile_begin = 0;
    k_tile_end = k_tiles;
    next_whole_unit += gridDim.x / kClusterSize;
    return unit < m_blocks * n_blocks;
  }
  __device__ __forceinline__ bool begins_unit() const { return k_tile_begin == 0; }
  __device__ __forceinline__ bool ends_unit() const { return k_tile_end == k_tiles; }
  // Returns the coordinates of this CTA's tile: the CTAs of a cluster have adjacent columns.
  __device__ __forceinline__ TileCoordinates tile() const {
    const TileCoordinates at = rasterize(unit, m_blocks, n_blocks);
    return {at.m_block, at.n_block * kClusterSize + cluster_rank<kClusterSize>()};
  }
};
