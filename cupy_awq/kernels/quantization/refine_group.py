# SPDX-License-Identifier: Apache-2.0
"""``refine_group``: the best scale and zero point of one group of input channels for each output channel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.dtypes import TYPES
from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "refine_group"
THREADS = 128
"""The number of threads per CTA."""


@dataclass(frozen=True)
class GroupRefinement(MemoryBoundProblem):
    """A refinement of the scales and zero points of a group of input channels.

    Attributes:
        group_size, n: numbers of input and output channels.
        stride: stride of ``scale`` and ``zero`` in elements.
        scale_dtype: dtype of scales, float16 or bfloat16.
        limits: (smallest scale, largest finite value) of this dtype.
        symmetric: whether every zero point is 8.
    """

    group_size: int
    n: int
    stride: int
    scale_dtype: str
    limits: tuple[float, float]
    symmetric: bool

    COMMON = ((128, 4096, 32, "float16", (2.0**-24, 65504.0), False),)

    def __str__(self) -> str:
        return f"refine scales[{self.n}] {self.scale_dtype} of W[{self.group_size}, {self.n}]"

    @property
    def nbytes(self) -> int:
        """The size of codes, gradient and step in bytes."""
        return 12 * self.group_size * self.n


def plan(config: SoleConfig, problem: GroupRefinement, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are ``codes``, ``curved``, ``gradient``, ``total``, ``scale``, ``zero`` and ``step``; see
    ``cuda_src/quantization/refine_group.cu`` for their shapes.
    """
    smallest, largest = problem.limits
    defines = (
        ("SCALE", TYPES[problem.scale_dtype]),
        ("SMALLEST", smallest.hex()),
        ("LARGEST", largest.hex()),
        ("SYMMETRIC", int(problem.symmetric)),
        ("THREADS", THREADS),
    )
    kernel = Kernel("quantization/refine_group.cu", NAME, defines, device.target)
    buffers = "codes", "curved", "gradient", "total", "scale", "zero", "step"
    sizes = map(np.int32, (problem.n, problem.group_size, problem.stride))
    return LaunchPlan(kernel, (ceil_div(problem.n, THREADS), 1, 1), (THREADS, 1, 1), (*buffers, *sizes))


REFINE_GROUP = FunctionFamily(NAME, sole_configs, traffic_us, plan)
