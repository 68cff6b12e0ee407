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
from cupy_awq.kernels.hopper import (
    prepare_weight as prepare_weight,
)
from cupy_awq.kernels.problem import Problem, ceil_div, next_power_of_two
from cupy_awq.kernels.repack import WEIGHT_TILE_K, WEIGHT_TILE_N, RepackedLayout, refuse_repacked
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "gemm_sm90"
WGMMA, MMA = "gemm_sm90", "gemm_sm90_mma"
"""The names of the two kernels."""
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
"""The largest M of a GEMM with a `Fusion`; at M = 32, fusion saves only 1% of a decoder layer's time on an H100."""
SQUARE_SUM_COLUMNS = 32
"""The number of residual-stream columns per element of ``square_sums``; the same as kSquareSumColumns in CUDA."""
FUSION_BUFFERS = ("h", "norm_weight", "square_sums", "previous_inverse_rms", "inverse_rms")
"""The additional buffers of a launch with a `Fusion`; ``cuda_src/hopper/residual_stream.cuh`` describes them."""
REGISTERS_PER_SM, THREADS_PER_SM = 65536, 2048
"""The numbers of 32-bit registers and of resident threads per SM."""
RESERVED_BYTES = 1024
"""The shared memory that the CUDA driver reserves per CTA, in bytes."""


@dataclass(frozen=True)
class GemmSm90Costs:
    """Constants of the two cost models, fitted on an H100: one for ``block_m`` <= 16, one for larger tiles.

    The first is fitted to 2443 measured times of 36 shapes with group size 128, the second to 4902 measured times of 39
    shapes with 32 <= M <= 128 and group sizes 32, 64 and 128. The RMS errors are 11% and 8%, where faster
    configurations have a larger weight. On shapes left out of the fit, the configuration that the model ranks first is
    10% and 3% slower than the best one (geometric mean).

    Attributes:
        k_tile_ns: (``block_m`` <= 16) compute time per k tile of a consumer, in nanoseconds, by ``x_rows`` (0: wgmma).
        refill_ns: (``block_m`` <= 16) time from the release of a stage until it is full again, in nanoseconds.
        stream_factor: (``block_m`` <= 16) time to read the weight, relative to the time at the nominal bandwidth.
        launch_us: (``block_m`` <= 16) launch overhead and epilogue by kernel, in microseconds.
        reduction_us: (``block_m`` <= 16) split-K reduction, in microseconds.
        crowded_us: (``block_m`` <= 16) delay if no CTA of the next kernel can be resident yet, in microseconds.
        uneven_us: (``block_m`` <= 16) delay if the number of CTAs is no multiple of the SM count, in microseconds.
        clock: (larger ``block_m``, as all below) SM clock in MHz.
        busy: tensor-core and issue cycles per k tile and 8 columns.
        busy_row: increase of ``busy`` per two rows of the CTA tile, in cycles.
        busy_alone: additional cycles per k tile if a single consumer dequantizes while the tensor cores idle.
        latency: latency of a copy to shared memory, in cycles.
        l2_bytes: L2 bandwidth per SM, in bytes per cycle.
        weight_bytes: bytes per weight, including scales and zero points.
        alone: fixed cycles per k tile of a consumer that is alone on its SM.
        scaled_min: minimum cycles per k tile and wgmma m64 tile of that consumer, with ``scaled``.
        scaled_row: cycles per k tile, m64 tile and two rows of the CTA tile, with ``scaled``.
        exact: cycles per k tile and m64 tile of that consumer, without ``scaled``.
        exact_row: increase of ``exact`` per two rows of the CTA tile, in cycles.
        wave_us: start-up and epilogue of a CTA, in microseconds.
        scaled_exposed: fraction of the shorter one of read and compute time that the longer one does not hide, with
            ``scaled``.
        exact_exposed: the same fraction without ``scaled``.
        prefetch_us: launch overhead with ``prefetch_weights``, in microseconds.
        prefetch_crowded_us: delay with ``prefetch_weights`` if no CTA of the next kernel can be resident yet, in
            microseconds.
        late_us: launch overhead without ``prefetch_weights``, in microseconds.
        late_crowded_us: delay without ``prefetch_weights`` if no CTA of the next kernel can be resident yet, in
            microseconds.
        wave_reduction_us: split-K reduction per wave, in microseconds.
        x_bytes_us: bandwidth at which all SMs together read x, in bytes per microsecond.
    """

    k_tile_ns: dict[int, int] = field(default_factory=lambda: {0: 185, 1: 300, 2: 353, 4: 364, 8: 391, 16: 674})
    refill_ns: int = 1845
    stream_factor: float = 1.12
    launch_us: dict[str, float] = field(default_factory=lambda: {WGMMA: 0.71, MMA: 0.37})
    reduction_us: float = 0.35
    crowded_us: float = 1.11
    uneven_us: float = 0.47
    clock: int = 1730
    busy: float = 14.4
    busy_row: float = 0.8
    busy_alone: int = 150
    latency: int = 1320
    l2_bytes: float = 47.6
    weight_bytes: float = 0.52
    alone: int = 60
    scaled_min: float = 360.0
    scaled_row: float = 5.24
    exact: int = 207
    exact_row: float = 13.9
    wave_us: float = 0.85
    scaled_exposed: float = 0.36
    exact_exposed: float = 0.3
    prefetch_us: float = 0.53
    prefetch_crowded_us: float = 1.5
    late_us: float = 0.73
    late_crowded_us: float = 0.25
    wave_reduction_us: float = 0.57
    x_bytes_us: float = 177e6


