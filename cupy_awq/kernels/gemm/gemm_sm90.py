# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm90``: GEMM on Hopper's tensor cores with a repacked weight, for M from 1 to a few hundred.

The family has three kernels: ``gemm_sm90.cu`` (wgmma) and, for M <= 16, ``gemm_sm90_mma.cu`` (mma.sync), or
``gemm_sm90_mma_invariant.cu`` for batch-invariant GEMMs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cupy_awq.kernels.family import FunctionFamily, Reduction, constants
from cupy_awq.kernels.gemm.fragments import (
    ROUNDED_MIN_M,
    fragment_defines,
    fragment_refusal,
    fusion_refusal,
    has_split_scales,
    x_tensor_map,
)
from cupy_awq.kernels.gemm.gemm_sm90_config import MMA, MMA_INVARIANT, WGMMA, GemmSm90Config
from cupy_awq.kernels.gemm.gemm_sm90_costs import TimeParts, mma_invariant_time, mma_time, wgmma_time
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K, WEIGHT_TILE_N
from cupy_awq.kernels.gemm.problem import FRAGMENTS, Problem
from cupy_awq.kernels.gemm.reduction import wgmma_reduction
from cupy_awq.kernels.hopper import HOPPER, available_ctas, is_excessive, most_stages, tile_heights
from cupy_awq.kernels.tiling import ceil_div, next_power_of_two
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "gemm_sm90"
MMA_MAX_M = 16
"""The largest M that the mma kernels support."""
GATHER_MAX_M, GATHER_MAX_K = 4, 16384
"""The largest M and K for which the mma kernel gathers the columns of x; above, `gather_columns` runs first."""
WGMMA_MIN_M = 9
"""The smallest M for the wgmma kernel; for smaller M, the mma kernels are faster."""
WGMMA_BLOCK_M = 16, 128
"""The smallest and the largest ``block_m`` of the wgmma kernel."""
MAX_HEIGHTS = 5
"""The largest number of values of ``block_m`` to try for the wgmma kernel, for one tile width and split-K factor."""
SPLITS = (1, 2, 3, 4, 5, 6, 8)
"""The split-K factors to try."""
SQUARE_SUM_COLUMNS = 32
"""The number of residual-stream columns per element of ``square_sums``; kSquareSumColumns in CUDA must be equal."""


def refusal(problem: Problem, device: Device) -> str | None:
    reason = fusion_refusal(problem) or fragment_refusal(problem, device, HOPPER)
    if not reason and problem.gathers_x and (problem.m > GATHER_MAX_M or problem.k > GATHER_MAX_K or problem.fusion):
        return f"gathers the columns of x only for M <= {GATHER_MAX_M} and K <= {GATHER_MAX_K}, without a fusion"
    return reason


def reduction(config: GemmSm90Config, problem: Problem) -> Reduction | None:
    """Return the order in which a configuration adds up an element of y, or None for the kernel MMA.

    The kernels WGMMA and MMA_INVARIANT give the same bits: on sm_90, mma and wgmma round alike.
    """
    if config.name == MMA:
        return None
    stages = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.k_tiles)
    return wgmma_reduction(config, stages, config.k_tiles, config.split_k, config.consumers, scaled=config.scaled)


def configs(problem: Problem, device: Device) -> list[GemmSm90Config]:
    # A small K limits the number of consumers, so the same configuration can be generated twice.
    few_rows = _mma_invariant_configs if problem.batch_invariant else _mma_configs
    found = dict.fromkeys([*few_rows(problem, device), *_wgmma_configs(problem, device)])
    # In a gated problem, half of the weight tiles of a CTA tile belong to the gate, the others to the up projection.
    return [config for config in found if not (problem.gated and config.weight_tiles % 2)]


