# SPDX-License-Identifier: Apache-2.0
"""`Convolution`: a 2-D convolution with a block-quantized weight, and what its families share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cupy_awq.activation import enumerator
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.family import TuningKey
from cupy_awq.kernels.problem import TYPES, ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument

EPILOGUE_ACTIVATIONS = (None, "clamp")
"""The kinds of activation that these families take, of `cupy_awq.activation`."""
UNIT = 8
"""The channels of 16 bytes, which the tensor-core kernels copy at a time."""
MMA_ARCH = 80
"""The first architecture with a tensor-core convolution."""


class ConvolutionSizes(NamedTuple):
    """The sizes of a convolution in the order of the kernels' arguments."""

    batch: int
    """The number of images."""
    height: int
    """The rows of an image of x."""
    width: int
    """The pixels of a row of x."""
    channels: int
    """The channels of x in one group."""
    outputs: int
    """The channels of y in one group."""
    groups: int
    """The number of groups of channels."""
    kernel_h: int
    """The rows of the kernel."""
    kernel_w: int
    """The taps of a row of the kernel."""
    out_h: int
    """The rows of an image of y."""
    out_w: int
    """The pixels of a row of y."""
    stride_h: int = 1
    """The rows of x from one row of y to the next."""
    stride_w: int = 1
    """The pixels of x from one pixel of y to the next."""
    pad_h: int = 0
    """The rows of padding above x."""
    pad_w: int = 0
    """The pixels of padding to the left of x."""
    dilation_h: int = 1
    """The rows of x from one row of the kernel to the next."""
    dilation_w: int = 1
    """The pixels of x from one tap to the next."""

    @property
    def pixels(self) -> int:
        """The number of pixels of y."""
        return self.batch * self.out_h * self.out_w


@dataclass(frozen=True)
class Convolution:
    """A convolution with a weight of 4- or 8-bit codes.

    Attributes:
        sizes: sizes of x, the kernel and y.
        block_size: channels, in one group, that share a scale.
        bits: bits of a code, 4 or 8.
        weight_offset: whether the weight has offsets.
        dtype: dtype of x and y.
        strides: elements of x from one image, row, pixel and channel to the next.
        nhwc: whether y is [batch, height, width, channels], else [batch, channels, height, width].
        bias_dtype: dtype of the bias; None without one.
        activation: kind of activation, one of `EPILOGUE_ACTIVATIONS`.
        limits: lowest and highest y of the activation "clamp".
        aligned: whether x starts at a multiple of 16 bytes.
        y_aligned: whether y does.
    """

    sizes: ConvolutionSizes
    block_size: int
    bits: int
    weight_offset: bool
    dtype: str
    strides: tuple[int, int, int, int]
    nhwc: bool = True
    bias_dtype: str | None = None
    activation: str | None = None
    limits: tuple[float, float] = (0.0, 0.0)
    aligned: bool = True
    y_aligned: bool = True

    def __str__(self) -> str:
        s = self.sizes
        return (
            f"conv2d x[{s.batch}, {s.height}, {s.width}, {s.channels * s.groups}] {self.dtype} with "
            f"W[{s.outputs * s.groups}, {s.kernel_h}, {s.kernel_w}, {s.channels}] int{self.bits} "
            f"stride {s.stride_h}x{s.stride_w} groups {s.groups}"
        )

    @property
    def tuning_key(self) -> TuningKey:
        """The key of the layer; every number of images is tuned by itself."""
        s = self.sizes
        layer = f"conv2d {s.channels * s.groups}x{s.outputs * s.groups} {s.kernel_h}x{s.kernel_w}"
        steps = f"stride {s.stride_h}x{s.stride_w} dilation {s.dilation_h}x{s.dilation_w} groups {s.groups}"
        shape = f"{layer} image {s.height}x{s.width} {steps} {self.bits} bits"
        return TuningKey((shape,), s.batch, s.batch)

    def without_stride(self) -> Convolution:
        """Return the same 1x1 convolution with stride 1 over the pixels that it reads; itself if that is impossible."""
        sizes = self.sizes
        last = (sizes.out_h - 1) * sizes.stride_h, (sizes.out_w - 1) * sizes.stride_w
        has_padding = sizes.pad_h or sizes.pad_w or last[0] >= sizes.height or last[1] >= sizes.width
        if (sizes.kernel_h, sizes.kernel_w) != (1, 1) or has_padding or (sizes.stride_h, sizes.stride_w) == (1, 1):
            return self
        batch, row, pixel, channel = self.strides
        strides = batch, row * sizes.stride_h, pixel * sizes.stride_w, channel
        dense = sizes._replace(height=sizes.out_h, width=sizes.out_w, stride_h=1, stride_w=1)
        return replace(self, sizes=dense, strides=strides)

    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """Return the constants that the families compile with."""
        return (
            ("X", TYPES[self.dtype]),
            ("NHWC", int(self.nhwc)),
            ("WEIGHT_OFFSET", int(self.weight_offset)),
            ("ACTIVATION", enumerator(self.activation)),
            ("GATED", 0),
            ("HAS_BIAS", int(self.bias_dtype is not None)),
            ("BIAS", TYPES[self.bias_dtype or "float16"]),
            ("HAS_RESIDUAL", 0),
        )

    def scalars(self, strides: int, block_size: int) -> tuple[Argument, ...]:
        """Return the scalar arguments: the first ``strides`` strides of x, the block size, the sizes and the limits."""
        limits = map(np.float32, self.limits)
        return (*map(np.int64, self.strides[:strides]), np.int32(block_size), *map(np.int32, self.sizes), *limits)


