# SPDX-License-Identifier: Apache-2.0
"""``expert_gemm_sm90``: the grouped product of many rows per expert on Hopper's tensor cores.

The kernel has the tiles and the main loop of ``gemm_sm90_large``. A unit is a block of ``block_m`` rows of one expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from cupy_awq.kernels.dtypes import ITEMSIZE
from cupy_awq.kernels.experts.expert_gemm_tiles import MAX_X_ELEMENTS, arguments
from cupy_awq.kernels.experts.problem import ExpertProduct, count_blocks, expected_blocks
from cupy_awq.kernels.family import FunctionFamily, Workspace, constants
from cupy_awq.kernels.gemm.fragments import fragment_refusal
from cupy_awq.kernels.gemm.gemm_sm90_large import MAX_STAGES, SHARED_BYTES_PER_CTA, GemmSm90LargeConfig
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K, WEIGHT_TILE_N
from cupy_awq.kernels.gemm.problem import FRAGMENTS, Problem
from cupy_awq.kernels.hopper import HOPPER, p_norm
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "expert_gemm_sm90"
SHAPES = {2: 144, 3: 80}
"""The largest ``block_m`` by the number of consumer warpgroups; three are for gated problems.

Each warpgroup has two m64 tiles; in a gated problem, one of the gate and one of the up projection.
"""
OVERESTIMATE = 1.06
"""The ratio of modelled to measured times of ``expert_gemm_tiles`` (64 products, H100), for a fair choice."""
LOWER_HEIGHTS = {
    16: (), 32: (16,), 48: (32, 16), 64: (48, 32), 80: (64, 48), 96: (80, 48), 112: (80, 48), 128: (96,),
    144: (96, 48),
}  # fmt: skip
"""The lower heights of tiles by ``block_m``. With four main loops, the compiler serializes wgmma."""


@dataclass(frozen=True)
class ExpertGemmSm90Costs:
    """Constants of the cost model, fitted to 350 times of products of six models, of 64 to 4096 tokens, on an H100.

    The root mean square of the relative errors is 5%.

    Attributes:
        launch_us: overhead of the launch and latency of routing and first copies, in microseconds.
        conversion: cycles to dequantize the weights of a k tile (128 rows of W) and 128 columns, by ``warpgroups``.
        tensor: time of the tensor cores, relative to that at the peak rate.
        k_tile_norm: exponent of the p-norm of these two times, which overlap in part.
        tile_cycles: cycles to start and to store a tile.
        reduction_cycles: cycles of the stream-K reduction, per element of a tile.
        reduction_split_cycles: increase of ``reduction_cycles`` per CTA that shares a tile.
        norm: exponent of the p-norm of the times of the SMs, of L2 and of device memory.
    """

    launch_us: float = 5.0
    conversion: dict[int, float] = field(default_factory=lambda: {2: 614.0, 3: 579.0})
    tensor: float = 1.2
    k_tile_norm: float = 2.39
    tile_cycles: float = 2580.0
    reduction_cycles: float = 0.354
    reduction_split_cycles: float = 0.145
    norm: float = 5.4


COSTS = ExpertGemmSm90Costs()


@dataclass(frozen=True)
class ExpertGemmSm90Config(GemmSm90LargeConfig):
    """A configuration of ``expert_gemm_sm90.cu``; `GemmSm90LargeConfig` describes the other attributes.

    Attributes:
        stream_k: whether CTAs share the tiles of the last two waves.
    """

    stream_k: bool = False

    @property
    def heights(self) -> tuple[int, ...]:
        """The heights of tiles that have a main loop, from ``block_m`` downwards."""
        return (self.block_m, *LOWER_HEIGHTS[self.block_m])

    def tiles(self, problem: Problem) -> int:
        """Return the number of tiles whose rows are in shared memory: those that can have a stage, and one more.

        Of the tiles with a stage, one may have fewer k tiles than K has (stream-K).
        """
        return ceil_div(MAX_STAGES - 1, ceil_div(problem.k, WEIGHT_TILE_K)) + 2

    def tiles_bytes(self, problem: Problem) -> int:
        """Return the size of these tiles' rows in bytes."""
        return self.tiles(problem) * (48 + 12 * self.block_m)

    def stages(self, problem: Problem) -> int:
        left = SHARED_BYTES_PER_CTA - self.tiles_bytes(problem) - 16 * self.store_row_bytes
        return min(MAX_STAGES, left // (self.stage_bytes(problem) + 8))

    def store_rows(self, problem: Problem) -> int:
        return 16

    def shared_bytes(self, problem: Problem) -> int:
        return super().shared_bytes(problem) + self.tiles_bytes(problem) + 8 * self.stages(problem)


def refusal(problem: ExpertProduct, device: Device) -> str | None:
    if problem.rows != "sorted":
        return "takes rows that are sorted by expert"
    if problem.x_rows * (problem.ldx or problem.k) >= MAX_X_ELEMENTS:
        return f"needs x of less than {MAX_X_ELEMENTS} elements"
    if problem.block % 16:
        return f"needs blocks of a multiple of 16 rows, not {problem.block}"
    if problem.dtype == "float16" and problem.wide_scales:
        return "needs scales whose range float16 can hold"
    return fragment_refusal(problem.of_expert(1), device, HOPPER)


def configs(problem: ExpertProduct, device: Device) -> list[ExpertGemmSm90Config]:
    return list(_configs(problem, device))


def _configs(problem: ExpertProduct, device: Device) -> Iterator[ExpertGemmSm90Config]:
    units = count_blocks(problem.pairs, problem.experts, problem.block)
    for warpgroups, most in SHAPES.items():
        if warpgroups == 3 and not problem.gated:
            continue
        heights = (problem.block // parts for parts in range(1, problem.block // 16 + 1) if problem.block % parts == 0)
        block_m = next(height for height in heights if height % 16 == 0 and height <= most)
        shape = ExpertGemmSm90Config(1, 1, block_m=block_m, warpgroups=warpgroups)
        tiles = units * (problem.block // block_m) * ceil_div(problem.n, shape.block_n)
        yield replace(shape, ctas=min(tiles, device.sm_count))
        yield replace(shape, ctas=device.sm_count, stream_k=True)


def plan(config: ExpertGemmSm90Config, problem: ExpertProduct, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are weight (the fragment layouts of all experts), bias, row_weights, y, sorted_pairs, experts,
    sorted_count, x, partials and counters.
    """
    unit = problem.of_expert(config.block_m)
    defines: tuple[tuple[str, int | str], ...] = (
        *problem.defines(),
        *problem.fragments.defines(),
        *constants(config, "block_m warpgroups m64_tiles"),
        ("HEIGHTS", ",".join(map(str, config.heights))),
        ("STAGES", config.stages(unit)),
        ("TILES", config.tiles(unit)),
        ("SHARED_BYTES", config.shared_bytes(unit)),
    )
    buffers_and_sizes = arguments(problem)
    at = buffers_and_sizes.index("x") + 1
    return LaunchPlan(
        Kernel(f"experts/{NAME}.cu", NAME, defines, device.target),
        (config.ctas, 1, 1),
        (128 * (config.warpgroups + 1), 1, 1),
        (*buffers_and_sizes[:at], "partials", "counters", *buffers_and_sizes[at:], np.int32(config.stream_k)),
        config.shared_bytes(unit),
        dependent=True,
    )


def workspace(config: ExpertGemmSm90Config, problem: ExpertProduct) -> Workspace:
    if not config.stream_k:
        return Workspace(0, 1)
    return Workspace(4 * config.ctas * config.block_m * config.block_n, 1 + 2 * config.ctas * config.warpgroups)


def estimate_us(config: ExpertGemmSm90Config, problem: ExpertProduct, device: Device) -> float:
    """Return the run time in microseconds for uniform routing, as a p-norm of the times of SMs, L2 and memory."""
    rates, k_tiles, columns = device.rates, ceil_div(problem.k, WEIGHT_TILE_K), ceil_div(problem.n, config.block_n)
    units = expected_blocks(problem.pairs, problem.experts, config.block_m, problem.top_k)
    tensor = COSTS.tensor * config.block_m * 128 * WEIGHT_TILE_K / rates.tensor
    k_tile = p_norm((COSTS.conversion[config.warpgroups], tensor), COSTS.k_tile_norm) * config.block_n / 128
    waves = units * columns / device.sm_count
    tiles = math.ceil(waves)
    cycles = (waves if config.stream_k else tiles) * k_tiles * k_tile + tiles * COSTS.tile_cycles
    if config.stream_k:
        reduction = COSTS.reduction_cycles + COSTS.reduction_split_cycles / min(1.0, waves)
        cycles += reduction * config.block_m * config.block_n
    weight_bytes = config.block_n // WEIGHT_TILE_N * problem.fragments.weight_tile_bytes * k_tiles
    l2_bytes = columns * (problem.pairs * problem.k * ITEMSIZE[problem.dtype] + units * weight_bytes)
    memory_us = device.read_us(problem.touched_bytes + problem.activation_bytes)
    us = COSTS.launch_us + p_norm((cycles / rates.clock_mhz, l2_bytes / (rates.l2_gbs * 1e3), memory_us), COSTS.norm)
    return OVERESTIMATE * us


EXPERT_GEMM_SM90 = FunctionFamily(
    NAME, configs, estimate_us, plan, refusal, needs=HOPPER, layout=FRAGMENTS, workspace=workspace
)
