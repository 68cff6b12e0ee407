// SPDX-License-Identifier: Apache-2.0
// The epilogue of every GEMM and convolution kernel, computed in float32 and rounded once:
//   y = activation(accumulator + bias) + residual
//   y = activation(gate accumulator + gate bias) * (up accumulator + up bias) + residual      if GATED
// kClampedsilu is that of gpt-oss, for GATED alone: g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and
// u = min(max(up, -7), 7).
//
// To add an activation, follow "How to add an activation to every kernel" in .github/contributing/activation.md.
#pragma once

#include "common/types.cuh"

enum class Activation { kNone, kClamp, kSilu, kGelu, kClampedsilu };

// What an epilogue computes, as EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL> with the
// constants that the host defines. The Config of a kernel inherits its options.
template <class BiasType, Activation kFunction, bool kHasGate, bool kAddsBias, bool kAddsResidual>
struct EpilogueOptions {
  using Bias = BiasType;
  static constexpr Activation kActivation = kFunction;
  static constexpr bool kGated = kHasGate, kHasBias = kAddsBias, kHasResidual = kAddsResidual;
};

// The operands of the epilogue: bias Options::Bias [n], residual T [m, n] (gated: [m, n / 2]) with row stride ldr, and
// the bounds of kClamp. n is the number of weight columns; if gated, the first n / 2 are the gate and the others
// the up projection.
template <class T, class Options> struct Epilogue {
  const typename Options::Bias* bias;
  const T* residual;
  float low;
  float high;
  int n;
  int ldr;

  __device__ __forceinline__ float activate(float value) const {
    if constexpr (Options::kActivation == Activation::kClamp) {
      // Unlike fminf and fmaxf, these comparisons propagate NaN.
      value = value < low ? low : value;
      return value > high ? high : value;
    } else if constexpr (Options::kActivation == Activation::kSilu) {
      return divided(value, -value);
    } else if constexpr (Options::kActivation == Activation::kGelu) {
      const float inner = 0.7978845608028654f * (value + 0.044715f * value * value * value);
      return 0.5f * value * (1.0f + tanhf(inner));
    } else if constexpr (Options::kActivation == Activation::kClampedsilu) {
      const float gate = value > 7.0f ? 7.0f : value;
      return divided(gate, -1.702f * gate);
    } else {
      static_assert(Options::kActivation == Activation::kNone, "activate() lacks a case of Activation");
      return value;
    }
  }

  // Returns value / (1 + exp(exponent)). 16-bit results need not be exact to the last bit of float32, which takes twice
  // as many instructions, and a branch per division.
  static __device__ __forceinline__ float divided(float value, float exponent) {
    if constexpr (sizeof(T) == 2) return __fdividef(value, 1.0f + __expf(exponent));
    return value / (1.0f + expf(exponent));
  }

  // Returns an accumulator plus the bias of its column.
  __device__ __forceinline__ float biased(float accumulator, int column) const {
    return Options::kHasBias ? accumulator + to_float(bias[column]) : accumulator;
  }

  __device__ __forceinline__ float with_residual(float value, int row, int column) const {
    return Options::kHasResidual ? value + to_float(residual[static_cast<int64_t>(row) * ldr + column]) : value;
  }

  // Returns eight adjacent values of the residual, or zeros without a residual. WHOLE: the address of the values is a
  // multiple of 16 bytes.
  template <bool WHOLE> __device__ __forceinline__ Vector<T, 8> residuals(int row, int column) const {
    Vector<T, 8> out = {};
    if constexpr (Options::kHasResidual) load<WHOLE>(out, residual + static_cast<int64_t>(row) * ldr + column);
    return out;
  }

  // Returns activation(gate) * up, where gate and up include their biases.
  __device__ __forceinline__ float multiply(float gate, float up) const {
    if constexpr (Options::kActivation == Activation::kClampedsilu) {
      up = (up < -7.0f ? -7.0f : up > 7.0f ? 7.0f : up) + 1.0f;
    }
    return activate(gate) * up;
  }

  // Returns activation(gate + gate bias) * (up + up bias), for the accumulators of a gate and of its up column.
  __device__ __forceinline__ float product(float gate, float up, int column) const {
    return multiply(biased(gate, column), biased(up, column + n / 2));
  }

  // Returns the element of y, with activation and residual, for an accumulator.
  __device__ __forceinline__ T finish(float accumulator, int row, int column) const {
    return from_float<T>(with_residual(activate(biased(accumulator, column)), row, column));
  }

  // Returns the element of y, with gate, activation and residual, for a gate and an up accumulator.
  __device__ __forceinline__ T finish_gated(float gate, float up, int row, int column) const {
    return from_float<T>(with_residual(product(gate, up, column), row, column));
  }
};

// Returns the index of the weight column that column `local` of a CTA tile holds, or a value >= n if there is no such
// column. A gated tile has BLOCK_WIDTH / 2 columns of the gate, then the matching columns of the up projection.
template <class Options, int BLOCK_WIDTH> __device__ __forceinline__ int weight_column(int tile, int local, int n) {
  if constexpr (!Options::kGated) return tile * BLOCK_WIDTH + local;
  constexpr int kHalf = BLOCK_WIDTH / 2;
  const int column = tile * kHalf + local % kHalf;
  if (column >= n / 2) return n;
  return local < kHalf ? column : n / 2 + column;
}
