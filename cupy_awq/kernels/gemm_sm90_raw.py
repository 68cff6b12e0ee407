# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm90_raw``: up to 16 rows of x on AWQ's own layout of the weight, by Hopper's tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.gemm_sm90 import _ByConfig
from cupy_awq.kernels.problem import ITEMSIZE, Problem, ceil_div, refuse_awq_layout
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan, TensorMap

ARCH = 90
MAX_ROWS = 16
STEP_K = 32
SPLITS = (1, 2, 3, 4, 6)

Block = tuple[int, int, int, int]
"""What a kernel is compiled for besides rows and splits: words, warps, depth, resident of `GemmSm90RawConfig`."""

BLOCKS: dict[int, dict[Block, tuple[float, float, float]]] = {
    1: {(1, 16, 2, 1): (446, 45.2, 1.67), (2, 16, 2, 1): (594, 34.1, 2.00), (4, 8, 2, 1): (792, 18.0, 2.22)},
    8: {(1, 16, 2, 1): (443, 48.0, 1.91), (2, 16, 2, 1): (602, 35.4, 2.63), (4, 8, 2, 1): (790, 19.7, 3.12)},
    16: {(1, 16, 2, 1): (507, 54.0, 2.44), (2, 8, 3, 1): (520, 31.6, 2.78), (2, 4, 3, 2): (516, 29.0, 2.91)},
}
"""By rows: nanoseconds of a warp's step and of 64 columns and 32 k on a multiprocessor, microseconds of a launch."""


@dataclass(frozen=True)
class GemmSm90RawConfig:
    """A cluster of ``splits`` blocks makes a tile of ``rows`` (1, 8 or 16) rows and ``words`` times 64 columns.

    Each of the ``warps`` warps of a block has a part of K, of which ``depth`` times 32 k are under way. A
    multiprocessor has room for ``resident`` blocks and no more: else those of one launch gather on some while the next
    launch's have the others, which took 1.4 times as long.
    """

    rows: int
    words: int
    warps: int
    depth: int
    resident: int
    splits: int

    @property
    def split_k(self) -> int:
        return self.splits

    @property
    def block_n(self) -> int:
        return 64 * self.words

    @property
    def shared_bytes(self) -> int:
        sums = self.rows * (self.block_n + 4) * 4
        step = self.words * 1024 + max(128, 64 * self.rows)
        mine = max(self.depth * step, ceil_div(sums, 128) * 128)
        return self.warps * (mine + self.depth * 8) + self.splits * sums + 8

    def blocks(self, problem: Problem) -> int:
        return ceil_div(problem.n, self.block_n) * self.splits

    def places(self, device: Device) -> int:
        """Blocks that run at the same time.

        Clusters lie within a part of the chip: those of more than three blocks do not find all places.
        """
        return int(device.sm_count * self.resident * (0.9 if self.splits > 3 else 1.0))

    def plan(self, problem: Problem, device: Device) -> LaunchPlan:
        defines = (
            *problem.defines(),
            ("ROWS", self.rows),
            ("WORDS", self.words),
            ("WARPS", self.warps),
            ("DEPTH", self.depth),
            ("RESIDENT", self.resident),
            ("SPLITS", self.splits),
            ("CONSTANT", int(problem.constant)),
        )
        strides = problem.row_strides
        words = TensorMap(
            "qweight",
            "uint32",
            dims=(problem.n // 8, problem.k // 8, 8),
            strides=(32 * strides.qweight, 4 * strides.qweight),
            box=(8 * self.words // (2 if problem.gated else 1), STEP_K // 8, 8),
            promotion=128,
        )
        itemsize = ITEMSIZE[problem.dtype]
        x = TensorMap(
            "x",
            problem.dtype,
            dims=(STEP_K, problem.m, problem.k // STEP_K),
            strides=(strides.x * itemsize, STEP_K * itemsize),
            box=(STEP_K, problem.m, 1),
        )
        sizes = (problem.m, problem.n, problem.k, problem.group_size)
        steps = (strides.scales, strides.qzeros, strides.residual, strides.y)
        scalars = (*map(np.int32, (*sizes, *steps)), *map(np.float32, problem.limits))
        return LaunchPlan(
            Kernel("gemm/gemm_sm90_raw.cu", "gemm_sm90_raw", defines, device.target),
            (self.blocks(problem), 1, 1),
            (self.warps * 32, 1, 1),
            ("scales", "qzeros", "bias", "residual", "y", words, x, *scalars),
            max(self.shared_bytes, device.shared_bytes_per_sm // (self.resident + 1)),
            cluster=(self.splits, 1, 1),
            dependent=True,
        )

    def estimate_us(self, problem: Problem, device: Device) -> float:
        """The launch, and a smooth maximum of the stream, of a warp's steps and of a multiprocessor's.

        The next launch fills what this one leaves free, so that a multiprocessor's work is the mean of all. Fitted to
        494 times of ten shapes with 1, 8 and 16 rows on an H100, group size 128: 3% off (root mean square) where within
        15% of the fastest of 13 blocks with up to 8 splits; its first choice took 1.016 times as long as that
        (geometric mean; at most 1.13). Half of them were of a constant weight, whose launches took 0.68 us less; that
        does not count here, so that a plan makes `gemm`'s choice, and bits.
        """
        alone, busy, fixed = BLOCKS[self.rows][self.words, self.warps, self.depth, self.resident]
        blocks = self.blocks(problem)
        waves = ceil_div(blocks, self.places(device))
        steps = ceil_div(problem.k, STEP_K)
        # The scales of a group cost as many instructions as half a step.
        step = (0.85 + 0.15 * 128 / problem.group_size) * 1e-3
        chain = waves * ceil_div(steps, self.splits * self.warps) * alone * step
        work = blocks * steps / self.splits * self.words * busy * step / device.sm_count
        stream = problem.weight_bytes / (device.read_gbs * 1e3)
        joining = 0.06 * self.splits + (0.17 if self.splits > 1 else 0.0)
        return float(fixed + joining + (chain**3 + work**3 + stream**3) ** (1 / 3))

    def workspace(self, problem: Problem) -> tuple[int, int]:
        return 0, 0


class GemmSm90Raw(_ByConfig):
    """What each warp multiplies comes by its own requests to the copy engine."""

    NAME = "gemm_sm90_raw"

    def refuse(self, problem: Problem, device: Device) -> str | None:
        reason = refuse_awq_layout(problem)
        if reason is not None:
            return reason
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
        words = problem.row_strides.qweight
        if not problem.wide or words % 4 or words < problem.n // 8:
            return "needs rows of the weight and of y that start at multiples of 16 bytes, one after the other"
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
    columns = 8 * config.words * (2 if problem.gated else 1)
    room = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // config.resident - 1024)
    return problem.n % columns == 0 and config.shared_bytes <= room
