# SPDX-License-Identifier: Apache-2.0
"""``dequantize``: dequantization of a 4-bit weight in the AWQ layout to a floating-point matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES, ZEROS
from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "dequantize"
ROWS, THREADS = 4, 128
"""The number of rows of W per thread, which writes 8 columns of each, and the number of threads per CTA."""


@dataclass(frozen=True)
class Dequantization(MemoryBoundProblem):
    """A validated dequantization W[k, n] = (q[k, n] - z[g, n]) * s[g, n], g = k // group_size.

    Attributes:
        k: number of rows of W.
        n: number of columns of W.
        group_size: number of rows of W that share scales and zero points.
        scales_dtype: dtype of the scales.
        zeros: kind of zero points, as in `Problem`.
        dtype: dtype of W.
        aligned: whether all rows of the scales, the offsets and W start at multiples of 16 bytes.
        strides: row strides of qweight, scales, qzeros and W in elements; an element of qweight or of packed zero
            points is a 32-bit word.
    """

    k: int
    n: int
    group_size: int
    scales_dtype: str
    zeros: str
    dtype: str
    aligned: bool
    strides: tuple[int, ...]

    COMMON = tuple(
        (4096, 4096, 128, scales, "packed", dtype, True, (512, 4096, 512, 4096))
        for scales, dtype in (("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float32"))
    )

    def __str__(self) -> str:
        return f"W[{self.k}, {self.n}] {self.dtype} = (q - z) * s, group size {self.group_size}"

    @property
    def nbytes(self) -> int:
        """The size of the codes and of W in bytes."""
        return self.k * self.n // 2 + self.k * self.n * ITEMSIZE[self.dtype]


def plan(config: SoleConfig, problem: Dequantization, device: Device) -> LaunchPlan:
    need = {"float16": Capability.INLINE_PTX, "bfloat16": Capability.BFLOAT16}[problem.scales_dtype]
    defines: tuple[tuple[str, int | str], ...] = (
        ("SCALE", TYPES[problem.scales_dtype]),
        ("OUT", TYPES[problem.dtype]),
        ("ZEROS", ZEROS[problem.zeros]),
        ("ALIGNED", int(problem.aligned)),
        ("PTX_PATH", int(device.has(need) and problem.dtype == problem.scales_dtype)),
        ("ROWS", ROWS),
        ("THREADS", THREADS),
    )
    sizes = (problem.k, problem.n, problem.group_size, *problem.strides)
    arguments: tuple[Argument, ...] = ("qweight", "scales", "qzeros", "out", *map(np.int32, sizes))
    kernel = Kernel("dequantize/dequantize.cu", NAME, defines, device.target)
    grid = (ceil_div(problem.k, ROWS) * ceil_div(problem.n // 8, THREADS), 1, 1)
    return LaunchPlan(kernel, grid, (THREADS, 1, 1), arguments)


DEQUANTIZE = FunctionFamily(NAME, sole_configs, traffic_us, plan)
