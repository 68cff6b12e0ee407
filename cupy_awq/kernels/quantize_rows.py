# SPDX-License-Identifier: Apache-2.0
"""``quantize_rows``: rows of x to int8 codes with parameters for each block; on any architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.family import Workspace
from cupy_awq.kernels.problem import ITEMSIZE, TYPES, ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "quantize_rows"
MAX_THREADS = 256
MAX_GRID = 65535
"""The largest grid along its second and third axes."""
MAX_WARP_ROUNDS = 8
"""The rounds in which a warp reads a block before a whole CTA reads it instead."""
START_US = 2.0
"""The launch in the estimate, which adds the bytes at the nominal bandwidth; not fitted to measurements."""


@dataclass(frozen=True)
class RowQuantization:
    """x [m, k] to int8 codes with a scale, an offset and a sum for each block of columns.

    Attributes:
        m, k: rows and columns of x.
        block_size: columns of a block.
        dtype: dtype of x.
        symmetric: whether blocks have no offset.
        half_even: whether halves round to even, else away from zero.
        wide: whether 8 elements of x can be read at a time.
        x_stride: elements from one row of x to the next.
    """

    m: int
    k: int
    block_size: int
    dtype: str
    symmetric: bool
    half_even: bool
    wide: bool
    x_stride: int

    def __str__(self) -> str:
        return f"quantize x[{self.m}, {self.k}] {self.dtype} to int8 block size {self.block_size}"

    tuning_key = None


@dataclass(frozen=True)
class QuantizeRowsConfig:
    """The threads that share a block of x, and those of a CTA.

    Attributes:
        lanes: adjacent threads that read a block.
        rounds: reads of a thread, each of 8 elements (or 1), in a block.
        threads: threads of a CTA.
    """

    lanes: int
    rounds: int
    threads: int

    split_k = 1


def refuse(problem: RowQuantization, device: Device) -> str | None:
    """Return None: the family solves every problem."""
    return None


def configs(problem: RowQuantization, device: Device) -> list[QuantizeRowsConfig]:
    """Return the one configuration."""
    reads = ceil_div(problem.block_size, 8 if problem.wide else 1)
    warp_lanes = min(32, max(1, 1 << (reads - 1).bit_length() >> 1))
    lanes = MAX_THREADS if reads > MAX_WARP_ROUNDS * 32 else warp_lanes
    threads = min(MAX_THREADS, ceil_div(ceil_div(problem.k, problem.block_size) * lanes, 32) * 32)
    return [QuantizeRowsConfig(lanes, ceil_div(reads, lanes), threads)]


def estimate_us(config: QuantizeRowsConfig, problem: RowQuantization, device: Device) -> float:
    """Return the expected time: one pass over x and the codes."""
    return START_US + problem.m * problem.k * (ITEMSIZE[problem.dtype] + 1) / (device.read_gbs * 1e3)


def plan(config: QuantizeRowsConfig, problem: RowQuantization, device: Device) -> LaunchPlan:
    """Return the launch. Buffers: x, codes, scale, offset, sums."""
    defines = (
        ("X", TYPES[problem.dtype]),
        ("LANES", config.lanes),
        ("ROUNDS", config.rounds),
        ("THREADS", config.threads),
        ("WIDE", int(problem.wide)),
        ("SYMMETRIC", int(problem.symmetric)),
        ("HALF_EVEN", int(problem.half_even)),
    )
    kernel = Kernel("int8/quantize_rows.cu", NAME, defines, device.target)
    blocks = ceil_div(problem.k, problem.block_size)
    layers = ceil_div(problem.m, MAX_GRID)
    grid = ceil_div(blocks * config.lanes, config.threads), ceil_div(problem.m, layers), layers
    sizes = map(np.int32, (problem.m, problem.k, problem.block_size, problem.x_stride))
    return LaunchPlan(kernel, grid, (config.threads, 1, 1), ("x", "codes", "scale", "offset", "sums", *sizes))


def workspace(config: QuantizeRowsConfig, problem: RowQuantization) -> Workspace:
    """Return an empty workspace."""
    return Workspace()


def common_problems() -> Iterator[RowQuantization]:
    """Yield the quantizations of common layers, for precompilation."""
    for dtype in ("float16", "bfloat16", "float32"):
        for block_size, symmetric in ((128, False), (128, True), (32, True), (4096, False)):
            yield RowQuantization(1, 4096, block_size, dtype, symmetric, False, True, 4096)
