# SPDX-License-Identifier: Apache-2.0
"""``quantize_rows``: quantization of x to int8 with a scale and an offset per block of columns, on any architecture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import FunctionFamily, KernelProblem, SoleConfig, constants
from cupy_awq.kernels.int8.problem import is_dependent
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "quantize_rows"
MAX_THREADS = 256
"""The largest number of threads per CTA."""
MAX_GRID = 65535
"""The largest value of gridDim.y and gridDim.z."""
MAX_WARP_ROUNDS = 8
"""The largest number of loads per lane with which a single warp reads a block; a whole CTA reads larger blocks."""
LAUNCHES = 3.3
"""The time by which quantizing a single row delays the GEMM that follows, in times of an empty launch (H100)."""


@dataclass(frozen=True)
class RowQuantization(KernelProblem):
    """A quantization of x [m, k] to int8 codes with a scale, an offset and a sum of codes per block of columns.

    Attributes:
        m: number of rows of x.
        k: number of columns of x.
        block_size: number of columns per block.
        dtype: dtype of x.
        symmetric: whether blocks have no offset.
        half_even: whether halves are rounded to even; otherwise they are rounded away from zero.
        wide: whether the alignment of x permits loads of 8 elements.
        x_stride: row stride of x in elements.
        fragments: whether the codes of each 16 columns are in the order that ``gemm_w4a8_mma`` takes.
    """

    m: int
    k: int
    block_size: int
    dtype: str
    symmetric: bool
    half_even: bool
    wide: bool
    x_stride: int
    fragments: bool = False

    COMMON = tuple(
        (1, 4096, block_size, dtype, symmetric, False, True, 4096)
        for dtype in ("float16", "bfloat16", "float32")
        for block_size, symmetric in ((128, False), (128, True), (32, True), (4096, False))
    ) + tuple(
        (m, 4096, 128, dtype, True, False, True, 4096, True) for m in (1, 256) for dtype in ("float16", "bfloat16")
    )

    def __str__(self) -> str:
        return f"quantize x[{self.m}, {self.k}] {self.dtype} to int8 block size {self.block_size}"


@dataclass(frozen=True)
class QuantizeRowsConfig(SoleConfig):
    """A configuration of ``quantize_rows``.

    Attributes:
        lanes: number of adjacent threads per quantization block.
        rounds: number of loads per thread and block; a load has 8 elements if the problem is ``wide``, else 1.
        threads: number of threads per CTA.
    """

    lanes: int
    rounds: int
    threads: int


def configs(problem: RowQuantization, device: Device) -> list[QuantizeRowsConfig]:
    """Return the family's single configuration, whose number of lanes depends on the problem."""
    reads = ceil_div(problem.block_size, 8 if problem.wide else 1)
    warp_lanes = min(32, max(1, 1 << (reads - 1).bit_length() >> 1))
    lanes = MAX_THREADS if reads > MAX_WARP_ROUNDS * 32 else warp_lanes
    threads = min(MAX_THREADS, ceil_div(ceil_div(problem.k, problem.block_size) * lanes, 32) * 32)
    return [QuantizeRowsConfig(lanes, ceil_div(reads, lanes), threads)]


def estimate_us(config: QuantizeRowsConfig, problem: RowQuantization, device: Device) -> float:
    """Return the run time in microseconds: launch overhead plus memory traffic at the nominal bandwidth."""
    nbytes = problem.m * problem.k * (ITEMSIZE[problem.dtype] + 1)
    return LAUNCHES * device.rates.launch_us + device.read_us(nbytes)


def plan(config: QuantizeRowsConfig, problem: RowQuantization, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are x, codes, scale, offset and sums."""
    defines = (
        ("X", TYPES[problem.dtype]),
        *constants(config, "lanes rounds threads"),
        ("WIDE", int(problem.wide)),
        ("SYMMETRIC", int(problem.symmetric)),
        ("HALF_EVEN", int(problem.half_even)),
        ("FRAGMENTS", int(problem.fragments)),
        ("DEPENDENT", int(is_dependent(problem.m, device))),
    )
    kernel = Kernel("int8/quantize_rows.cu", NAME, defines, device.target)
    blocks = ceil_div(problem.k, problem.block_size)
    layers = ceil_div(problem.m, MAX_GRID)
    grid = ceil_div(blocks * config.lanes, config.threads), ceil_div(problem.m, layers), layers
    sizes = map(np.int32, (problem.m, problem.k, problem.block_size, problem.x_stride))
    return LaunchPlan(
        kernel,
        grid,
        (config.threads, 1, 1),
        ("x", "codes", "scale", "offset", "sums", *sizes),
        dependent=is_dependent(problem.m, device),
    )


QUANTIZE_ROWS = FunctionFamily(NAME, configs, estimate_us, plan)
