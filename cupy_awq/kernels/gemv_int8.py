# SPDX-License-Identifier: Apache-2.0
"""``gemv_int8``: the integer product of up to 8 rows, which reads each weight once; on any architecture."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupy_awq.kernels.family import Workspace
from cupy_awq.kernels.int8_problem import Int8Problem, prepare_weight, refuse_layout
from cupy_awq.kernels.problem import ceil_div, split_counts
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

__all__ = ["NAME", "GemvInt8Config", "configs", "estimate_us", "plan", "prepare_weight", "refuse", "workspace"]

NAME = "gemv_int8"
MAX_ROWS = 8
WARPS = 8
CHUNK = 128
"""The columns of K that a warp multiplies at a time."""
COLUMNS = 16
"""The columns of y that a CTA computes."""


@dataclass(frozen=True)
class Fit:
    """Constants of the cost model, fitted to 97 times on an H100: 10% off (root mean square)."""

    start_us: float = 0.8
    """The launch, without split-K."""
    split_start_us: float = 1.9
    """The launch with split-K."""
    exchange_us: float = 1.0
    """The reduction over split-K, for each wave of CTAs."""
    bytes_per_us_per_gbs: float = 1.09e3
    """The bytes that all SMs load in a microsecond, for each nominal GB/s."""
    weights_per_us: float = 256e3
    """The weights that one SM multiplies by one row in a microsecond."""
    free_rows: float = 0.2
    """The rows whose products are hidden behind the loads."""


FIT = Fit()


@dataclass(frozen=True)
class GemvInt8Config:
    """One CTA for 16 columns of y.

    Attributes:
        rows: rows of x that the kernel is compiled for: 2, 4 or 8.
        split_k: CTAs that share an accumulator.
    """

    rows: int
    split_k: int


def refuse(problem: Int8Problem, device: Device) -> str | None:
    """Return why the family cannot solve the problem, or None."""
    if problem.fp8:
        return "multiplies int8, not e4m3"
    if problem.m > MAX_ROWS:
        return f"takes up to {MAX_ROWS} rows, not {problem.m}"
    return refuse_layout(problem)


def configs(problem: Int8Problem, device: Device) -> list[GemvInt8Config]:
    """Return a configuration for each split of K."""
    rows = max(2, 1 << (problem.m - 1).bit_length())
    return [GemvInt8Config(rows, split_k) for split_k in split_counts(ceil_div(problem.k, CHUNK * WARPS))]


def estimate_us(config: GemvInt8Config, problem: Int8Problem, device: Device) -> float:
    """Return the expected time: a start, and what the busiest SM loads, multiplies and exchanges."""
    cta_weights = COLUMNS * problem.k / config.split_k
    parameter_bytes = COLUMNS * 4 * problem.parameters * problem.blocks / config.split_k
    loaded_bytes = cta_weights * problem.bits / 8 + parameter_bytes
    load_us = loaded_bytes * device.sm_count / (FIT.bytes_per_us_per_gbs * device.read_gbs)
    multiply_us = cta_weights * (config.rows - FIT.free_rows) / FIT.weights_per_us
    ctas_per_sm = ceil_div(problem.n, COLUMNS) * config.split_k / device.sm_count
    # In a last wave that is not full, each CTA has a larger share of the memory bandwidth.
    waves = (math.ceil(ctas_per_sm) + max(ctas_per_sm, 1)) / 2
    start_us, exchange_us = (FIT.start_us, 0.0) if config.split_k == 1 else (FIT.split_start_us, FIT.exchange_us)
    return start_us + waves * (load_us + multiply_us + exchange_us)


def plan(config: GemvInt8Config, problem: Int8Problem, device: Device) -> LaunchPlan:
    """Return the launch."""
    defines = (
        *problem.defines(weight_offset=problem.weight_offset),
        ("ROWS", config.rows),
        ("WARPS", WARPS),
        ("PREFETCHED_CHUNKS", (16 if config.rows == 2 else 8) // problem.bits),
    )
    kernel = Kernel("int8/gemv_int8.cu", NAME, defines, device.target)
    grid = (ceil_div(problem.n, COLUMNS), 1, config.split_k)
    return LaunchPlan(kernel, grid, (32 * WARPS, 1, 1), problem.arguments(), dependent=device.arch >= 90)


def workspace(config: GemvInt8Config, problem: Int8Problem) -> Workspace:
    """Return the partial sums of split-K, one float32 for each thread, and a counter for each 16 columns."""
    if config.split_k == 1:
        return Workspace()
    tiles = ceil_div(problem.n, COLUMNS)
    return Workspace(tiles * config.split_k * 32 * WARPS * 4, tiles)
