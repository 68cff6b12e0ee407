# SPDX-License-Identifier: Apache-2.0
"""``gemv`` and ``gemm_small``: GEMM for M <= 16 on CUDA cores of any architecture; each weight is read once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupy_awq.kernels.family import Family, Workspace, constants
from cupy_awq.kernels.gemm.problem import AWQ, Problem, awq_layout_refusal, plan_awq_layout
from cupy_awq.kernels.tiling import ceil_div, next_power_of_two, split_counts
from cupy_awq.kernels.waves import CtaWork, reduction_us, waves_us
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
"""The number of registers per thread, by the number of rows of x whose sums a thread holds."""


@dataclass(frozen=True)
class GemvCosts:
    """Fitted constants of the cost model.

    Attributes:
        chunk: latencies of device memory per chunk (`GemvConfig.chunk`).
        chunk_row: further cycles per chunk and row of x.
        issue: instructions of a thread per weight.
        issue_row: increase of ``issue`` per row of x.
        read_fraction: fraction of the bandwidth that is reached, of that of a plain read.
        start: time to start and finish a CTA, in latencies of device memory.
    """

    chunk: float = 0.9
    chunk_row: float = 370.0
    issue: float = 1.4
    issue_row: float = 0.1
    read_fraction: float = 0.75
    start: float = 0.2


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
        fewest = next_power_of_two(problem.m)
        # Twice as many rows take more registers: an SM has fewer CTAs, which may fill the last wave better.
        rows = [count for count in (fewest, 2 * fewest) if count <= next_power_of_two(self._max_m)]
        splits = split_counts(ceil_div(problem.k // chunk, SLICES))
        return [GemvConfig(count, chunk, split_k) for count in rows for split_k in splits]

    def estimate_us(self, config: GemvConfig, problem: Problem, device: Device) -> float:
        """Return the run time in microseconds: launch overhead, all waves of CTAs and the split-K reduction."""
        rates, ctas = device.rates, ceil_div(problem.n, BLOCK_N) * config.split_k
        chunk_k = SLICES * config.chunk
        weight_bytes = problem.weight_bytes / problem.k / problem.n * BLOCK_N * chunk_k
        issue = COSTS.issue + COSTS.issue_row * config.rows
        work = CtaWork(
            math.ceil(problem.k / config.split_k / chunk_k),
            COSTS.chunk * rates.latency_us + COSTS.chunk_row * config.rows / rates.clock_mhz,
            chunk_k * BLOCK_N * issue / (32 * rates.issue),
            weight_bytes,
            weight_bytes / COSTS.read_fraction,
            COSTS.start * rates.latency_us,
        )
        waves = waves_us(ctas, 65536 // (REGISTERS[config.rows] * THREADS), work, device)
        return rates.launch_us + waves + reduction_us(config.split_k, 4.0 * ctas * config.rows * BLOCK_N, device)

    def plan(self, config: GemvConfig, problem: Problem, device: Device) -> LaunchPlan:
        defines = (
            ("ALIGNED", int(problem.aligned)),
            ("X_ALIGNED", int(problem.x_aligned)),
            ("PTX_PATH", int(device.has(Capability.INLINE_PTX))),
            *constants(config, "rows chunk"),
        )
        grid = (ceil_div(problem.n, BLOCK_N), config.split_k, 1)
        return plan_awq_layout("gemm/gemv.cu", "gemv", defines, problem, device, grid, THREADS)

    def workspace(self, config: GemvConfig, problem: Problem) -> Workspace:
        return Workspace.for_split_k(config.split_k, ceil_div(problem.n, BLOCK_N), config.rows * BLOCK_N)


GEMV = Gemv("gemv", 1, 1)
GEMM_SMALL = Gemv("gemm_small", 2, MAX_M)
