# SPDX-License-Identifier: Apache-2.0
"""`Convolution`, a 2-D convolution with a block-quantized weight, and functions shared by kernel families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.dtypes import TYPES
from cupy_awq.kernels.epilogue import clamp_refusal, epilogue_defines
from cupy_awq.kernels.family import KernelProblem, SoleConfig, TuningKey
from cupy_awq.kernels.hopper import HOPPER
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument

VECTOR_CHANNELS = 8
"""The number of 16-bit channels in a 16-byte copy of the tensor-core kernels."""
TENSOR_CORES = Capability.MMA_M16N8K8, Capability.LDMATRIX
"""The capabilities that the tensor-core convolution kernels need."""

RESIDENT_THREADS = 2048
"""The number of resident threads per SM that `simt_estimate_us` assumes."""
FMA_FRACTION = 0.46
"""The fraction of the peak rate of multiply-adds that `simt_estimate_us` assumes; not measured."""


class ConvolutionSizes(NamedTuple):
    """The sizes of a convolution, in the order of the kernel arguments."""

    batch: int
    """The number of images."""
    height: int
    """The input height in pixels."""
    width: int
    """The input width in pixels."""
    channels: int
    """The number of input channels per group."""
    outputs: int
    """The number of output channels per group."""
    groups: int
    """The number of channel groups."""
    kernel_h: int
    """The filter height, in filter taps."""
    kernel_w: int
    """The filter width, in filter taps."""
    out_h: int
    """The output height in pixels."""
    out_w: int
    """The output width in pixels."""
    stride_h: int = 1
    """The vertical stride in pixels of x."""
    stride_w: int = 1
    """The horizontal stride in pixels of x."""
    pad_h: int = 0
    """The top padding in pixels."""
    pad_w: int = 0
    """The left padding in pixels."""
    dilation_h: int = 1
    """The vertical dilation in pixels of x."""
    dilation_w: int = 1
    """The horizontal dilation in pixels of x."""

    @property
    def pixels(self) -> int:
        """The total number of output pixels of all images."""
        return self.batch * self.out_h * self.out_w


@dataclass(frozen=True)
class Convolution(KernelProblem):
    """A validated 2-D convolution with a weight of 4- or 8-bit codes.

    Attributes:
        sizes: sizes of x, the filter and y.
        block_size: number of input channels per quantization block, which has one scale; blocks do not span groups.
        bits: bits per code, 4 or 8.
        weight_offset: whether the weight has an offset per quantization block.
        dtype: dtype of x and y.
        strides: strides of x along batch, height, width and channels, in elements.
        nhwc: whether y is [batch, height, width, channels]; otherwise y is [batch, channels, height, width].
        bias_dtype: dtype of the bias, or None without a bias.
        activation: kind of activation, one of `EPILOGUE_ACTIVATIONS`.
        limits: lower and upper bound of the activation "clamp".
        aligned: whether x starts at a multiple of 16 bytes.
        y_aligned: whether y starts at a multiple of 16 bytes.
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
        """The tuning key: the layer's sizes and bits per code as the shape, and the unrounded batch size as M."""
        s = self.sizes
        layer = f"conv2d {s.channels * s.groups}x{s.outputs * s.groups} {s.kernel_h}x{s.kernel_w}"
        steps = f"stride {s.stride_h}x{s.stride_w} dilation {s.dilation_h}x{s.dilation_w} groups {s.groups}"
        shape = f"{layer} image {s.height}x{s.width} {steps} {self.bits} bits"
        return TuningKey((shape,), s.batch, s.batch)

    def without_stride(self) -> Convolution:
        """Return a 1x1 convolution with stride 1 over a strided view of x that has the same result.

        Returns ``self`` if the filter is not 1x1, the stride is already 1, or the convolution has padding.
        """
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
        """Return the compile-time constants (name, value) that all convolution families have."""
        return (
            ("X", TYPES[self.dtype]),
            ("NHWC", int(self.nhwc)),
            ("WEIGHT_OFFSET", int(self.weight_offset)),
            *epilogue_defines(self.activation, self.bias_dtype),
        )

    def scalars(self, stride_count: int, block_size: int) -> tuple[Argument, ...]:
        """Return the scalar arguments: the first ``stride_count`` strides of x, ``block_size``, sizes and limits."""
        limits = map(np.float32, self.limits)
        return (*map(np.int64, self.strides[:stride_count]), np.int32(block_size), *map(np.int32, self.sizes), *limits)

    @classmethod
    def common_problems(cls) -> Iterator[Convolution]:
        """Yield convolutions of common layers, which the compile command compiles in advance."""
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


