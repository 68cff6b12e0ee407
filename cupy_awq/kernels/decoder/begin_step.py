# SPDX-License-Identifier: Apache-2.0
"""``begin_step``: the tokens, the positions and the work list of attention for a decode step on a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupy_awq.kernels.decoder.common import int32s, plan_launch
from cupy_awq.kernels.decoder.decode_attention import MAX_SPLITS, range_constants
from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

NAME = "begin_step"
ROW_FIELDS = 5
"""The number of integers that the host passes for each row."""
MAX_ROWS = 1024
"""The largest number of rows of a step: the kernel has one CTA, with a thread per row."""
ITEM_WORDS = 4
"""The number of entries (int4) of an item in the work list of decode attention (``key_ranges.cuh``)."""


@dataclass(frozen=True)
class StepPreparation(MemoryBoundProblem):
    """The preparation of a decode step of m rows.

    Attributes:
        m: number of rows, at most `MAX_ROWS`.
        width: number of columns of the block table.
        splits: as in `DecodeAttention`; 0 to write a tile per row for ``attention_mma`` instead of ranges of keys.
    """

    m: int
    width: int
    splits: int

    COMMON = ((1, 8, 0), (1, 8, 16))

    def __str__(self) -> str:
        return f"preparation of a decode step of {self.m} rows"

    @property
    def nbytes(self) -> int:
        """The size of the rows and of the work list in bytes."""
        return 4 * self.m * (ROW_FIELDS + 3) + 16 * work_items(self.m, self.splits)


def work_items(m: int, splits: int) -> int:
    """Return the number of entries (int4) of the work list, from which attention takes its work, for m rows."""
    return ITEM_WORDS * (1 + m * MAX_SPLITS) if splits else m


def plan(config: SoleConfig, problem: StepPreparation, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are rows, newest, table, tokens, lengths, slots and work."""
    if problem.m > MAX_ROWS:
        raise ValueError(f"rows: expected at most {MAX_ROWS}, got {problem.m}")
    defines = {"RANGES": int(problem.splits > 0), **range_constants(problem.splits or 1)}
    buffers = ("rows", "newest", "table", "tokens", "lengths", "slots", "work")
    threads = min(32 * problem.m, MAX_ROWS) if problem.splits else 32 * ceil_div(problem.m, 32)
    plan = plan_launch(device, NAME, defines, (1, 1, 1), threads, (*buffers, *int32s(problem.m, problem.width)))
    return replace(plan, dependent=False)


BEGIN_STEP = FunctionFamily(NAME, sole_configs, traffic_us, plan)