def _mma_configs(problem: Problem, device: Device) -> Iterator[GemmSm90Config]:
    if problem.m > MMA_MAX_M:
        return
    all_k_tiles, x_rows = ceil_div(problem.k, WEIGHT_TILE_K), next_power_of_two(problem.m)
    for weight_tiles, split_k, warps, k_tiles in itertools.product((1, 2, 3, 4, 6, 7, 8), SPLITS, (16, 8), (1, 2, 4)):
        if split_k > ceil_div(all_k_tiles, k_tiles):
            continue
        if is_excessive(split_k, ceil_div(problem.n, weight_tiles * WEIGHT_TILE_N), device):
            continue
        consumers = max(1, min(warps // weight_tiles, all_k_tiles // split_k // k_tiles))
        x_stages = 4 if k_tiles == 1 else 2
        config = GemmSm90Config(
            MMA, max(8, x_rows), weight_tiles, 1, consumers, 0, split_k, k_tiles, 1, x_rows, x_stages
        )
        yield from _with_most_stages(config, problem, device)


def _mma_invariant_configs(problem: Problem, device: Device) -> Iterator[GemmSm90Config]:
    if problem.m > MMA_MAX_M or problem.gathers_x:
        return
    all_k_tiles, x_rows = ceil_div(problem.k, WEIGHT_TILE_K), next_power_of_two(problem.m)
    for weight_tiles, split_k, consumers, k_tiles in itertools.product(
        (1, 2, 3, 4, 6, 8), SPLITS, (1, 2, 3, 4), (1, 2, 4)
    ):
        if consumers * weight_tiles > 8 or consumers * split_k * k_tiles > all_k_tiles:
            continue
        x_stages = 2 if k_tiles == 4 else 4
        config = GemmSm90Config(
            MMA_INVARIANT, max(8, x_rows), weight_tiles, 1, consumers, 0, split_k, k_tiles, 1, x_rows, x_stages
        )
        for scaled in _scaled_choices(problem, config.block_m, k_tiles):
            yield from _with_most_stages(replace(config, scaled=scaled), problem, device)


def _scaled_choices(problem: Problem, block_m: int, k_tiles: int) -> list[bool]:
    """Return the values of ``scaled`` to try: True to multiply weights by their scales before the product."""
    can_scale = problem.m >= ROUNDED_MIN_M or problem.batch_invariant
    can_scale = can_scale and not (problem.dtype == "float16" and problem.wide_scales)
    # With several groups per weight tile, unscaled weights need a wgmma wait per group: up to 39% slower.
    has_short_groups = problem.group_size < WEIGHT_TILE_K
    choices = [] if can_scale and has_short_groups else [False]
    # A float16 scale split into two bfloat16 values costs two more instructions per pair of weights: up to 23% slower
    # with block_m = 64.
    is_costly = has_split_scales(problem) and not has_short_groups and block_m <= 64
    if can_scale and not (has_short_groups and k_tiles > 1) and not is_costly:
        choices.append(True)
    return choices


def _wgmma_configs(problem: Problem, device: Device) -> Iterator[GemmSm90Config]:
    if problem.gathers_x or problem.m < WGMMA_MIN_M:
        return
    all_k_tiles = ceil_div(problem.k, WEIGHT_TILE_K)
    smallest, largest = WGMMA_BLOCK_M
    # Clusters only split K: multicast of x to 2 CTAs with the same rows gains nothing.
    for m64_tiles, warpgroups, split_k in itertools.product((1, 2), (1, 2, 3, 4, 6, 7), SPLITS):
        weight_tiles = warpgroups * m64_tiles * 2
        columns = ceil_div(problem.n, weight_tiles * WEIGHT_TILE_N)
        resident = max(1, device.sm_count // split_k)
        heights = tile_heights(problem.m, largest, columns, resident)[:MAX_HEIGHTS]
        if problem.m <= largest // 2:  # lower tiles pay if they occupy SMs that would be idle
            heights[1:] = [h for h in heights[1:] if ceil_div(problem.m, h) * columns <= resident][:1]
        for block_m, consumers, k_tiles in itertools.product(heights, (1, 2, 3, 4), (1, 2, 4)):
            block_m = max(smallest, block_m)
            if k_tiles > (4 if block_m == smallest else 2 if block_m <= 64 else 1):
                continue
            if k_tiles == 4 and (m64_tiles, warpgroups, consumers) != (1, 2, 1):
                continue  # 4 k tiles per stage make all other shapes up to 28% slower than fewer k tiles
            if consumers * split_k * k_tiles > all_k_tiles:
                continue
            # A batch-invariant problem keeps the split-K factor of its weight for every M, even if it is excessive.
            tiles = ceil_div(problem.m, block_m) * columns
            if is_excessive(split_k, tiles, device) and not problem.batch_invariant:
                continue
            config = GemmSm90Config(WGMMA, block_m, weight_tiles, m64_tiles, consumers, 0, split_k, k_tiles)
            for scaled in _scaled_choices(problem, block_m, k_tiles):
                yield from _with_most_stages(replace(config, scaled=scaled), problem, device)


def _with_most_stages(config: GemmSm90Config, problem: Problem, device: Device) -> Iterator[GemmSm90Config]:
    """Yield, for 2 and for 1 resident CTAs per SM, the configuration with the most stages that fit in shared memory.

    Those of the wgmma kernel are yielded with and without ``prefetch_weights``. Configurations for which an
    SM has too few registers are left out.
    """
    # Each stage belongs to one consumer, and a consumer needs no more stages than iterations.
    enough = ceil_div(config.iterations(problem), config.consumers)
    stages_each = range(1 if config.consumers > 1 and not config.scaled else 2, max(3, enough + 1))

    def shared_bytes(count: int) -> int:
        return replace(config, stages=count * config.consumers).shared_bytes(problem)

    for ctas_per_sm in (2, 1):
        if ctas_per_sm == 1 and config.consumer_registers:
            fits = config.registers <= config.consumer_registers
        else:
            fits = available_ctas(config.threads(problem), config.registers) >= ctas_per_sm
        if config.registers > 255 or not fits:
            continue
        most = most_stages(stages_each, ctas_per_sm, device, shared_bytes)
        if most is not None:
            yield (chosen := replace(config, stages=most * config.consumers, ctas_per_sm=ctas_per_sm))
            if config.name == WGMMA:
                yield replace(chosen, prefetch_weights=False)


def plan(config: GemmSm90Config, problem: Problem, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are weight (`FragmentLayout`), bias, residual, y, x, `Fusion.buffers` and, with ``gathers_x``, order:
    uint16 [k], a permutation, aligned to 16 bytes.
    """
    defines: tuple[tuple[str, int | str], ...] = (
        *fragment_defines(problem),
        *constants(config, "block_m weight_tiles consumers consumer_warps stages k_tiles split_k"),
        ("RANK_ORDER", int(problem.batch_invariant and config.split_k > 2)),
        *constants(config, "ctas_per_sm prefetch_weights"),
        ("WINDOW", config.window(problem)),
        ("START_NEXT_LATE", int(config.starts_next_late(problem, device))),
        *constants(config, "consumer_registers x_stage_bytes"),
        ("X_RING_BYTES", 0 if problem.gathers_x else config.x_ring_bytes),
        ("SHARED_BYTES", config.storage_bytes(problem)),
        ("ADD_TO_STREAM", int(problem.adds_to_stream)),
        ("RMS_NORM_X", int(problem.rms_norms_x)),
        ("ORDER_OUT", int(problem.orders_y)),
    )
    strides = problem.row_strides
    sizes: tuple[int, ...] = (problem.m, problem.n, problem.k, strides.residual, strides.y)
    x: Argument = "x"
    factors: tuple[float, ...] = ()
    if config.name == WGMMA:
        defines += (
            ("WARPGROUPS", config.consumer_warps // 4),
            *constants(config, "m64_tiles scaled"),
        )
        x = x_tensor_map(problem, config.block_m, 2 * config.k_tiles)
    else:
        defines += (("X_ROWS", config.x_rows), ("X_STAGES", config.x_stages), ("GATHER_X", int(problem.gathers_x)))
        sizes += (strides.x,)
    if config.name == MMA_INVARIANT:
        defines += (("SCALED", int(config.scaled)),)
    if config.name != MMA:
        factors = 2.0**problem.scale_exponent, 2.0**-problem.scale_exponent
    eps = problem.fusion.eps if problem.fusion else 0.0
    scalars = (*map(np.int32, sizes), *map(np.float32, (*problem.limits, eps, *factors)))
    grid = config.grid(problem)
    if problem.fusion and problem.adds_to_stream:
        scalars += problem.fusion.next_weight.scalars(grid[0])
    fusion_buffers = problem.fusion.buffers if problem.fusion else ()
    return LaunchPlan(
        Kernel(f"gemm/{config.name}.cu", config.name, defines, device.target),
        grid,
        (config.threads(problem), 1, 1),
        ("weight", "bias", "residual", "y", *fusion_buffers, x, *(("order",) if problem.gathers_x else ()), *scalars),
        config.shared_bytes(problem),
        cluster=(config.split_k, 1, 1),
        dependent=True,
    )


def describe_work(config: GemmSm90Config, problem: Problem) -> str:
    """Return how the tiles of y and their k tiles are divided among the CTAs, which `explain` prints.

    >>> config = GemmSm90Config(WGMMA, 112, weight_tiles=2, m64_tiles=1, consumers=2, stages=6, split_k=3)
    >>> describe_work(config, Problem(224, 1088, 15872, 128))
    '2 x 17 tiles of 112 x 64, 124 k tiles each; clusters of 3 CTAs take a tile each, at most 42 k tiles per CTA'
    >>> config = GemmSm90Config(WGMMA, 16, weight_tiles=2, m64_tiles=1, consumers=2, stages=6, split_k=2, k_tiles=2)
    >>> describe_work(config, Problem(16, 4096, 11008, 128))  # stages of two k tiles are not divided
    '1 x 64 tiles of 16 x 64, 86 k tiles each; clusters of 2 CTAs take a tile each, at most 44 k tiles per CTA'
    """
    m_blocks, n_blocks = config.tiles(problem)
    k_tiles = ceil_div(problem.k, WEIGHT_TILE_K)
    text = f"{m_blocks} x {n_blocks} tiles of {config.block_m} x {config.block_n}, {k_tiles} k tiles each"
    if config.split_k == 1:
        return f"{text}; one CTA per tile"
    share = min(k_tiles, config.iterations(problem) * config.k_tiles)
    return f"{text}; clusters of {config.split_k} CTAs take a tile each, at most {share} k tiles per CTA"


def time_parts(config: GemmSm90Config, problem: Problem, device: Device) -> TimeParts:
    """Return the modelled run time and its parts, which `explain` prints."""
    find = {WGMMA: wgmma_time, MMA: mma_time, MMA_INVARIANT: mma_invariant_time}[config.name]
    return find(config, problem, device)


def estimate_us(config: GemmSm90Config, problem: Problem, device: Device) -> float:
    return time_parts(config, problem, device).us


GEMM_SM90 = FunctionFamily(
    NAME,
    configs,
    estimate_us,
    plan,
    refusal,
    needs=HOPPER,
    layout=FRAGMENTS,
    reduction=reduction,
    describe_work=describe_work,
    time_parts=time_parts,
)
