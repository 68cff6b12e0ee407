# SPDX-License-Identifier: Apache-2.0
"""``gemm_mma_fragments``: GEMM with mma.sync on a 4- or 8-bit weight in the fragment layout, for any M."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from cupy_awq.kernels.family import FunctionFamily, Reduction, Workspace, constants
from cupy_awq.kernels.gemm.fragments import ROUNDED_MIN_M, fragment_defines, fragment_refusal, fusion_refusal
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K, WEIGHT_TILE_N, FragmentLayout
from cupy_awq.kernels.gemm.problem import FRAGMENTS, INT8_FRAGMENTS, Problem
from cupy_awq.kernels.hopper import HOPPER
from cupy_awq.kernels.tiling import MmaStreamK, ceil_div, next_power_of_two, stream_k_divisions, with_stages
from cupy_awq.kernels.waves import CtaWork, waves_us
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "gemm_mma_fragments"
NEEDS = Capability.MMA_M16N8K8, Capability.LDMATRIX
"""The capabilities that the kernel needs."""
FEW_ROWS = 16
"""The largest M of a tile of 8 or 16 rows, whose slices of K are single warps."""
MAX_GATED_BYTES = 1 << 33
"""The largest size of a gated weight, whose up projection lies within 32-bit offsets of the gate projection."""
STAGED_BLOCK_M = 96
"""The largest ``block_m`` for which registers also hold the copies of a stage, where the GPU lacks cp.async."""
INT8_BLOCK_M = 80
"""The largest ``block_m`` for which registers hold 8-bit codes, or converted offsets, in every layout of the warps."""
MAX_STAGES = 8
"""The largest number of pipeline stages."""

Math = Literal["kExact", "kScaled"]


@dataclass(frozen=True)
class GemmFragmentsCosts:
    """Constants of the cost model, fitted to times of 237 problems with M = 1 to 2048 on an H100.

    Over 583 problems, the first choice is slower than the fastest configuration by 2.4% (geometric mean).

    Attributes:
        mma: time of an mma, relative to that at the peak rate.
        issue: cycles that any other instruction takes from the mma of its scheduler.
        sync: cycles per k tile for which the warps of a slice wait for each other; warps of other slices hide them.
        start: time to fill the pipeline of a tile and to finish the tile, in latencies of device memory.
        store: cycles to store y, per element of a CTA tile.
        shared_reads: number of SMs that share a read from L2 (on average).
        stream_k: fixed time of the stream-K reduction, in latencies of device memory.
        exchange: cycles per partial sum that a CTA writes or reads.
    """

    mma: float = 0.992
    issue: float = 0.86
    sync: float = 337.0
    start: float = 2.56
    store: float = 0.2
    shared_reads: float = 1.86
    stream_k: float = 6.1
    exchange: float = 0.295


COSTS = GemmFragmentsCosts()
CONVERT = {"kExact": 9, "kScaled": 13}
"""The number of instructions that convert eight codes to operand A, with float16 x, by ``math``."""
BFLOAT16_CONVERT = {4: 2, 8: 12}
"""The number of further instructions with bfloat16 x, by bits per code."""
SCHEDULERS = 4
"""The number of warp schedulers per SM."""
MMA_PRODUCTS = 16 * 8 * 16
"""The number of multiply-adds of an mma."""


@dataclass(frozen=True)
class GemmFragmentsConfig(MmaStreamK):
    """A configuration of ``gemm_mma_fragments.cu``.

    Attributes:
        math: how a warp computes the products of a group, an enumerator of ``Math`` in the kernel.
        block_m: number of rows per CTA tile.
        x_rows: number of rows of x in shared memory; less than ``block_m`` for fewer than 8 rows.
        weight_tiles: number of weight tiles (32 columns) along n per warp.
        warps_n: number of warps per slice of K, side by side along n.
        warps_k: number of slices of K per CTA.
        stage_k: extent of a pipeline stage along K, 64 or 128.
        is_async: whether cp.async copies, or else the threads, through registers.
        stages: number of pipeline stages per slice.
        ctas_per_sm: number of resident CTAs per SM for which the kernel is compiled (``__launch_bounds__``).
        ctas: number of CTAs of the launch, which compute one tile after another.
        stream_k_units: number of tiles that are computed with stream-K, counted from the first; each of the others is
            computed by one CTA. See ``StreamKTileScheduler`` in ``cuda_src/common/tile_scheduler.cuh``.
        stream_k_ctas: number of CTAs among which the k tiles of the stream-K tiles are divided.
    """

    math: Math
    block_m: int
    x_rows: int
    weight_tiles: int
    warps_n: int
    warps_k: int
    stage_k: int
    is_async: bool = True
    stages: int = 2
    ctas_per_sm: int = 1
    ctas: int = 1
    stream_k_units: int = 0
    stream_k_ctas: int = 0

    @property
    def tile_columns(self) -> int:
        """The number of weight tiles along n per CTA tile."""
        return self.weight_tiles * self.warps_n

    @property
    def block_n(self) -> int:
        """The number of columns per CTA tile."""
        return self.tile_columns * WEIGHT_TILE_N

    @property
    def threads(self) -> int:
        """The number of threads per CTA."""
        return 32 * self.warps_n * self.warps_k

    def stage_bytes(self, problem: Problem) -> int:
        """Return the size of a pipeline stage in bytes: codes and groups of the weight tiles, and x."""
        layout = FragmentLayout.of(problem)
        parts = WEIGHT_TILE_K // self.stage_k
        groups = max(1, layout.groups // parts)
        code_bytes = self.stage_k * WEIGHT_TILE_N * problem.bits // 8
        weight = self.tile_columns * (code_bytes + groups * layout.group_bytes)
        return ceil_div(self.x_rows * self.stage_k * 2 + weight, 128) * 128

    def shared_bytes(self, problem: Problem) -> int:
        """Return the dynamic shared memory per CTA in bytes; SharedStorage in CUDA static_asserts the same value."""
        ring = self.warps_k * self.stages * self.stage_bytes(problem)
        factors = 4 * self.block_m if problem.rms_norms_x else 0
        return max(ring, self.warps_k * self.pass_rows * (self.block_n + 4) * 4) + factors

    @property
    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """The constants of the tile and of its pipeline, which ``expert_gemm_tiles.cu`` has as well."""
        return constants(self, "math block_m weight_tiles warps_n warps_k stage_k stages pass_rows ctas_per_sm")


def refusal(problem: Problem, device: Device) -> str | None:
    if problem.gathers_x:
        return "cannot gather the columns of x"
    if device.has(*HOPPER) and problem.bits == 4 and problem.zeros != "float":
        return "serves weights and GPUs that gemm_sm90 does not"
    if problem.gated and FragmentLayout.of(problem).nbytes > MAX_GATED_BYTES:
        return f"needs a gated weight of at most {MAX_GATED_BYTES >> 30} GiB"
    if problem.bits == 8 and problem.dtype != problem.scales_dtype:
        return f"takes x in the dtype of the 8-bit weight, {problem.scales_dtype}, not {problem.dtype}"
    layouts = FRAGMENTS, INT8_FRAGMENTS
    return fusion_refusal(problem) or fragment_refusal(problem, device, NEEDS, layouts, adds_offsets=True)


def reduction(config: GemmFragmentsConfig, problem: Problem) -> Reduction | None:
    """Return the order of the additions along K, or None for the mathematics and stream-K of which it depends on M."""
    if config.stream_k_units or config.math not in ("kExact", "kScaled"):
        return None
    math = "mma with scaled weights"
    if config.math == "kExact":
        math = f"mma with accumulators scaled after {min(config.stage_k, problem.group_size)} rows"
    return Reduction(math, (0,), config.warps_k, 1 if config.warps_k > 1 else 0)


def configs(problem: Problem, device: Device) -> list[GemmFragmentsConfig]:
    return list(_configs(problem, device))


def _configs(problem: Problem, device: Device) -> Iterator[GemmFragmentsConfig]:
    is_async = device.has(Capability.CP_ASYNC)
    most = 128 if is_async else STAGED_BLOCK_M
    if converts_offsets(problem) or (problem.bits == 8 and (problem.batch_invariant or not is_async)):
        most = INT8_BLOCK_M
    # Without cp.async, registers of the sums of a group and of the copies would spill.
    for how in maths(problem) if is_async or problem.batch_invariant else maths(problem)[-1:]:
        for block_m in _heights(problem.m, how, most, 8 if problem.bits == 4 else 16):
            x_rows = min(block_m, next_power_of_two(problem.m))
            some = invariant_layouts(block_m, how) if problem.batch_invariant else layouts(block_m, how, problem)
            for layout in some:
                if problem.gated and layout.weight_tiles * layout.warps_n % 2:
                    continue
                if layout.weight_tiles > 1 and block_m > FEW_ROWS and (problem.rms_norms_x or not is_async):
                    continue  # registers would spill
                for stage_k in (128, 64):
                    sizes = layout.weight_tiles, layout.warps_n, layout.warps_k, stage_k
                    shape = GemmFragmentsConfig(how, block_m, x_rows, *sizes, is_async)
                    stages = MAX_STAGES if is_async else 2
                    config = with_stages(shape, layout.ctas_per_sm, stages, problem, device)
                    fits = config is not None
                    while config is not None:
                        yield from _divided(config, problem, device)
                        fewer = config.ctas_per_sm - 1 if block_m <= FEW_ROWS else 0
                        config = with_stages(shape, fewer, stages, problem, device)
                    if fits and not problem.batch_invariant:
                        break


def maths(problem: Problem) -> tuple[Math, ...]:
    """Return the values of ``math`` to try; a batch-invariant weight needs one that serves every M."""
    if problem.bits == 8 or problem.zeros == "float":
        return ("kScaled",)
    is_wide = problem.dtype == "float16" and problem.wide_scales
    if problem.batch_invariant:
        return ("kExact",) if is_wide else ("kExact", "kScaled")
    if problem.m < ROUNDED_MIN_M or is_wide:
        return ("kExact",)
    # With more groups, registers of their float32 sums would spill.
    return ("kExact", "kScaled") if problem.m <= 64 and FragmentLayout.of(problem).groups == 1 else ("kScaled",)


def converts_offsets(problem: Problem) -> bool:
    """Return whether the offsets of the weight are converted to the dtype of x, which takes registers."""
    return problem.zeros == "float" and problem.dtype != problem.scales_dtype


def _heights(m: int, math: Math, most: int, step: int = 8) -> list[int]:
    """Return the values of ``block_m`` to try, multiples of ``step`` up to ``most``: the smallest per number of tiles.

    >>> _heights(5, "kExact", 128), _heights(40, "kScaled", 128), _heights(200, "kScaled", 128)
    ([8], [16, 24, 40], [48, 64, 80, 112])
    """
    if m <= FEW_ROWS:
        return [ceil_div(m, 8) * 8]
    if m <= 64:
        return sorted({max(16, ceil_div(m, tiles * step) * step) for tiles in (1, 2, 3)})
    if math == "kExact":
        return [64]
    return [h for h in range(48, most + 1, 16) if h == 48 or ceil_div(m, h) < ceil_div(m, h - 16)]


class Layout(NamedTuple):
    """The arrangement of a CTA's warps, as in `GemmFragmentsConfig`; ``ctas_per_sm`` is the largest number to try."""

    weight_tiles: int
    warps_n: int
    warps_k: int
    ctas_per_sm: int = 1


