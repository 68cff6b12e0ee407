# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm75`` and ``gemm_sm80``: tensor cores on AWQ's own layout of the weight."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.device import Device
from cupy_awq.kernels import problem as common
from cupy_awq.kernels.problem import Problem, ceil_div
from cupy_awq.launch_plan import LaunchPlan

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
        source = f"{self.name}.cu"
        return common.plan(source, self.name, defines, problem, device, grid, self.warps * 32, self.shared_bytes)

    def microseconds(self, problem: Problem, device: Device) -> float:
        tiles_k = ceil_div(ceil_div(problem.k, BLOCK_K), self.splits)
        blocks = ceil_div(problem.m, self.block_m) * ceil_div(problem.n, self.block_n) * self.splits
        registers = 3 * self.block_m + 40
        fit = device.shared_bytes_per_sm // (self.shared_bytes + 1024), 65536 // (registers * self.warps * 32)
        per_sm = max(1, min(fit))
        waves = ceil_div(blocks, device.sm_count * per_sm)
        sharing = min(per_sm, ceil_div(blocks, device.sm_count))
        # Nanoseconds of one tile of K, fitted to 700 measurements on an H200: the latency of a block that is alone, or
        # the work of all blocks on the SM: tensor cores, conversion, copies of x; or their share of the memory.
        latency = 810 + 8 * self.block_m
        work = self.block_m * self.block_n * BLOCK_K / 1000 + BLOCK_K * (0.0165 * self.block_n + 0.0235 * self.block_m)
        stream = BLOCK_K * self.block_n / 2 * device.sm_count / (0.8 * device.read_gbs)
        tile = max(latency, sharing * max(work, stream))
        reduction = 3.2 + 0.4 * self.splits if self.splits > 1 else 0.0
        # With one buffer ahead and copies through registers, loads and products hardly overlap.
        overlap = 1.0 if self.stages > 2 else 1.5
        return 0.5 + reduction + waves * tiles_k * tile * overlap * 1e-3

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
GEMM_SM80 = GemmMma("gemm_sm80", 80, ("float16", "bfloat16"), stages=4)
