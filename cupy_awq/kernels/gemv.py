# SPDX-License-Identifier: Apache-2.0
"""``gemv``: few rows of x on CUDA cores, every weight read once; on any architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupy_awq.device import Device
from cupy_awq.kernels import problem as common
from cupy_awq.kernels.problem import Problem, ceil_div
from cupy_awq.launch_plan import LaunchPlan

MAX_ROWS = 16
LANES = 16
"""Lanes side by side on a row of the weight."""


@dataclass(frozen=True)
class GemvConfig:
    """``rows`` of x a block holds (a power of two), ``words`` of eight columns a lane owns, blocks that share a sum."""

    rows: int
    words: int
    chunk: int
    splits: int

    @property
    def block_n(self) -> int:
        return LANES * self.words * 8

    @property
    def threads(self) -> int:
        return self.block_n

    def plan(self, problem: Problem, device: Device) -> LaunchPlan:
        defines = (
            ("ALIGNED", int(problem.aligned)),
            ("X_ALIGNED", int(problem.x_aligned)),
            ("PTX_PATH", int(device.arch >= common.PTX_ARCH)),
            ("ROWS", self.rows),
            ("CHUNK", self.chunk),
            ("WORDS", self.words),
        )
        grid = (ceil_div(problem.n, self.block_n), self.splits, 1)
        return common.plan("gemv.cu", "gemv", defines, problem, device, grid, self.threads)

    def microseconds(self, problem: Problem, device: Device) -> float:
        blocks = ceil_div(problem.n, self.block_n) * self.splits
        # About eight warps an SM keep the memory busy; more blocks than that come in waves.
        per_sm = max(1, 512 // self.threads)
        waves = ceil_div(blocks, device.sm_count * per_sm)
        filled = min(1.0, blocks / (device.sm_count * per_sm))
        stream = problem.weight_bytes / (device.read_gbs * 1e3) / max(filled, 1 / device.sm_count)
        issue = problem.k * problem.n * (2 + self.rows) / (device.sm_count * 64 * 1.5e3) / max(filled, 1e-3)
        return 3.0 + max(stream, issue) + 0.3 * waves + (1.5 + 0.02 * self.splits if self.splits > 1 else 0.0)

    def workspace(self, problem: Problem) -> tuple[int, int]:
        if self.splits == 1:
            return 0, 0
        blocks = ceil_div(problem.n, self.block_n)
        return blocks * self.splits * self.rows * self.block_n * 4, blocks


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
    # Two words a lane halve the number of loads; with more rows their sums would not fit into registers.
    for words in (1, 2) if rows == 1 else (1,):
        slices = LANES * words * 8 // LANES
        for splits in common.split_counts(ceil_div(problem.k // chunk, slices)):
            yield GemvConfig(rows, words, chunk, splits)
