# SPDX-License-Identifier: Apache-2.0
"""``expert_gemm``: the grouped product with mma.sync on weights in the fragment layout, for few rows per expert."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cupy_awq.kernels.experts.problem import (
    MAX_TOKEN_SLOTS,
    ExpertProduct,
    count_blocks,
    expected_blocks,
)
from cupy_awq.kernels.family import FunctionFamily, Reduction
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K
from cupy_awq.kernels.gemm.problem import FRAGMENTS
from cupy_awq.kernels.hopper import SCHEDULERS, p_norm
from cupy_awq.kernels.tiling import ceil_div, with_stages
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan
from cupy_awq.runtime.rates import READ_FRACTION

NAME = "expert_gemm"
NEEDS = Capability.MMA_M16N8K16, Capability.LDMATRIX, Capability.CP_ASYNC
"""The capabilities that the kernel needs."""
BLOCKS = (8, 16)
"""The largest numbers of rows per unit (a block of rows that take the same expert) to try."""
MAX_STAGES = 6
"""The largest number of pipeline stages of x."""


class ExpertGemmCosts(NamedTuple):
    """Constants of the cost model, fitted to 1064 times of 8 random layers with 1 to 48 tokens on an H100.

    The root mean square of the relative errors is 6%.

    Attributes:
        mma: cycles of an mma of one scheduler.
        instruction: cycles of another instruction of one scheduler.
        stall: cycles from the first to the last instruction of a warp's k tile, relative to those in which one is
            issued.
        load: time of a k tile of a warp whose weights arrive late, in latencies of device memory.
        tile: cycles of an SM to sum and store a tile.
        drain: time of a CTA to finish a tile before it starts the next, in latencies of device memory.
        fill: time until the first weights arrive, if they are not read ahead, in latencies of device memory.
        norm: exponent of the p-norm of times that overlap.
        l2: achieved fraction of the bandwidth of L2.
        end_us: time of a launch that reads its weights ahead, besides, in microseconds.
    """

    mma: float = 2.11
    instruction: float = 0.98
    stall: float = 4.07
    load: float = 1.04
    tile: float = 335.0
    drain: float = 0.25
    fill: float = 4.55
    norm: float = 2.24
    l2: float = 0.65
    end_us: float = 1.24


COSTS = ExpertGemmCosts()
CONVERT = 9
"""The number of instructions that convert a word of eight codes to operand A, with float16 x."""
SLOTS = 50
"""The number of additional instructions per k tile if the slots of a token are summed."""


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
        return ring + sums + 2 * self.block_m * 4

    def n_blocks(self, problem: ExpertProduct) -> int:
        """Return the number of CTA tiles along N for each unit (block of rows of one expert)."""
        return ceil_div(problem.n, self.block_n)


def refusal(problem: ExpertProduct, device: Device) -> str | None:
    reason = device.refusal(NEEDS) or problem.fragments.refusal()
    if reason is not None:
        return reason
    if problem.layout != FRAGMENTS or problem.zeros == "float":
        return "needs repacked weights, with zero points as 4-bit codes or none"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"takes x of float16 or bfloat16, not {problem.dtype}"
    if problem.gated and problem.n % 32:
        return f"needs N to be a multiple of 32 when gated, not {problem.n}"
    if problem.rows == "tokens" and problem.top_k > MAX_TOKEN_SLOTS:
        return f"sums up to {MAX_TOKEN_SLOTS} experts per token, not {problem.top_k}"
    if problem.rows == "sorted" and not any(problem.block % block == 0 for block in BLOCKS):
        return f"needs blocks of a multiple of {BLOCKS[0]} rows, not {problem.block}"
    return None


class Warps(NamedTuple):
    """The fields of `ExpertGemmConfig` that arrange a CTA's warps.

    ``ctas_per_sm`` is the largest number to try, and a ``depth`` of 0 stands for as many k tiles as registers hold.
    """

    column_tiles: int
    warps_n: int
    warps_k: int
    ctas_per_sm: int
    depth: int = 0


LAYOUTS = {
    8: (
        Warps(2, 1, 8, 2),
        Warps(2, 1, 4, 4),
        Warps(1, 1, 8, 2),
        Warps(2, 2, 4, 2),
        Warps(2, 2, 2, 4),
        Warps(2, 4, 2, 2),
        Warps(2, 4, 1, 4),
    ),
    16: (Warps(2, 2, 4, 2), Warps(2, 4, 2, 2), Warps(2, 2, 2, 4), Warps(2, 4, 1, 4)),
}
"""The arrangements of a CTA's warps to try, by the number of rows per unit."""
SPILLING = {8: ((2, 4), (2, 2)), 16: ((4, 1),)}
"""The (warps_n, warps_k) by rows per unit with which registers spill if a weight tile has two groups."""
SHALLOW = {
    "packed": (
        Warps(2, 1, 8, 3, 1), Warps(2, 2, 4, 3, 1), Warps(2, 4, 2, 3, 1), Warps(2, 1, 4, 6, 1), Warps(2, 1, 16, 1, 1),
    ),
    "symmetric": (Warps(2, 1, 8, 3, 1), Warps(2, 1, 4, 6, 1)),
}  # fmt: skip
"""Further arrangements for gated pairs, by the zero points: more resident warps in place of more k tiles in registers.

The others spill registers.
"""
MANY_SLICES = Warps(2, 1, 16, 1), Warps(1, 1, 16, 1)
"""Further arrangements for the sum over the slots of a token, along which K is long and there are few CTA tiles."""


