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
from dataclasses import dataclass, field, replace

import numpy as np

from cupy_awq.kernels.family import Workspace
from cupy_awq.kernels.hopper import (
    has_split_scales,
    power_limited_us,
    repacked_defines,
    resident_clusters,
    x_tensor_map,
)
from cupy_awq.kernels.hopper import prepare_weight as prepare_weight
from cupy_awq.kernels.problem import Problem, ceil_div, next_power_of_two
from cupy_awq.kernels.repack import WEIGHT_TILE_K, WEIGHT_TILE_N, RepackedLayout, repacked_refusal
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "gemm_sm90"
WGMMA, MMA = "gemm_sm90", "gemm_sm90_mma"
"""The names of the family's two kernels: wgmma and mma.sync."""
MMA_MAX_M = 16
"""The largest M that the mma kernel supports."""
WGMMA_MIN_M = 9
"""The smallest M for the wgmma kernel; below it the mma kernel is faster."""
WGMMA_MAX_BLOCK_M = 128
"""The largest ``block_m`` of the wgmma kernel."""
SCALED_MIN_M = 33
"""The smallest M with ``scaled``, which rounds the scaled weights: for smaller M, `gemm` guarantees unrounded ones."""
SPLITS = (1, 2, 3, 4, 5, 6, 8)
"""The split-K factors to try."""
MAX_FUSED_ROWS = 32
"""The largest M of a GEMM with a `Fusion`; at M = 32 fusion saves only 1% of a decoder layer's time on an H100."""
SQUARE_SUM_COLUMNS = 32
"""The number of residual-stream columns per element of ``square_sums``; kSquareSumColumns in CUDA must be equal."""
FUSION_BUFFERS = ("h", "norm_weight", "square_sums", "previous_inverse_rms", "inverse_rms")
"""The additional buffers of a launch with a `Fusion`; ``cuda_src/hopper/residual_stream.cuh`` describes them."""
REGISTERS_PER_SM, THREADS_PER_SM = 65536, 2048
"""The number of 32-bit registers per SM, and the largest number of resident threads per SM."""
RESERVED_BYTES = 1024
"""The shared memory that the CUDA driver reserves per CTA, in bytes."""


@dataclass(frozen=True)
class SmallTileCosts:
    """Constants of the cost model for ``block_m`` <= 16, fitted on an H100 to 2443 measured times.

    The times are of 36 shapes with group size 128. The RMS error is 11%; the fit gives faster configurations a larger
    weight. On shapes left out of the fit, the configuration that the model ranks first is 10% slower than the fastest
    one (geometric mean).

    Attributes:
        k_tile_ns: time in which a consumer computes one k tile (128 k), in nanoseconds, by ``x_rows`` (0: wgmma).
        refill_ns: time from the release of a stage until its next copies have landed, in nanoseconds.
        stream_factor: time to read the weight from device memory, relative to the time at the nominal bandwidth.
        launch_us: launch overhead plus epilogue, in microseconds, by kernel.
        reduction_us: time of the split-K reduction, in microseconds.
        nonresident_us: delay if no CTA of the next kernel can become resident during the launch, in microseconds.
        uneven_us: delay if the number of CTAs is not a multiple of the SM count, in microseconds.
    """

    k_tile_ns: dict[int, int] = field(default_factory=lambda: {0: 185, 1: 300, 2: 353, 4: 364, 8: 391, 16: 674})
    refill_ns: int = 1845
    stream_factor: float = 1.12
    launch_us: dict[str, float] = field(default_factory=lambda: {WGMMA: 0.71, MMA: 0.37})
    reduction_us: float = 0.35
    nonresident_us: float = 1.11
    uneven_us: float = 0.47


