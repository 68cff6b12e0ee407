# SPDX-License-Identifier: Apache-2.0
"""``conv2d_int8``: int8 convolution with int8 output, on CUDA cores of any architecture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.conv2d.problem import ConvolutionSizes, SimtConfig, output_grid, simt_estimate_us
from cupy_awq.kernels.family import FunctionFamily, KernelProblem
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "conv2d_int8"


@dataclass(frozen=True)
class Int8Convolution(KernelProblem):
    """A convolution of int8 x with int8 codes, requantized to int8 with one multiplier per output channel.

    Attributes:
        sizes: sizes of x, the filter and y.
        strides: strides of x along batch, height, width and channels, in elements.
        nhwc: whether y is [batch, height, width, channels]; otherwise y is [batch, channels, height, width].
        x_zero: zero point of x, which is also the value of the padding.
        limits: lower and upper bound of the int8 codes of y, to which the kernel always clamps.
    """

    sizes: ConvolutionSizes
    strides: tuple[int, int, int, int]
    nhwc: bool
    x_zero: int
    limits: tuple[int, int]

    COMMON = tuple(
        (
            ConvolutionSizes(1, 56, 56, 64, 64, 1, 3, 3, 56, 56, pad_h=1, pad_w=1),
            (56 * 56 * 64, 56 * 64, 64, 1),
            nhwc,
            0,
            (-128, 127),
        )
        for nhwc in (True, False)
    )

    def __str__(self) -> str:
        s = self.sizes
        return (
            f"conv2d_int8 x[{s.batch}, {s.height}, {s.width}, {s.channels * s.groups}] with "
            f"W[{s.outputs * s.groups}, {s.kernel_h}, {s.kernel_w}, {s.channels}]"
        )


def configs(problem: Int8Convolution, device: Device) -> list[SimtConfig]:
    """Return the family's single configuration: the problem determines the launch."""
    return [SimtConfig()]


def estimate_us(config: SimtConfig, problem: Int8Convolution, device: Device) -> float:
    return simt_estimate_us(problem.sizes, device)


def plan(config: SimtConfig, problem: Int8Convolution, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are x, codes, fused, multiplier and y."""
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


CONV2D_INT8 = FunctionFamily(NAME, configs, estimate_us, plan)
