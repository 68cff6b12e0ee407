# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm90``: Hopper's tensor cores on the repacked weight, for few rows of x up to a few hundred.

Two kernels: ``gemm_sm90.cu`` (wgmma) and, up to 16 rows, ``gemm_sm90_mma.cu`` (mma).
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
"""The largest M of the mma kernel."""
WGMMA_MIN_M = 9
"""The smallest M of the wgmma kernel, which takes as long for one row as for 16 and is slower below."""
MAX_FUSED_ROWS = 32
"""The largest M of a GEMM with a `Fusion`; fusing 32 rows saves 1% of a decoder layer on an H100."""
SQUARE_SUM_COLUMNS = 32
"""The columns of the residual stream per element of ``square_sums``; kSquareSumColumns of the kernel."""
FUSION_BUFFERS = ("h", "norm_weight", "square_sums", "previous_inverse_rms", "inverse_rms")
"""The buffers that a launch with a `Fusion` takes besides those of a GEMM; `residual_stream.cuh` describes them."""
REGISTERS_PER_SM, THREADS_PER_SM = 65536, 2048
"""The limits of an SM."""
RESERVED_BYTES = 1024
"""The shared memory that the system takes for each CTA."""


@dataclass(frozen=True)
class GemmSm90Costs:
    """The fitted constants of the cost models, for an H100.

    For M <= 16 they are fitted to 2443 times of 36 shapes with group size 128, for larger M to 4902 times of 39 shapes
    with 32 to 128 rows and group sizes of 32, 64 and 128. The fits are 11% and 8% off (root mean square, weighted to
    the faster configurations). For shapes left out of the fit the first choice takes 1.10 and 1.03 times as long as the
    best one (geometric mean).

    Attributes:
        k_tile_ns: (M <= 16) time of one consumer for one k tile, by ``x_rows`` (0: wgmma).
        refill_ns: (M <= 16) time from the release of a stage until it is full again.
        stream_factor: (M <= 16) time to read the weight, relative to the nominal bandwidth.
        launch_us: (M <= 16) launch and epilogue, by kernel.
        reduction_us, crowded_us, uneven_us: (M <= 16) split-K; CTAs of the next kernel that find no free SM; a number
            of CTAs that is no multiple of the SM count.
        clock: (larger M) cycles in a microsecond.
        busy, busy_row: cycles in which a k tile of 8 columns occupies the tensor cores and the schedulers; and its
            increase for each two rows of x.
        busy_alone: cycles more where a single consumer leaves the tensor cores idle while it dequantizes.
        latency: cycles from the start of a copy until it has landed.
        l2_bytes: bytes per cycle from L2 to an SM.
        weight_bytes: bytes of a weight with its scales, in the stage of a k tile.
        alone, scaled_min, scaled_row, exact, exact_row: cycles of a consumer that has the SM to itself for one k tile;
            for each of its 64 columns at least; for each two rows of x; the same for accumulators that are scaled.
        wave_us: start and epilogue of each CTA.
        scaled_exposed, exact_exposed: fraction of the shorter one of reading and computing that the other one does not
            hide.
        prefetch_us, prefetch_crowded_us: launch with PREFETCH_WEIGHTS; and its increase if no free SM is left.
        late_us, late_crowded_us: the same without PREFETCH_WEIGHTS.
        wave_reduction_us: split-K, for each wave.
        x_bytes_us: bytes of x that all SMs read in a microsecond.
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
    """One way to launch ``gemm_sm90.cu`` or ``gemm_sm90_mma.cu``.

    Attributes:
        name: the kernel, WGMMA or MMA.
        block_m: rows of a CTA tile.
        weight_tiles: weight tiles of 32 columns side by side in a CTA tile.
        m64_tiles: wgmma tiles of 64 columns that a warpgroup computes; 1 with mma, where a warp computes 32 columns.
        consumers: groups of warps that take turns at the pipeline stages.
        stages: pipeline stages.
        split_k: CTAs of a cluster, which share a tile along k.
        k_tiles: weight tiles along k in a stage.
        ctas_per_sm: CTAs that fit on an SM at the same time.
        x_rows, x_stages: (mma) rows of x in shared memory, a power of two, and stages of x of each consumer.
        scaled: (wgmma) whether weights are scaled before they are multiplied, rounded once, or accumulators after it.
        prefetch_weights: whether the weights of all stages are copied before the wait for the preceding kernel, or only
            those of the first. x waits behind them, which delays a CTA that starts late.
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
        """The columns of a CTA tile."""
        return self.weight_tiles * WEIGHT_TILE_N

    @property
    def consumer_warps(self) -> int:
        """The warps of a consumer."""
        return self.weight_tiles if self.name == MMA else self.weight_tiles // (2 * self.m64_tiles) * 4

    @property
    def consumer_registers(self) -> int:
        """The registers of a consumer's thread after setmaxnreg; 0 if the producer is one warp, without setmaxnreg."""
        if self.name == MMA or self.block_m < 64:
            return 0
        return {8: 232, 12: 152}.get(self.consumers * self.consumer_warps, 0)

    @property
    def x_stage_bytes(self) -> int:
        """The bytes of x that the producer copies in a stage; 0 with mma, whose consumers copy x."""
        return 0 if self.name == MMA else self.block_m * self.k_tiles * WEIGHT_TILE_K * 2

    @property
    def x_ring_bytes(self) -> int:
        """The bytes of all stages of x."""
        if self.name == MMA:
            return self.consumers * self.x_stages * self.x_rows * self.k_tiles * WEIGHT_TILE_K * 2
        return self.stages * self.x_stage_bytes

    def threads(self, problem: Problem) -> int:
        """Return the threads of a CTA: consumers, the producer and, with mma, a warp for the factors of RMSNorm."""
        others = 4 if self.consumer_registers else 2 if self.name == MMA and problem.rms_norms_x else 1
        return (self.consumers * self.consumer_warps + others) * 32

    def shared_bytes(self, problem: Problem) -> int:
        """Return the dynamic shared memory of a CTA; ``SharedStorage`` of the kernel asserts it."""
        stage = self.weight_tiles * self.k_tiles * RepackedLayout.of(problem).weight_tile_bytes + 16
        stages = self.x_ring_bytes + self.stages * stage
        accumulators = self.consumers * self._accumulator_bytes(self.block_m)
        owned = self.block_m // self.split_k
        received = 16 + (self.split_k - 1) * self._accumulator_bytes(owned) if self.split_k > 1 else 0
        return max(stages, accumulators) + received + (owned * 4 if problem.rms_norms_x else 0)

    def _accumulator_bytes(self, rows: int) -> int:
        """Return the bytes of the accumulators of some rows of the tile, as ``AccumulatorBlocks`` has them."""
        return ceil_div(rows, 8) * (self.block_n // 16) * (8 * min(4, rows // 2) * 4 + 8) * 4

    def tiles(self, problem: Problem) -> tuple[int, int]:
        """Return the number of CTA tiles along m and along n."""
        return ceil_div(problem.m, self.block_m), ceil_div(problem.n, self.block_n)

    def grid(self, problem: Problem, device: Device) -> tuple[int, int, int]:
        """Return the grid: CTAs of the tiles and, where few make it a CTA for each SM, padding CTAs.

        With 128 tiles and 132 SMs they make 4096 x 4096 at 8 rows 1.16 times as fast on an H100.
        """
        m_blocks, n_blocks = self.tiles(problem)
        ctas, whole = n_blocks * self.split_k, device.sm_count // self.split_k * self.split_k
        return whole if m_blocks == 1 and 0.9 * whole < ctas < whole else ctas, m_blocks, 1

    def capacity(self, problem: Problem, device: Device) -> int:
        """Return the number of CTAs that fit on all SMs at the same time."""
        fitting = device.shared_bytes_per_sm // (self.shared_bytes(problem) + RESERVED_BYTES)
        return device.sm_count * max(1, min(fitting, THREADS_PER_SM // self.threads(problem)))

    def crowding(self, problem: Problem, device: Device) -> float:
        """Return the fraction of the next kernel's CTAs for which no SM has space beside these, 0 to 1."""
        free = self.capacity(problem, device) / math.prod(self.grid(problem, device)) - 1
        return 1 - min(1.0, max(0.0, free))


def refuse(problem: Problem, device: Device) -> str | None:
    if problem.fusion and problem.m > MAX_FUSED_ROWS:
        return f"fuses the residual stream only for M <= {MAX_FUSED_ROWS}, not {problem.m}"
    if problem.adds_to_stream and (problem.gated or problem.residual or not problem.aligned):
        return "cannot add a gated, unaligned or residual result to the residual stream"
    return refuse_repacked(problem, device)


def configs(problem: Problem, device: Device) -> list[GemmSm90Config]:
    # Short K leaves fewer consumers, so some configurations occur twice.
    found = dict.fromkeys([*_mma_configs(problem, device), *_wgmma_configs(problem, device)])
    # A gated tile has as many weight tiles of the gate as of the up projection.
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
    if problem.m < WGMMA_MIN_M:
        return
    all_k_tiles, rows = ceil_div(problem.k, WEIGHT_TILE_K), max(16, next_power_of_two(problem.m))
    for block_m in (16, 32, 64, 128):
        if block_m > rows or block_m < min(rows, 64):
            continue
        k_tile_counts = (1, 2, 4) if block_m == 16 else (1, 2) if block_m <= 64 else (1,)
        # An H100 runs only 30 clusters of four at a time, and multicast of x in clusters of two gains nothing.
        for m64_tiles, warpgroups, consumers, split_k, k_tiles in itertools.product(
            (1, 2), (1, 2, 3, 4, 6, 7), (1, 2, 3, 4), (1, 2), k_tile_counts
        ):
            if k_tiles == 4 and (m64_tiles, warpgroups, consumers) != (1, 2, 1):
                continue  # up to 1.28 times as slow
            if consumers * split_k * k_tiles > all_k_tiles:
                continue
            weight_tiles = warpgroups * m64_tiles * 2
            config = GemmSm90Config(WGMMA, block_m, weight_tiles, m64_tiles, consumers, 0, split_k, k_tiles)
            can_scale = block_m >= 64 and not (problem.dtype == "float16" and problem.wide_scales)
            # Accumulators of groups shorter than a weight tile are waited for one by one: up to 1.39 times as slow.
            has_short_groups = problem.group_size < WEIGHT_TILE_K
            if not (can_scale and has_short_groups):
                # Accumulators, those of a group, operand A of a group, and about 30 more registers.
                yield from _with_most_stages(config, problem, device, block_m * (m64_tiles + 1) // 2 + 62)
            # Two more instructions for each pair of weights: up to 1.23 times as slow at 64 rows.
            is_costly = has_split_scales(problem) and not has_short_groups and block_m == 64
            if can_scale and not (has_short_groups and k_tiles > 1) and not is_costly:
                # With four registers fewer for two tiles, ptxas serializes wgmma.
                registers = block_m * m64_tiles // 2 + (86 if m64_tiles == 1 else 90)
                yield from _with_most_stages(replace(config, scaled=True), problem, device, registers)


def _with_most_stages(
    config: GemmSm90Config, problem: Problem, device: Device, registers: int
) -> Iterator[GemmSm90Config]:
    """Yield a configuration with as many stages as let two CTAs, or one, share an SM.

    ``registers`` are those that a consumer's thread needs.
    """
    all_k_tiles = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.split_k)
    # A stage belongs to one consumer; more stages than iterations are useless.
    enough = ceil_div(all_k_tiles, config.consumers * config.k_tiles)
    stages_each = range(1 if config.consumers > 1 and not config.scaled else 2, max(3, enough + 1))
    for ctas_per_sm in (2, 1):
        # Warps are distributed to four schedulers.
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
    """Return the configuration with ``stages_each`` stages for each consumer."""
    return replace(config, stages=stages_each * config.consumers, ctas_per_sm=ctas_per_sm)


def plan(config: GemmSm90Config, problem: Problem, device: Device) -> LaunchPlan:
    """Return the launch.

    Its buffers: weight (`RepackedLayout`), bias, residual, y, x, and FUSION_BUFFERS with a `Fusion`.
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
    """Return the time of the launch and of reading, computing and refilling stages, which overlap.

    In a chain of kernels the next kernel's CTAs start as soon as they find space, each with the weights of its stages.
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
    """Return the longer one of the times to read the weight and to compute, and the part that does not overlap."""
    m_blocks, n_blocks = config.tiles(problem)
    tiles = n_blocks * config.split_k * m_blocks
    k_tiles = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.split_k)
    waves = ceil_div(tiles, device.sm_count * config.ctas_per_sm)
    sharing = min(config.ctas_per_sm, ceil_div(tiles, device.sm_count))
    # Cycles of a k tile: of a consumer alone, of the tensor cores and schedulers, and of the copies.
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
