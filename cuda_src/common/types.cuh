// SPDX-License-Identifier: Apache-2.0
// Integer and 16-bit floating-point types for NVRTC. Without headers of the CUDA toolkit, kernels compile several times
// faster, and only the compiler must be installed.
#pragma once

#include "ptx/cvt.cuh"

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

struct half_t {
  uint16_t bits;
};

struct bfloat16_t {
  uint16_t bits;
};

template <class T> constexpr bool kIsHalf = false;
template <> constexpr bool kIsHalf<half_t> = true;

template <bool kCondition, class First, class Second> struct SelectType {
  using Type = First;
};
template <class First, class Second> struct SelectType<false, First, Second> {
  using Type = Second;
};
// The type First if kCondition is true, else Second (std::conditional, whose header NVRTC lacks).
template <bool kCondition, class First, class Second> using Select =
    typename SelectType<kCondition, First, Second>::Type;

__device__ __forceinline__ float to_float(half_t value) { return ptx::cvt_f32_f16(value.bits); }
__device__ __forceinline__ float to_float(bfloat16_t value) { return __uint_as_float(uint32_t{value.bits} << 16); }
__device__ __forceinline__ float to_float(float value) { return value; }

// Converts a float32 to T, rounded to nearest even.
template <class T> __device__ __forceinline__ T from_float(float value);

template <> __device__ __forceinline__ half_t from_float<half_t>(float value) { return {ptx::cvt_rn_f16_f32(value)}; }

template <> __device__ __forceinline__ bfloat16_t from_float<bfloat16_t>(float value) {
#if __CUDA_ARCH__ >= 800
  return {ptx::cvt_rn_bf16_f32(value)};
#else
  const uint32_t bits = __float_as_uint(value);
  // A NaN stays as it is: adding the rounding term could carry into its sign bit.
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fffu};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

template <> __device__ __forceinline__ float from_float<float>(float value) { return value; }

// COUNT adjacent values; the alignment lets a single instruction load or store them.
template <class T, int COUNT> struct alignas(sizeof(T) * COUNT) Vector {
  T values[COUNT];
};

// Loads a vector: with a single instruction if WHOLE says that the address is aligned, otherwise value by value.
template <bool WHOLE, class T, int COUNT> __device__ __forceinline__ void load(Vector<T, COUNT>& out, const T* source) {
  if constexpr (WHOLE) {
    out = *reinterpret_cast<const Vector<T, COUNT>*>(source);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) out.values[i] = source[i];
  }
}

// Stores a vector: with a single instruction if WHOLE says that the address is aligned, otherwise value by value.
template <bool WHOLE, class T, int COUNT>
__device__ __forceinline__ void store(T* target, const Vector<T, COUNT>& values) {
  if constexpr (WHOLE) {
    *reinterpret_cast<Vector<T, COUNT>*>(target) = values;
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) target[i] = values.values[i];
  }
}

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Calls function(0), ..., function(kCount - 1) with compile-time constants, so that they can index registers.
template <int kCount, class Function, int kFirst = 0>
__device__ __forceinline__ void for_each_constant(const Function& function) {
  if constexpr (kFirst < kCount) {
    function(kFirst);
    for_each_constant<kCount, Function, kFirst + 1>(function);
  }
}
