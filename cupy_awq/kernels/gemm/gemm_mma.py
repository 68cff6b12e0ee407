# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm75`` and ``gemm_sm80``: GEMM with mma.sync on a weight in the AWQ layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from cupy_awq.kernels.family import Family, Reduction, Workspace, constants
from cupy_awq.kernels.gemm.problem import AWQ, Problem, awq_layout_refusal, plan_awq_layout
from cupy_awq.kernels.gemm.reduction import slice_begins
from cupy_awq.kernels.tiling import ceil_div, split_counts
from cupy_awq.kernels.waves import CtaWork, reduction_us, waves_us
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import LaunchPlan

Needs: TypeAlias = tuple[Capability, ...]

BLOCK_K = 64
"""The extent of a pipeline stage along K: its number of rows of W."""
MMA_K = 16
"""The extent of an mma instruction along K; the group size must be a multiple of MMA_K."""
WARP_N = 32
"""The number of columns of y per warp."""
REGISTER_SUMS_BLOCK_M = 32
"""The largest ``block_m`` whose registers also hold the sums of slices; for larger tiles, shared memory holds them."""
REGISTERS = {16: 96, 32: 150, 64: 232}
"""The number of registers per thread by ``block_m``, the number of rows of y per CTA tile."""


@dataclass(frozen=True)
class GemmMmaCosts:
    """Fitted constants of the cost model.

    Attributes:
        instructions: a warp's instructions other than mma in the compiled main loop, per k tile: (fixed, per 16 rows).
        issue: cycles of a scheduler per such instruction.
        chain: cycles per instruction of a warp that is alone on its scheduler, where nothing hides the latency.
        exposed: exposed part of a device-memory latency per k tile, divided by the number of stages in flight; times 9
            with two stages, whose loads pass through registers one after the other.
        read_fraction: fraction of the bandwidth that copies of 32 bytes per row of W reach, of that of a plain read.
        start: time to start and finish a CTA, in latencies of device memory.
    """

    instructions: tuple[int, int] = (165, 37)
    issue: float = 1.6
    chain: float = 4.3
    exposed: float = 0.24
    read_fraction: float = 0.67
    start: float = 2.2


COSTS = GemmMmaCosts()


