// SPDX-License-Identifier: Apache-2.0
// The sizes and the formula of a convolution; the kernels of all families except those for sm_90 include this file:
//   y[b, i, j, co] = activation(bias[co] + sum over fy, fx, c of
//                               x[b, i*stride_h - pad_h + fy*dilation_h, j*stride_w - pad_w + fx*dilation_w, c]
//                               * w[co, fy, fx, c])
// Elements outside x are 0, or the zero point of x in conv2d_int8. With several channel groups, c runs over the input
// channels of the group of co.
#pragma once

#include "common/types.cuh"

// The sizes of a convolution; `channels` and `outputs` are the numbers of input and output channels per group.
struct Sizes {
  int batch, height, width, channels;
  int outputs, groups, kernel_h, kernel_w, out_h, out_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

#define SIZES                                                                                                     \
  int batch, int height, int width, int channels, int outputs, int groups, int kernel_h, int kernel_w, int out_h, \
      int out_w, int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w
#define SIZES_GIVEN                                                          \
  {batch, height, width,    channels, outputs, groups, kernel_h,   kernel_w, \
   out_h, out_w,  stride_h, stride_w, pad_h,   pad_w,  dilation_h, dilation_w}

// The image, row, column and output channel of an element of y.
struct Output {
  int b, i, j, co;
};

// Returns the coordinates of element `index` of y in memory order. If a thread's index is its element, adjacent threads
// store adjacent elements.
template <bool kNhwc> __device__ __forceinline__ Output output_of(int64_t index, const Sizes& s) {
  const int all = s.outputs * s.groups;
  const int pixels = s.out_h * s.out_w;
  const int64_t within = index % (static_cast<int64_t>(all) * pixels);
  const int pixel = static_cast<int>(kNhwc ? within / all : within % pixels);
  const int co = static_cast<int>(kNhwc ? within % all : within / pixels);
  return {static_cast<int>(index / (static_cast<int64_t>(all) * pixels)), pixel / s.out_w, pixel % s.out_w, co};
}
