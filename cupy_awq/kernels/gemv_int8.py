# SPDX-License-Identifier: Apache-2.0
"""``gemv_int8``: integer products of up to 8 rows, every weight read once; on any architecture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupy_awq.kernels.problem import ceil_div, split_counts
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan
from cupy_awq.runtime.workspace import COUNTERS, WORKSPACE_BYTES

if TYPE_CHECKING:
    from cupy_awq.kernels.int8 import IntegerProduct

MAX_ROWS = 8
WARPS = 8
CHUNK = 128
"""Columns of K that a warp takes at once."""
COLUMNS = 16
"""Of the weight, a thread block."""


@dataclass(frozen=True)
class GemvInt8Config:
    """``rows`` of x a thread block holds (2, 4 or 8), and blocks that share a sum."""

    rows: int
    splits: int

    def plan(self, problem: IntegerProduct, device: Device) -> LaunchPlan:
        defines = (
            *problem.defines(),
            ("ROWS", self.rows),
            ("WARPS", WARPS),
            ("DEPTH", (16 if self.rows == 2 else 8) // problem.bits),
        )
        kernel = Kernel("int8/gemv_int8.cu", "gemv_int8", defines, device.target)
        grid = (ceil_div(problem.n, COLUMNS), 1, self.splits)
        return LaunchPlan(kernel, grid, (32 * WARPS, 1, 1), problem.arguments(), dependent=device.arch >= 90)

    def estimate_us(self, problem: IntegerProduct, device: Device) -> float:
        """A start, and what each multiprocessor copies and multiplies; splits add an exchange to each block.

        Fitted to 97 times on an H100: 10% off (root mean square).
        """
        parts = 1 + problem.weight_offset + problem.x_offset
        weights = COLUMNS * problem.k / self.splits  # of a block
        block_bytes = weights * problem.bits / 8 + COLUMNS * 4 * parts * problem.blocks / self.splits
        copied = block_bytes * device.sm_count / (1.09e3 * device.read_gbs)
        multiplied = weights * (self.rows - 0.2) / 256e3
        blocks = ceil_div(problem.n, COLUMNS) * self.splits / device.sm_count
        # Blocks of a last round that is not full have more of the memory's rate each.
        rounds = (math.ceil(blocks) + max(blocks, 1)) / 2
        start, exchange = (0.8, 0.0) if self.splits == 1 else (1.9, 1.0)
        return start + rounds * (copied + multiplied + exchange)

    def workspace(self, problem: IntegerProduct) -> tuple[int, int]:
        """Bytes of partial sums and number of counters."""
        if self.splits == 1:
            return 0, 0
        tiles = ceil_div(problem.n, COLUMNS)
        return tiles * self.splits * 32 * WARPS * 4, tiles


def configs(problem: IntegerProduct) -> list[GemvInt8Config]:
    """All for a problem of up to 8 rows that `int8.refuse_layout` does not refuse."""
    rows = max(2, 1 << (problem.m - 1).bit_length())
    found = [GemvInt8Config(rows, splits) for splits in split_counts(ceil_div(problem.k, CHUNK * WARPS))]
    needs = [config.workspace(problem) for config in found]
    return [c for c, (size, tiles) in zip(found, needs, strict=True) if size <= WORKSPACE_BYTES and tiles <= COUNTERS]


def choose(problem: IntegerProduct, device: Device) -> GemvInt8Config:
    return min(configs(problem), key=lambda config: config.estimate_us(problem, device))
