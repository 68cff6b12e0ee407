# SPDX-License-Identifier: Apache-2.0
"""``gemv``: few rows of x on CUDA cores, every weight read once; on any architecture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cupy_awq.kernels import problem as common
from cupy_awq.kernels.problem import Problem, ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

MAX_ROWS = 16
LANES = 16
"""Lanes side by side on a row of the weight, a word each; two such slices make a warp."""
BLOCK_N = THREADS = LANES * 8
SLICES = THREADS // LANES
REGISTERS = {1: 80, 2: 128, 4: 154, 8: 192, 16: 248}
"""Of a thread, by rows of x."""


@dataclass(frozen=True)
class GemvConfig:
    """``rows`` of x a block holds (a power of two), ``chunk`` rows of the weight a lane takes at once, blocks that
    share a sum."""

    rows: int
    chunk: int
    splits: int

    def plan(self, problem: Problem, device: Device) -> LaunchPlan:
        defines = (
            ("ALIGNED", int(problem.aligned)),
            ("X_ALIGNED", int(problem.x_aligned)),
            ("PTX_PATH", int(device.arch >= common.PTX_ARCH)),
            ("ROWS", self.rows),
            ("CHUNK", self.chunk),
        )
        grid = (ceil_div(problem.n, BLOCK_N), self.splits, 1)
        return common.plan("gemm/gemv.cu", "gemv", defines, problem, device, grid, THREADS)

    def estimate_us(self, problem: Problem, device: Device) -> float:
        blocks = ceil_div(problem.n, BLOCK_N) * self.splits
        per_sm = 65536 // (REGISTERS[self.rows] * THREADS)
        full_waves = ceil_div(blocks, device.sm_count * per_sm) - 1
        tail = ceil_div(blocks - full_waves * device.sm_count * per_sm, device.sm_count)
        # Nanoseconds of a block, fitted to 150 measurements on an H200: the latency of a lane's chunks, or the work of
        # all blocks on the SM: their instructions, or their share of the memory.
        rows = problem.k / self.splits
        latency = math.ceil(rows / (SLICES * self.chunk)) * (530 + 215 * self.rows)
        issue = rows * BLOCK_N * (1.4 + 0.1 * self.rows) / 218
        stream = rows * BLOCK_N / 2 * device.sm_count / (0.79 * device.read_gbs)
        work = max(issue, stream)
        reduction = 2.75 + 0.32 * self.splits if self.splits > 1 else 0.0
        return reduction + (full_waves * max(latency, per_sm * work) + max(latency, tail * work)) * 1e-3

    def workspace(self, problem: Problem) -> tuple[int, int]:
        if self.splits == 1:
            return 0, 0
        blocks = ceil_div(problem.n, BLOCK_N)
        return blocks * self.splits * self.rows * BLOCK_N * 4, blocks


class Gemv:
    """One row of x."""

    NAME = "gemv"

    def refuse(self, problem: Problem, device: Device) -> str | None:
        return None if problem.m == 1 else f"takes one row of x, not M={problem.m}"

    def configs(self, problem: Problem, device: Device) -> list[GemvConfig]:
        return list(_configs(problem, 1))


class GemmSmall:
    """2 to 16 rows of x, the weight read once for all of them."""

    NAME = "gemm_small"

    def refuse(self, problem: Problem, device: Device) -> str | None:
        if 2 <= problem.m <= MAX_ROWS:
            return None
        return f"takes 2 to {MAX_ROWS} rows of x, not M={problem.m}"

    def configs(self, problem: Problem, device: Device) -> list[GemvConfig]:
        return list(_configs(problem, 1 << (problem.m - 1).bit_length()))


def _configs(problem: Problem, rows: int) -> Iterator[GemvConfig]:
    chunk = 8 if problem.group_size % 8 == 0 else 1
    for splits in common.split_counts(ceil_div(problem.k // chunk, SLICES)):
        yield GemvConfig(rows, chunk, splits)
