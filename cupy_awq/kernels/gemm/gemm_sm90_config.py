# SPDX-License-Identifier: Apache-2.0
"""`GemmSm90Config`: the fields of a configuration of ``gemm_sm90``, and its grid, memory and resident CTAs per SM."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K, WEIGHT_TILE_N, FragmentLayout
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.kernels.hopper import (
    REGISTERS_PER_SM,
    SCHEDULERS,
    available_ctas,
    could_hold_three_launches,
    resident_ctas,
)
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device

WGMMA, MMA, MMA_INVARIANT = "gemm_sm90", "gemm_sm90_mma", "gemm_sm90_mma_invariant"
"""The names of the family's kernels: wgmma, mma.sync, and mma.sync with the arithmetic of wgmma."""
WINDOW_BYTES = 35000
"""The largest size in bytes of a CTA's weight copies in flight in a decode step; see `GemmSm90Config.window`.

On an H100, decode steps of Qwen3-8B and Llama-3.2-1B with 1 to 8 sequences are slower with a window of 18 KB, and also
with a window of all stages.
"""


@dataclass(frozen=True)
class GemmSm90Config:
    """A configuration of ``gemm_sm90.cu``, ``gemm_sm90_mma.cu`` or ``gemm_sm90_mma_invariant.cu``.

    Attributes:
        name: name of the kernel: WGMMA, MMA or MMA_INVARIANT.
        block_m: number of rows per CTA tile.
        weight_tiles: number of weight tiles along n per CTA tile, each of 32 columns.
        m64_tiles: number of wgmma m64 tiles (64 columns of y each) per warpgroup; 1 with mma.
        consumers: number of consumers, which are groups of warps that take turns at the pipeline stages.
        stages: number of pipeline stages.
        split_k: number of CTAs per cluster; each computes the CTA tile over its slice of K.
        k_tiles: number of weight tiles along k per pipeline stage, each of 128 rows of W.
        ctas_per_sm: number of resident CTAs per SM for which the kernel is compiled (``__launch_bounds__``).
        x_rows: (mma) number of rows of x in shared memory, a power of two; 0 with wgmma.
        x_stages: (mma) number of pipeline stages of x per consumer; 0 with wgmma.
        scaled: whether weights are multiplied by their scale and rounded before they are multiplied by x (never with
            MMA); otherwise the accumulators of each group are multiplied by the scale.
        prefetch_weights: whether the weights of all stages are copied before the wait for the preceding kernel (PDL);
            otherwise only those of the first stages. Copies of x are queued after these copies, which delays a CTA that
            starts late.
    """

    name: str
    block_m: int
    weight_tiles: int
    m64_tiles: int
    consumers: int
    stages: int
    split_k: int
    k_tiles: int = 1
    ctas_per_sm: int = 1
    x_rows: int = 0
    x_stages: int = 0
    scaled: bool = False
    prefetch_weights: bool = True

    @property
    def block_n(self) -> int:
        """The number of columns per CTA tile."""
        return self.weight_tiles * WEIGHT_TILE_N

    @property
    def consumer_warps(self) -> int:
        """The number of warps per consumer."""
        return {MMA: self.weight_tiles, MMA_INVARIANT: 2 * self.weight_tiles}.get(
            self.name, self.weight_tiles // (2 * self.m64_tiles) * 4
        )

    @property
    def consumer_registers(self) -> int:
        """The number of registers per consumer thread after setmaxnreg, or 0 if the kernel does not use setmaxnreg."""
        if self.name != WGMMA or self.block_m <= 32:
            return 0
        return {8: 232, 12: 152}.get(self.consumers * self.consumer_warps, 0)

    @property
    def x_stage_bytes(self) -> int:
        """The size of x per pipeline stage in bytes; 0 with mma, where the consumers copy x to stages of their own."""
        return 0 if self.name != WGMMA else self.block_m * self.k_tiles * WEIGHT_TILE_K * 2

    @property
    def x_ring_bytes(self) -> int:
        """The total size of all pipeline stages of x, in bytes."""
        if self.name != WGMMA:
            return self.consumers * self.x_stages * self.x_rows * self.k_tiles * WEIGHT_TILE_K * 2
        return self.stages * self.x_stage_bytes

    def threads(self, problem: Problem) -> int:
        """Return the number of threads per CTA: consumers, producer and, with mma, one warp for the RMSNorm factors."""
        others = 4 if self.consumer_registers else 2 if self.name != WGMMA and problem.rms_norms_x else 1
        return (self.consumers * self.consumer_warps + others) * 32

    def iterations(self, problem: Problem) -> int:
        """Return the largest number of iterations of a CTA, each of which consumes one pipeline stage."""
        return ceil_div(problem.k, WEIGHT_TILE_K * self.k_tiles * self.split_k)

    def window(self, problem: Problem) -> int:
        """Return the largest number of pipeline stages whose copies may be in flight.

        It is limited, by WINDOW_BYTES, only for `gemm_sm90_mma` in a GEMM with a `Fusion` whose stages hold more than
        half of a CTA's weights: most of these weights are copied before the PDL wait, while the preceding kernel still
        loads. Other CTAs copy at least half of their weights after the preceding kernel has finished.
        """
        if not problem.fusion or self.name != MMA or 2 * self.stages <= self.iterations(problem):
            return self.stages
        stage_bytes = self.weight_tiles * self.k_tiles * FragmentLayout.of(problem).weight_tile_bytes
        return min(self.stages, max(1, WINDOW_BYTES // stage_bytes))

    def shared_bytes(self, problem: Problem) -> int:
        """Return the dynamic shared memory per CTA in bytes."""
        if not problem.gathers_x:
            return self.storage_bytes(problem)
        columns = self.iterations(problem) * self.k_tiles * WEIGHT_TILE_K
        gathered = problem.m * problem.k + (1 + self.x_rows) * columns
        return ceil_div(self.storage_bytes(problem), 16) * 16 + gathered * 2

    def storage_bytes(self, problem: Problem) -> int:
        """Return the size of SharedStorage in CUDA in bytes, which static_asserts the same value.

        With ``gathers_x``, the rows, the order and the gathered columns of x are stored behind it.
        """
        stage = self.weight_tiles * self.k_tiles * FragmentLayout.of(problem).weight_tile_bytes + 16
        stages = (0 if problem.gathers_x else self.x_ring_bytes) + self.stages * stage
        accumulators = self.consumers * self._accumulator_bytes(self.block_m)
        owned = ceil_div(self.block_m // 2, self.split_k) * 2
        received = 16 + (self.split_k - 1) * self._accumulator_bytes(owned) if self.split_k > 1 else 0
        return max(stages, accumulators) + received + (owned * 4 if problem.rms_norms_x else 0)

    def _accumulator_bytes(self, rows: int) -> int:
        """Return the size of the accumulators of ``rows`` rows in bytes, in the layout of AccumulatorBlocks in CUDA."""
        row_pairs = math.gcd(4, rows // 2)
        return rows // (2 * row_pairs) * (self.block_n // 16) * (8 * row_pairs * 4 + 8) * 4

    def tiles(self, problem: Problem) -> tuple[int, int]:
        """Return the numbers of CTA tiles of y along m and along n."""
        return ceil_div(problem.m, self.block_m), ceil_div(problem.n, self.block_n)

    def grid(self, problem: Problem) -> tuple[int, int, int]:
        """Return the grid: ``split_k`` CTAs per tile."""
        m_blocks, n_blocks = self.tiles(problem)
        return n_blocks * self.split_k, m_blocks, 1

    @property
    def registers(self) -> int:
        """The number of registers that a consumer thread needs."""
        if self.name == MMA:
            return 72 if self.x_rows <= 8 else 112
        if self.name == MMA_INVARIANT:
            return 96 if not self.scaled else 64 if self.x_rows <= 8 else 80
        if self.scaled:
            # With fewer than 90 additional registers for two m64 tiles, ptxas serializes the wgmmas.
            return self.block_m * self.m64_tiles // 2 + (86 if self.m64_tiles == 1 else 90)
        # The registers hold the accumulators of y and of one group, operand A of one group, and 30 others.
        return self.block_m * (self.m64_tiles + 1) // 2 + 62

    def resident(self, problem: Problem, device: Device) -> int:
        """Return the largest number of resident CTAs per SM.

        Without setmaxnreg, wgmma kernels use 18 registers per thread fewer than `registers`, but at least 72.
        """
        threads = self.threads(problem)
        if self.consumer_registers:
            registers = 1
        elif self.name == WGMMA:
            warp_registers = 32 * ceil_div(max(72, self.registers - 18), 8) * 8
            registers = REGISTERS_PER_SM // SCHEDULERS // warp_registers * SCHEDULERS // ceil_div(threads, 32)
        else:
            registers = available_ctas(threads, self.registers)
        return resident_ctas(device, self.shared_bytes(problem), threads, registers)

    def starts_next_late(self, problem: Problem, device: Device) -> bool:
        """Return whether this kernel lets the next one start only after its own PDL wait, not at once.

        The preceding kernel has finished by then. This holds where CTAs of three kernels could otherwise be resident at
        once, so that two CTAs of one kernel may share an SM while other SMs have none. On an H100 such configurations
        take, with a late start, 0.82 (wgmma) and 0.88 (mma) of the time, or 0.99 (wgmma) with one CTA per SM; all
        others 1.01 (geometric means of 7,831 configurations with M <= 64). A GEMM with a `Fusion` is followed by a
        different kernel, which gains more from an early start: with an output projection that starts it late, a layer
        of Qwen3-8B takes 0.9 us more, one of Llama-3.2-1B 1.1 us.
        """
        if problem.fusion:
            return False
        resident = self.resident(problem, device)
        if resident == 1 and self.name != WGMMA:
            return False
        return could_hold_three_launches(math.prod(self.grid(problem)), resident, device)