@dataclass(frozen=True)
class GemmMmaConfig:
    """A configuration of ``gemm_sm75`` or ``gemm_sm80``, with CTA tiles of ``block_m`` rows x ``32 * warps`` columns.

    Attributes:
        block_m: number of rows per CTA tile.
        warps: number of warps per CTA, side by side along n.
        stages: number of pipeline stages, each of BLOCK_K rows of W.
        split_k: number of CTAs per tile; each computes a slice of K.
        slices: number of slices of K that a CTA computes one after the other; 1 with split-K.
    """

    block_m: int
    warps: int
    stages: int
    split_k: int
    slices: int = 1

    @property
    def block_n(self) -> int:
        """The number of columns per CTA tile."""
        return self.warps * WARP_N

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory per CTA in bytes: the stages, and the sums of slices."""
        has_sums = self.slices > 1 and self.block_m > REGISTER_SUMS_BLOCK_M
        sums = 4 * self.block_m * self.block_n if has_sums else 0
        return self.stages * BLOCK_K * (2 * self.block_m + self.block_n // 2) + sums

    def tiles(self, problem: Problem) -> int:
        """Return the number of CTA tiles of y."""
        return ceil_div(problem.m, self.block_m) * ceil_div(problem.n, self.block_n)


class GemmMma(Family[Problem, GemmMmaConfig]):
    """A GEMM family with mma.sync. `GEMM_SM75` and `GEMM_SM80` differ in their mma and copy instructions."""

    layout = AWQ

    def __init__(
        self, name: str, needs: Needs, dtypes: tuple[str, ...], stages: int, replaced_by: Needs | None = None
    ) -> None:
        """Create the family; GPUs with the capabilities ``replaced_by`` have another one that is faster."""
        self.NAME = name
        self.needs = needs
        self._replaced_by = replaced_by
        self._dtypes = dtypes
        self._stages = stages

    def refusal(self, problem: Problem, device: Device) -> str | None:
        reason = awq_layout_refusal(problem) or device.refusal(self.needs)
        if reason is not None:
            return reason
        if self._replaced_by is not None and device.has(*self._replaced_by):
            return "serves GPUs on which gemm_sm80 cannot run"
        if problem.dtype not in self._dtypes:
            return f"takes x of {' or '.join(self._dtypes)}, not {problem.dtype}"
        if problem.group_size % MMA_K:
            return f"needs a group size that is a multiple of {MMA_K}, not {problem.group_size}"
        if not problem.x_aligned:
            return "needs rows of x that start at multiples of 16 bytes"
        return None

    def configs(self, problem: Problem, device: Device) -> list[GemmMmaConfig]:
        rows = [block_m for block_m in (16, 32, 64) if block_m == 16 or problem.m > block_m // 2]
        splits = split_counts(ceil_div(problem.k, BLOCK_K))
        found = [GemmMmaConfig(m, w, self._stages, s) for m in rows for w in (2, 4) for s in splits]
        if problem.batch_invariant:
            found += [replace(config, split_k=1, slices=config.split_k) for config in found if config.split_k > 1]
        return [config for config in found if config.shared_bytes <= device.shared_bytes_per_block]

    def reduction(self, config: GemmMmaConfig, problem: Problem) -> Reduction:
        """Return the order of the additions along K: split-K and several slices per CTA add in the same order."""
        slices = slice_begins(ceil_div(problem.k, BLOCK_K), config.split_k * config.slices)
        return Reduction(self.NAME, slices=slices)

    def estimate_us(self, config: GemmMmaConfig, problem: Problem, device: Device) -> float:
        """Return the run time in microseconds: launch overhead, all waves of CTAs and the split-K reduction."""
        rates, rows = device.rates, config.block_m // MMA_K
        by_memory = device.shared_bytes_per_sm // (config.shared_bytes + 1024)
        by_registers = 65536 // (REGISTERS[config.block_m] * config.warps * 32)
        elements = config.block_m * config.block_n
        instructions: float = COSTS.instructions[0] + COSTS.instructions[1] * rows
        # Where m16n8k16 exists, m16n8k8 does half of its products in the same time, so a kernel with m16n8k8 takes
        # twice as long.
        is_half = self is GEMM_SM75 and Capability.MMA_M16N8K16.is_in(device.native)
        mma_cycles = elements * BLOCK_K / rates.mma_fp32 * (1 + is_half)
        copied = 9 if config.stages == 2 else 1 / (config.stages - 1)
        if config.slices > 1 and config.block_m > REGISTER_SUMS_BLOCK_M:
            instructions += config.slices * elements / config.warps / 32 * 3 / ceil_div(problem.k, BLOCK_K)
        weight_bytes = problem.weight_bytes / problem.k / problem.n * config.block_n * BLOCK_K
        ctas = config.tiles(problem) * config.split_k
        work = CtaWork(
            ceil_div(ceil_div(problem.k, BLOCK_K), config.split_k),
            COSTS.exposed * copied * rates.latency_us + COSTS.chain * instructions / rates.clock_mhz,
            mma_cycles + COSTS.issue * config.warps * instructions / rates.issue,
            weight_bytes + 2 * config.block_m * BLOCK_K,
            weight_bytes / ceil_div(problem.m, config.block_m) / COSTS.read_fraction,
            COSTS.start * rates.latency_us,
        )
        readers = ctas // ceil_div(problem.m, config.block_m)
        waves = waves_us(ctas, max(1, min(by_memory, by_registers)), work, device, readers)
        return rates.launch_us + waves + reduction_us(config.split_k, 4.0 * ctas * elements, device)

    def plan(self, config: GemmMmaConfig, problem: Problem, device: Device) -> LaunchPlan:
        defines = (
            ("ALIGNED", int(problem.wide)),
            *constants(config, "block_m warps stages slices"),
            ("GROUP_IN_TILE", int(problem.group_size % BLOCK_K != 0)),
        )
        grid = (ceil_div(problem.m, config.block_m), ceil_div(problem.n, config.block_n), config.split_k)
        source, threads = f"gemm/{self.NAME}.cu", config.warps * 32
        return plan_awq_layout(source, self.NAME, defines, problem, device, grid, threads, config.shared_bytes)

    def workspace(self, config: GemmMmaConfig, problem: Problem) -> Workspace:
        return Workspace.for_split_k(config.split_k, config.tiles(problem), config.block_m * config.block_n)


GEMM_SM80 = GemmMma("gemm_sm80", (Capability.MMA_M16N8K16, Capability.CP_ASYNC), ("float16", "bfloat16"), stages=3)
GEMM_SM75 = GemmMma("gemm_sm75", (Capability.MMA_M16N8K8,), ("float16",), stages=2, replaced_by=GEMM_SM80.needs)
