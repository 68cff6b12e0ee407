# SPDX-License-Identifier: Apache-2.0
"""``gemv`` and ``gemm_small``: GEMM for M <= 16 on CUDA cores of any architecture; each weight is read once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupy_awq.kernels.family import Family, Workspace
from cupy_awq.kernels.gemm.problem import AWQ, Problem, awq_layout_refusal, plan_awq_layout
from cupy_awq.kernels.tiling import ceil_div, next_power_of_two, split_counts
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import LaunchPlan

MAX_M = 16
"""The largest M; a thread holds the accumulators of all rows."""
LANES = 16
"""The number of lanes per slice of K, side by side along N; each lane reads words of 8 codes."""
BLOCK_N = THREADS = LANES * 8
"""The number of columns per CTA, which is also the number of threads."""
SLICES = THREADS // LANES
"""The number of slices into which the threads of a CTA divide K."""
REGISTERS = {1: 80, 2: 128, 4: 154, 8: 192, 16: 248}
"""The number of registers per thread, by ``rows``."""


@dataclass(frozen=True)
class GemvCosts:
    """Constants of the cost model, fitted to 150 measured times on an H100.

    Attributes:
        chunk_ns: latency per chunk (`GemvConfig.chunk`), in nanoseconds.
        chunk_row_ns: increase of ``chunk_ns`` per row of x, in nanoseconds.
        issue_cycles: number of instructions per weight, not counting those per row of x.
        issue_row_cycles: increase of ``issue_cycles`` per row of x.
        issue_rate: issue throughput of an SM, in thread instructions per nanosecond.
        bandwidth: achieved fraction of the nominal memory bandwidth.
        reduction_us: fixed time of the split-K reduction, in microseconds.
        reduction_split_us: additional time of the split-K reduction per split, in microseconds.
    """

    chunk_ns: int = 530
    chunk_row_ns: int = 215
    issue_cycles: float = 1.4
    issue_row_cycles: float = 0.1
    issue_rate: int = 218
    bandwidth: float = 0.79
    reduction_us: float = 2.75
    reduction_split_us: float = 0.32


COSTS = GemvCosts()


@dataclass(frozen=True)
class GemvConfig:
    """A configuration of ``gemv`` or ``gemm_small``.

    Attributes:
        rows: number of rows of x for which the kernel is compiled, a power of two.
        chunk: number of rows of W that a lane loads at once.
        split_k: number of CTAs per tile; each computes a slice of K.
    """

    rows: int
    chunk: int
    split_k: int


class Gemv(Family[Problem, GemvConfig]):
    """A kernel family: the kernel of ``gemv.cu`` for a range of M."""

    layout = AWQ

    def __init__(self, name: str, min_m: int, max_m: int) -> None:
        self.NAME = name
        self._min_m = min_m
        self._max_m = max_m

    def refusal(self, problem: Problem, device: Device) -> str | None:
        reason = awq_layout_refusal(problem)
        if reason is None and not self._min_m <= problem.m <= self._max_m:
            rows = "one row" if self._max_m == 1 else f"{self._min_m} to {self._max_m} rows"
            reason = f"takes {rows} of x, not M={problem.m}"
        return reason

    def configs(self, problem: Problem, device: Device) -> list[GemvConfig]:
        chunk = 8 if problem.group_size % 8 == 0 else 1
        rows = next_power_of_two(problem.m)
        return [GemvConfig(rows, chunk, split_k) for split_k in split_counts(ceil_div(problem.k // chunk, SLICES))]

    def estimate_us(self, config: GemvConfig, problem: Problem, device: Device) -> float:
        """Return the run time in microseconds: all waves of CTAs and the split-K reduction.

        The time of a wave is the longest of latency, instruction issue, and reading the weights.
        """
        ctas = ceil_div(problem.n, BLOCK_N) * config.split_k
        ctas_per_sm = 65536 // (REGISTERS[config.rows] * THREADS)
        full_waves = ceil_div(ctas, device.sm_count * ctas_per_sm) - 1
        tail = ceil_div(ctas - full_waves * device.sm_count * ctas_per_sm, device.sm_count)
        k = problem.k / config.split_k
        latency = math.ceil(k / (SLICES * config.chunk)) * (COSTS.chunk_ns + COSTS.chunk_row_ns * config.rows)
        issue = k * BLOCK_N * (COSTS.issue_cycles + COSTS.issue_row_cycles * config.rows) / COSTS.issue_rate
        stream = k * BLOCK_N / 2 * device.sm_count / (COSTS.bandwidth * device.read_gbs)
        work = max(issue, stream)
        reduction = COSTS.reduction_us + COSTS.reduction_split_us * config.split_k if config.split_k > 1 else 0.0
        return reduction + (full_waves * max(latency, ctas_per_sm * work) + max(latency, tail * work)) * 1e-3

    def plan(self, config: GemvConfig, problem: Problem, device: Device) -> LaunchPlan:
        defines = (
            ("ALIGNED", int(problem.aligned)),
            ("X_ALIGNED", int(problem.x_aligned)),
            ("PTX_PATH", int(device.has(Capability.INLINE_PTX))),
            ("ROWS", config.rows),
            ("CHUNK", config.chunk),
        )
        grid = (ceil_div(problem.n, BLOCK_N), config.split_k, 1)
        return plan_awq_layout("gemm/gemv.cu", "gemv", defines, problem, device, grid, THREADS)

    def workspace(self, config: GemvConfig, problem: Problem) -> Workspace:
        if config.split_k == 1:
            return Workspace()
        tiles = ceil_div(problem.n, BLOCK_N)
        return Workspace(tiles * config.split_k * config.rows * BLOCK_N * 4, tiles)


GEMV = Gemv("gemv", 1, 1)
GEMM_SMALL = Gemv("gemm_small", 2, MAX_M)