COSTS = GemmSm90Costs()


@dataclass(frozen=True)
class GemmSm90Config:
    """A configuration of ``gemm_sm90.cu`` or ``gemm_sm90_mma.cu``.

    Attributes:
        name: the kernel, WGMMA or MMA.
        block_m: number of rows per CTA tile.
        weight_tiles: number of weight tiles along n per CTA tile, each of 32 columns.
        m64_tiles: number of wgmma m64 tiles (64 columns of y each) per warpgroup; 1 with mma.
        consumers: number of groups of warps that take turns at the pipeline stages.
        stages: number of pipeline stages.
        split_k: number of CTAs per cluster, which divide K of one tile among them.
        k_tiles: number of weight tiles along k per pipeline stage, each of 128 rows of W.
        ctas_per_sm: number of resident CTAs per SM for which the kernel is compiled.
        x_rows: (mma) number of rows of x in shared memory, a power of two; 0 with wgmma.
        x_stages: (mma) number of pipeline stages of x per consumer; 0 with wgmma.
        scaled: (wgmma) whether weights are multiplied by their scale and rounded before the wgmma; else the
            accumulators are scaled after it.
        prefetch_weights: whether the weights of all stages are copied before the wait for the preceding kernel (PDL);
            else only those of the first stage. Copies of x are queued after these, which delays a CTA that starts late.
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
        """The number of registers per consumer thread after setmaxnreg; 0 if the kernel does not use setmaxnreg."""
        if self.name == MMA or self.block_m <= 32:
            return 0
        return {8: 232, 12: 152}.get(self.consumers * self.consumer_warps, 0)

    @property
    def x_stage_bytes(self) -> int:
        """The size in bytes of x in a pipeline stage; 0 with mma, whose consumers copy x into their own stages."""
        return 0 if self.name == MMA else self.block_m * self.k_tiles * WEIGHT_TILE_K * 2

    @property
    def x_ring_bytes(self) -> int:
        """The size in bytes of all pipeline stages of x."""
        if self.name == MMA:
            return self.consumers * self.x_stages * self.x_rows * self.k_tiles * WEIGHT_TILE_K * 2
        return self.stages * self.x_stage_bytes

    def threads(self, problem: Problem) -> int:
        """Return the number of threads per CTA: consumers, producer and, with mma, a warp for the RMSNorm factors."""
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
        """Return the size in bytes of the accumulators of ``rows`` rows in the layout of CUDA's AccumulatorBlocks."""
        row_pairs = math.gcd(4, rows // 2)
        return rows // (2 * row_pairs) * (self.block_n // 16) * (8 * row_pairs * 4 + 8) * 4

    def tiles(self, problem: Problem) -> tuple[int, int]:
        """Return the number of CTA tiles along m and along n."""
        return ceil_div(problem.m, self.block_m), ceil_div(problem.n, self.block_n)

    def grid(self, problem: Problem, device: Device) -> tuple[int, int, int]:
        """Return the grid: the CTAs of all tiles and, if these are slightly fewer than the SMs, padding CTAs.

        With 128 tiles on the 132 SMs of an H100, padding speeds up K = N = 4096 at M = 8 by 16%. Clusters of more than
        two CTAs do not fill all SMs, so they have no padding.
        """
        m_blocks, n_blocks = self.tiles(problem)
        ctas, whole = n_blocks * self.split_k, device.sm_count // self.split_k * self.split_k
        is_padded = m_blocks == 1 and self.split_k <= 2 and 0.9 * whole < ctas < whole
        return whole if is_padded else ctas, m_blocks, 1

    def capacity(self, problem: Problem, device: Device) -> int:
        """Return the largest number of CTAs that can be resident on the GPU at the same time."""
        fitting = device.shared_bytes_per_sm // (self.shared_bytes(problem) + RESERVED_BYTES)
        per_sm = max(1, min(fitting, THREADS_PER_SM // self.threads(problem)))
        return resident_clusters(device, self.split_k, per_sm) * self.split_k

    def crowding(self, problem: Problem, device: Device) -> float:
        """Return the fraction (0 to 1) of the next kernel's CTAs that cannot become resident while this launch runs."""
        free = self.capacity(problem, device) / math.prod(self.grid(problem, device)) - 1
        return 1 - min(1.0, max(0.0, free))


def refuse(problem: Problem, device: Device) -> str | None:
    if problem.fusion and problem.m > MAX_FUSED_ROWS:
        return f"fuses the residual stream only for M <= {MAX_FUSED_ROWS}, not {problem.m}"
    if problem.adds_to_stream and (problem.gated or problem.residual or not problem.aligned):
        return "cannot add a gated, unaligned or residual result to the residual stream"
    return refuse_repacked(problem, device)


def configs(problem: Problem, device: Device) -> list[GemmSm90Config]:
    # A small K reduces the number of consumers, so some configurations occur twice.
    found = dict.fromkeys([*_mma_configs(problem, device), *_wgmma_configs(problem, device)])
    # A CTA tile of a gated problem has as many weight tiles of the gate as of the up projection.
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
                continue  # up to 28% slower
            if consumers * split_k * k_tiles > all_k_tiles:
                continue
            weight_tiles = warpgroups * m64_tiles * 2
            tiles = ceil_div(problem.m, block_m) * ceil_div(problem.n, weight_tiles * WEIGHT_TILE_N)
            if is_excessive(split_k, tiles, device):
                continue
            config = GemmSm90Config(WGMMA, block_m, weight_tiles, m64_tiles, consumers, 0, split_k, k_tiles)
            can_scale = problem.m >= SCALED_MIN_M and not (problem.dtype == "float16" and problem.wide_scales)
            # With several groups per weight tile, each waits for its own wgmmas: up to 39% slower.
            has_short_groups = problem.group_size < WEIGHT_TILE_K
            if not (can_scale and has_short_groups):
                # Registers: accumulators of y and of one group, operand A of one group, and about 30 others.
                yield from _with_most_stages(config, problem, device, block_m * (m64_tiles + 1) // 2 + 62)
            # Split scales take two more instructions per pair of weights: up to 23% slower with block_m = 64.
            is_costly = has_split_scales(problem) and not has_short_groups and block_m <= 64
            if can_scale and not (has_short_groups and k_tiles > 1) and not is_costly:
                # With 4 registers fewer for two m64 tiles, ptxas would serialize the wgmmas.
                registers = block_m * m64_tiles // 2 + (86 if m64_tiles == 1 else 90)
                yield from _with_most_stages(replace(config, scaled=True), problem, device, registers)


def _with_most_stages(
    config: GemmSm90Config, problem: Problem, device: Device, registers: int
) -> Iterator[GemmSm90Config]:
    """Yield the configuration with the most stages for which 2 CTAs per SM are resident, and the same for 1 CTA per SM.

    ``registers`` is the number of registers that a consumer thread needs.
    """
    all_k_tiles = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.split_k)
    # Each stage belongs to one consumer; more stages than iterations are useless.
    enough = ceil_div(all_k_tiles, config.consumers * config.k_tiles)
    stages_each = range(1 if config.consumers > 1 and not config.scaled else 2, max(3, enough + 1))
    for ctas_per_sm in (2, 1):
        # An SM distributes the warps of a CTA to four schedulers.
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

    Its buffers are weight (`RepackedLayout`), bias, residual, y, x, and FUSION_BUFFERS with a `Fusion`.
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
        return _estimate_few_rows_us(config, problem, device)
    return _estimate_many_rows_us(config, problem, device)


def _estimate_few_rows_us(config: GemmSm90Config, problem: Problem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead plus read, compute and refill time, which overlap.

    The model includes the next kernel's CTAs, which prefetch their weights as soon as they become resident (PDL).
    """
    ctas = math.prod(config.grid(problem, device))
    k_tiles = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.split_k)
    waves = max(1.0, ctas / config.capacity(problem, device))
    iterations = ceil_div(ceil_div(k_tiles, config.k_tiles), config.consumers)
    overlapping_ns = (
        waves * iterations * config.k_tiles * COSTS.k_tile_ns[config.x_rows],
        waves * k_tiles / (config.stages * config.k_tiles) * COSTS.refill_ns,
        COSTS.stream_factor * problem.weight_bytes / device.read_gbs,
    )
    reduction = COSTS.reduction_us if config.split_k > 1 else 0.0
    crowded = COSTS.crowded_us * config.crowding(problem, device)
    uneven = COSTS.uneven_us if ctas % device.sm_count else 0.0
    return COSTS.launch_us[config.name] + reduction + crowded + uneven + math.hypot(*overlapping_ns) * 1e-3


def _estimate_many_rows_us(config: GemmSm90Config, problem: Problem, device: Device) -> float:
    """Return the run time in microseconds: the longer one of read and compute time, plus a fraction of the other."""
    m_blocks, n_blocks = config.tiles(problem)
    tiles = n_blocks * config.split_k * m_blocks
    k_tiles = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.split_k)
    waves = ceil_div(tiles, device.sm_count * config.ctas_per_sm)
    sharing = min(config.ctas_per_sm, ceil_div(tiles, device.sm_count))
    # Cycles per k tile: of a consumer alone on its SM, of tensor cores and schedulers, and of the copies.
    row_pairs = config.block_m / 2
    busy = config.block_n / 8 * (COSTS.busy + COSTS.busy_row * row_pairs)
    stage_bytes = config.k_tiles * WEIGHT_TILE_K * (2 * config.block_m + COSTS.weight_bytes * config.block_n)
    copy = (COSTS.latency + stage_bytes / COSTS.l2_bytes * sharing) / config.k_tiles
    if config.scaled:
        alone = COSTS.alone + config.m64_tiles * max(COSTS.scaled_min, COSTS.scaled_row * row_pairs)
        copy /= config.stages - config.consumers  # a stage is released one iteration later
    else:
        alone = COSTS.alone + config.m64_tiles * (COSTS.exact + COSTS.exact_row * row_pairs)
        copy /= config.stages
        if config.consumers == 1 and sharing == 1:
            busy += COSTS.busy_alone
    cycles = k_tiles * max(alone / config.consumers, busy * sharing, copy)
    work = power_limited_us(waves * (cycles / COSTS.clock + COSTS.wave_us), problem)
    stream = problem.weight_bytes / (device.read_gbs * 1e3)
    exposed = (COSTS.scaled_exposed if config.scaled else COSTS.exact_exposed) * min(stream, work)
    x_bytes = tiles * k_tiles * min(config.block_m, problem.m) * 2 * WEIGHT_TILE_K
    crowding = config.crowding(problem, device)
    launch = COSTS.late_us + COSTS.late_crowded_us * crowding
    if config.prefetch_weights:
        launch = COSTS.prefetch_us + COSTS.prefetch_crowded_us * crowding
    reduction = COSTS.wave_reduction_us * waves if config.split_k > 1 else 0.0
    return launch + reduction + max(stream, work) + exposed + x_bytes / COSTS.x_bytes_us
