# SPDX-License-Identifier: Apache-2.0
"""``dequantize``: dequantization of a 4-bit weight in the AWQ layout to a floating-point matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES, ZEROS
from cupy_awq.kernels.family import FunctionFamily, KernelProblem
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "dequantize"


@dataclass(frozen=True)
class Dequantization(KernelProblem):
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
    strides: tuple[int, int, int, int]

    def __str__(self) -> str:
        return f"W[{self.k}, {self.n}] {self.dtype} = (q - z) * s, group size {self.group_size}"

    @classmethod
    def common_problems(cls) -> Iterator[Dequantization]:
        """Yield dequantizations to each dtype, which the compile command compiles in advance."""
        n = 4096
        for dtype in ("float16", "bfloat16", "float32"):
            scales = "bfloat16" if dtype == "bfloat16" else "float16"
            yield cls(4096, n, 128, scales, "packed", dtype, True, (n // 8, n, n // 8, n))


@dataclass(frozen=True)
class DequantizeConfig:
    """A configuration of ``dequantize``.

    Attributes:
        rows: number of rows of W per thread; a thread writes 8 columns of each row.
        threads: number of threads per CTA.
    """

    rows: int = 4
    threads: int = 128

    split_k = 1


def configs(problem: Dequantization, device: Device) -> list[DequantizeConfig]:
    return [DequantizeConfig()]


def estimate_us(config: DequantizeConfig, problem: Dequantization, device: Device) -> float:
    """Return the run time in microseconds: the memory traffic at the nominal bandwidth."""
    nbytes = problem.k * problem.n * (0.5 + ITEMSIZE[problem.dtype])
    return device.rates.launch_us + device.read_us(nbytes)


def plan(config: DequantizeConfig, problem: Dequantization, device: Device) -> LaunchPlan:
    need = {"float16": Capability.INLINE_PTX, "bfloat16": Capability.BFLOAT16}[problem.scales_dtype]
    defines: tuple[tuple[str, int | str], ...] = (
        ("SCALE", TYPES[problem.scales_dtype]),
        ("OUT", TYPES[problem.dtype]),
        ("ZEROS", ZEROS[problem.zeros]),
        ("ALIGNED", int(problem.aligned)),
        ("PTX_PATH", int(device.has(need) and problem.dtype == problem.scales_dtype)),
        ("ROWS", config.rows),
        ("THREADS", config.threads),
    )
    sizes = (problem.k, problem.n, problem.group_size, *problem.strides)
    arguments: tuple[Argument, ...] = ("qweight", "scales", "qzeros", "out", *map(np.int32, sizes))
    kernel = Kernel("dequantize/dequantize.cu", NAME, defines, device.target)
    grid = (ceil_div(problem.k, config.rows) * ceil_div(problem.n // 8, config.threads), 1, 1)
    return LaunchPlan(kernel, grid, (config.threads, 1, 1), arguments)


DEQUANTIZE = FunctionFamily(NAME, configs, estimate_us, plan)
