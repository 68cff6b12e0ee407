# SPDX-License-Identifier: Apache-2.0
"""``quantize_fp8``: quantization of x to e4m3 with one scale per row, on sm_89 and newer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import FunctionFamily, KernelProblem, SoleConfig
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "quantize_fp8"
VALUES = 8
"""The number of elements that a thread loads at once."""
FEW_ROWS_M = 256
"""The largest M for which latency counts more than throughput."""
FEW_ROWS_THREADS, MANY_ROWS_THREADS = 1024, 384
"""The largest number of threads per CTA for few rows, and for many rows unless x is read twice then."""
KEPT_BYTES = 128
"""The bytes of x that a thread can keep in registers between its two passes."""
LAUNCHES = 2.2
"""The launch overhead in the cost model, in times of an empty launch; an assumption, not a measurement."""


@dataclass(frozen=True)
class Fp8Quantization(KernelProblem):
    """A quantization of x [m, k] to e4m3 with one scale per row; the rows of x start at multiples of 16 bytes.

    Attributes:
        m: number of rows of x.
        k: number of columns of x, a multiple of 8.
        block_size: number of columns whose codes are summed: 8, 16, 32, 64, 128 or 256.
        dtype: dtype of x.
        x_stride: row stride of x in elements.
        fragments: whether the codes of each 16 columns are in the order that ``gemm_w4a8_mma`` takes.
    """

    m: int
    k: int
    block_size: int
    dtype: str
    x_stride: int
    fragments: bool = False

    COMMON = tuple(
        (m, 4096, 128, dtype, 4096, fragments)
        for dtype in ("float16", "bfloat16")
        for m in (1, 1024)
        for fragments in (False, True)
    )

    def __str__(self) -> str:
        return f"quantize x[{self.m}, {self.k}] {self.dtype} to e4m3"


@dataclass(frozen=True)
class QuantizeFp8Config(SoleConfig):
    """A configuration of ``quantize_fp8``, which has one CTA per row.

    Attributes:
        threads: number of threads per CTA.
    """

    threads: int

    def rounds(self, problem: Fp8Quantization) -> int:
        """Return the number of loads of ``VALUES`` elements per thread."""
        return ceil_div(problem.k, self.threads * VALUES)

    def keeps_row(self, problem: Fp8Quantization) -> bool:
        """Return whether a row stays in registers between the two passes; otherwise it is read twice."""
        return self.rounds(problem) * VALUES * ITEMSIZE[problem.dtype] <= KEPT_BYTES


def half_sum_stride(k: int, block_size: int) -> int:
    """Return the row stride of ``half_sums`` in elements: the number of blocks, rounded up to 16 bytes for TMA."""
    return ceil_div(ceil_div(k, block_size), 8) * 8


def configs(problem: Fp8Quantization, device: Device) -> list[QuantizeFp8Config]:
    """Return the family's single configuration, whose number of threads depends on the problem."""
    few, many = _even_rounds(problem, FEW_ROWS_THREADS), _even_rounds(problem, MANY_ROWS_THREADS)
    return [many if problem.m > FEW_ROWS_M and many.keeps_row(problem) else few]


def _even_rounds(problem: Fp8Quantization, most_threads: int) -> QuantizeFp8Config:
    """Return the fewest threads, up to ``most_threads``, that need no more rounds than ``most_threads``."""
    loads = ceil_div(problem.k, VALUES)
    return QuantizeFp8Config(ceil_div(ceil_div(loads, ceil_div(loads, most_threads)), 32) * 32)


def estimate_us(config: QuantizeFp8Config, problem: Fp8Quantization, device: Device) -> float:
    """Return the run time in microseconds: launch overhead plus memory traffic."""
    nbytes = problem.m * problem.k * (ITEMSIZE[problem.dtype] + 1)
    return LAUNCHES * device.rates.launch_us + device.read_us(nbytes)


def plan(config: QuantizeFp8Config, problem: Fp8Quantization, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are x, codes, scale, sums and half_sums."""
    dependent = device.has(Capability.DEPENDENT_LAUNCH)
    defines = (
        ("X", TYPES[problem.dtype]),
        ("THREADS", config.threads),
        ("ROUNDS", config.rounds(problem)),
        ("KEEPS_ROW", int(config.keeps_row(problem))),
        ("BLOCK_SIZE", problem.block_size),
        ("FRAGMENTS", int(problem.fragments)),
        ("DEPENDENT", int(dependent)),
    )
    kernel = Kernel("int8/quantize_fp8.cu", NAME, defines, device.target)
    half_stride = half_sum_stride(problem.k, problem.block_size)
    sizes = map(np.int32, (problem.k, problem.x_stride, half_stride))
    return LaunchPlan(
        kernel,
        (problem.m, 1, 1),
        (config.threads, 1, 1),
        ("x", "codes", "scale", "sums", "half_sums", *sizes),
        dependent=dependent,
    )


QUANTIZE_FP8 = FunctionFamily(NAME, configs, estimate_us, plan, needs=(Capability.MMA_FP8,))
