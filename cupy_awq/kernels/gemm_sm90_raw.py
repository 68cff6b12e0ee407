# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm90_raw``: up to 16 rows of x on AWQ's own layout of the weight, by Hopper's tensor cores."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupy_awq.device import Device
from cupy_awq.kernels import problem as common
from cupy_awq.kernels.problem import Problem, ceil_div
from cupy_awq.launch_plan import LaunchPlan

ARCH = 90
MAX_ROWS = 16
STEP_K = 32
SPLITS = (1, 2, 3, 6)

Block = tuple[int, int, int, int]
"""What a kernel is compiled for besides rows and splits: words, warps, depth, resident of `GemmSm90RawConfig`."""

BLOCKS: dict[int, dict[Block, tuple[float, float]]] = {
    1: {(1, 24, 1, 1): (19.3, 19.3), (2, 16, 1, 1): (14.9, 14.9), (2, 8, 1, 2): (29.0, 9.5)},
    8: {(1, 16, 3, 1): (21.4, 21.4), (1, 8, 2, 2): (42.7, 19.4)},
    16: {
        (1, 12, 2, 1): (38.8, 38.8),
        (2, 8, 2, 1): (33.4, 33.4),
        (2, 4, 2, 2): (64.1, 32.9),
        (1, 4, 2, 3): (94.1, 43.8),
    },
}
"""By rows: nanoseconds that a block takes for 64 columns and 32 k alone, and those for which others wait for it."""


@dataclass(frozen=True)
class GemmSm90RawConfig:
    """A cluster of ``splits`` blocks makes a tile of ``rows`` (1, 8 or 16) rows and ``words`` times 64 columns.

    Each of the ``warps`` warps of a block has a part of K, of which ``depth`` times 32 k are under way. A
    multiprocessor has room for ``resident`` blocks.
    """

    rows: int
    words: int
    warps: int
    depth: int
    resident: int
    splits: int

    @property
    def block_n(self) -> int:
        return 64 * self.words

    @property
    def shared_bytes(self) -> int:
        return (self.warps + self.splits) * self.rows * (self.block_n + 4) * 4 + 8

    def blocks(self, problem: Problem) -> int:
        return ceil_div(problem.n, self.block_n) * self.splits

    def places(self, device: Device) -> int:
        """Blocks that run at the same time.

        Clusters lie within a part of the chip: those of more than three blocks do not find all places.
        """
        return int(device.sm_count * self.resident * (0.9 if self.splits > 3 else 1.0))

    def plan(self, problem: Problem, device: Device) -> LaunchPlan:
        defines = (
            ("ALIGNED", int(problem.aligned)),
            ("ROWS", self.rows),
            ("WORDS", self.words),
            ("WARPS", self.warps),
            ("DEPTH", self.depth),
            ("RESIDENT", self.resident),
            ("SPLITS", self.splits),
        )
        name = "gemm_sm90_raw"
        grid = self.blocks(problem), 1, 1
        plan = common.plan(f"{name}.cu", name, defines, problem, device, grid, self.warps * 32, self.shared_bytes)
        return replace(plan, cluster=(self.splits, 1, 1), dependent=True)

    def microseconds(self, problem: Problem, device: Device) -> float:
        """The larger of the stream and of the work on it, and what does not overlap.

        Fitted to 89 times of 1, 8 and 16 rows on an H100, group size 128: 6% off (root mean square); of six shapes each
        its first choice took at most 1.02 times as long as the best.
        """
        alone, busy = BLOCKS[self.rows][self.words, self.warps, self.depth, self.resident]
        blocks = self.blocks(problem)
        places = self.places(device)
        full_waves = ceil_div(blocks, places) - 1
        sharing = ceil_div(blocks - full_waves * places, device.sm_count)
        # The scales of a group cost as many instructions as half a step.
        units = ceil_div(problem.k, STEP_K) / self.splits * self.words * (0.85 + 0.15 * 128 / problem.group_size)
        work = units * (full_waves * max(alone, self.resident * busy) + max(alone, sharing * busy)) * 1e-3
        stream = problem.weight_bytes / (device.read_gbs * 1e3)
        joining = 0.07 if self.splits > 1 else 0.0
        return 2.96 + joining + max(stream, work) + 0.685 * min(stream, work)

    def workspace(self, problem: Problem) -> tuple[int, int]:
        return 0, 0


class GemmSm90Raw:
    """Words go from memory to registers, with neither a layout of their own nor a stage of shared memory."""

    NAME = "gemm_sm90_raw"

    def refuse(self, problem: Problem, device: Device) -> str | None:
        if device.arch != ARCH:
            return f"needs sm_{ARCH}, not sm_{device.arch}"
        if problem.repacked:
            return "is for weights that have no other layout than AWQ's own"
        if problem.dtype not in ("float16", "bfloat16"):
            return f"takes x of float16 or bfloat16, not {problem.dtype}"
        if problem.m > MAX_ROWS:
            return f"takes up to {MAX_ROWS} rows of x, not M={problem.m}"
        if problem.group_size % STEP_K:
            return f"needs a group size that is a multiple of {STEP_K}, not {problem.group_size}"
        if not problem.x_aligned:
            return "needs rows of x that start at multiples of 16 bytes"
        return None

    def configs(self, problem: Problem, device: Device) -> list[GemmSm90RawConfig]:
        rows = next(rows for rows in BLOCKS if problem.m <= rows)
        configs = [GemmSm90RawConfig(rows, *block, splits) for block in BLOCKS[rows] for splits in SPLITS]
        return [config for config in configs if _fits(config, problem, device)]


def _fits(config: GemmSm90RawConfig, problem: Problem, device: Device) -> bool:
    """Whether a configuration is legal, and not for nothing: blocks that wait for others are split no further."""
    if config.splits > 1 and config.blocks(problem) > config.places(device):
        return False
    if config.splits > max(1, problem.k // STEP_K // config.warps):
        return False
    # A lane's words move together; with offsets for the columns of two there are too few registers.
    if config.words > 1 and not (problem.aligned and problem.zeros != "float"):
        return False
    columns = 8 * config.words * (2 if problem.gated else 1)
    room = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // config.resident - 1024)
    return problem.n % columns == 0 and config.shared_bytes <= room
