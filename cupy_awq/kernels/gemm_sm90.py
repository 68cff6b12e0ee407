# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm90``: GEMM on Hopper's tensor cores with a repacked weight, for M from 1 to a few hundred.

The family has two kernels: ``gemm_sm90.cu`` (wgmma) and, for M <= 16, ``gemm_sm90_mma.cu`` (mma.sync).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.kernels.family import Workspace
from cupy_awq.kernels.gemm_sm90_costs import LARGE_TILES, MMA, SMALL_TILES, WGMMA
from cupy_awq.kernels.hopper import has_split_scales, power_limited_us, repacked_defines, x_tensor_map
from cupy_awq.kernels.hopper import prepare_weight as prepare_weight
from cupy_awq.kernels.problem import Problem, ceil_div, next_power_of_two
from cupy_awq.kernels.reduction import Reduction, wgmma_reduction
from cupy_awq.kernels.repack import WEIGHT_TILE_K, WEIGHT_TILE_N, RepackedLayout, repacked_refusal
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "gemm_sm90"
MMA_MAX_M = 16
"""The largest M that the mma kernel supports."""
WGMMA_MIN_M = 9
"""The smallest M for the wgmma kernel; below it the mma kernel is faster."""
MAX_FUSED_ROWS = 32
"""The largest M of a GEMM with a `Fusion`; at M = 32 fusion saves only 1% of a decoder layer's time on an H100."""
SQUARE_SUM_COLUMNS = 32
"""The number of residual-stream columns per element of ``square_sums``; kSquareSumColumns in CUDA must be equal."""
REGISTERS_PER_SM, THREADS_PER_SM = 65536, 2048
"""The number of 32-bit registers per SM, and the largest number of resident threads per SM."""
RESERVED_BYTES = 1024
"""The shared memory that the CUDA driver reserves per CTA, in bytes."""


