# SPDX-License-Identifier: Apache-2.0
"""``gemv_int8``: GEMM of int8 activations for M <= 8 on any architecture; each weight is read once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupy_awq.kernels.family import Family, Workspace
from cupy_awq.kernels.int8.problem import ROWS_TO_BLOCKS_US, Int8Problem, layout_refusal, prepare_weight
from cupy_awq.kernels.tiling import ceil_div, split_counts
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

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
    """Constants of the cost model, fitted to 69 times of 41 random problems on an H100; RMS error 9%."""

    launch_us: float = 1.13
    """The launch overhead without split-K, in microseconds."""
    split_launch_us: float = 0.82
    """The launch overhead with split-K, in microseconds."""
    cta_us: float = 0.49
    """The time of a CTA apart from loads and multiplications, in microseconds."""
    reduction_us: float = 0.91
    """The time of the split-K reduction per wave of CTAs, in microseconds."""
    bytes_per_us_per_gbs: float = 1.18e3
    """The achieved memory bandwidth: bytes per microsecond, per GB/s of nominal bandwidth."""
    weights_per_us: float = 245e3
    """The throughput of one SM, in multiply-adds per microsecond."""
    free_rows: float = 0.2
    """The number of rows of x whose multiply-adds overlap entirely with the loads."""


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
    """Return the reason why the family cannot solve the problem, or None if it can."""
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
    cta_weights = COLUMNS * problem.k / config.split_k
    parameter_bytes = COLUMNS * 4 * problem.parameters * problem.blocks / config.split_k
    loaded_bytes = cta_weights * problem.bits / 8 + parameter_bytes
    load_us = loaded_bytes * device.sm_count / (COSTS.bytes_per_us_per_gbs * device.read_gbs)
    multiply_us = cta_weights * (config.rows - COSTS.free_rows) / COSTS.weights_per_us
    ctas_per_sm = ceil_div(problem.n, COLUMNS) * config.split_k / device.sm_count
    # A partial last wave takes less time than a full one, because each CTA gets a larger share of the bandwidth.
    waves = (math.ceil(ctas_per_sm) + max(ctas_per_sm, 1)) / 2
    launch_us, reduction_us = COSTS.launch_us, 0.0
    if config.split_k > 1:
        launch_us, reduction_us = COSTS.split_launch_us, COSTS.reduction_us
    expand_us = ROWS_TO_BLOCKS_US if problem.row_scales else 0.0
    return launch_us + waves * (load_us + multiply_us + COSTS.cta_us + reduction_us) + expand_us


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
    if config.split_k == 1:
        return Workspace()
    tiles = ceil_div(problem.n, COLUMNS)
    return Workspace(tiles * config.split_k * 32 * WARPS * 4, tiles)


class GemvInt8(Family[Int8Problem, GemvInt8Config]):
    """The family ``gemv_int8``."""

    NAME = NAME
    refusal = staticmethod(refusal)
    configs = staticmethod(configs)
    estimate_us = staticmethod(estimate_us)
    plan = staticmethod(plan)
    workspace = staticmethod(workspace)
    prepare_weight = staticmethod(prepare_weight)


GEMV_INT8 = GemvInt8()
