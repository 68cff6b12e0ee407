# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm90`` and ``gemm_sm90_mma``: Hopper's tensor cores on the repacked weight (`Repacking`)."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupy_awq.kernels.family import Workspace
from cupy_awq.kernels.problem import ITEMSIZE, Problem, ceil_div
from cupy_awq.kernels.repack import RECORD_COLUMNS, RECORD_K, Repacking
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan, TensorMap

WGMMA, MMA = "gemm_sm90", "gemm_sm90_mma"
MAX_BLOCK_M = 128
MMA_MAX_ROWS = 16
MMA_ALONE_ROWS = 8
"""Up to which wgmma, which takes as long as for 16, was the slower one for all shapes that were measured."""
MAX_FUSED_ROWS = 32
"""The largest M of a GEMM with a `Fusion`; fusing 32 rows saves 1% of a decoder layer on an H100."""
SQUARE_SUM_COLUMNS = 32
"""The columns of the residual stream per element of ``square_sums``; kSquareSumColumns of the kernel."""
FUSION_BUFFERS = ("h", "norm_weight", "square_sums", "previous_inverse_rms", "inverse_rms")
"""The buffers that a launch with a `Fusion` takes besides those of a GEMM; `residual_stream.cuh` describes them."""
REGISTERS = 65536
THREADS = 2048
"""Of a multiprocessor."""
STEPS = {0: 185, 1: 300, 2: 353, 4: 364, 8: 391, 16: 674}
"""Nanoseconds of a team's 128 k, of up to 16 rows, by `GemmSm90Config.x_rows`."""


def layout(problem: Problem) -> Repacking:
    """The layout that the weight of a problem must have."""
    return Repacking(problem.k, problem.n, problem.group_size, problem.scales_dtype, problem.zeros)


