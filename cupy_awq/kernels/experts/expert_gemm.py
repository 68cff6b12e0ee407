# SPDX-License-Identifier: Apache-2.0
"""``expert_gemm``: the grouped product with mma.sync on weights in the fragment layout, for few rows per expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cupy_awq.kernels.experts.problem import (
    MAX_TOKEN_SLOTS,
    ExpertProduct,
    count_blocks,
    expected_blocks,
)
from cupy_awq.kernels.family import FunctionFamily
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K
from cupy_awq.kernels.gemm.problem import FRAGMENTS
from cupy_awq.kernels.hopper import RESERVED_BYTES, SCHEDULERS, p_norm
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "expert_gemm"
NEEDS = Capability.MMA_M16N8K16, Capability.LDMATRIX, Capability.CP_ASYNC
"""The capabilities that the kernel needs."""
BLOCKS = (8, 16)
"""The largest numbers of rows per unit (a block of rows that take the same expert) to try."""
MAX_STAGES = 6
"""The largest number of pipeline stages of x."""


@dataclass(frozen=True)
class ExpertGemmCosts:
    """Constants of the cost model, fitted to 43 times of layers of four models with 1 to 1024 tokens on an H100.

    The root mean square of the relative errors is 6%.

    Attributes:
        mma_us: time of an mma of one scheduler, in microseconds.
        instruction_us: time of another instruction of one scheduler, in microseconds.
        load_us: latency of a load of weights under load, in microseconds.
        tile_us: time to fill the pipeline of a tile and to finish the tile, in microseconds.
        launch_us: launch overhead, in microseconds.
        bandwidth: achieved fraction of the nominal memory bandwidth.
        norm: exponent of the p-norm of times that overlap.
    """

    mma_us: float = 0.0058
    instruction_us: float = 0.00122
    load_us: float = 3.5
    tile_us: float = 2.9
    launch_us: float = 0.6
    bandwidth: float = 0.97
    norm: float = 5.3


COSTS = ExpertGemmCosts()
CONVERT = 9
"""The number of instructions that convert a word of eight codes to operand A, with float16 x."""


@dataclass(frozen=True)
class ExpertGemmConfig:
    """A configuration of ``expert_gemm.cu``.

    Attributes:
        block_m: number of rows per unit.
        column_tiles: number of tiles of 16 columns per warp.
        warps_n: number of warps per slice of K, side by side along n.
        warps_k: number of slices of K per CTA.
        stages: number of stages of x per slice.
        depth: number of k tiles of the weight that a warp holds in registers.
        ctas_per_sm: number of resident CTAs per SM for which the kernel is compiled.
    """

    block_m: int
    column_tiles: int
    warps_n: int
    warps_k: int
    stages: int = 2
    depth: int = 2
    ctas_per_sm: int = 1

    split_k = 1

    @property
    def block_n(self) -> int:
        """The number of columns of W per CTA tile."""
        return 16 * self.column_tiles * self.warps_n

    @property
    def threads(self) -> int:
        """The number of threads per CTA."""
        return 32 * self.warps_n * self.warps_k

    def shared_bytes(self, problem: ExpertProduct) -> int:
        """Return the dynamic shared memory per CTA in bytes; SharedStorage in CUDA static_asserts the same value."""
        x_rows = self.block_m if problem.rows == "sorted" else 1
        ring = self.warps_k * self.stages * x_rows * WEIGHT_TILE_K * 2
        sums = self.warps_k * self.block_m * (self.block_n + 4) * 4
        return max(ring, sums) + self.block_m * 4

    def n_blocks(self, problem: ExpertProduct) -> int:
        """Return the number of CTA tiles along N for each unit (block of rows of one expert)."""
        return ceil_div(problem.n, self.block_n)


def refusal(problem: ExpertProduct, device: Device) -> str | None:
    reason = device.refusal(NEEDS) or problem.fragments.refusal()
    if reason is not None:
        return reason
    if problem.layout != FRAGMENTS:
        return "needs repacked weights"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"takes x of float16 or bfloat16, not {problem.dtype}"
    if problem.gated and problem.n % 32:
        return f"needs N to be a multiple of 32 when gated, not {problem.n}"
    if problem.rows == "tokens" and problem.top_k > MAX_TOKEN_SLOTS:
        return f"sums up to {MAX_TOKEN_SLOTS} experts per token, not {problem.top_k}"
    if problem.rows == "sorted" and not any(problem.block % block == 0 for block in BLOCKS):
        return f"needs blocks of a multiple of {BLOCKS[0]} rows, not {problem.block}"
    return None


SMALL_SM_BYTES = 100 << 10
"""The shared memory per SM of GPUs for which the compiler takes more registers: sm_86, sm_89 and sm_120."""


class Warps(NamedTuple):
    """The fields of `ExpertGemmConfig` that arrange a CTA's warps; ``ctas_per_sm`` is the largest number to try."""

    column_tiles: int
    warps_n: int
    warps_k: int
    ctas_per_sm: int


