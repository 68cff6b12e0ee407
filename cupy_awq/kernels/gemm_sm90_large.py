# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm90_large``: Hopper's tensor cores on the repacked weight (`Repacking`), for hundreds of rows and more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.kernels.gemm_sm90 import _ByConfig, layout, powered, split_scales, unfit, x_map
from cupy_awq.kernels.problem import Problem, ceil_div
from cupy_awq.kernels.repack import RECORD_COLUMNS, RECORD_K
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

SHARED_BYTES = 232448
"""That a block of sm_90 can have."""
MAX_STAGES = 6
LEAST_ROWS = 33
"""Fewer rows are promised products of weights that were not rounded."""


@dataclass(frozen=True)
class GemmSm90LargeConfig:
    """Clusters of ``cluster`` persistent blocks make units of ``block_m`` rows and ``cluster * block_n`` columns.

    In a block each of ``warpgroups`` warpgroups makes ``tiles`` times 64 columns. The first ``shared`` units are
    divided along K among ``sharers`` clusters, the others are made whole.
    """

    cluster: int
    blocks: int
    shared: int = 0
    sharers: int = 0
    block_m: int = 128
    warpgroups: int = 2
    tiles: int = 2

    @property
    def split_k(self) -> int:
        return self.splits

    @property
    def splits(self) -> int:
        return ceil_div(self.sharers, self.shared) if self.shared else 1

    @property
    def block_n(self) -> int:
        return self.warpgroups * self.tiles * 64

    def units(self, problem: Problem) -> int:
        return ceil_div(problem.m, self.block_m) * ceil_div(problem.n, self.block_n * self.cluster)

    @property
    def store_row_bytes(self) -> int:
        """Of a row on its way to y, of all warpgroups."""
        return 2 * (self.block_n + 8 * self.warpgroups)

    def stage_bytes(self, problem: Problem) -> int:
        return self.block_m * RECORD_K * 2 + self.block_n // RECORD_COLUMNS * layout(problem).record_bytes + 16

    def stages(self, problem: Problem) -> int:
        """Of 128 k in shared memory: as many as fit beside 16 rows on their way to y."""
        return min(MAX_STAGES, (SHARED_BYTES - 16 * self.store_row_bytes) // self.stage_bytes(problem))

    def store_rows(self, problem: Problem) -> int:
        """That the warpgroups store at a time: 32 if the stages leave room for them, else 16."""
        left = SHARED_BYTES - self.stages(problem) * self.stage_bytes(problem)
        return 32 if left >= 32 * self.store_row_bytes else 16

    def shared_bytes(self, problem: Problem) -> int:
        return self.stages(problem) * self.stage_bytes(problem) + self.store_rows(problem) * self.store_row_bytes

    def plan(self, problem: Problem, device: Device) -> LaunchPlan:
        """The launch. Buffers: weight (of `Repacking`), bias, residual, y, partials, counters, x."""
        defines: tuple[tuple[str, int | str], ...] = (
            *(item for item in problem.defines() if item[0] not in ("SCALE", "ZEROS")),
            *layout(problem).defines(),
            ("ALIGNED", int(problem.aligned)),
            ("BLOCK_M", self.block_m),
            ("WARPGROUPS", self.warpgroups),
            ("TILES", self.tiles),
            ("STAGES", self.stages(problem)),
            ("CLUSTER", self.cluster),
            ("SHARED", int(self.shared > 0)),
            ("STORE_ROWS", self.store_rows(problem)),
        )
        strides = problem.row_strides
        x = x_map(problem, self.block_m, 2 // self.cluster)
        sizes = (problem.m, problem.n, problem.k, strides.residual, strides.y, self.shared, self.sharers)
        factors = (*problem.limits, 2.0**problem.scale_exponent, 2.0**-problem.scale_exponent)
        scalars = (*(np.int32(size) for size in sizes), *(np.float32(factor) for factor in factors))
        return LaunchPlan(
            Kernel("gemm/gemm_sm90_large.cu", "gemm_sm90_large", defines, device.target),
            (self.blocks, 1, 1),
            (128 * (self.warpgroups + 1), 1, 1),
            ("weight", "bias", "residual", "y", "partials", "counters", x, *scalars),
            self.shared_bytes(problem),
            cluster=(self.cluster, 1, 1),
            dependent=True,
        )

    def estimate_us(self, problem: Problem, device: Device) -> float:
        """The steps of the busiest cluster, and what sharing takes.

        Fitted to 21 problems from 64 to 4096 rows on an H100, then to 52 from 256 rows on: 5% off (root mean square),
        and its first choice took 1.03 times as long as the best (geometric mean; at most 1.14, where times vary by 5%).
        """
        workers = self.blocks // self.cluster
        steps = ceil_div(problem.k, RECORD_K)
        rounds = ceil_div(self.units(problem) - self.shared, workers)
        share = self.shared * steps / self.sharers if self.shared else 0.0
        one = {64: 0.92, 128: 1.28 if self.tiles == 2 else 0.73, 256: 1.18}[self.block_m]
        work = powered(one * (rounds * steps + share), problem)
        stream = problem.weight_bytes / (device.read_gbs * 1e3)
        sums = 4.4 + 1.7 * self.splits + 0.01 * work if self.shared else 0.0
        return max(work, stream) + sums

    def workspace(self, problem: Problem) -> tuple[int, int]:
        if not self.shared:
            return 0, 0
        blocks = self.sharers * self.cluster
        return blocks * self.block_m * self.block_n * 4, self.shared * self.cluster * self.warpgroups


class GemmSm90Large(_ByConfig):
    NAME = "gemm_sm90_large"

    def refuse(self, problem: Problem, device: Device) -> str | None:
        if problem.fusion:
            return "cannot fuse the residual add or RMSNorm of a decoder"
        reason = unfit(problem, device)
        if reason is not None:
            return reason
        if problem.m < LEAST_ROWS:
            return f"needs {LEAST_ROWS} rows of x"
        if problem.dtype == "float16" and problem.wide_scales:
            return "needs scales whose products float16 holds in full"
        return layout(problem).refuse()

    def configs(self, problem: Problem, device: Device) -> list[GemmSm90LargeConfig]:
        return list(_configs(problem, device))


def _configs(problem: Problem, device: Device) -> Iterator[GemmSm90LargeConfig]:
    steps = ceil_div(problem.k, RECORD_K)
    # A thread has registers for 128 sums, or 32 with four warpgroups. A gate and what it gates are a warpgroup's tiles.
    few = problem.m <= 64
    shapes = [(1, 64 if few else 128, 2, 2)]
    if not problem.gated:
        if few:
            shapes += [(1, 64, 4, 1)]
        elif problem.m <= 128 or not split_scales(problem):
            # A weight is scaled for 128 rows only: where it takes more, up to 1.10 times as long at 512 rows.
            shapes += [(1, 128, 2, 1)]
        if problem.m > 128:
            shapes += [(1, 256, 2, 1), (2, 256, 2, 1)]
    for cluster, block_m, warpgroups, tiles in shapes:
        workers = device.sm_count // cluster
        config = GemmSm90LargeConfig(cluster, workers * cluster, block_m=block_m, warpgroups=warpgroups, tiles=tiles)
        units = config.units(problem)
        yield replace(config, blocks=min(units, workers) * cluster)
        # The units of the last, incomplete round, alone or with those of the round before.
        left = units % workers
        for shared in sorted({left, left + workers if units > workers else left} - {0}):
            for sharers in sorted({min(workers, 2 * shared), min(workers, 4 * shared), workers}):
                if sharers != shared and shared * steps >= 2 * sharers:
                    blocks = (sharers if units == shared else workers) * cluster
                    yield replace(config, blocks=blocks, shared=shared, sharers=sharers)