@dataclass(frozen=True)
class GemmSm90Config:
    """A configuration of ``gemm_sm90.cu`` or ``gemm_sm90_mma.cu``.

    Attributes:
        name: name of the kernel, WGMMA or MMA.
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
        scaled: (wgmma) whether weights are multiplied by their scale and rounded before the wgmma; otherwise the
            accumulators of each group are multiplied by the scale after the wgmma.
        prefetch_weights: whether the weights of all stages are copied before the wait for the preceding kernel (PDL);
            otherwise only those of the first stage. Copies of x are queued after these copies, which delays a CTA that
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
        return self.weight_tiles if self.name == MMA else self.weight_tiles // (2 * self.m64_tiles) * 4

    @property
    def consumer_registers(self) -> int:
        """The number of registers per consumer thread after setmaxnreg, or 0 if the kernel does not use setmaxnreg."""
        if self.name == MMA or self.block_m < 64:
            return 0
        return {8: 232, 12: 152}.get(self.consumers * self.consumer_warps, 0)

    @property
    def x_stage_bytes(self) -> int:
        """The size of x per pipeline stage in bytes; 0 with mma, whose consumers copy x to stages of their own."""
        return 0 if self.name == MMA else self.block_m * self.k_tiles * WEIGHT_TILE_K * 2

    @property
    def x_ring_bytes(self) -> int:
        """The total size of all pipeline stages of x, in bytes."""
        if self.name == MMA:
            return self.consumers * self.x_stages * self.x_rows * self.k_tiles * WEIGHT_TILE_K * 2
        return self.stages * self.x_stage_bytes

    def threads(self, problem: Problem) -> int:
        """Return the number of threads per CTA: consumers, producer and, with mma, one warp for the RMSNorm factors."""
        others = 4 if self.consumer_registers else 2 if self.name == MMA and problem.rms_norms_x else 1
        return (self.consumers * self.consumer_warps + others) * 32

    def shared_bytes(self, problem: Problem) -> int:
        """Return the dynamic shared memory per CTA in bytes; SharedStorage in CUDA static_asserts the same value."""
        stage = self.weight_tiles * self.k_tiles * RepackedLayout.of(problem).weight_tile_bytes + 16
        stages = self.x_ring_bytes + self.stages * stage
        accumulators = self.consumers * self._accumulator_bytes(self.block_m)
        owned = self.block_m // self.split_k
        received = 16 + (self.split_k - 1) * self._accumulator_bytes(owned) if self.split_k > 1 else 0
        return max(stages, accumulators) + received + (owned * 4 if problem.rms_norms_x else 0)

    def _accumulator_bytes(self, rows: int) -> int:
        """Return the size of the accumulators of ``rows`` rows in bytes, in the layout AccumulatorBlocks of CUDA."""
        return ceil_div(rows, 8) * (self.block_n // 16) * (8 * min(4, rows // 2) * 4 + 8) * 4

    def tiles(self, problem: Problem) -> tuple[int, int]:
        """Return the numbers of CTA tiles along m and along n."""
        return ceil_div(problem.m, self.block_m), ceil_div(problem.n, self.block_n)

    def grid(self, problem: Problem, device: Device) -> tuple[int, int, int]:
        """Return the grid: the CTAs of all tiles, padded to the number of SMs if they are up to 10% fewer.

        Padding CTAs have no tile. With 128 tiles on the 132 SMs of an H100, they speed up K = N = 4096, M = 8 by 16%.
        """
        m_blocks, n_blocks = self.tiles(problem)
        ctas, whole = n_blocks * self.split_k, device.sm_count // self.split_k * self.split_k
        return whole if m_blocks == 1 and 0.9 * whole < ctas < whole else ctas, m_blocks, 1

    def capacity(self, problem: Problem, device: Device) -> int:
        """Return the largest number of CTAs that the GPU can hold at the same time."""
        fitting = device.shared_bytes_per_sm // (self.shared_bytes(problem) + RESERVED_BYTES)
        return device.sm_count * max(1, min(fitting, THREADS_PER_SM // self.threads(problem)))

    def nonresident_fraction(self, problem: Problem, device: Device) -> float:
        """Return the fraction (0 to 1) of the next kernel's CTAs that cannot become resident while this launch runs."""
        free = self.capacity(problem, device) / math.prod(self.grid(problem, device)) - 1
        return 1 - min(1.0, max(0.0, free))


def refusal(problem: Problem, device: Device) -> str | None:
    if problem.fusion and problem.m > MAX_FUSED_ROWS:
        return f"fuses the residual stream only for M <= {MAX_FUSED_ROWS}, not {problem.m}"
    if problem.adds_to_stream and (problem.gated or problem.residual or not problem.aligned):
        return "cannot add a gated, unaligned or residual result to the residual stream"
    return repacked_refusal(problem, device)


def reduction(config: GemmSm90Config, problem: Problem) -> Reduction | None:
    if config.name != WGMMA:
        return None  # mma supports few rows only
    stages, turns = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.k_tiles), (config.split_k, config.consumers)
    return wgmma_reduction(config, stages, config.k_tiles, *turns, scaled=config.scaled)


def configs(problem: Problem, device: Device) -> list[GemmSm90Config]:
    # A small K limits the number of consumers, so the same configuration can be generated twice.
    found = dict.fromkeys([*_mma_configs(problem, device), *_wgmma_configs(problem, device)])
    # In a gated problem, half of the weight tiles of a CTA tile belong to the gate, the others to the up projection.
    return [config for config in found if not (problem.gated and config.weight_tiles % 2)]


