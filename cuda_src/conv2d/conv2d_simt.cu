// SPDX-License-Identifier: Apache-2.0
// The convolution of conv2d.cuh on CUDA cores, for any sizes, groups and architecture; one thread per element of y. For
// each quantization block, x * code and x are summed in float32 and then multiplied by scale and offset, so weights are
// not rounded.
//
//   x           X, strides x_batch, x_row, x_pixel, x_channel in elements
//   codes       uint8 [groups * outputs, kernel_h, kernel_w, channels]; the signed code is code - ZERO
//   parameters  float32 [2, groups * outputs, blocks]: scales, then offsets
//   bias        BIAS [groups * outputs] or null
//   y           X, contiguous, NHWC or NCHW
#include "conv2d/conv2d.cuh"
#include "common/epilogue.cuh"

using Options = EpilogueOptions<BIAS, Activation::ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL>;
constexpr bool kWeightOffset = WEIGHT_OFFSET;

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_simt(const X* x, const uint8_t* codes, const float* parameters, const BIAS* bias, X* y, int64_t x_batch,
                int64_t x_row, int64_t x_pixel, int64_t x_channel, int block_size, SIZES, float low, float high) {
  const Sizes s SIZES_GIVEN;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int all = s.outputs * s.groups;
  if (index >= static_cast<int64_t>(s.batch) * all * s.out_h * s.out_w) return;
  const auto [b, i, j, co] = output_of<NHWC>(index, s);
  const int blocks = ceil_div(s.channels, block_size);
  const X* image = x + b * x_batch + co / s.outputs * static_cast<int64_t>(s.channels) * x_channel;
  const uint8_t* weight = codes + static_cast<int64_t>(co) * s.kernel_h * s.kernel_w * s.channels;
  const float* scales = parameters + static_cast<int64_t>(co) * blocks;
  const float* offsets = scales + static_cast<int64_t>(all) * blocks;

  float sum = 0.0f;
  for (int fy = 0; fy < s.kernel_h; ++fy) {
    const int row = i * s.stride_h - s.pad_h + fy * s.dilation_h;
    if (row < 0 || row >= s.height) continue;
    for (int fx = 0; fx < s.kernel_w; ++fx) {
      const int column = j * s.stride_w - s.pad_w + fx * s.dilation_w;
      if (column < 0 || column >= s.width) continue;
      const X* pixel = image + row * x_row + column * x_pixel;
      const uint8_t* tap = weight + static_cast<int64_t>(fy * s.kernel_w + fx) * s.channels;
      for (int part = 0; part < blocks; ++part) {
        float products = 0.0f;
        float values = 0.0f;
        for (int c = part * block_size; c < min(part * block_size + block_size, s.channels); ++c) {
          const float value = to_float(pixel[c * x_channel]);
          products = fmaf(value, static_cast<float>(tap[c] - ZERO), products);
          values += value;
        }
        sum = fmaf(products, scales[part], sum);
        if constexpr (kWeightOffset) sum = fmaf(values, offsets[part], sum);
      }
    }
  }
  const Epilogue<X, Options> epilogue{bias, nullptr, low, high, all, 0};
  y[index] = epilogue.finish(sum, 0, co);
}
