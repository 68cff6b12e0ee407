# SPDX-License-Identifier: Apache-2.0
"""``conv2d_int8``: int8 convolution with int8 output, on CUDA cores of any architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.conv2d_problem import ConvolutionSizes, output_grid
from cupy_awq.kernels.family import Workspace
from cupy_awq.kernels.problem import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "conv2d_int8"
ACTIVATIONS = (None, "clamp")
"""The kinds of activation that the operation supports; the kernel only clamps to ``limits``."""
RESIDENT_THREADS = 2048
"""The number of resident threads per SM that the cost model assumes."""
LAUNCH_US = 2.0
"""The launch overhead in the cost model, in microseconds; not fitted to measurements."""
MULTIPLY_ADD_US = 0.02
"""The time of one multiply-add by every resident thread of an SM, in microseconds; not fitted to measurements."""


@dataclass(frozen=True)
class Int8Convolution:
    """A convolution of int8 x with int8 codes, requantized to int8 with one multiplier per output channel.

    Attributes:
        sizes: sizes of x, the filter and y.
        strides: strides of x along batch, height, width and channels, in elements.
        nhwc: whether y is [batch, height, width, channels], else [batch, channels, height, width].
        x_zero: zero point of x, with which x is padded.
        limits: lower and upper bound of y, int8 codes.
    """

    sizes: ConvolutionSizes
    strides: tuple[int, int, int, int]
    nhwc: bool
    x_zero: int
    limits: tuple[int, int]

    def __str__(self) -> str:
        s = self.sizes
        return (
            f"conv2d_int8 x[{s.batch}, {s.height}, {s.width}, {s.channels * s.groups}] with "
            f"W[{s.outputs * s.groups}, {s.kernel_h}, {s.kernel_w}, {s.channels}]"
        )

    tuning_key = None


@dataclass(frozen=True)
class Conv2dInt8Config:
    """A configuration of ``conv2d_int8``, which has one thread per element of y.

    Attributes:
        threads: number of threads per CTA.
    """

    threads: int = 256

    split_k = 1


def refusal(problem: Int8Convolution, device: Device) -> str | None:
    """Return None, since the family solves every problem."""
    return None


def configs(problem: Int8Convolution, device: Device) -> list[Conv2dInt8Config]:
    """Return the only configuration."""
    return [Conv2dInt8Config()]


def estimate_us(config: Conv2dInt8Config, problem: Int8Convolution, device: Device) -> float:
    """Return the run time in microseconds: the multiply-adds of one thread, once for each wave of threads."""
    sizes = problem.sizes
    elements = sizes.pixels * sizes.outputs * sizes.groups
    multiply_adds = sizes.kernel_h * sizes.kernel_w * sizes.channels
    return LAUNCH_US + ceil_div(elements, device.sm_count * RESIDENT_THREADS) * multiply_adds * MULTIPLY_ADD_US


def plan(config: Conv2dInt8Config, problem: Int8Convolution, device: Device) -> LaunchPlan:
    """Return the launch plan. Its buffers are x, codes, fused, multiplier and y."""
    defines = (("NHWC", int(problem.nhwc)), ("THREADS", config.threads))
    kernel = Kernel("conv2d/conv2d_int8.cu", NAME, defines, device.target)
    pointers = ("x", "codes", "fused", "multiplier", "y")
    scalars: tuple[Argument, ...] = (
        *map(np.int64, problem.strides),
        np.int32(problem.x_zero),
        *map(np.int32, problem.sizes),
        *map(np.float32, problem.limits),
    )
    grid = output_grid(problem.sizes, config.threads)
    return LaunchPlan(kernel, grid, (config.threads, 1, 1), (*pointers, *scalars))


def workspace(config: Conv2dInt8Config, problem: Int8Convolution) -> Workspace:
    """Return an empty workspace, since K is not split."""
    return Workspace()


def common_problems() -> Iterator[Int8Convolution]:
    """Yield a convolution with y in NHWC and one with y in NCHW, for precompilation."""
    sizes = ConvolutionSizes(1, 56, 56, 64, 64, 1, 3, 3, 56, 56, pad_h=1, pad_w=1)
    for nhwc in (True, False):
        yield Int8Convolution(sizes, (56 * 56 * 64, 56 * 64, 64, 1), nhwc, 0, (-128, 127))