@dataclass(frozen=True)
class LargeTileCosts:
    """Constants of the cost model for ``block_m`` > 16, fitted on an H100 to 4902 measured times.

    The times are of 39 shapes with 32 <= M <= 128 and group sizes 32, 64 and 128. The RMS error is 8%; on shapes left
    out of the fit, the configuration that the model ranks first is 3% slower than the fastest one. A row pair is two
    rows of the CTA tile.

    Attributes:
        clock_mhz: SM clock in MHz.
        sm_cycles: cycles that the tensor cores and schedulers of an SM need per k tile and 8 columns.
        sm_cycles_per_row_pair: increase of ``sm_cycles`` per row pair, in cycles.
        single_consumer_cycles: additional cycles per k tile with a single consumer, because tensor cores idle while the
            consumer dequantizes.
        copy_latency_cycles: latency of a copy to shared memory, in cycles.
        l2_bytes_per_cycle: L2 bandwidth per SM, in bytes per cycle.
        bytes_per_weight: size of one weight in bytes, including its share of scales and zero points.
        consumer_cycles: fixed cycles per k tile of a consumer that shares its SM with no other warps.
        scaled_min_cycles: smallest number of cycles of this consumer per k tile and m64 tile, with ``scaled``.
        scaled_cycles_per_row_pair: cycles of this consumer per k tile, m64 tile and row pair, with ``scaled``.
        unscaled_cycles: cycles of this consumer per k tile and m64 tile, without ``scaled``.
        unscaled_cycles_per_row_pair: increase of ``unscaled_cycles`` per row pair, in cycles.
        wave_us: start-up and epilogue of a CTA, in microseconds.
        scaled_exposed: fraction of the shorter of read and compute time that does not overlap with the longer one, with
            ``scaled``.
        unscaled_exposed: the same fraction, without ``scaled``.
        prefetch_us: launch overhead with ``prefetch_weights``, in microseconds.
        prefetch_nonresident_us: ``nonresident_us`` of `SmallTileCosts`, with ``prefetch_weights``.
        no_prefetch_us: launch overhead without ``prefetch_weights``, in microseconds.
        no_prefetch_nonresident_us: ``nonresident_us`` of `SmallTileCosts`, without ``prefetch_weights``.
        reduction_us_per_wave: time of the split-K reduction per wave of CTAs, in microseconds.
        x_bytes_per_us: bandwidth at which all SMs together read x, in bytes per microsecond.
    """

    clock_mhz: int = 1730
    sm_cycles: float = 14.4
    sm_cycles_per_row_pair: float = 0.8
    single_consumer_cycles: int = 150
    copy_latency_cycles: int = 1320
    l2_bytes_per_cycle: float = 47.6
    bytes_per_weight: float = 0.52
    consumer_cycles: int = 60
    scaled_min_cycles: float = 360.0
    scaled_cycles_per_row_pair: float = 5.24
    unscaled_cycles: int = 207
    unscaled_cycles_per_row_pair: float = 13.9
    wave_us: float = 0.85
    scaled_exposed: float = 0.36
    unscaled_exposed: float = 0.3
    prefetch_us: float = 0.53
    prefetch_nonresident_us: float = 1.5
    no_prefetch_us: float = 0.73
    no_prefetch_nonresident_us: float = 0.25
    reduction_us_per_wave: float = 0.57
    x_bytes_per_us: float = 177e6


