// SPDX-License-Identifier: Apache-2.0
// The order in which CTAs take the tiles of y.
//
// Rasterization: tiles are numbered down a band of rows, then along its columns, then band after band. CTAs that run
// at the same time so share few rows of x and few columns of the weight in L2. For a band of 2 rows:
//
//             n_block 0  1  2
//   m_block 0         0  2  4
//           1         1  3  5
//           2         6  7  8    the last band has the rows that are left
#pragma once

#include "common/types.cuh"
#include "ptx/cluster.cuh"

// The rows of tiles in a band, over all CTAs of a cluster.
constexpr int kBandRows = 8;

struct TileCoordinates {
  int m_block, n_block;
};

// Returns the coordinates of a tile of a matrix of m_blocks x n_blocks tiles.
template <int kRows = kBandRows>
__device__ __forceinline__ TileCoordinates rasterize(int tile_idx, int m_blocks, int n_blocks) {
  const int band = tile_idx / (kRows * n_blocks);
  const int height = min(kRows, m_blocks - band * kRows);
  const int within = tile_idx - band * kRows * n_blocks;
  return {band * kRows + within % height, within / height};
}

// The rank of this CTA in a cluster of kClusterSize CTAs.
template <int kClusterSize>
__device__ __forceinline__ int cluster_rank() {
  return kClusterSize == 1 ? 0 : static_cast<int>(ptx::cluster_ctarank());
}

// The tiles of a persistent cluster of kClusterSize CTAs. A unit is one tile of each CTA; all clusters take turns at
// units.
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

// A persistent scheduler with stream-K: `stream_k_clusters` clusters divide the k tiles of the first `stream_k_units`
// units evenly, so that no SM idles in the last wave; the other units are computed whole.
//
//   cluster   0          1          2            each gets 4 of 3 * 4 k tiles; unit 0 is shared by clusters 0 and 1
//   k tiles   0 1 2 3 4 5 | 6 7 8 9 10 11        (unit, k tile) pairs, unit after unit
//
// A cluster takes its k tiles from the last unit to the first: it starts with the first k tiles of a unit, which
// another cluster finishes, so that their partial sums are ready early.
template <int kClusterSize, bool kUseStreamK>
struct StreamKTileScheduler {
  int m_blocks, n_blocks;  // of units
  int k_tiles;
  int cluster_idx;
  int stream_k_units, stream_k_clusters;
  int low, high;        // the k tiles that remain of this cluster's share, numbered over all shared units
  int next_whole_unit;  // computed whole

  // The work that advance() has found: k tiles [k_tile_begin, k_tile_end) of a unit.
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

  // Returns the first k tile of a cluster's share of the shared units.
  __device__ __forceinline__ int share_begin(int cluster) const {
    return stream_k_units * k_tiles * min(cluster, stream_k_clusters) / max(stream_k_clusters, 1);
  }
  // Finds the next work; returns false if there is none.
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
  // Returns the coordinates of this CTA's tile: the CTAs of a cluster have neighbouring columns.
  __device__ __forceinline__ TileCoordinates tile() const {
    const TileCoordinates at = rasterize(unit, m_blocks, n_blocks);
    return {at.m_block, at.n_block * kClusterSize + cluster_rank<kClusterSize>()};
  }
};