def configs(problem: ExpertProduct, device: Device) -> list[ExpertGemmConfig]:
    return list(_configs(problem, device))


def _configs(problem: ExpertProduct, device: Device) -> Iterator[ExpertGemmConfig]:
    for block in BLOCKS:
        if block > (problem.block if problem.rows == "sorted" else 8) or (
            problem.rows == "sorted" and problem.block % block
        ):
            continue
        has_many_slices = problem.rows == "tokens" and problem.fragments.groups <= 2
        is_shallow = problem.rows == "pairs" and problem.gated and problem.fragments.groups == 1
        shallow = SHALLOW.get(problem.zeros, ()) if is_shallow else ()
        for layout in LAYOUTS[block] + MANY_SLICES * has_many_slices + shallow:
            if problem.gated and layout.column_tiles * layout.warps_n % 2:
                continue
            if problem.fragments.groups == 2 and (layout.warps_n, layout.warps_k) in SPILLING[block]:
                continue
            depth = layout.depth or _depth(problem, block, layout.column_tiles)
            shape = ExpertGemmConfig(block, layout.column_tiles, layout.warps_n, layout.warps_k, depth=depth)
            # The scales of small groups also take registers, so fewer CTAs share those of an SM.
            ctas = layout.ctas_per_sm if problem.fragments.groups <= 2 else max(1, layout.ctas_per_sm // 2)
            config = with_stages(shape, ctas, _most_stages(shape, problem), problem, device)
            if config is not None:
                yield config


def _depth(problem: ExpertProduct, block: int, column_tiles: int) -> int:
    """Return the number of k tiles of the weight whose registers fit beside the accumulators."""
    groups = problem.fragments.groups
    return 3 if groups == 1 else 16 // block if groups == 2 else 3 - column_tiles


def _most_stages(shape: ExpertGemmConfig, problem: ExpertProduct) -> int:
    """Return the largest number of stages of a slice of K: at most one more than it has k tiles of a CTA tile."""
    k_tiles = ceil_div(problem.k, WEIGHT_TILE_K) * (problem.top_k if problem.rows == "tokens" else 1)
    return max(2, min(MAX_STAGES, shape.depth + 1, 1 + max(1, k_tiles // shape.warps_k)))


def count_units(config: ExpertGemmConfig, problem: ExpertProduct) -> int:
    """Return the largest number of units (blocks of rows of one expert) that any routing can give."""
    if problem.rows != "sorted":
        return problem.pairs // (problem.top_k if problem.rows == "tokens" else 1)
    return count_blocks(problem.pairs, problem.experts, problem.block) * (problem.block // config.block_m)


def reduction(config: ExpertGemmConfig, problem: ExpertProduct) -> Reduction | None:
    """Return the order of the additions along K, or None for one row per unit.

    A unit of one row is multiplied by codes without their zero points, which rounds otherwise. Without chains the order
    of other units is that of ``gemm_mma_fragments``.
    """
    if problem.rows != "sorted":
        return None
    math = f"mma with accumulators scaled after {min(WEIGHT_TILE_K, problem.group_size)} rows"
    if config.block_m == 8 and problem.fragments.groups == 1:
        math += ", in two chains"
    return Reduction(math, (0,), config.warps_k, 1 if config.warps_k > 1 else 0)


def plan(config: ExpertGemmConfig, problem: ExpertProduct, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are weight (the fragment layouts of all experts), bias, row_weights, y, shared, sorted_pairs, experts,
    sorted_count and x.
    """
    dependent = device.has(Capability.DEPENDENT_LAUNCH)
    layout = problem.fragments
    tiles = count_units(config, problem) * config.n_blocks(problem)
    ctas = min(tiles, config.ctas_per_sm * device.sm_count)
    defines: tuple[tuple[str, int | str], ...] = (
        *problem.defines(),
        *layout.defines(),
        ("HAS_SHARED", int(problem.shared)),
        ("ROWS", f"k{problem.rows.capitalize()}"),
        ("READS_AHEAD", int(problem.reads_ahead and dependent)),
        ("ONE_TILE", int(ctas == tiles and problem.rows != "sorted")),
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
        (ctas, 1, 1),
        (config.threads, 1, 1),
        (*buffers, *scalars),
        config.shared_bytes(problem),
        dependent=dependent,
    )


def estimate_us(config: ExpertGemmConfig, problem: ExpertProduct, device: Device) -> float:
    """Return the run time in microseconds for uniform routing.

    The times of the busiest SM and of memory, and the latency of a CTA, which loads the weights of a tile during the
    tile before, overlap.
    """
    rates, sums_slots = device.rates, problem.rows == "tokens"
    units: float = count_units(config, problem)
    if problem.rows == "sorted":
        units = expected_blocks(problem.pairs, problem.experts, config.block_m, problem.top_k)
    iterations = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K) * (problem.top_k if sums_slots else 1), config.warps_k)
    rows_16 = max(1, config.block_m // 8)
    mmas = 8 * config.column_tiles * rows_16
    others = 8 * (config.column_tiles * CONVERT + rows_16) + 60 + SLOTS * sums_slots
    others += problem.fragments.groups * config.column_tiles * (6 + 8 * rows_16)
    cycles = mmas * COSTS.mma + others * COSTS.instruction
    tiles = units * config.n_blocks(problem)
    ctas = min(tiles, config.ctas_per_sm * device.sm_count)
    # The busiest SM has more CTAs than the mean one, but the others finish meanwhile.
    per_sm = (max(1.0, ctas / device.sm_count) + math.ceil(ctas / device.sm_count)) / 2
    rounds = math.ceil(tiles / ctas - 1e-9)
    load_us = COSTS.load * rates.latency_us
    drain_us = COSTS.drain * rates.latency_us / min(config.ctas_per_sm, per_sm)
    latency_us = rounds * (iterations * max(cycles * COSTS.stall / rates.clock_mhz, load_us) + drain_us)
    warps = config.warps_n * config.warps_k
    sm_us = per_sm * rounds * (iterations * warps * cycles / SCHEDULERS + COSTS.tile) / rates.clock_mhz
    memory_us = (problem.touched_bytes + problem.activation_bytes) / (READ_FRACTION * rates.read_gbs * 1e3)
    read = units * problem.fragments.nbytes * (problem.top_k if sums_slots else 1)
    memory_us = max(memory_us, read / (COSTS.l2 * rates.l2_gbs * 1e3))
    fill_us = 0.0 if problem.reads_ahead else COSTS.fill * rates.latency_us
    return COSTS.end_us + fill_us + p_norm((latency_us, sm_us, memory_us), COSTS.norm)


EXPERT_GEMM = FunctionFamily(
    NAME, configs, estimate_us, plan, refusal, needs=NEEDS, layout=FRAGMENTS, reduction=reduction
)
