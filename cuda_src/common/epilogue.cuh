// SPDX-License-Identifier: Apache-2.0
// What happens to a sum before it is stored: y = activation(sum + bias) + residual, in float32, rounded once. A gated
// kernel multiplies activation(gate sum + bias) by (up sum + bias) in place of the activation alone.
//
// Compile-time constants of every kernel that has an epilogue: ACTIVATION, GATED, HAS_BIAS, BIAS (its type),
// HAS_RESIDUAL.
#pragma once

#include "common/types.cuh"

enum class Activation { kNone, kClamp, kSilu, kGelu };

constexpr Activation kActivation = Activation::ACTIVATION;
constexpr bool kGated = GATED;
constexpr bool kHasBias = HAS_BIAS;
constexpr bool kHasResidual = HAS_RESIDUAL;

// bias BIAS [n]; residual T [m, n_out], row stride ldr; the bounds of kClamp. n_out is n, or n / 2 when gated: the
// weight's first n / 2 columns are the gate, the others the up projection.
template <class T>
struct Epilogue {
  const BIAS* bias;
  const T* residual;
  float low;
  float high;
  int n;
  int ldr;

  __device__ __forceinline__ float activate(float value) const {
    if constexpr (kActivation == Activation::kClamp) {
      // Comparisons that let a NaN through.
      value = value < low ? low : value;
      return value > high ? high : value;
    } else if constexpr (kActivation == Activation::kSilu) {
      return value / (1.0f + expf(-value));
    } else if constexpr (kActivation == Activation::kGelu) {
      const float inner = 0.7978845608028654f * (value + 0.044715f * value * value * value);
      return 0.5f * value * (1.0f + tanhf(inner));
    } else {
      return value;
    }
  }

  __device__ __forceinline__ float biased(float sum, int column) const {
    return kHasBias ? sum + to_float(bias[column]) : sum;
  }

  __device__ __forceinline__ float with_residual(float value, int row, int column) const {
    return kHasResidual ? value + to_float(residual[static_cast<int64_t>(row) * ldr + column]) : value;
  }

  // Eight adjacent values of the residual, zeros where there is none. WHOLE: they start at a multiple of 16 bytes.
  template <bool WHOLE>
  __device__ __forceinline__ Vector<T, 8> residuals(int row, int column) const {
    Vector<T, 8> out = {};
    if constexpr (kHasResidual) load<WHOLE>(out, residual + static_cast<int64_t>(row) * ldr + column);
    return out;
  }

  __device__ __forceinline__ float product(float gate, float up, int column) const {
    return activate(biased(gate, column)) * biased(up, column + n / 2);
  }

  __device__ __forceinline__ T finish(float sum, int row, int column) const {
    return from_float<T>(with_residual(activate(biased(sum, column)), row, column));
  }

  __device__ __forceinline__ T finish_gated(float gate, float up, int row, int column) const {
    return from_float<T>(with_residual(product(gate, up, column), row, column));
  }
};

// The weight's column of a tile's local column. A gated tile has BLOCK_N / 2 gate columns, then the up columns that
// belong to them.
template <int BLOCK_WIDTH>
__device__ __forceinline__ int weight_column(int block, int local, int n) {
  if constexpr (!kGated) return block * BLOCK_WIDTH + local;
  constexpr int kHalf = BLOCK_WIDTH / 2;
  const int within = block * kHalf + local % kHalf;
  if (within >= n / 2) return n;
  return local < kHalf ? within : n / 2 + within;
}