def x_map(problem: Problem, block_m: int, count: int) -> TensorMap:
    """x in boxes of 64 k of each row of a tile, ``count`` times; only one time where the tile lacks rows.

    See ``lacks_rows`` in ``cuda_src/hopper.cuh``.
    """
    m, itemsize = problem.m, ITEMSIZE[problem.dtype]
    return TensorMap(
        "x",
        problem.dtype,
        dims=(64, m, problem.k // 64),
        strides=(problem.row_strides.x * itemsize, 64 * itemsize),
        box=(64, m, 1) if m <= block_m - 16 else (64, block_m, count),
        swizzle=128,
    )


def powered(work: float, problem: Problem) -> float:
    """Microseconds of what would take ``work`` at full clock, with the clock that the chip's power allows.

    In between the larger one counts most: while some blocks have nothing to do, the others' clock rises.
    """
    power = 2 * problem.m * problem.n * problem.k / 877e6
    return float((work**3 + power**3) ** (1 / 3))


@dataclass(frozen=True)
class GemmSm90Config:
    """``splits`` blocks of a cluster make a tile of ``block_m`` rows and ``records`` times 32 columns.

    In each block ``teams`` teams of warps take turns at ``stages`` stages of ``depth`` times 128 k. By wgmma (``name``)
    a warpgroup makes ``tiles`` times 64 columns; by mma a warp makes 32, and a team keeps ``x_stages`` stages of
    ``x_rows`` rows of x. A multiprocessor has room for ``resident`` blocks. ``scaled``: weights are rounded to float16
    once they are scaled, instead of scaling the sums of each group. ``eager``: all of a block's first weights are asked
    for before x, for which a block waits that begins before the kernel before has ended.
    """

    name: str
    block_m: int
    records: int
    tiles: int
    teams: int
    stages: int
    splits: int
    depth: int = 1
    resident: int = 1
    x_rows: int = 0
    x_stages: int = 0
    scaled: bool = False
    eager: bool = True

    @property
    def split_k(self) -> int:
        return self.splits

    @property
    def team_warps(self) -> int:
        return self.records if self.name == MMA else self.records // (2 * self.tiles) * 4

    def threads(self, problem: Problem) -> int:
        others = 4 if self.consumer_registers else 2 if self.name == MMA and problem.rms_norms_x else 1
        return (self.teams * self.team_warps + others) * 32

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer where the producer is a warpgroup that leaves it most of its own; else 0."""
        if self.name == MMA or self.block_m < 64:
            return 0
        return {8: 232, 12: 152}.get(self.teams * self.team_warps, 0)

    @property
    def block_n(self) -> int:
        return self.records * RECORD_COLUMNS

    def x_ring_bytes(self) -> int:
        if self.name == MMA:
            return self.teams * self.x_stages * self.x_rows * self.depth * RECORD_K * 2
        return self.stages * self.block_m * self.depth * RECORD_K * 2

    def shared_bytes(self, problem: Problem) -> int:
        stage = self.records * self.depth * layout(problem).record_bytes + 16
        staged = self.x_ring_bytes() + self.stages * stage
        sums = self.teams * self._sum_bytes(self.block_m)
        owned = self.block_m // self.splits
        barrier_and_sent = 16 + (self.splits - 1) * self._sum_bytes(owned) if self.splits > 1 else 0
        return max(staged, sums) + barrier_and_sent + (owned * 4 if problem.rms_norms_x else 0)

    def _sum_bytes(self, rows: int) -> int:
        """Of the tile's sums in `rows` of its rows, as SumTiles has them."""
        return ceil_div(rows, 8) * (self.block_n // 16) * (8 * min(4, rows // 2) * 4 + 8) * 4

    def grid(self, problem: Problem) -> tuple[int, int, int]:
        return ceil_div(problem.n, self.block_n) * self.splits, ceil_div(problem.m, self.block_m), 1

    def _launched(self, problem: Problem, device: Device) -> tuple[int, int, int]:
        """The grid with blocks that only keep a place, where few of them make it one block a multiprocessor.

        4096 x 4096, 128 blocks of 132 places: 1.16 times as fast at 8 rows on an H100, 1.09 over 1 to 16.
        """
        columns, rows, _ = self.grid(problem)
        whole = device.sm_count // self.splits * self.splits
        return whole if rows == 1 and 0.9 * whole < columns < whole else columns, rows, 1

    def plan(self, problem: Problem, device: Device) -> LaunchPlan:
        """The launch. Buffers: weight (of `Repacking`), bias, residual, y, x; and FUSION_BUFFERS with a `Fusion`."""
        defines: tuple[tuple[str, int | str], ...] = (
            *(item for item in problem.defines() if item[0] not in ("SCALE", "ZEROS")),
            *layout(problem).defines(),
            ("ALIGNED", int(problem.aligned)),
            ("BLOCK_M", self.block_m),
            ("RECORDS", self.records),
            ("TEAMS", self.teams),
            ("TEAM_WARPS", self.team_warps),
            ("STAGES", self.stages),
            ("DEPTH", self.depth),
            ("SPLITS", self.splits),
            ("RESIDENT", self.resident),
            ("EAGER", int(self.eager)),
            ("CONSUMER_REGISTERS", self.consumer_registers),
            ("X_BYTES", 0 if self.name == MMA else self.block_m * self.depth * RECORD_K * 2),
            ("X_RING_BYTES", self.x_ring_bytes()),
            ("ADD_TO_STREAM", int(problem.adds_to_stream)),
            ("RMS_NORM_X", int(problem.rms_norms_x)),
        )
        strides = problem.row_strides
        sizes: tuple[int, ...] = (problem.m, problem.n, problem.k, strides.residual, strides.y)
        x: Argument = "x"
        factors: tuple[float, ...] = ()
        if self.name == MMA:
            defines += (("X_ROWS", self.x_rows), ("X_STAGES", self.x_stages))
            sizes += (strides.x,)
        else:
            defines += (("WARPGROUPS", self.team_warps // 4), ("TILES", self.tiles), ("SCALED", int(self.scaled)))
            factors = 2.0**problem.scale_exponent, 2.0**-problem.scale_exponent
            x = x_map(problem, self.block_m, 2 * self.depth)
        eps = problem.fusion.eps if problem.fusion else 0.0
        scalars = (*map(np.int32, sizes), *map(np.float32, (*problem.limits, eps, *factors)))
        fusion_buffers = FUSION_BUFFERS if problem.fusion else ()
        return LaunchPlan(
            Kernel(f"gemm/{self.name}.cu", self.name, defines, device.target),
            self._launched(problem, device),
            (self.threads(problem), 1, 1),
            ("weight", "bias", "residual", "y", *fusion_buffers, x, *scalars),
            self.shared_bytes(problem),
            cluster=(self.splits, 1, 1),
            dependent=True,
        )

    def estimate_us(self, problem: Problem, device: Device) -> float:
        if self.block_m <= MMA_MAX_ROWS:
            return self._few_rows_estimate_us(problem, device)
        return self._many_rows_estimate_us(problem, device)

    def _few_rows_estimate_us(self, problem: Problem, device: Device) -> float:
        """The launch, what goes on side by side, and what no kernel before could do ahead.

        While a kernel ends, the next one's blocks begin where there is room for them, each with as much of the weight
        as its stages hold. Fitted to 2443 times of 36 shapes with 1 to 16 rows on an H100, group size 128: 11% off
        (root mean square, the faster ones above all). For shapes that were left out its first choice took 1.10 times
        as long as the best (geometric mean), as the constants before would have 1.14 times.
        """
        blocks = math.prod(self._launched(problem, device))
        steps = ceil_div(ceil_div(problem.k, RECORD_K), self.splits)
        waves = max(1.0, blocks / self._places(problem, device))
        nanoseconds = (
            waves * ceil_div(ceil_div(steps, self.depth), self.teams) * self.depth * STEPS[self.x_rows],
            waves * steps / (self.stages * self.depth) * 1845,
            1.12 * problem.weight_bytes / device.read_gbs,
        )
        launch = 0.71 if self.name == WGMMA else 0.37
        joining = 0.35 if self.splits > 1 else 0.0
        crowded = 1.11 * self._crowded(problem, device)
        uneven = 0.47 if blocks % device.sm_count else 0.0
        return launch + joining + crowded + uneven + math.hypot(*nanoseconds) * 1e-3

    def _places(self, problem: Problem, device: Device) -> int:
        """For blocks, on all multiprocessors."""
        resident = device.shared_bytes_per_sm // (self.shared_bytes(problem) + 1024)
        return device.sm_count * max(1, min(resident, THREADS // self.threads(problem)))

    def _crowded(self, problem: Problem, device: Device) -> float:
        """The share of the next kernel's blocks that find no place beside these."""
        free = self._places(problem, device) / math.prod(self._launched(problem, device)) - 1
        return 1 - min(1.0, max(0.0, free))

    def _many_rows_estimate_us(self, problem: Problem, device: Device) -> float:
        """The larger of the stream and of the work on it, and what does not overlap.

        Fitted to 4902 times of 39 shapes with 32 to 128 rows on an H100, group sizes 32, 64 and 128: 8% off (root mean
        square, the faster ones above all). For shapes that were left out its first choice took 1.03 times as long as
        the best (geometric mean), as the constants before would have 1.05 times.
        """
        columns, rows, _ = self.grid(problem)
        steps = ceil_div(ceil_div(problem.k, RECORD_K), self.splits)
        waves = ceil_div(columns * rows, device.sm_count * self.resident)
        sharing = min(self.resident, ceil_div(columns * rows, device.sm_count))
        # Cycles of a step: how long a team takes for it alone, how long it keeps the tensor cores and schedulers, and
        # how long it waits for the copies.
        wide = self.block_m / 2
        busy = self.block_n / 8 * (14.4 + 0.8 * wide)
        stage = self.depth * RECORD_K * (2 * self.block_m + 0.52 * self.block_n)
        wait = (1320 + stage / 47.6 * sharing) / self.depth
        if self.scaled:
            alone = 60 + self.tiles * max(360.0, 5.24 * wide)
            wait /= self.stages - self.teams  # a stage is given back one later
        else:
            alone = 60 + self.tiles * (207 + 13.9 * wide)
            wait /= self.stages
            if self.teams == 1 and sharing == 1:
                busy += 150  # nobody else uses the tensor cores while the only team converts
        work = waves * (steps * max(alone / self.teams, busy * sharing, wait) / 1730 + 0.85)
        work = powered(work, problem)
        stream = problem.weight_bytes / (device.read_gbs * 1e3)
        beside = (0.36 if self.scaled else 0.3) * min(stream, work)
        x_bytes = columns * rows * steps * min(self.block_m, problem.m) * 2 * RECORD_K
        crowded = self._crowded(problem, device)
        launch = 0.53 + 1.5 * crowded if self.eager else 0.73 + 0.25 * crowded
        joining = 0.57 * waves if self.splits > 1 else 0.0
        return launch + joining + max(stream, work) + beside + x_bytes / 177e6

    def workspace(self, problem: Problem) -> tuple[int, int]:
        return 0, 0


def unfit(problem: Problem, device: Device) -> str | None:
    """Why no kernel on repacked weights can take a problem, whatever the layout of these, or None."""
    if device.arch != 90:
        return f"needs sm_90, not sm_{device.arch}"
    if not problem.repacked:
        return "needs the layout in which AwqLinear keeps its weight"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"takes x of float16 or bfloat16, not {problem.dtype}"
    if not problem.x_aligned:
        return "needs rows of x that start at multiples of 16 bytes"
    if problem.gated and problem.n % (2 * RECORD_COLUMNS):
        return f"needs N to be a multiple of {2 * RECORD_COLUMNS} when gated, not {problem.n}"
    return None


class _ByConfig:
    """The part of a `Family` that its configurations implement."""

    def estimate_us(self, config: Any, problem: Problem, device: Device) -> float:
        return float(config.estimate_us(problem, device))

    def plan(self, config: Any, problem: Problem, device: Device) -> LaunchPlan:
        plan: LaunchPlan = config.plan(problem, device)
        return plan

    def workspace(self, config: Any, problem: Problem) -> Workspace:
        return Workspace(*config.workspace(problem))


class GemmSm90(_ByConfig):
    NAME = "gemm_sm90"

    def refuse(self, problem: Problem, device: Device) -> str | None:
        if problem.fusion and problem.m > MAX_FUSED_ROWS:
            return f"fuses the residual stream only for M <= {MAX_FUSED_ROWS}, not {problem.m}"
        if problem.adds_to_stream and (problem.gated or problem.residual or not problem.aligned):
            return "cannot add a gated, unaligned or residual result to the residual stream"
        return unfit(problem, device) or layout(problem).refuse()

    def configs(self, problem: Problem, device: Device) -> list[GemmSm90Config]:
        # A gated tile has as many records of the gate as of the up projection; short K leaves fewer teams, twice.
        found = dict.fromkeys(_configs(problem, device))
        return [config for config in found if not (problem.gated and config.records % 2)]


def split_scales(problem: Problem) -> bool:
    """Whether weights take two more operations a pair to be scaled: by bfloat16 in two parts."""
    return (problem.dtype, problem.scales_dtype) == ("bfloat16", "float16")


def _power(problem: Problem) -> int:
    """Rows that are kept of x."""
    return 1 << (problem.m - 1).bit_length()


def _configs(problem: Problem, device: Device) -> Iterator[GemmSm90Config]:
    steps = ceil_div(problem.k, RECORD_K)
    power = _power(problem)
    if problem.m <= MMA_MAX_ROWS:
        for records, splits, warps, depth in itertools.product((1, 2, 3, 4, 6, 7, 8), (1, 2), (16, 8), (1, 2, 4)):
            teams = max(1, min(warps // records, steps // splits // depth))
            x_stages = 4 if depth == 1 else 2
            config = GemmSm90Config(MMA, max(8, power), records, 1, teams, 0, splits, depth, 1, power, x_stages)
            yield from _staged(config, problem, device, 72 if power <= 8 else 112)
    for block_m in (16, 32, 64, 128) if problem.m > MMA_ALONE_ROWS else ():
        if block_m > max(16, power) or block_m < min(max(16, power), 64):
            continue
        depths = (1, 2, 4) if block_m == 16 else (1, 2) if block_m <= 64 else (1,)
        # Of clusters of four 30 run at a time on an H100, too few for 4096 columns. Clusters of two whose tiles bring x
        # together by multicast took 0 to 13% longer (20 cases from 32 to 128 rows on an H100).
        for tiles, warpgroups, teams, splits, depth in itertools.product(
            (1, 2), (1, 2, 3, 4, 6, 7), (1, 2, 3, 4), (1, 2), depths
        ):
            if depth == 4 and (tiles, warpgroups, teams) != (1, 2, 1):
                continue  # took up to 1.28 times as long
            config = GemmSm90Config(WGMMA, block_m, warpgroups * tiles * 2, tiles, teams, 0, splits, depth)
            if teams * splits * depth > steps:
                continue
            scales = block_m >= 64 and not (problem.dtype == "float16" and problem.wide_scales)
            # Sums of groups shorter than a record are waited for one by one: up to 1.39 times as long in 16 cases.
            short = problem.group_size < RECORD_K
            if not (scales and short):
                # Sums, parts, the operand of a group and about 30 more.
                yield from _staged(config, problem, device, block_m * (tiles + 1) // 2 + 62)
            # Two operations more a pair: up to 1.23 times as long at 64 rows.
            if scales and not (short and depth > 1) and not (split_scales(problem) and not short and block_m == 64):
                scaled = replace(config, scaled=True)
                # With two tiles and four fewer, the assembler serializes wgmma for want of registers.
                yield from _staged(scaled, problem, device, block_m * tiles // 2 + (86 if tiles == 1 else 90))


def _staged(config: GemmSm90Config, problem: Problem, device: Device, registers: int) -> Iterator[GemmSm90Config]:
    """The configuration with as many stages as let two blocks, or one, live on a multiprocessor."""
    steps = ceil_div(ceil_div(problem.k, RECORD_K), config.splits)
    # A stage belongs to one team.
    enough = ceil_div(steps, config.teams * config.depth)
    rounds = range(1 if config.teams > 1 and not config.scaled else 2, max(3, enough + 1))
    for resident in (2, 1):
        # Warps are dealt to four schedulers; a block takes 1 KB of shared memory besides its own.
        most = REGISTERS // (ceil_div(config.threads(problem) // 32, 4) * 128 * resident) // 8 * 8
        limit = min(device.shared_bytes_per_sm // resident - 1024, device.shared_bytes_per_block)
        if resident == 1 and config.consumer_registers:
            most = config.consumer_registers
        if registers > min(most, 255):
            continue
        counts = functools.partial(_with_stages, config, resident)
        fitting = bisect.bisect_right(rounds, limit, key=lambda each: counts(each).shared_bytes(problem))
        if fitting:
            yield (chosen := counts(rounds[fitting - 1]))
            if config.block_m > MMA_MAX_ROWS:
                yield replace(chosen, eager=False)


def _with_stages(config: GemmSm90Config, resident: int, each: int) -> GemmSm90Config:
    """The configuration with ``each`` stages a team."""
    return replace(config, stages=each * config.teams, resident=resident)
