// SPDX-License-Identifier: Apache-2.0
// The epilogue of gemm_mma_fragments.cu: sums the accumulators of a unit over the slices of a CTA and over the CTAs
// that share the unit (stream-K), and stores y. The order of additions is fixed: the CTA's slices, then the other CTAs
// from the first to the last.
#pragma once

#include "common/reduce.cuh"
#include "gemm/gemm_mma_fragments.cuh"

// The float32 sums of eight adjacent columns of a row of y.
template <class C> struct Sums {
  float values[8] = {};

  // Adds eight partial sums of another CTA, which the compiler must not keep in a cache: it has just written them.
  __device__ __forceinline__ void add_partial(const float* source) {
    const float4 low = __ldcg(reinterpret_cast<const float4*>(source));
    const float4 high = __ldcg(reinterpret_cast<const float4*>(source) + 1);
    const float others[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += others[i];
  }
  // Adds the accumulators of all slices of K of this CTA; those of the first slice begin at `source`.
  __device__ __forceinline__ void add_slices(const float* source) {
#pragma unroll
    for (int slice = 0; slice < C::kSlices; ++slice) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vector<float, 4> four;
        load<true>(four, source + slice * (C::kPassRows * C::kPitch) + half * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[half * 4 + i] += four.values[i];
      }
    }
  }
  __device__ __forceinline__ void write(float* target) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* mine = values + half * 4;
      __stcg(reinterpret_cast<float4*>(target) + half, make_float4(mine[0], mine[1], mine[2], mine[3]));
    }
  }
};

// Where the sums of a tile go: y with its epilogue or, if CTAs share the tile, partial sums.
template <class C> struct Output {
  using T = typename C::T;

  Epilogue<T, C> epilogue;
  ResidualStream<C::kOrdersY> stream;
  T* y;
  float* partials;       // the partial sums of shared tiles, float32 [CTA][kBlockM][kBlockN]
  const float* factors;  // with kRmsNormsX the factors of the rows, float32 [kBlockM] in shared memory
  int m, n, ldy;

  // Returns the number of columns of y.
  __device__ __forceinline__ int n_out() const { return C::kGated ? n / 2 : n; }

  // With kAddsToStream, prefetches what the epilogue of a tile reads: after the weights of a decoder, it is not in L2.
  __device__ __forceinline__ void prefetch(const TileCoordinates& tile) const {
    constexpr int kLineColumns = 32;  // columns of h, or of the norm weight, per cache line
    constexpr int kRowLines = C::kBlockN / kLineColumns;
    const int rows = min(C::kBlockM, m - tile.m_block * C::kBlockM);
    for (int i = threadIdx.x; i < rows * kRowLines; i += C::kThreads) {
      const int column = tile.n_block * C::kBlockN + i % kRowLines * kLineColumns;
      if (column < n) stream.prefetch(tile.m_block * C::kBlockM + i / kRowLines, column, n);
    }
  }
  // Sums and stores rows `first` .. `first` + kPassRows - 1 of the tile, whose accumulators are in shared memory.
  __device__ __forceinline__ void store_pass(const float* accumulators, const typename C::Scheduler& scheduler,
                                             const TileCoordinates& tile, int first) const {
    const int rows = min(C::kPassRows, m - tile.m_block * C::kBlockM - first);
    const bool is_complete = !C::kStreamK || scheduler.has_last_k_tile();
    const int first_sharer =
        C::kStreamK && scheduler.adds_partial_sums() ? scheduler.first_sharer() : scheduler.cluster_idx;
    constexpr int kVectors = C::kStoreN / 8;
#pragma unroll 1
    for (int index = threadIdx.x; index < rows * kVectors; index += C::kThreads) {
      const int row = first + index / kVectors;  // row of y within the tile
      const int local_column = index % kVectors * 8;
      const int column = tile.n_block * C::kStoreN + local_column;
      const bool is_valid = column < n_out();
      float square_sum = 0.0f;
      if (is_valid) {
        Sums<C> sums[C::kGated + 1];
#pragma unroll
        for (int half = 0; half <= C::kGated; ++half) {
          const int offset = row * C::kBlockN + half * C::kStoreN + local_column;
          sums[half].add_slices(accumulators + (row - first) * C::kPitch + half * C::kStoreN + local_column);
          for (int other = first_sharer; other < scheduler.cluster_idx; ++other) {
            sums[half].add_partial(partials + static_cast<int64_t>(other) * C::kCtaSums + offset);
          }
          if (!is_complete) {
            sums[half].write(partials + static_cast<int64_t>(scheduler.cluster_idx) * C::kCtaSums + offset);
          }
          if constexpr (C::kRmsNormsX) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[half].values[i] *= factors[row];
          }
        }
        if (is_complete) square_sum = store_vector(sums, tile.m_block * C::kBlockM + row, column);
      }
      if constexpr (C::kAddsToStream) {
        if (is_complete) stream.store_square_sum(square_sum, is_valid, tile.m_block * C::kBlockM + row, column, n);
      }
    }
  }

 private:
  // Stores eight columns of a row of y; with kAddsToStream, returns the sum of h^2 over them (residual_stream.cuh).
  __device__ __forceinline__ float store_vector(const Sums<C> (&sums)[C::kGated + 1], int row, int column) const {
    const Vector<T, 8> residuals = epilogue.template residuals<C::kAligned>(row, column);
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (C::kGated) {
        values[i] = epilogue.product(sums[0].values[i], sums[1].values[i], column + i);
      } else {
        values[i] = epilogue.activate(epilogue.biased(sums[0].values[i], column + i));
      }
      if constexpr (C::kHasResidual) values[i] += to_float(residuals.values[i]);
    }
    T* const y_row = y + static_cast<int64_t>(row) * ldy;
    float square_sum = 0.0f;
    Vector<T, 8> out;
    if constexpr (C::kAddsToStream) {
      const auto part = stream.part(row, column, n);
      square_sum = stream.add(values, part, row, column, n);
      if constexpr (C::kOrdersY) {
#pragma unroll
        for (int i = 0; i < 8; ++i) y_row[part.positions.values[i]] = from_float<T>(values[i]);
        return square_sum;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) out.values[i] = from_float<T>(values[i]);
    store<C::kAligned>(y_row + column, out);
    return square_sum;
  }
};
