# SPDX-License-Identifier: Apache-2.0
"""`conv2d`: 2-D convolution with 4- and 8-bit weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cupy_awq import block_check, block_reference, check
from cupy_awq.activation import Activation
from cupy_awq.array_types import Clamp
from cupy_awq.block_check import ConvolutionShape
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import HOST, Array
from cupy_awq.kernels.conv2d.problem import VECTOR_CHANNELS, Convolution, ConvolutionSizes, tensor_core_refusal
from cupy_awq.kernels.epilogue import EPILOGUE_ACTIVATIONS
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.runtime import device, placement
from cupy_awq.runtime.arrays import deliver, dtype_name, views


def conv2d(
    x: Array,
    weight: BlockQuantizedWeight,
    /,
    *,
    bias: Array | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    activation: Clamp = None,
    layout: str = "NCHW",
    out: Array | None = None,
) -> Array:
    """Compute a 2-D convolution (cross-correlation) with quantized weights.

        y[b, co, i, j] = activation(bias[co] + sum over y, x, c of
                                    x[b, c, i*stride + y*dilation - top, j*stride + x*dilation - left] * w[co, y, x, c])

    Args:
        x: [batch, Ci, height, width] float16, bfloat16 or float32; [batch, height, width, Ci] if ``layout="NHWC"``.
        weight: [Co, Kh, Kw, Ci/groups].
        bias: [Co] float16, bfloat16 or float32.
        stride, dilation: number of pixels, or (vertical, horizontal).
        padding: number of pixels; (vertical, horizontal); ((top, bottom), (left, right)); or "same", which gives y
            ceil(size / stride) pixels per axis, with an odd pixel of padding at the bottom or the right.
        groups: number of channel groups; Ci for a depthwise convolution.
        activation: None, "relu", "relu6", or (low, high) to clamp.
        layout: memory layout of x and y, "NCHW" or "NHWC".
        out: array with the shape and dtype of y to fill and return.

    Returns:
        y in the layout and dtype of x.

    On a GPU, float16 and bfloat16 x use tensor cores, and dequantized weights are rounded to the dtype of x.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value; the message names the argument.

    >>> weight = BlockQuantizedWeight(np.full((1, 3, 3, 1), 9, np.uint8), np.ones((1, 1), np.float32), None)
    >>> conv2d(np.ones((1, 1, 3, 3), np.float32), weight, padding=1)[0, 0]
    array([[4., 6., 4.],
           [6., 9., 6.],
           [4., 6., 4.]], dtype=float32)
    """
    weight = block_check.validate_block_weight(weight)
    x, bias, out = views(x=x, bias=bias, out=out)
    block_check.validate_float_x(x, weight)
    shape = block_check.validate_convolution(x.shape, weight.shape, stride, padding, dilation, groups, layout)
    epilogue = block_check.validate_supported_activation(activation, EPILOGUE_ACTIVATIONS)
    if bias is not None:
        check.validate_bias(bias, shape.outputs, device=weight.device)
    if out is not None:
        check.validate_out(out, shape.y_shape, x.dtype, weight.device)
        block_check.validate_disjoint(out, weight, bias)
    if weight.device == HOST:
        target = np.empty(shape.y_shape, x.dtype) if out is None else out
        return block_reference.conv2d(x, weight, shape, bias, epilogue, target)
    return _conv2d_on_gpu(x, weight, shape, bias, epilogue, out)


def kernel_sizes(shape: ConvolutionShape) -> ConvolutionSizes:
    """Return the sizes as the kernels take them: channels per group, and of the padding only top and left."""
    (top, _), (left, _) = shape.padding
    return ConvolutionSizes(
        shape.batch,
        shape.height,
        shape.width,
        shape.channels // shape.groups,
        shape.outputs // shape.groups,
        shape.groups,
        *shape.kernel,
        *shape.out,
        *shape.stride,
        top,
        left,
        *shape.dilation,
    )


def x_strides(x: Array, nhwc: bool) -> tuple[int, int, int, int]:
    """Return the strides of x along batch, height, width and channels, in elements."""
    batch, *others = (int(stride) // x.dtype.itemsize for stride in x.strides)
    if len(x) == 1:
        batch = others[0] * x.shape[1]  # The stride of an axis of length 1 is arbitrary; kernels need a positive one.
    return (batch, *others) if nhwc else (batch, *others[1:], others[0])


def _conv2d_on_gpu(
    x: Array,
    weight: BlockQuantizedWeight,
    shape: ConvolutionShape,
    bias: Array | None,
    activation: Activation,
    out: Array | None,
) -> Array:
    import cupy

    with placement.use_device(weight.device):
        y = cupy.empty(shape.y_shape, x.dtype) if out is None or not out.flags.c_contiguous else out
        if y.size:
            gpu = device.current()
            given = Convolution(
                kernel_sizes(shape),
                weight.block_size,
                weight.bits,
                weight.offset is not None,
                dtype_name(x.dtype),
                x_strides(x, shape.nhwc),
                shape.nhwc,
                None if bias is None else dtype_name(bias.dtype),
                activation.kind,
                activation.limits,
                aligned=x.data.ptr % 16 == 0,
                y_aligned=y.data.ptr % 16 == 0,
            )
            problem = given.without_stride()
            if tensor_core_refusal(problem, gpu):
                # Where no tensor-core kernel takes x as it is, one may take a contiguous NHWC copy.
                channels = -(-shape.channels // VECTOR_CHANNELS) * VECTOR_CHANNELS
                strides = shape.height * shape.width * channels, shape.width * channels, channels, 1
                copied = replace(given, strides=strides, aligned=True).without_stride()
                if not tensor_core_refusal(copied, gpu):
                    x, problem = _to_nhwc(x, shape, channels), copied
            chosen = choose_kernel(problem, weight.device)
            chosen.launch(chosen.weight_buffers(weight) | {"x": x, "bias": bias, "y": y})
        return deliver(y, out)


def _to_nhwc(x: Array, shape: ConvolutionShape, channels: int) -> Array:
    """Return a contiguous NHWC copy of x, padded with zeros to ``channels`` channels."""
    import cupy

    pixels = x if shape.nhwc else x.transpose(0, 2, 3, 1)
    if shape.channels == channels:
        return cupy.array(pixels, order="C")
    padded = cupy.zeros((*pixels.shape[:3], channels), x.dtype)
    padded[..., : shape.channels] = pixels
    return padded