def refuse_activation(problem: Convolution) -> str | None:
    """Return why no convolution kernel has the problem's activation, or None."""
    if problem.activation not in EPILOGUE_ACTIVATIONS:
        return f"has no activation {problem.activation}, only clamp"
    return None


def refuse_tensor_cores(problem: Convolution, device: Device) -> str | None:
    """Return why no tensor-core kernel can solve the problem, or None."""
    sizes = problem.sizes
    if device.arch < MMA_ARCH:
        return f"needs sm_{MMA_ARCH} or newer, not sm_{device.arch}"
    if problem.dtype == "float32":
        return "takes x of float16 or bfloat16, not float32"
    if sizes.pixels >= 2**31:
        return f"needs fewer than 2**31 pixels in y, not {sizes.pixels}"
    if problem.strides[3] != 1 or any(s % UNIT for s in problem.strides[:3]) or not problem.aligned:
        return f"needs x with contiguous channels, each pixel at a multiple of {2 * UNIT} bytes"
    if sizes.groups > 1 and sizes.channels % UNIT:
        return f"needs groups of a multiple of {UNIT} channels, not {sizes.channels}"
    if problem.block_size % UNIT and problem.block_size < sizes.channels:
        return f"needs blocks that are multiples of {UNIT} channels, not {problem.block_size}"
    return refuse_activation(problem)


def output_grid(sizes: ConvolutionSizes, threads: int) -> tuple[int, int, int]:
    """Return the grid of a kernel with one thread for each element of y."""
    return ceil_div(sizes.pixels * sizes.outputs * sizes.groups, threads), 1, 1


def rounded_parameters(weight: BlockQuantizedWeight, dtype: np.dtype[Any]) -> tuple[Array, Array | None]:
    """Return scale and offset [Co, blocks], contiguous and rounded to the dtype of x."""

    def rounded() -> tuple[Array, Array | None]:
        xp = namespace(weight.scale)
        scale, offset = (
            a if a is None else xp.ascontiguousarray(a.astype(dtype)) for a in (weight.scale, weight.offset)
        )
        return scale, offset

    parameters: tuple[Array, Array | None] = weight.layout(("rounded", dtype.name), rounded)
    return parameters


def nhwc_problem(
    batch: int, side: int, channels: int, outputs: int, kernel: int, bits: int = 4, dtype: str = "float16"
) -> Convolution:
    """Return a layer with stride 1, padding "same" and blocks of 32 channels over contiguous square NHWC images."""
    pad = kernel // 2
    sizes = ConvolutionSizes(batch, side, side, channels, outputs, 1, kernel, kernel, side, side, pad_h=pad, pad_w=pad)
    return Convolution(sizes, 32, bits, True, dtype, (side * side * channels, side * channels, channels, 1))


def common_problems() -> Iterator[Convolution]:
    """Yield the convolutions of common layers, for precompilation."""
    for dtype in ("float16", "bfloat16", "float32"):
        for bits in (4, 8):
            problem = nhwc_problem(1, 56, 64, 64, 3, bits, dtype)
            yield problem
            yield replace(problem, nhwc=False)
    wide = ((3, 64, 64, 56), (3, 128, 128, 28), (3, 256, 256, 14), (3, 512, 512, 7))
    pointwise = ((1, 64, 256, 56), (1, 256, 64, 56), (1, 1024, 256, 14), (1, 512, 2048, 7))
    for batch in (1, 8, 32):
        for bits in (4, 8):
            for kernel, channels, outputs, side in wide + pointwise:
                yield nhwc_problem(batch, side, channels, outputs, kernel, bits)
