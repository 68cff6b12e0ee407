# SPDX-License-Identifier: Apache-2.0
"""``expert_gemm_tiles``: the grouped product of many rows per expert, with the main loop of ``gemm_mma_fragments``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupy_awq.kernels.experts.expert_gemm import EXPERT_GEMM
from cupy_awq.kernels.experts.problem import ExpertProduct, count_blocks, expected_blocks, expected_touched
from cupy_awq.kernels.family import FunctionFamily, Reduction
from cupy_awq.kernels.gemm.fragments import fragment_refusal
from cupy_awq.kernels.gemm.gemm_mma_fragments import (
    COSTS,
    FEW_ROWS,
    INT8_BLOCK_M,
    MAX_STAGES,
    NEEDS,
    SCHEDULERS,
    STAGED_BLOCK_M,
    GemmFragmentsConfig,
    converts_offsets,
    invariant_layouts,
    layouts,
    maths,
    warp_cycles,
)
from cupy_awq.kernels.gemm.gemm_mma_fragments import reduction as reduction_of_expert
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K
from cupy_awq.kernels.gemm.problem import FRAGMENTS
from cupy_awq.kernels.tiling import RESERVED_BYTES, ceil_div, with_stages
from cupy_awq.kernels.waves import CtaWork, waves_us
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "expert_gemm_tiles"
BLOCKS = (8, 16, 32, 48, 64, 80, 96, 128)
"""The largest numbers of rows per unit (a block of rows that take the same expert) to try."""
GATHERED = 1.14
"""The time with gathered rows and units of several experts, relative to ``gemm_mma_fragments`` (14 layers, H100)."""
MAX_X_ELEMENTS = 1 << 31
"""The largest extent of x, whose rows are addressed by 32-bit offsets."""


def refusal(problem: ExpertProduct, device: Device) -> str | None:
    if problem.rows != "sorted":
        return "takes rows that are sorted by expert"
    if problem.x_rows * (problem.ldx or problem.k) >= MAX_X_ELEMENTS:
        return f"needs x of less than {MAX_X_ELEMENTS} elements"
    if not any(problem.block % block == 0 for block in BLOCKS):
        return f"needs blocks of a multiple of {BLOCKS[0]} rows, not {problem.block}"
    return fragment_refusal(problem.of_expert(1), device, NEEDS, adds_offsets=True)


def configs(problem: ExpertProduct, device: Device) -> list[GemmFragmentsConfig]:
    return list(_configs(problem, device))


def _configs(problem: ExpertProduct, device: Device) -> Iterator[GemmFragmentsConfig]:
    is_async = device.has(Capability.CP_ASYNC)
    most = BLOCKS[-1] if is_async else STAGED_BLOCK_M
    if converts_offsets(problem.of_expert(1)):
        most = INT8_BLOCK_M
    # With 8 rows, expert_gemm is faster, but its order of additions may be another one.
    is_faster = EXPERT_GEMM.refusal(problem, device) is None and not problem.batch_invariant
    for block in BLOCKS[is_faster:]:
        unit = problem.of_expert(block)
        if problem.block % block or block > most:
            continue
        for math in maths(unit) if problem.batch_invariant else maths(unit)[-1:]:
            exact_most = 48 if problem.batch_invariant else 64  # registers would spill with more rows
            if not is_async and problem.fragments.groups > 2:
                exact_most = FEW_ROWS
            if math == "kExact" and block > exact_most:
                continue
            for layout in invariant_layouts(block, math) if problem.batch_invariant else layouts(block, math, unit):
                if problem.gated and layout.weight_tiles * layout.warps_n % 2:
                    continue
                if layout.weight_tiles > 1 and block > FEW_ROWS and not is_async:
                    continue  # registers would spill
                for stage_k in (128, 64):
                    sizes = layout.weight_tiles, layout.warps_n, layout.warps_k, stage_k
                    shape = GemmFragmentsConfig(math, block, block, *sizes, is_async)
                    reserved = RESERVED_BYTES + 4 * block
                    stages = MAX_STAGES if is_async else 2
                    config = with_stages(shape, layout.ctas_per_sm, stages, unit, device, reserved)
                    if config is not None:
                        yield config
                        if not problem.batch_invariant:
                            break


def _shared_bytes(config: GemmFragmentsConfig, problem: ExpertProduct) -> int:
    return config.shared_bytes(problem.of_expert(config.block_m)) + 4 * config.block_m


def arguments(problem: ExpertProduct) -> tuple[Argument, ...]:
    """Return the kernel arguments: the names of the buffers, sizes and factors."""
    sizes = (
        problem.pairs,
        problem.routed_rows,
        problem.experts,
        problem.n,
        problem.k,
        problem.x_divisor,
        problem.block,
        problem.ldx or problem.k,
        problem.ldy or problem.n_out,
    )
    factors = 2.0**problem.scale_exponent, 2.0**-problem.scale_exponent
    return (
        *("weight", "bias", "row_weights", "y", "sorted_pairs", "experts", "sorted_count", "x"),
        np.int64(problem.fragments.nbytes),
        *map(np.int32, sizes),
        *map(np.float32, factors),
    )


def plan(config: GemmFragmentsConfig, problem: ExpertProduct, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are weight (the fragment layouts of all experts), bias, row_weights, y, sorted_pairs, experts,
    sorted_count and x.
    """
    dependent = device.has(Capability.DEPENDENT_LAUNCH)
    defines: tuple[tuple[str, int | str], ...] = (
        *problem.defines(),
        *problem.fragments.defines(),
        ("ASYNC", int(config.is_async)),
        ("DEPENDENT", int(dependent)),
        *config.defines,
        ("SHARED_BYTES", _shared_bytes(config, problem)),
    )
    units = count_blocks(problem.pairs, problem.experts, problem.block) * (problem.block // config.block_m)
    return LaunchPlan(
        Kernel(f"experts/{NAME}.cu", NAME, defines, device.target),
        (min(units * ceil_div(problem.n, config.block_n), config.ctas_per_sm * device.sm_count), 1, 1),
        (config.threads, 1, 1),
        arguments(problem),
        _shared_bytes(config, problem),
        dependent=dependent,
    )


def estimate_us(config: GemmFragmentsConfig, problem: ExpertProduct, device: Device) -> float:
    """Return the run time in microseconds, by the constants of ``gemm_mma_fragments``, for uniform routing."""
    rates, k_tiles = device.rates, ceil_div(problem.k, WEIGHT_TILE_K)
    units = expected_blocks(problem.pairs, problem.experts, config.block_m, problem.top_k)
    touched = expected_touched(problem.pairs, problem.experts, problem.top_k)
    cycles = warp_cycles(config, problem.of_expert(config.block_m), device)
    weight_bytes = config.tile_columns * problem.fragments.weight_tile_bytes
    elements = config.block_m * config.block_n
    tiles = ceil_div(int(units * problem.n), config.block_n)
    work = CtaWork(
        k_tiles,
        max((cycles + COSTS.sync) / rates.clock_mhz, rates.latency_us / config.stages) / config.warps_k,
        cycles * config.warps_n / SCHEDULERS + COSTS.store * elements / k_tiles,
        (weight_bytes + config.x_rows * 2 * WEIGHT_TILE_K) / COSTS.shared_reads,
        weight_bytes * touched / units + problem.activation_bytes / max(1, tiles) / k_tiles,
        COSTS.start * rates.latency_us,
    )
    readers = max(1, round(tiles * touched / units))
    return rates.launch_us + GATHERED * waves_us(tiles, config.ctas_per_sm, work, device, readers, 1)


def reduction(config: GemmFragmentsConfig, problem: ExpertProduct) -> Reduction | None:
    """Return the order of the additions along K, which is that of ``gemm_mma_fragments``."""
    return reduction_of_expert(config, problem.of_expert(config.block_m))


EXPERT_GEMM_TILES = FunctionFamily(
    NAME, configs, estimate_us, plan, refusal, needs=NEEDS, layout=FRAGMENTS, reduction=reduction
)
