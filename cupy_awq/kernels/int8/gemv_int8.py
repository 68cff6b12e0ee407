# SPDX-License-Identifier: Apache-2.0
"""``gemv_int8``: GEMM of int8 activations for M <= 8 on any architecture; each weight is read once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupy_awq.kernels.family import FunctionFamily, Workspace
from cupy_awq.kernels.int8.problem import ROWS_TO_BLOCKS_LAUNCHES, Int8Problem, layout_refusal, prepare_weight
from cupy_awq.kernels.tiling import ceil_div, split_counts
from cupy_awq.kernels.waves import reduction_us
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan
from cupy_awq.runtime.rates import READ_FRACTION

NAME = "gemv_int8"
MAX_ROWS = 8
"""The largest M that the family supports."""
WARPS = 8
"""The number of warps per CTA."""
CHUNK = 128
"""The extent along k of one iteration of a warp."""
COLUMNS = 16
"""The number of columns of y per CTA."""


@dataclass(frozen=True)
class GemvInt8Costs:
    """Constants of the cost model, fitted to 69 times of 41 random problems on an H100; RMS error 9%.

    Attributes:
        start: time to start and finish a CTA, in latencies of device memory.
        read_fraction: bandwidth that is reached, relative to that of a plain read; PDL hides a part of the time.
        fma_fraction: multiply-adds per cycle over the rate of float32 multiply-adds.
        free_rows: number of rows of x whose multiply-adds overlap entirely with the loads.
    """

    start: float = 0.8
    read_fraction: float = 1.24
    fma_fraction: float = 1.1
    free_rows: float = 0.2


COSTS = GemvInt8Costs()


@dataclass(frozen=True)
class GemvInt8Config:
    """A configuration of ``gemv_int8``, with CTA tiles of 16 columns of y.

    Attributes:
        rows: number of rows of x for which the kernel is compiled: 2, 4 or 8.
        split_k: number of CTAs per tile; each computes a slice of K.
    """

    rows: int
    split_k: int


def refusal(problem: Int8Problem, device: Device) -> str | None:
    if problem.fp8:
        return "multiplies int8, not e4m3"
    if problem.m > MAX_ROWS:
        return f"takes up to {MAX_ROWS} rows, not {problem.m}"
    return layout_refusal(problem)


def configs(problem: Int8Problem, device: Device) -> list[GemvInt8Config]:
    """Return a configuration for each split-K factor."""
    rows = max(2, 1 << (problem.m - 1).bit_length())
    return [GemvInt8Config(rows, split_k) for split_k in split_counts(ceil_div(problem.k, CHUNK * WARPS))]


def estimate_us(config: GemvInt8Config, problem: Int8Problem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, and load, math and reduction time of all waves of CTAs."""
    rates, cta_weights = device.rates, COLUMNS * problem.k / config.split_k
    parameter_bytes = COLUMNS * 4 * problem.parameters * problem.blocks / config.split_k
    loaded_bytes = (cta_weights * problem.bits / 8 + parameter_bytes) * device.sm_count
    load_us = device.read_us(loaded_bytes) / (READ_FRACTION * COSTS.read_fraction)
    multiply_us = cta_weights * (config.rows - COSTS.free_rows) / (COSTS.fma_fraction * rates.fma * rates.clock_mhz)
    ctas = ceil_div(problem.n, COLUMNS) * config.split_k
    # A partial last wave takes less time than a full one, because each CTA gets a larger share of the bandwidth.
    waves = (math.ceil(ctas / device.sm_count) + max(ctas / device.sm_count, 1)) / 2
    us = rates.launch_us + waves * (load_us + multiply_us + COSTS.start * rates.latency_us)
    us += reduction_us(config.split_k, 4.0 * ctas * config.rows * COLUMNS, device)
    return us + ROWS_TO_BLOCKS_LAUNCHES * rates.launch_us * problem.row_scales


def plan(config: GemvInt8Config, problem: Int8Problem, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are those of `Int8Problem.arguments`."""
    defines = (
        *problem.defines(weight_offset=problem.weight_offset),
        ("ROWS", config.rows),
        ("WARPS", WARPS),
        ("PREFETCHED_CHUNKS", (16 if config.rows == 2 else 8) // problem.bits),
    )
    kernel = Kernel("int8/gemv_int8.cu", NAME, defines, device.target)
    grid = (ceil_div(problem.n, COLUMNS), 1, config.split_k)
    dependent = device.has(Capability.DEPENDENT_LAUNCH)
    return LaunchPlan(kernel, grid, (32 * WARPS, 1, 1), problem.arguments(), dependent=dependent)


def workspace(config: GemvInt8Config, problem: Int8Problem) -> Workspace:
    """Return the split-K workspace: one float32 per thread of each CTA, and one counter per tile of 16 columns."""
    return Workspace.for_split_k(config.split_k, ceil_div(problem.n, COLUMNS), 32 * WARPS)


GEMV_INT8 = FunctionFamily(
    NAME, configs, estimate_us, plan, refusal, workspace=workspace, prepare_weight=prepare_weight
)