def _mma_configs(problem: Problem, device: Device) -> Iterator[GemmSm90Config]:
    if problem.m > MMA_MAX_M:
        return
    all_k_tiles, x_rows = ceil_div(problem.k, WEIGHT_TILE_K), next_power_of_two(problem.m)
    for weight_tiles, split_k, warps, k_tiles in itertools.product((1, 2, 3, 4, 6, 7, 8), (1, 2), (16, 8), (1, 2, 4)):
        consumers = max(1, min(warps // weight_tiles, all_k_tiles // split_k // k_tiles))
        x_stages = 4 if k_tiles == 1 else 2
        config = GemmSm90Config(
            MMA, max(8, x_rows), weight_tiles, 1, consumers, 0, split_k, k_tiles, 1, x_rows, x_stages
        )
        yield from _with_most_stages(config, problem, device, 72 if x_rows <= 8 else 112)


def _wgmma_configs(problem: Problem, device: Device) -> Iterator[GemmSm90Config]:
    if problem.m < WGMMA_MIN_M and not problem.batch_invariant:
        return
    all_k_tiles, rows = ceil_div(problem.k, WEIGHT_TILE_K), max(16, next_power_of_two(problem.m))
    for block_m in (16, 32, 64, 128):
        if block_m > rows or block_m < min(rows, 64):
            continue
        k_tile_counts = (1, 2, 4) if block_m == 16 else (1, 2) if block_m <= 64 else (1,)
        # Clusters of 4 CTAs are not tried: an H100 holds only 30 of them. Multicast of x to 2 CTAs gains nothing.
        for m64_tiles, warpgroups, consumers, split_k, k_tiles in itertools.product(
            (1, 2), (1, 2, 3, 4, 6, 7), (1, 2, 3, 4), (1, 2), k_tile_counts
        ):
            if k_tiles == 4 and (m64_tiles, warpgroups, consumers) != (1, 2, 1):
                continue  # These shapes are up to 28% slower.
            if consumers * split_k * k_tiles > all_k_tiles:
                continue
            weight_tiles = warpgroups * m64_tiles * 2
            config = GemmSm90Config(WGMMA, block_m, weight_tiles, m64_tiles, consumers, 0, split_k, k_tiles)
            can_scale = block_m >= 64 or problem.batch_invariant
            can_scale = can_scale and not (problem.dtype == "float16" and problem.wide_scales)
            # With several groups per weight tile, unscaled weights need a wgmma wait per group: up to 39% slower.
            has_short_groups = problem.group_size < WEIGHT_TILE_K
            if not (can_scale and has_short_groups):
                # The registers hold the accumulators of y and of one group, operand A of one group, and 30 others.
                yield from _with_most_stages(config, problem, device, block_m * (m64_tiles + 1) // 2 + 62)
            # Split scales cost two more instructions per pair of weights: up to 23% slower with block_m = 64.
            is_costly = has_split_scales(problem) and not has_short_groups and block_m == 64
            if can_scale and not (has_short_groups and k_tiles > 1) and not is_costly:
                # With fewer than 90 additional registers for two m64 tiles, ptxas serializes the wgmmas.
                registers = block_m * m64_tiles // 2 + (86 if m64_tiles == 1 else 90)
                yield from _with_most_stages(replace(config, scaled=True), problem, device, registers)


def _with_most_stages(
    config: GemmSm90Config, problem: Problem, device: Device, registers: int
) -> Iterator[GemmSm90Config]:
    """Yield, for 2 and for 1 resident CTAs per SM, the configuration with the most stages that fit in shared memory.

    Configurations with ``block_m`` > 16 are yielded with and without ``prefetch_weights``. ``registers`` is the number
    of registers that a consumer thread needs; configurations for which an SM has fewer are left out.
    """
    all_k_tiles = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.split_k)
    # Each stage belongs to one consumer, which needs no more stages than it has iterations.
    enough = ceil_div(all_k_tiles, config.consumers * config.k_tiles)
    stages_each = range(1 if config.consumers > 1 and not config.scaled else 2, max(3, enough + 1))
    for ctas_per_sm in (2, 1):
        # An SM allocates registers for a multiple of four warps, one per scheduler.
        warps = ceil_div(config.threads(problem) // 32, 4) * 4
        available = REGISTERS_PER_SM // (warps * 32 * ctas_per_sm) // 8 * 8
        limit = min(device.shared_bytes_per_sm // ctas_per_sm - RESERVED_BYTES, device.shared_bytes_per_block)
        if ctas_per_sm == 1 and config.consumer_registers:
            available = config.consumer_registers
        if registers > min(available, 255):
            continue
        with_stages = functools.partial(_with_stages, config, ctas_per_sm)
        fitting = bisect.bisect_right(stages_each, limit, key=lambda each: with_stages(each).shared_bytes(problem))
        if fitting:
            yield (chosen := with_stages(stages_each[fitting - 1]))
            if config.block_m > MMA_MAX_M:
                yield replace(chosen, prefetch_weights=False)


def _with_stages(config: GemmSm90Config, ctas_per_sm: int, stages_each: int) -> GemmSm90Config:
    """Return the configuration with ``stages_each`` stages per consumer."""
    return replace(config, stages=stages_each * config.consumers, ctas_per_sm=ctas_per_sm)


def plan(config: GemmSm90Config, problem: Problem, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are weight (`RepackedLayout`), bias, residual, y, x and `Fusion.buffers`.
    """
    defines: tuple[tuple[str, int | str], ...] = (
        *repacked_defines(problem),
        ("BLOCK_M", config.block_m),
        ("WEIGHT_TILES", config.weight_tiles),
        ("CONSUMERS", config.consumers),
        ("CONSUMER_WARPS", config.consumer_warps),
        ("STAGES", config.stages),
        ("K_TILES", config.k_tiles),
        ("SPLIT_K", config.split_k),
        ("CTAS_PER_SM", config.ctas_per_sm),
        ("PREFETCH_WEIGHTS", int(config.prefetch_weights)),
        ("CONSUMER_REGISTERS", config.consumer_registers),
        ("X_STAGE_BYTES", config.x_stage_bytes),
        ("X_RING_BYTES", config.x_ring_bytes),
        ("SHARED_BYTES", config.shared_bytes(problem)),
        ("ADD_TO_STREAM", int(problem.adds_to_stream)),
        ("RMS_NORM_X", int(problem.rms_norms_x)),
        ("ORDER_Y", int(problem.orders_y)),
    )
    strides = problem.row_strides
    sizes: tuple[int, ...] = (problem.m, problem.n, problem.k, strides.residual, strides.y)
    x: Argument = "x"
    factors: tuple[float, ...] = ()
    if config.name == MMA:
        defines += (("X_ROWS", config.x_rows), ("X_STAGES", config.x_stages))
        sizes += (strides.x,)
    else:
        defines += (
            ("WARPGROUPS", config.consumer_warps // 4),
            ("M64_TILES", config.m64_tiles),
            ("SCALED", int(config.scaled)),
        )
        factors = 2.0**problem.scale_exponent, 2.0**-problem.scale_exponent
        x = x_tensor_map(problem, config.block_m, 2 * config.k_tiles)
    eps = problem.fusion.eps if problem.fusion else 0.0
    scalars = (*map(np.int32, sizes), *map(np.float32, (*problem.limits, eps, *factors)))
    fusion_buffers = problem.fusion.buffers if problem.fusion else ()
    return LaunchPlan(
        Kernel(f"gemm/{config.name}.cu", config.name, defines, device.target),
        config.grid(problem, device),
        (config.threads(problem), 1, 1),
        ("weight", "bias", "residual", "y", *fusion_buffers, x, *scalars),
        config.shared_bytes(problem),
        cluster=(config.split_k, 1, 1),
        dependent=True,
    )


def workspace(config: GemmSm90Config, problem: Problem) -> Workspace:
    return Workspace()


def estimate_us(config: GemmSm90Config, problem: Problem, device: Device) -> float:
    if config.block_m <= MMA_MAX_M:
        return _estimate_small_tiles_us(config, problem, device)
    return _estimate_large_tiles_us(config, problem, device)


def _estimate_small_tiles_us(config: GemmSm90Config, problem: Problem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead plus the overlapping read, compute and refill times.

    The estimate includes the delay of the next kernel, whose CTAs copy weights once they are resident (PDL).
    """
    costs = SMALL_TILES
    ctas = math.prod(config.grid(problem, device))
    k_tiles = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.split_k)
    waves = max(1.0, ctas / config.capacity(problem, device))
    iterations = ceil_div(ceil_div(k_tiles, config.k_tiles), config.consumers)
    overlapping_ns = (
        waves * iterations * config.k_tiles * costs.k_tile_ns[config.x_rows],
        waves * k_tiles / (config.stages * config.k_tiles) * costs.refill_ns,
        costs.stream_factor * problem.weight_bytes / device.read_gbs,
    )
    reduction = costs.reduction_us if config.split_k > 1 else 0.0
    delay = costs.nonresident_us * config.nonresident_fraction(problem, device)
    delay += costs.uneven_us if ctas % device.sm_count else 0.0
    return costs.launch_us[config.name] + reduction + delay + math.hypot(*overlapping_ns) * 1e-3


def _estimate_large_tiles_us(config: GemmSm90Config, problem: Problem, device: Device) -> float:
    """Return the run time in microseconds: the longer of read and compute time plus a fraction of the shorter one."""
    costs = LARGE_TILES
    m_blocks, n_blocks = config.tiles(problem)
    tiles = n_blocks * config.split_k * m_blocks
    k_tiles = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.split_k)
    waves = ceil_div(tiles, device.sm_count * config.ctas_per_sm)
    sharing = min(config.ctas_per_sm, ceil_div(tiles, device.sm_count))
    # The largest of three numbers of cycles per k tile limits the main loop: those of one consumer, those of the SM's
    # tensor cores and schedulers, and those of the copies.
    row_pairs = config.block_m / 2
    sm_cycles = config.block_n / 8 * (costs.sm_cycles + costs.sm_cycles_per_row_pair * row_pairs)
    stage_bytes = config.k_tiles * WEIGHT_TILE_K * (2 * config.block_m + costs.bytes_per_weight * config.block_n)
    copy = (costs.copy_latency_cycles + stage_bytes / costs.l2_bytes_per_cycle * sharing) / config.k_tiles
    if config.scaled:
        m64_cycles = max(costs.scaled_min_cycles, costs.scaled_cycles_per_row_pair * row_pairs)
        copy /= config.stages - config.consumers  # With `scaled`, a stage is released one iteration later.
    else:
        m64_cycles = costs.unscaled_cycles + costs.unscaled_cycles_per_row_pair * row_pairs
        copy /= config.stages
        if config.consumers == 1 and sharing == 1:
            sm_cycles += costs.single_consumer_cycles
    consumer_cycles = costs.consumer_cycles + config.m64_tiles * m64_cycles
    cycles = k_tiles * max(consumer_cycles / config.consumers, sm_cycles * sharing, copy)
    work = power_limited_us(waves * (cycles / costs.clock_mhz + costs.wave_us), problem)
    stream = problem.weight_bytes / (device.read_gbs * 1e3)
    exposed = (costs.scaled_exposed if config.scaled else costs.unscaled_exposed) * min(stream, work)
    x_bytes = tiles * k_tiles * min(config.block_m, problem.m) * 2 * WEIGHT_TILE_K
    nonresident = config.nonresident_fraction(problem, device)
    launch = costs.no_prefetch_us + costs.no_prefetch_nonresident_us * nonresident
    if config.prefetch_weights:
        launch = costs.prefetch_us + costs.prefetch_nonresident_us * nonresident
    reduction = costs.reduction_us_per_wave * waves if config.split_k > 1 else 0.0
    return launch + reduction + max(stream, work) + exposed + x_bytes / costs.x_bytes_per_us
