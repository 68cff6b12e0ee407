# SPDX-License-Identifier: Apache-2.0
"""``gemm_simt``: any problem, in float32 on CUDA cores; the fallback, and the check on the other kernels."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.kernels import problem as common
from cupy_awq.kernels.problem import Problem, ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

BLOCK_M, BLOCK_N, BLOCK_K, THREADS = 64, 64, 16, 256


@dataclass(frozen=True)
class GemmSimtConfig:
    splits: int

    def plan(self, problem: Problem, device: Device) -> LaunchPlan:
        grid = (ceil_div(problem.m, BLOCK_M), ceil_div(problem.n, BLOCK_N), self.splits)
        return common.plan("gemm/gemm_simt.cu", "gemm_simt", (), problem, device, grid, THREADS)

    def estimate_us(self, problem: Problem, device: Device) -> float:
        blocks = ceil_div(problem.m, BLOCK_M) * ceil_div(problem.n, BLOCK_N) * self.splits
        # 1.1 us for a block's step of 16 rows, measured on an H200; blocks on one SM share its lanes.
        steps = ceil_div(ceil_div(problem.k, BLOCK_K), self.splits)
        reduction = 2.0 + 0.2 * self.splits if self.splits > 1 else 0.0
        return 2.0 + reduction + ceil_div(blocks, device.sm_count) * steps * 1.1

    def workspace(self, problem: Problem) -> tuple[int, int]:
        if self.splits == 1:
            return 0, 0
        tiles = ceil_div(problem.m, BLOCK_M) * ceil_div(problem.n, BLOCK_N)
        return tiles * self.splits * BLOCK_M * BLOCK_N * 4, tiles


class GemmSimt:
    NAME = "gemm_simt"

    def refuse(self, problem: Problem, device: Device) -> str | None:
        return None

    def configs(self, problem: Problem, device: Device) -> list[GemmSimtConfig]:
        return [GemmSimtConfig(splits) for splits in common.split_counts(ceil_div(problem.k, BLOCK_K))]