def layouts(block_m: int, math: Math, problem: Problem) -> tuple[Layout, ...]:
    """Return the layouts of the warps to try: those that are the fastest for some weight and whose registers fit."""
    few_groups = FragmentLayout.of(problem).groups <= 2
    if block_m == 8:
        single = Layout(1, 1, 8, 2), Layout(1, 1, 4, 4 if few_groups else 3), Layout(2, 1, 4, 3)
        pairs = (Layout(1, 2, 4, 2), Layout(1, 2, 2, 4)) if problem.bits == 8 else (Layout(1, 2, 4, 2),)
        return *single, *pairs, Layout(1, 4, 2, 2), Layout(1, 4, 1, 3), Layout(1, 8, 1, 2)
    if block_m == 16 and problem.m <= FEW_ROWS:
        split = Layout(1, 1, 8), Layout(1, 1, 4, 3), Layout(1, 2, 4, 2), Layout(1, 2, 2, 4), Layout(1, 4, 2, 2)
        return *split, Layout(1, 4, 1, 3), Layout(1, 8, 1, 2)
    if block_m <= 32:
        narrow = Layout(1, 1, 8), Layout(1, 2, 4), Layout(1, 2, 2, 2), Layout(1, 4, 2)
        return *narrow, Layout(1, 4, 1, 2), Layout(1, 8, 1), Layout(2, 2, 2, 2), Layout(2, 4, 2)
    if math == "kExact":
        two = Layout(1, 4, 2), Layout(1, 8, 1)
        is_scarce = problem.wide_scales or FragmentLayout.of(problem).groups > 1  # registers would spill
        return two if is_scarce else (Layout(1, 2, 4), *two)
    if block_m <= 64:
        four = Layout(1, 4, 1, 2 if problem.bits == 8 or problem.zeros == "float" else 3)
        one = Layout(1, 1, 8), Layout(1, 2, 4), Layout(1, 4, 2), Layout(1, 8, 1), four
        if block_m > 48 or problem.bits == 8:
            return one  # registers would spill with more columns per warp
        return *one, Layout(2, 2, 2), Layout(2, 4, 2)
    if problem.bits == 8 and block_m > INT8_BLOCK_M:
        return (Layout(1, 8, 1),)
    return Layout(1, 4, 1, 2), Layout(1, 4, 2), Layout(1, 8, 1)


