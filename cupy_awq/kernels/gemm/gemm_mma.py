# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm75`` and ``gemm_sm80``: GEMM with mma.sync on a weight in the AWQ layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from cupy_awq.kernels.family import Family, Reduction, Workspace
from cupy_awq.kernels.gemm.problem import AWQ, Problem, awq_layout_refusal, plan_awq_layout
from cupy_awq.kernels.gemm.reduction import slice_begins
from cupy_awq.kernels.tiling import ceil_div, split_counts
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
"""The number of registers per thread for each ``block_m``."""


@dataclass(frozen=True)
class GemmMmaCosts:
    """Constants of the cost model, fitted to 300 measured times on an H200.

    Attributes:
        start_ns: start-up time of a CTA, in nanoseconds.
        latency_ns: latency per k tile (64 rows of W) of a CTA that is alone on its SM, in nanoseconds.
        latency_row_ns: increase of ``latency_ns`` per row of the CTA tile, in nanoseconds.
        mma_rate: tensor-core throughput of an SM, in multiply-adds per nanosecond.
        convert_ns: time in which an SM dequantizes one weight, in nanoseconds.
        bandwidth: achieved fraction of the nominal memory bandwidth.
        two_stages: factor on the latency with two stages, because copies through registers hardly overlap with mma.
        shared_sums_ns: time per slice to add the accumulators of a CTA to sums in shared memory, per element of the CTA
            tile, in nanoseconds.
        launch_us: launch overhead and epilogue, in microseconds.
        reduction_us: fixed time of the split-K reduction, in microseconds.
        reduction_split_us: additional time of the split-K reduction per split, in microseconds.
    """

    start_ns: int = 4700
    latency_ns: int = 550
    latency_row_ns: float = 4.4
    mma_rate: int = 930
    convert_ns: float = 0.0046
    bandwidth: float = 0.5
    two_stages: int = 2
    shared_sums_ns: float = 0.018
    launch_us: float = 0.4
    reduction_us: float = 1.0
    reduction_split_us: float = 0.17


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
        """Return the run time in microseconds: launch overhead, all waves of CTAs and the split-K reduction.

        The time per k tile is the longest of three: the latency of the k tile, the compute time of all CTAs of an SM,
        and the time to load the weights of these CTAs.
        """
        k_tiles = ceil_div(ceil_div(problem.k, BLOCK_K), config.split_k)
        ctas = config.tiles(problem) * config.split_k
        by_memory = device.shared_bytes_per_sm // (config.shared_bytes + 1024)
        by_registers = 65536 // (REGISTERS[config.block_m] * config.warps * 32)
        ctas_per_sm = max(1, min(by_memory, by_registers))
        full_waves = ceil_div(ctas, device.sm_count * ctas_per_sm) - 1
        tail = ceil_div(ctas - full_waves * device.sm_count * ctas_per_sm, device.sm_count)
        latency = COSTS.latency_ns + COSTS.latency_row_ns * config.block_m
        work = config.block_n * BLOCK_K * (config.block_m / COSTS.mma_rate + COSTS.convert_ns)
        stream = config.block_n * BLOCK_K / 2 * device.sm_count / (COSTS.bandwidth * device.read_gbs)
        if config.stages == 2:
            latency *= COSTS.two_stages
        if config.slices > 1 and config.block_m > REGISTER_SUMS_BLOCK_M:
            work += config.slices / k_tiles * COSTS.shared_sums_ns * config.block_m * config.block_n
        full = k_tiles * max(latency, ctas_per_sm * max(work, stream)) + COSTS.start_ns
        last = k_tiles * max(latency, tail * max(work, stream)) + COSTS.start_ns
        reduction = COSTS.reduction_us + COSTS.reduction_split_us * config.split_k if config.split_k > 1 else 0.0
        return COSTS.launch_us + reduction + (full_waves * full + last) * 1e-3

    def plan(self, config: GemmMmaConfig, problem: Problem, device: Device) -> LaunchPlan:
        defines = (
            ("ALIGNED", int(problem.wide)),
            ("BLOCK_M", config.block_m),
            ("WARPS", config.warps),
            ("STAGES", config.stages),
            ("SLICES", config.slices),
            ("GROUP_IN_TILE", int(problem.group_size % BLOCK_K != 0)),
        )
        grid = (ceil_div(problem.m, config.block_m), ceil_div(problem.n, config.block_n), config.split_k)
        source, threads = f"gemm/{self.NAME}.cu", config.warps * 32
        return plan_awq_layout(source, self.NAME, defines, problem, device, grid, threads, config.shared_bytes)

    def workspace(self, config: GemmMmaConfig, problem: Problem) -> Workspace:
        if config.split_k == 1:
            return Workspace()
        tiles = config.tiles(problem)
        return Workspace(tiles * config.split_k * config.block_m * config.block_n * 4, tiles)


GEMM_SM80 = GemmMma("gemm_sm80", (Capability.MMA_M16N8K16, Capability.CP_ASYNC), ("float16", "bfloat16"), stages=3)
GEMM_SM75 = GemmMma("gemm_sm75", (Capability.MMA_M16N8K8,), ("float16",), stages=2, replaced_by=GEMM_SM80.needs)