def tensor_core_refusal(problem: Convolution, device: Device) -> str | None:
    """Return the reason why tensor-core kernels cannot solve the problem, or None."""
    sizes = problem.sizes
    reason = device.refusal(TENSOR_CORES, problem.dtype)
    if reason is not None:
        return reason
    if problem.dtype == "float32":
        return "takes x of float16 or bfloat16, not float32"
    if sizes.pixels >= 2**31:
        return f"needs fewer than 2**31 pixels in y, not {sizes.pixels}"
    if problem.strides[3] != 1 or any(s % VECTOR_CHANNELS for s in problem.strides[:3]) or not problem.aligned:
        return f"needs x with contiguous channels, each pixel at a multiple of {2 * VECTOR_CHANNELS} bytes"
    if sizes.groups > 1 and sizes.channels % VECTOR_CHANNELS:
        return f"needs groups of a multiple of {VECTOR_CHANNELS} channels, not {sizes.channels}"
    if problem.block_size % VECTOR_CHANNELS and problem.block_size < sizes.channels:
        return f"needs blocks that are multiples of {VECTOR_CHANNELS} channels, not {problem.block_size}"
    return clamp_refusal(problem.activation)


def sm90_refusal(problem: Convolution, device: Device) -> str | None:
    """Return the reason why kernels for Hopper's tensor cores cannot solve the problem, or None."""
    return device.refusal(HOPPER) or tensor_core_refusal(problem, device)


@dataclass(frozen=True)
class SimtConfig(SoleConfig):
    """A configuration of a convolution kernel on CUDA cores, which has one thread per element of y.

    Attributes:
        threads: number of threads per CTA.
    """

    threads: int = 256


def simt_estimate_us(sizes: ConvolutionSizes, device: Device) -> float:
    """Return the run time in microseconds of a kernel with `SimtConfig`.

    The time is the launch overhead plus, for each wave of threads, the multiply-adds of one element of y per thread.
    """
    rates, elements = device.rates, sizes.pixels * sizes.outputs * sizes.groups
    sm_elements = ceil_div(elements, device.sm_count * RESIDENT_THREADS) * RESIDENT_THREADS
    products = sm_elements * sizes.kernel_h * sizes.kernel_w * sizes.channels
    return rates.launch_us + 2 * rates.latency_us + products / (FMA_FRACTION * rates.fma * rates.clock_mhz)


def output_grid(sizes: ConvolutionSizes, threads: int) -> tuple[int, int, int]:
    """Return the grid of a kernel with one thread per element of y and ``threads`` threads per CTA."""
    return ceil_div(sizes.pixels * sizes.outputs * sizes.groups, threads), 1, 1


def rounded_parameters(weight: BlockQuantizedWeight, dtype: np.dtype[Any]) -> tuple[Array, Array | None]:
    """Return the scales and the offsets (or None) [Co, blocks], contiguous and rounded to ``dtype``, the dtype of x."""

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
    """Return a convolution of contiguous square NHWC images: stride 1, "same" padding, quantization blocks of 32."""
    pad = kernel // 2
    sizes = ConvolutionSizes(batch, side, side, channels, outputs, 1, kernel, kernel, side, side, pad_h=pad, pad_w=pad)
    return Convolution(sizes, 32, bits, True, dtype, (side * side * channels, side * channels, channels, 1))
