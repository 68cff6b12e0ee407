// SPDX-License-Identifier: Apache-2.0
// The epilogue of gemm_sm90.cu and gemm_sm90_mma.cu: sums the accumulators of all consumers and all CTAs of a cluster,
// and stores y. The order of additions is fixed: the consumers of this CTA, then the other CTAs by rank. So it depends
// on the row, unless RANK_ORDER = 1: then the partial sums of all CTAs are added by rank.
//
//   1. each consumer stores its accumulators to shared memory                          store_accumulators
//   2. each CTA sums its consumers' accumulators of the rows that another CTA owns
//      and writes the partial sums to that CTA's shared memory (DSMEM)                 write_partial_sums
//   3. each CTA sums, for the rows it owns, its consumers' accumulators and the
//      received partial sums, applies the epilogue and stores y                        store_tile
#pragma once

#include "gemm/gemm_sm90_tile.cuh"

// Stores this lane's four accumulators c (ptx/mma.cuh) of a block of 8 rows and 16 columns, which starts at `row` and
// `column`, to the consumer's accumulators in shared memory.
template <class C> __device__ __forceinline__ void store_accumulators(float* accumulators, int consumer, int row,
                                                                      int column, const float (&c)[4]) {
  const int lane = threadIdx.x % 32;
  const int index = C::ConsumerBlocks::index(row + lane % 4 * 2, column + lane / 4);
  store<true>(accumulators + consumer * C::kConsumerFloats + index, Vector<float, 4>{c[0], c[1], c[2], c[3]});
}

// The position of a vector of 8 columns of y; `index` numbers the vectors of the rows that this CTA owns, row by row.
template <class C> struct OutputVector {
  uint32_t local_row, local_column;  // row among the rows that this CTA stores, and column within the tile
  int row, column;
  bool is_valid;

  __device__ __forceinline__ OutputVector(const Tile<C>& tile, uint32_t index, int m, int n_out) {
    local_row = index / (C::kStoreN / 8);
    local_column = index % (C::kStoreN / 8) * 8;
    row = tile.m_begin + tile.split * C::kOwnedRows + local_row;
    column = tile.n_block * C::kStoreN + local_column;
    is_valid = index < C::kOwnedRows * (C::kStoreN / 8) && row >= tile.store_begin && row < m && column < n_out;
    if (!C::kOwnsEvenly) is_valid = is_valid && tile.split * C::kOwnedRows + local_row < C::kBlockM;
  }
};

// The kernel arguments that gemm_sm90 and gemm_sm90_mma* have in common.
template <class C> struct GemmArguments {
  const uint8_t* weight;
  const typename C::Bias* bias;
  const typename C::T* residual;
  typename C::T* y;
  const TensorMap* x_map;  // tensor map of x; null if consumers copy x with cp.async
  int m, n, k, ldr, ldy;
  float low, high;
  ResidualStream<C::kOrdersY> stream;
  NextWeight next_weight;
};

// Stores the rows that this CTA owns. `part` holds the residual stream's operands for the thread's first output vector.
template <class C> __device__ __forceinline__ void store_tile(const Tile<C>& tile, const uint8_t* memory,
                                                              const GemmArguments<C>& args,
                                                              typename ResidualStream<C::kOrdersY>::Part part) {
  using T = typename C::T;
  const Epilogue<T, C> epilogue{args.bias, args.residual, args.low, args.high, args.n, args.ldr};
  const float* accumulators = reinterpret_cast<const float*>(memory);
  const float* received = reinterpret_cast<const float*>(memory + C::SharedStorage::Received::kBegin);
  const float* factors = reinterpret_cast<const float*>(memory + C::SharedStorage::Factors::kBegin);
  auto add_up = [&](float (&out)[8], uint32_t row, uint32_t column) {
    add_all<typename C::Sums>(out, tile.shared, accumulators, received, tile.split, row, column);
    if constexpr (C::kRmsNormsX) {
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] *= factors[row];
    }
  };
  const int n_out = C::kGated ? args.n / 2 : args.n;
  for (uint32_t index = threadIdx.x; index < C::kOwnedRows * (C::kStoreN / 8); index += C::kConsumerThreads) {
    const OutputVector<C> at(tile, index, args.m, n_out);
    float square_sum = 0.0f;
    if (at.is_valid) {
      const Vector<T, 8> residual = epilogue.template residuals<C::kAligned>(at.row, at.column);
      float total[8];
      add_up(total, at.local_row, at.local_column);
      if constexpr (C::kGated) {
        float up[8];
        add_up(up, at.local_row, at.local_column + C::kStoreN);
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] = epilogue.product(total[i], up[i], at.column + i);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] = epilogue.activate(epilogue.biased(total[i], at.column + i));
      }
      if constexpr (C::kAddsToStream) {
        if (index != threadIdx.x) part = args.stream.part(at.row, at.column, args.n);
        square_sum = args.stream.add(total, part, at.row, at.column, args.n);
      }
      Vector<T, 8> out;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (C::kHasResidual) total[i] += to_float(residual.values[i]);
        out.values[i] = from_float<T>(total[i]);
      }
      T* y_row = args.y + static_cast<int64_t>(at.row) * args.ldy;
      if constexpr (C::kOrdersY) {
#pragma unroll
        for (int i = 0; i < 8; ++i) y_row[part.positions.values[i]] = out.values[i];
      } else {
        store<C::kAligned>(y_row + at.column, out);
      }
    }
    if constexpr (C::kAddsToStream) args.stream.store_square_sum(square_sum, at.is_valid, at.row, at.column, args.n);
  }
}