SMALL_TILES, LARGE_TILES = SmallTileCosts(), LargeTileCosts()


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
        if self.name == MMA or self.block_m <= 32:
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
        owned = ceil_div(self.block_m // 2, self.split_k) * 2
        received = 16 + (self.split_k - 1) * self._accumulator_bytes(owned) if self.split_k > 1 else 0
        return max(stages, accumulators) + received + (owned * 4 if problem.rms_norms_x else 0)

    def _accumulator_bytes(self, rows: int) -> int:
        """Return the size of the accumulators of ``rows`` rows in bytes, in the layout AccumulatorBlocks of CUDA."""
        row_pairs = math.gcd(4, rows // 2)
        return rows // (2 * row_pairs) * (self.block_n // 16) * (8 * row_pairs * 4 + 8) * 4

    def tiles(self, problem: Problem) -> tuple[int, int]:
        """Return the numbers of CTA tiles along m and along n."""
        return ceil_div(problem.m, self.block_m), ceil_div(problem.n, self.block_n)

    def grid(self, problem: Problem, device: Device) -> tuple[int, int, int]:
        """Return the grid: the CTAs of all tiles, padded to the number of SMs if they are up to 10% fewer.

        Padding CTAs have no tile. With 128 tiles on the 132 SMs of an H100, they speed up K = N = 4096, M = 8 by 16%.
        Clusters of more than two CTAs do not fill all SMs, so they get none.
        """
        m_blocks, n_blocks = self.tiles(problem)
        ctas, whole = n_blocks * self.split_k, device.sm_count // self.split_k * self.split_k
        is_padded = m_blocks == 1 and self.split_k <= 2 and 0.9 * whole < ctas < whole
        return whole if is_padded else ctas, m_blocks, 1

    def capacity(self, problem: Problem, device: Device) -> int:
        """Return the largest number of CTAs that the GPU can hold at the same time."""
        fitting = device.shared_bytes_per_sm // (self.shared_bytes(problem) + RESERVED_BYTES)
        per_sm = max(1, min(fitting, THREADS_PER_SM // self.threads(problem)))
        return resident_clusters(device, self.split_k, per_sm) * self.split_k

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


def configs(problem: Problem, device: Device) -> list[GemmSm90Config]:
    # A small K limits the number of consumers, so the same configuration can be generated twice.
    found = dict.fromkeys([*_mma_configs(problem, device), *_wgmma_configs(problem, device)])
    # In a gated problem, half of the weight tiles of a CTA tile belong to the gate, the others to the up projection.
    return [config for config in found if not (problem.gated and config.weight_tiles % 2)]


def tile_heights(m: int) -> list[int]:
    """Return the values of ``block_m`` to try for the wgmma kernel: multiples of 8 that divide M rows evenly.

    >>> tile_heights(20), tile_heights(48), tile_heights(96), tile_heights(200), tile_heights(1000)
    ([24], [48], [96, 48], [104, 72, 56], [128, 112, 64])
    """
    if m <= WGMMA_MAX_BLOCK_M // 2:
        return [max(MMA_MAX_M, ceil_div(m, 8) * 8)]
    fewest = ceil_div(m, WGMMA_MAX_BLOCK_M)
    counts = (fewest, fewest + 1, 2 * fewest)
    return list(dict.fromkeys(ceil_div(ceil_div(m, count), 8) * 8 for count in counts))


def is_excessive(split_k: int, tiles: int, device: Device) -> bool:
    """Return whether a cluster of more than two CTAs is pointless, because fewer CTAs per tile occupy all SMs."""
    return split_k > 2 and tiles * split_k > device.sm_count


def _mma_configs(problem: Problem, device: Device) -> Iterator[GemmSm90Config]:
    if problem.m > MMA_MAX_M:
        return
    all_k_tiles, x_rows = ceil_div(problem.k, WEIGHT_TILE_K), next_power_of_two(problem.m)
    for weight_tiles, split_k, warps, k_tiles in itertools.product((1, 2, 3, 4, 6, 7, 8), SPLITS, (16, 8), (1, 2, 4)):
        if is_excessive(split_k, ceil_div(problem.n, weight_tiles * WEIGHT_TILE_N), device):
            continue
        consumers = max(1, min(warps // weight_tiles, all_k_tiles // split_k // k_tiles))
        x_stages = 4 if k_tiles == 1 else 2
        config = GemmSm90Config(
            MMA, max(8, x_rows), weight_tiles, 1, consumers, 0, split_k, k_tiles, 1, x_rows, x_stages
        )
        yield from _with_most_stages(config, problem, device, 72 if x_rows <= 8 else 112)


def _wgmma_configs(problem: Problem, device: Device) -> Iterator[GemmSm90Config]:
    if problem.m < WGMMA_MIN_M:
        return
    all_k_tiles = ceil_div(problem.k, WEIGHT_TILE_K)
    for block_m in tile_heights(problem.m):
        k_tile_counts = (1, 2, 4) if block_m == 16 else (1, 2) if block_m <= 64 else (1,)
        # Multicast of x in clusters of 2 gains nothing.
        for m64_tiles, warpgroups, consumers, split_k, k_tiles in itertools.product(
            (1, 2), (1, 2, 3, 4, 6, 7), (1, 2, 3, 4), SPLITS, k_tile_counts
        ):
            if k_tiles == 4 and (m64_tiles, warpgroups, consumers) != (1, 2, 1):
                continue  # These shapes are up to 28% slower.
            if consumers * split_k * k_tiles > all_k_tiles:
                continue
            weight_tiles = warpgroups * m64_tiles * 2
            tiles = ceil_div(problem.m, block_m) * ceil_div(problem.n, weight_tiles * WEIGHT_TILE_N)
            if is_excessive(split_k, tiles, device):
                continue
            config = GemmSm90Config(WGMMA, block_m, weight_tiles, m64_tiles, consumers, 0, split_k, k_tiles)
            can_scale = problem.m >= SCALED_MIN_M and not (problem.dtype == "float16" and problem.wide_scales)
            # With several groups per weight tile, unscaled weights need a wgmma wait per group: up to 39% slower.
            has_short_groups = problem.group_size < WEIGHT_TILE_K
            if not (can_scale and has_short_groups):
                # The registers hold the accumulators of y and of one group, operand A of one group, and 30 others.
                yield from _with_most_stages(config, problem, device, block_m * (m64_tiles + 1) // 2 + 62)
            # Split scales cost two more instructions per pair of weights: up to 23% slower with block_m = 64.
            is_costly = has_split_scales(problem) and not has_short_groups and block_m <= 64
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

    The buffers are weight (`RepackedLayout`), bias, residual, y, x and, for a `Fusion`, FUSION_BUFFERS.
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
    fusion_buffers = FUSION_BUFFERS if problem.fusion else ()
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
