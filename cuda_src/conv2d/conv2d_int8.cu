// SPDX-License-Identifier: Apache-2.0
// Convolution of int8 x with int8 codes and int8 output, for any sizes and architecture; one thread per element of y.
//
//   y = clamp(rint((sum of x * code + fused[co]) * multiplier[co]), low, high)
//
// The int32 sum is the sum of conv2d.cuh over taps and channels; elements outside x are x_zero.
//
//   x       int8, strides x_batch, x_row, x_pixel, x_channel in elements
//   codes   int8 [groups * outputs, kernel_h, kernel_w, channels]
//   fused       int32 [groups * outputs], bias and zero-point correction
//   multiplier  float32 [groups * outputs]
//   y       int8, contiguous, NHWC or NCHW
#include "conv2d/conv2d.cuh"

using int8_t = signed char;

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_int8(const int8_t* x, const int8_t* codes, const int32_t* fused, const float* multiplier, int8_t* y,
                int64_t x_batch, int64_t x_row, int64_t x_pixel, int64_t x_channel, int x_zero, SIZES, float low,
                float high) {
  const Sizes s SIZES_GIVEN;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= static_cast<int64_t>(s.batch) * s.outputs * s.groups * s.out_h * s.out_w) return;
  const auto [b, i, j, co] = output_of<NHWC>(index, s);
  const int8_t* image = x + b * x_batch + co / s.outputs * static_cast<int64_t>(s.channels) * x_channel;
  const int8_t* tap = codes + static_cast<int64_t>(co) * s.kernel_h * s.kernel_w * s.channels;

  int32_t sum = fused[co];
  for (int fy = 0; fy < s.kernel_h; ++fy) {
    const int row = i * s.stride_h - s.pad_h + fy * s.dilation_h;
    for (int fx = 0; fx < s.kernel_w; ++fx, tap += s.channels) {
      const int column = j * s.stride_w - s.pad_w + fx * s.dilation_w;
      const bool inside = row >= 0 && row < s.height && column >= 0 && column < s.width;
      const int8_t* pixel = image + (inside ? row * x_row + column * x_pixel : 0);
      for (int c = 0; c < s.channels; ++c) sum += (inside ? pixel[c * x_channel] : x_zero) * tap[c];
    }
  }
  const float value = fminf(fmaxf(__fmul_rn(static_cast<float>(sum), multiplier[co]), low), high);
  y[index] = static_cast<int8_t>(static_cast<int>(rintf(value)));
}