FEW_ROWS = Warps(2, 1, 8, 2), Warps(2, 1, 4, 4), Warps(1, 1, 8, 2), Warps(2, 2, 4, 2), Warps(2, 1, 2, 8)
LAYOUTS = {
    8: FEW_ROWS,
    16: (Warps(2, 2, 4, 2), Warps(2, 4, 2, 2), Warps(2, 2, 2, 4)),
}
"""The arrangements of a CTA's warps to try, by the number of rows per unit."""


def configs(problem: ExpertProduct, device: Device) -> list[ExpertGemmConfig]:
    return list(_configs(problem, device))


def _configs(problem: ExpertProduct, device: Device) -> Iterator[ExpertGemmConfig]:
    for block in BLOCKS:
        if block > (problem.block if problem.rows == "sorted" else 8) or (
            problem.rows == "sorted" and problem.block % block
        ):
            continue
        for layout in LAYOUTS[block]:
            if problem.gated and layout.column_tiles * layout.warps_n % 2:
                continue
            depth = _depth(problem, layout.column_tiles)
            shape = ExpertGemmConfig(block, layout.column_tiles, layout.warps_n, layout.warps_k, depth=depth)
            # The scales of small groups also take registers, so fewer CTAs share those of an SM.
            ctas = layout.ctas_per_sm if problem.fragments.groups <= 2 else max(1, layout.ctas_per_sm // 2)
            if device.shared_bytes_per_sm <= SMALL_SM_BYTES:
                ctas = min(ctas, 6)  # with 8 CTAs per SM only 128 registers per thread are left, and some would spill
            config = _with_stages(shape, ctas, problem, device)
            if config is not None:
                yield config


def _depth(problem: ExpertProduct, column_tiles: int) -> int:
    """Return the number of k tiles of the weight whose registers fit beside the accumulators."""
    if problem.fragments.groups > 2:
        return 3 - column_tiles
    return 3 if problem.rows == "sorted" else 4


def _with_stages(
    shape: ExpertGemmConfig, ctas_per_sm: int, problem: ExpertProduct, device: Device
) -> ExpertGemmConfig | None:
    """Return the shape with as many CTAs per SM, then stages, as fit in shared memory, or None if two stages do not."""
    for ctas in range(ctas_per_sm, 0, -1):
        limit = min(device.shared_bytes_per_sm // ctas - RESERVED_BYTES, device.shared_bytes_per_block)
        for stages in range(max(2, min(MAX_STAGES, shape.depth + 1)), 1, -1):
            config = replace(shape, ctas_per_sm=ctas, stages=stages)
            if config.shared_bytes(problem) <= limit:
                return config
    return None


def count_units(config: ExpertGemmConfig, problem: ExpertProduct) -> int:
    """Return the largest number of units (blocks of rows of one expert) that any routing can give."""
    if problem.rows != "sorted":
        return problem.pairs // (problem.top_k if problem.rows == "tokens" else 1)
    return count_blocks(problem.pairs, problem.experts, problem.block) * (problem.block // config.block_m)


def plan(config: ExpertGemmConfig, problem: ExpertProduct, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are weight (the fragment layouts of all experts), bias, row_weights, y, shared, sorted_pairs, experts,
    sorted_count and x.
    """
    dependent = device.has(Capability.DEPENDENT_LAUNCH)
    layout = problem.fragments
    defines: tuple[tuple[str, int | str], ...] = (
        *problem.defines(),
        *layout.defines(),
        ("HAS_SHARED", int(problem.shared)),
        ("ROWS", f"k{problem.rows.capitalize()}"),
        ("READS_AHEAD", int(problem.reads_ahead and dependent)),
        ("DEPENDENT", int(dependent)),
        ("BLOCK_M", config.block_m),
        ("COLUMN_TILES", config.column_tiles),
        ("WARPS_N", config.warps_n),
        ("WARPS_K", config.warps_k),
        ("STAGES", config.stages),
        ("DEPTH", config.depth),
        ("CTAS_PER_SM", config.ctas_per_sm),
        ("SHARED_BYTES", config.shared_bytes(problem)),
    )
    tiles = count_units(config, problem) * config.n_blocks(problem)
    sizes = (
        problem.pairs,
        problem.routed_rows,
        problem.experts,
        problem.n,
        problem.k,
        problem.x_divisor,
        problem.top_k,
        problem.block,
        problem.ldx or problem.k,
        problem.ldy or problem.n_out,
        problem.ld_shared or problem.n_out,
    )
    scalars: tuple[Argument, ...] = (np.int64(layout.nbytes), *map(np.int32, sizes))
    buffers = ("weight", "bias", "row_weights", "y", "shared", "sorted_pairs", "experts", "sorted_count", "x")
    return LaunchPlan(
        Kernel("experts/expert_gemm.cu", NAME, defines, device.target),
        (min(tiles, config.ctas_per_sm * device.sm_count), 1, 1),
        (config.threads, 1, 1),
        (*buffers, *scalars),
        config.shared_bytes(problem),
        dependent=dependent,
    )


def estimate_us(config: ExpertGemmConfig, problem: ExpertProduct, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, and memory, tensor cores and latency, which overlap."""
    k_tiles, n_blocks = ceil_div(problem.k, WEIGHT_TILE_K), config.n_blocks(problem)
    units: float = count_units(config, problem)
    rows = 1.0
    if problem.rows == "sorted":
        units = expected_blocks(problem.pairs, problem.experts, config.block_m)
        rows = problem.pairs / units
    k_tiles *= problem.top_k if problem.rows == "tokens" else 1
    tiles = units * n_blocks
    row_tiles = max(1, ceil_div(int(rows), 16)) if config.block_m > 8 else 0.5
    mmas = 8 * config.column_tiles * 2 * row_tiles
    others = 8 * (config.column_tiles * CONVERT + 2 * row_tiles) + 60
    others += problem.fragments.groups * config.column_tiles * (6 + 16 * row_tiles)
    warp_us = mmas * COSTS.mma_us + others * COSTS.instruction_us
    iterations = ceil_div(k_tiles, config.warps_k)
    ctas = min(tiles, config.ctas_per_sm * device.sm_count)
    waves = tiles / ctas if ctas else 0.0
    per_sm = max(1.0, ctas / device.sm_count)
    latency_us = iterations * max(warp_us, COSTS.load_us / config.depth) + COSTS.tile_us
    work_us = per_sm * config.warps_n * config.warps_k / SCHEDULERS * iterations * warp_us
    sm_us = ceil_div(int(waves * 100), 100) * latency_us if waves <= 2 else waves * latency_us
    memory = problem.touched_bytes + problem.activation_bytes
    if problem.rows != "sorted":
        memory = max(
            memory, 0.5 * units * problem.fragments.nbytes * (problem.top_k if problem.rows == "tokens" else 1)
        )
    memory_us = memory / (COSTS.bandwidth * device.read_gbs * 1e3)
    return COSTS.launch_us + p_norm((sm_us, waves * work_us, memory_us), COSTS.norm)


EXPERT_GEMM = FunctionFamily(NAME, configs, estimate_us, plan, refusal, needs=NEEDS, layout=FRAGMENTS)
