// SPDX-License-Identifier: Apache-2.0
// RMSNorm at the beginning of a product, for few rows: each block makes all of x in its shared memory, in place of a
// kernel that makes it once, which costs more than the repetition: a launch later, and a way through memory.
//
//   x[m, i] = (h[m, i] + delta[m, i]) * norm[i] / sqrt(mean of (h[m, :] + delta[m, :])^2 + eps)
#pragma once

#include "gemm_sm90.cuh"
#include "warp.cuh"

// ROWS rows of UNITS times 8 values, made by THREADS threads that share barrier 1; one tile of rows in all.
template <int ROWS, int UNITS, int THREADS, bool DELTA>
class NormedRows {
 public:
  // Contiguous: h, sum [m, k], delta [m, k] or null, norm [k].
  struct Source {
    const float* h;
    const X* delta;
    const float* norm;
    float* sum;
    float eps;
  };

  // Reads the norm's weight, which may be while the kernel before still runs.
  __device__ __forceinline__ NormedRows(const Source& source, const Tile& tile, int m, int k)
      : source_(source), rows_(m), k_(k), shared_(tile.shared_begin), first_(tile.step_begin) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (unit(step) * 8 < k) load<true>(norm_[step], source.norm + unit(step) * 8);
    }
  }

  // Unit u of row r goes to u ^ (r % 8), so that ldmatrix meets no bank twice; zeros for what h does not have. Behind
  // the rows are the sums of each warp. h + delta goes to `sum`, a part of it from each block of the grid.
  __device__ __forceinline__ void begin() {
    Vector<float, 8> values[ROWS][kSteps] = {};
    Vector<X, 8> added[ROWS][kSteps] = {};
    each([&](int row, int step, int64_t at) {
      load<true>(values[row][step], source_.h + at);
      if constexpr (DELTA) load<true>(added[row][step], source_.delta + at);
    });
    float squares[ROWS] = {};
    each([&](int row, int step, int64_t at) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& value = values[row][step].values[i];
        if constexpr (DELTA) value += to_float(added[row][step].values[i]);
        squares[row] = fmaf(value, value, squares[row]);
      }
      if (DELTA && unit(step) % gridDim.x == blockIdx.x) store<true>(source_.sum + at, values[row][step]);
    });
    float* warps = static_cast<float*>(__cvta_shared_to_generic(shared_ + ROWS * UNITS * 16));
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const float sum = warp_sum(squares[row]);
      if (threadIdx.x % 32 == 0) warps[row * kWarps + threadIdx.x / 32] = sum;
    }
    ptx::barrier_sync(1, THREADS);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const int lane = threadIdx.x % 32;
      const float total = warp_sum(lane < kWarps ? warps[row * kWarps + lane] : 0.0f);
      const float factor = 1.0f / sqrtf(total / static_cast<float>(k_) + source_.eps);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (unit(step) >= UNITS) continue;
        Vector<X, 8> x;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x.values[i] = from_float<X>(values[row][step].values[i] * factor * norm_[step].values[i]);
        }
        const uint32_t target = shared_ + (row * UNITS + (unit(step) ^ (row % 8))) * 16;
        *static_cast<Vector<X, 8>*>(__cvta_shared_to_generic(target)) = x;
      }
    }
    ptx::barrier_sync(1, THREADS);
  }

  // Where the x of a round begins.
  __device__ __forceinline__ uint32_t next(int round) const {
    return shared_ + (first_ + round * kDepth) * kRecordK * 2;
  }

  __device__ __forceinline__ void end() const {}

 private:
  static constexpr int kWarps = THREADS / 32;
  static constexpr int kSteps = ceil_div(UNITS, THREADS);

  static_assert(kWarps <= 32, "a lane has the sum of a warp");

  static __device__ __forceinline__ int unit(int step) { return step * THREADS + threadIdx.x; }

  // act(row, step, where it lies in h) for what the thread has of h.
  template <class Act>
  __device__ __forceinline__ void each(Act act) const {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (row < rows_ && unit(step) * 8 < k_) act(row, step, static_cast<int64_t>(row) * k_ + unit(step) * 8);
      }
    }
  }

  Source source_;
  int rows_, k_;
  uint32_t shared_;
  int first_;
  Vector<float, 8> norm_[kSteps] = {};
};