def invariant_layouts(block_m: int, math: Math) -> tuple[Layout, ...]:
    """Return the layouts to try for a batch-invariant weight: with 2 slices for every M, and with 4 for M up to 32."""
    if block_m <= 16:
        return Layout(1, 1, 2, 8), Layout(1, 1, 4, 4), Layout(1, 2, 2, 4), Layout(1, 2, 4, 2)
    if block_m <= 64 and (block_m <= 32 or math == "kScaled"):
        return Layout(1, 2, 2, 2), Layout(1, 2, 4), Layout(1, 4, 2)
    return (Layout(1, 4, 2),)


def _divided(config: GemmFragmentsConfig, problem: Problem, device: Device) -> Iterator[GemmFragmentsConfig]:
    """Yield the configuration with one CTA per tile, and with stream-K."""
    k_tiles, units = ceil_div(problem.k, WEIGHT_TILE_K), config.units(problem)
    resident = config.ctas_per_sm * device.sm_count
    if config.block_m > 96 and config.warps_k > 1 and units > device.sm_count and not problem.batch_invariant:
        return  # two CTAs per SM are faster, on an H100 by up to 10%
    yield replace(config, ctas=units)
    if problem.batch_invariant:
        return
    if config.block_m == 8 and 2 * units > resident and problem.bits == 4:
        return  # sharing tiles gains nothing where memory limits the speed
    for shared, sharers, ctas in stream_k_divisions(units, k_tiles, resident):
        yield replace(config, ctas=ctas, stream_k_units=shared, stream_k_ctas=sharers)


