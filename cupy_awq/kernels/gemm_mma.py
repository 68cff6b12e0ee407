# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm75`` and ``gemm_sm80``: tensor cores on AWQ's own layout of the weight."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.kernels import problem as common
from cupy_awq.kernels.problem import Problem, ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

BLOCK_K = 64
STEP_K = 16
WARP_N = 32


@dataclass(frozen=True)
class GemmMmaConfig:
    """A tile of ``block_m`` rows and 32 columns a warp, made through ``stages`` stages of shared memory."""

    name: str
    block_m: int
    warps: int
    stages: int
    splits: int

    @property
    def block_n(self) -> int:
        return self.warps * WARP_N

    @property
    def shared_bytes(self) -> int:
        return self.stages * BLOCK_K * (2 * self.block_m + self.block_n // 2)

    def plan(self, problem: Problem, device: Device) -> LaunchPlan:
        defines = (
            ("ALIGNED", int(problem.wide)),
            ("BLOCK_M", self.block_m),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("GROUP_IN_TILE", int(problem.group_size % BLOCK_K != 0)),
        )
        grid = (ceil_div(problem.m, self.block_m), ceil_div(problem.n, self.block_n), self.splits)
        source = f"gemm/{self.name}.cu"
        return common.plan(source, self.name, defines, problem, device, grid, self.warps * 32, self.shared_bytes)

    def estimate_us(self, problem: Problem, device: Device) -> float:
        tiles_k = ceil_div(ceil_div(problem.k, BLOCK_K), self.splits)
        blocks = ceil_div(problem.m, self.block_m) * ceil_div(problem.n, self.block_n) * self.splits
        fit = device.shared_bytes_per_sm // (self.shared_bytes + 1024), 65536 // (self._registers * self.warps * 32)
        per_sm = max(1, min(fit))
        full_waves = ceil_div(blocks, device.sm_count * per_sm) - 1
        tail = ceil_div(blocks - full_waves * device.sm_count * per_sm, device.sm_count)
        # Nanoseconds, fitted to 300 measurements on an H200: of a block's start; of a tile of K, which has the latency
        # of a block that is alone, or the work of all blocks on the SM, or their share of the memory.
        start = 4700
        latency = 550 + 4.4 * self.block_m
        work = self.block_n * BLOCK_K * (self.block_m / 930 + 0.0046)
        stream = self.block_n * BLOCK_K / 2 * device.sm_count / (0.5 * device.read_gbs)
        if self.stages == 2:
            latency *= 2  # copies through registers hardly overlap with the products
        full = tiles_k * max(latency, per_sm * max(work, stream)) + start
        last = tiles_k * max(latency, tail * max(work, stream)) + start
        reduction = 1.0 + 0.17 * self.splits if self.splits > 1 else 0.0
        return 0.4 + reduction + (full_waves * full + last) * 1e-3

    @property
    def _registers(self) -> int:
        return {16: 96, 32: 150, 64: 232}[self.block_m]

    def workspace(self, problem: Problem) -> tuple[int, int]:
        if self.splits == 1:
            return 0, 0
        tiles = ceil_div(problem.m, self.block_m) * ceil_div(problem.n, self.block_n)
        return tiles * self.splits * self.block_m * self.block_n * 4, tiles


class GemmMma:
    """Both families differ in the instructions alone."""

    def __init__(self, name: str, arch: int, dtypes: tuple[str, ...], stages: int) -> None:
        self.NAME = name
        self._arch = arch
        self._dtypes = dtypes
        self._stages = stages

    def refuse(self, problem: Problem, device: Device) -> str | None:
        if device.arch < self._arch:
            return f"needs sm_{self._arch} or newer, not sm_{device.arch}"
        if problem.dtype not in self._dtypes:
            return f"takes x of {' or '.join(self._dtypes)}, not {problem.dtype}"
        if problem.group_size % STEP_K:
            return f"needs a group size that is a multiple of {STEP_K}, not {problem.group_size}"
        if not problem.x_aligned:
            return "needs rows of x that start at multiples of 16 bytes"
        return None

    def configs(self, problem: Problem, device: Device) -> list[GemmMmaConfig]:
        rows = [block_m for block_m in (16, 32, 64) if block_m == 16 or problem.m > block_m // 2]
        splits = common.split_counts(ceil_div(problem.k, BLOCK_K))
        configs = [GemmMmaConfig(self.NAME, m, w, self._stages, s) for m in rows for w in (2, 4) for s in splits]
        return [config for config in configs if config.shared_bytes <= device.shared_bytes_per_block]


GEMM_SM75 = GemmMma("gemm_sm75", 75, ("float16",), stages=2)
GEMM_SM80 = GemmMma("gemm_sm80", 80, ("float16", "bfloat16"), stages=3)