def plan(config: GemmFragmentsConfig, problem: Problem, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are weight (`FragmentLayout`), bias, residual, y, partials, counters, x and, with a fusion,
    `Fusion.buffers` and ``next_weight``. The launch of a few rows of x on an 8-bit weight is dependent (PDL).
    """
    dependent = problem.bits == 8 and problem.m <= FEW_ROWS and not problem.fusion
    dependent &= device.has(Capability.DEPENDENT_LAUNCH)
    defines: tuple[tuple[str, int | str], ...] = (
        *fragment_defines(problem),
        *config.defines,
        ("ASYNC", int(config.is_async)),
        ("DEPENDENT", int(dependent)),
        ("X_ROWS", config.x_rows),
        ("BITS", problem.bits),
        ("STREAM_K", int(config.stream_k_units > 0)),
        ("SHARED_BYTES", config.shared_bytes(problem)),
        ("ADD_TO_STREAM", int(problem.adds_to_stream)),
        ("RMS_NORM_X", int(problem.rms_norms_x)),
        ("ORDER_OUT", int(problem.orders_y)),
    )
    strides = problem.row_strides
    sizes = (problem.m, problem.n, problem.k, strides.residual, strides.y, strides.x)
    stream_k = (config.stream_k_units, config.stream_k_ctas)
    # The scales of an 8-bit weight are stored with the factor.
    scale_factor = 2.0**problem.scale_exponent if problem.bits == 4 else 1.0
    factors = (*problem.limits, scale_factor, 2.0**-problem.scale_exponent)
    fusion = problem.fusion
    fusion_buffers = dict.fromkeys((*fusion.buffers, "next_weight")) if fusion else ()
    scalars = (*map(np.int32, (*sizes, *stream_k)), *map(np.float32, (*factors, fusion.eps if fusion else 0.0)))
    if fusion:
        scalars += fusion.next_weight.scalars(config.ctas)
    return LaunchPlan(
        Kernel(f"gemm/{NAME}.cu", NAME, defines, device.target),
        (config.ctas, 1, 1),
        (config.threads, 1, 1),
        ("weight", "bias", "residual", "y", "partials", "counters", *fusion_buffers, "x", *scalars),
        config.shared_bytes(problem),
        dependent=dependent,
    )


def workspace(config: GemmFragmentsConfig, problem: Problem) -> Workspace:
    if not config.stream_k_units:
        return Workspace()
    return Workspace(config.stream_k_ctas * config.block_m * config.block_n * 4, config.stream_k_units)


def estimate_us(config: GemmFragmentsConfig, problem: Problem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, and all waves of CTAs; stream-K tiles are the last wave.

    The weights of tiles with the same columns are read from device memory once. With 8-bit codes, an SM reads at most
    its share of the bandwidth.
    """
    rates, k_tiles, units = device.rates, ceil_div(problem.k, WEIGHT_TILE_K), config.units(problem)
    shared, sharers = config.stream_k_units, config.stream_k_ctas
    rows, elements = min(problem.m, config.block_m), config.block_m * config.block_n
    cycles = warp_cycles(config, problem, device)
    sync_us = (cycles * max(1.0, config.warps_n / SCHEDULERS) + COSTS.sync) / rates.clock_mhz
    # The warps of a slice wait for each other, while those of other slices on the same schedulers go on.
    part = min(1.0, config.warps_n / SCHEDULERS)
    bubble = COSTS.sync * part / max(1.0, config.warps_k * config.ctas_per_sm * part) ** 2
    rows_of_tiles = ceil_div(problem.m, config.block_m)
    share = max(1.0, rows_of_tiles * device.sm_count / config.ctas) if problem.bits == 8 else 1.0
    weight_bytes = share * config.tile_columns * FragmentLayout.of(problem).weight_tile_bytes
    work = CtaWork(
        ceil_div(k_tiles, config.warps_k) * config.warps_k,
        max(sync_us, rates.latency_us / (config.stages - 1)) / config.warps_k,
        cycles * config.warps_n / SCHEDULERS + bubble + COSTS.store * elements / k_tiles,
        (weight_bytes + config.x_rows * 2 * WEIGHT_TILE_K) / COSTS.shared_reads,
        weight_bytes / rows_of_tiles,
        COSTS.start * rates.latency_us,
    )
    total = rates.launch_us
    if units > shared:
        own = units - shared
        readers = max(1, own // rows_of_tiles)
        total += waves_us(own, config.ctas_per_sm, _uneven(work, own, config, device), device, readers)
    if shared:
        per_sm = ceil_div(sharers, device.sm_count)
        parts = (shared + sharers - math.gcd(shared, sharers)) / sharers  # of units, per CTA
        work = work._replace(k_tiles=shared / sharers * k_tiles + (config.warps_k - 1) / 2, end_us=parts * work.end_us)
        total += waves_us(sharers, config.ctas_per_sm, _uneven(work, sharers, config, device), device)
        cycles = per_sm * rows * config.block_n * (1 + sharers / shared) * COSTS.exchange
        total += COSTS.stream_k * rates.latency_us + cycles / rates.clock_mhz
    return total


def _uneven(work: CtaWork, ctas: int, config: GemmFragmentsConfig, device: Device) -> CtaWork:
    """Return the work of CTAs that are one wave, with the reads from L2 that an uneven distribution over SMs costs.

    They take the geometric mean of the time of an even distribution and that of the busiest SM.
    """
    if ctas > config.ctas_per_sm * device.sm_count:
        return work
    busiest = ceil_div(ctas, device.sm_count) * device.sm_count / ctas
    return work._replace(l2_bytes=work.l2_bytes * math.sqrt(busiest))


def warp_cycles(config: GemmFragmentsConfig, problem: Problem, device: Device) -> float:
    """Return the cycles in which a scheduler issues a warp's instructions for one k tile.

    The counts are those of the compiled main loop: per 16 columns and 16 k, the conversion of a word of eight codes;
    per mma tile of 8 rows, half an ldmatrix and the float32 sums of a group; per k tile, copies and loop control.
    """
    columns, rows = 2 * config.weight_tiles, ceil_div(config.block_m, 8)
    groups, sums = FragmentLayout.of(problem).groups, int(config.math == "kExact")
    mmas = 8 * columns * rows
    convert = CONVERT[config.math] + (BFLOAT16_CONVERT[problem.bits] if problem.dtype == "bfloat16" else 0)
    others: float = 8 * columns * convert + 4 * rows + 4 * columns + (4 * sums * columns * rows + 6 * columns) * groups
    others += 48 * config.x_rows / (32 * config.warps_n) + 5 * config.weight_tiles + 45
    return mmas * COSTS.mma * MMA_PRODUCTS * SCHEDULERS / device.rates.mma_fp32 + others * COSTS.issue


GEMM_MMA_FRAGMENTS = FunctionFamily(
    NAME,
    configs,
    estimate_us,
    plan,
    refusal,
    needs=NEEDS,
    layout=FRAGMENTS,
    workspace=workspace,
    reduction=reduction,
)
