# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm90_large``: GEMM on Hopper's tensor cores with a repacked weight, for large M.

A work unit (``unit`` in names) is what a cluster computes in one iteration of the persistent loop: one CTA tile per CTA
of the cluster, adjacent along n.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from cupy_awq.kernels.family import FunctionFamily, Reduction, Workspace, constants
from cupy_awq.kernels.gemm.fragments import (
    ROUNDED_MIN_M,
    fragment_defines,
    fragment_refusal,
    has_split_scales,
    power_limited_us,
    x_tensor_map,
)
from cupy_awq.kernels.gemm.gemm_sm90_costs import TimeParts
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K, WEIGHT_TILE_N, FragmentLayout
from cupy_awq.kernels.gemm.problem import FRAGMENTS, Problem
from cupy_awq.kernels.gemm.reduction import wgmma_reduction
from cupy_awq.kernels.hopper import HOPPER, p_norm, tile_heights
from cupy_awq.kernels.tiling import ceil_div, stream_k_divisions
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "gemm_sm90_large"
SHARED_BYTES_PER_CTA = 232448
"""The largest dynamic shared memory per CTA on sm_90, in bytes."""
MAX_STAGES = 6
"""The largest number of pipeline stages; more stages gain nothing."""
MIN_BLOCK_M = 32
"""The smallest ``block_m`` to try beside the highest one."""
MAX_HEIGHTS = 5
"""The largest number of values of ``block_m`` to try for one shape of CTA tiles and clusters."""


@dataclass(frozen=True)
class GemmSm90LargeCosts:
    """Constants of the cost model, fitted on an H100.

    ``launch_us`` and ``stream_factor`` are fitted to 3155 times of 270 random problems with M = 64 to 4096, the others
    to 7619 times of 568 problems with M = 129 to 4096, the configurations of each of which were timed round-robin. The
    first choice of this kernel and gemm_sm90 is slower than the fastest configuration by 1% (geometric mean over
    problems that are left out of the fit).

    Attributes:
        launch_us: launch overhead, in microseconds.
        conversion_cycles: cycles to dequantize the weights of a k tile (128 rows of W) and 128 columns of a CTA tile,
            by ``m64_tiles``; it overlaps with the tensor cores' time.
        tensor: time of the tensor cores, relative to that at the peak rate.
        k_tile_norm: exponent of the p-norm of these two times.
        norm: exponent of the p-norm of the time on the SMs and the time to read the weight.
        store_cycles: cycles to store y, per element of a CTA tile.
        stream_factor: time to read the weight, relative to the time at the nominal bandwidth.
        reduction_cycles: cycles of the stream-K reduction, per element of a CTA tile.
        reduction_split_cycles: increase of ``reduction_cycles`` per cluster that shares a unit.
        stream_k_factor: compute time per k tile of a stream-K unit, relative to that of other units: clusters that
            share units are at different k, so that they find fewer rows of x in L2.
    """

    launch_us: float = 1.53
    conversion_cycles: dict[int, float] = field(default_factory=lambda: {1: 955.5, 2: 838.25})
    tensor: float = 0.932
    k_tile_norm: float = 5.0
    norm: float = 4.0
    store_cycles: float = 0.049
    stream_factor: float = 1.44
    reduction_cycles: float = 0.13475
    reduction_split_cycles: float = 0.13055
    stream_k_factor: float = 1.038


COSTS = GemmSm90LargeCosts()


@dataclass(frozen=True)
class GemmSm90LargeConfig:
    """A configuration of ``gemm_sm90_large.cu``, whose persistent clusters compute one unit after another.

    Attributes:
        cluster: number of CTAs per cluster; the CTAs compute adjacent columns of the same rows.
        ctas: number of CTAs of the launch.
        stream_k_units: number of units that are computed with stream-K, counted from the first; each of the others is
            computed by one cluster. See ``StreamKTileScheduler`` in ``cuda_src/common/tile_scheduler.cuh``.
        stream_k_clusters: number of clusters among which the k tiles of the stream-K units are divided.
        block_m: number of rows per CTA tile.
        warpgroups: number of consumer warpgroups per CTA.
        m64_tiles: number of wgmma m64 tiles (64 columns of y each) per warpgroup.
    """

    cluster: int
    ctas: int
    stream_k_units: int = 0
    stream_k_clusters: int = 0
    block_m: int = 128
    warpgroups: int = 2
    m64_tiles: int = 2

    @property
    def split_k(self) -> int:
        """The average number of clusters per stream-K unit, rounded up; 1 without stream-K."""
        return ceil_div(self.stream_k_clusters, self.stream_k_units) if self.stream_k_units else 1

    @property
    def block_n(self) -> int:
        """The number of columns per CTA tile."""
        return self.warpgroups * self.m64_tiles * 64

    def units(self, problem: Problem) -> int:
        """Return the number of work units into which the clusters divide y."""
        return ceil_div(problem.m, self.block_m) * ceil_div(problem.n, self.block_n * self.cluster)

    @property
    def store_row_bytes(self) -> int:
        """The size in bytes of one row of the store buffers of all warpgroups, including padding."""
        return 2 * (self.block_n + 8 * self.warpgroups)

    def stage_bytes(self, problem: Problem) -> int:
        """Return the size of a pipeline stage in bytes: one k tile of x and of the weight, and two mbarriers."""
        weight = self.block_n // WEIGHT_TILE_N * FragmentLayout.of(problem).weight_tile_bytes
        return self.block_m * WEIGHT_TILE_K * 2 + weight + 16

    def stages(self, problem: Problem) -> int:
        """Return the number of pipeline stages: as many as fit in shared memory beside store buffers of 16 rows."""
        return min(MAX_STAGES, (SHARED_BYTES_PER_CTA - 16 * self.store_row_bytes) // self.stage_bytes(problem))

    def store_rows(self, problem: Problem) -> int:
        """Return the number of rows per store buffer: 32 if these fit in shared memory beside the stages, else 16."""
        left = SHARED_BYTES_PER_CTA - self.stages(problem) * self.stage_bytes(problem)
        return 32 if self.block_m % 32 == 0 and left >= 32 * self.store_row_bytes else 16

    def shared_bytes(self, problem: Problem) -> int:
        """Return the dynamic shared memory per CTA in bytes; SharedStorage in CUDA static_asserts the same value."""
        return self.stages(problem) * self.stage_bytes(problem) + self.store_rows(problem) * self.store_row_bytes


def refusal(problem: Problem, device: Device) -> str | None:
    if problem.fusion:
        return "cannot fuse the residual add or RMSNorm of a decoder"
    if problem.gathers_x:
        return "cannot gather the columns of x"
    if problem.m < ROUNDED_MIN_M:
        return f"needs M >= {ROUNDED_MIN_M}, not {problem.m}"
    if problem.dtype == "float16" and problem.wide_scales:
        return "needs scales whose range float16 can hold"
    return fragment_refusal(problem, device, HOPPER)


def reduction(config: GemmSm90LargeConfig, problem: Problem) -> Reduction | None:
    """Return the order of the additions along K: as in ``gemm_sm90.cu`` with one consumer, or None with stream-K."""
    if config.stream_k_units:
        return None
    return wgmma_reduction(config, ceil_div(problem.k, WEIGHT_TILE_K), 1)


def configs(problem: Problem, device: Device) -> list[GemmSm90LargeConfig]:
    return list(_configs(problem, device))


def _configs(problem: Problem, device: Device) -> Iterator[GemmSm90LargeConfig]:
    # A thread has registers for 128 accumulators, or 32 with four warpgroups. In a gated problem each warpgroup
    # computes one m64 tile of the gate and one of the up projection, so m64_tiles = 2.
    m = problem.m
    shapes = [(1, 128, 2, 2)]
    if not problem.gated:
        if m <= 64:
            shapes.append((1, 64, 4, 1))
        if m <= 128 or not has_split_scales(problem):
            # Each weight is dequantized once per 128 rows of x, so split scales make this shape up to 10% slower.
            shapes.append((1, 128, 2, 1))
        if m > 128:
            shapes += [(1, 256, 2, 1), (2, 256, 2, 1)]
    for cluster, most, warpgroups, m64_tiles in shapes:
        clusters = device.sm_count // cluster
        shape = GemmSm90LargeConfig(cluster, clusters * cluster, warpgroups=warpgroups, m64_tiles=m64_tiles)
        highest, *others = tile_heights(m, most, ceil_div(problem.n, shape.block_n * cluster), clusters)
        least = MIN_BLOCK_M if most <= 128 else 129  # of up to 128 rows, another shape has the tiles
        lower = [height for height in others if height >= least]
        for block_m in (highest, *lower[: MAX_HEIGHTS - 1]):
            yield from _with_stream_k(replace(shape, block_m=block_m), problem, clusters)


def _with_stream_k(config: GemmSm90LargeConfig, problem: Problem, clusters: int) -> Iterator[GemmSm90LargeConfig]:
    """Yield the configuration for at most ``clusters`` clusters, without stream-K and with it."""
    k_tiles, units = ceil_div(problem.k, WEIGHT_TILE_K), config.units(problem)
    yield replace(config, ctas=min(units, clusters) * config.cluster)
    for shared, sharers, count in stream_k_divisions(units, k_tiles, clusters):
        yield replace(config, ctas=count * config.cluster, stream_k_units=shared, stream_k_clusters=sharers)


def plan(config: GemmSm90LargeConfig, problem: Problem, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are weight (`FragmentLayout`), bias, residual, y, partials, counters and x.
    """
    defines: tuple[tuple[str, int | str], ...] = (
        *fragment_defines(problem),
        *constants(config, "block_m warpgroups m64_tiles"),
        ("STAGES", config.stages(problem)),
        ("CLUSTER", config.cluster),
        ("STREAM_K", int(config.stream_k_units > 0)),
        ("STORE_ROWS", config.store_rows(problem)),
        ("SHARED_BYTES", config.shared_bytes(problem)),
    )
    strides = problem.row_strides
    x = x_tensor_map(problem, config.block_m, 2 // config.cluster)
    sizes = (problem.m, problem.n, problem.k, strides.residual, strides.y)
    stream_k = (config.stream_k_units, config.stream_k_clusters)
    factors = (*problem.limits, 2.0**problem.scale_exponent, 2.0**-problem.scale_exponent)
    scalars = (*map(np.int32, (*sizes, *stream_k)), *map(np.float32, factors))
    return LaunchPlan(
        Kernel("gemm/gemm_sm90_large.cu", NAME, defines, device.target),
        (config.ctas, 1, 1),
        (128 * (config.warpgroups + 1), 1, 1),
        ("weight", "bias", "residual", "y", "partials", "counters", x, *scalars),
        config.shared_bytes(problem),
        cluster=(config.cluster, 1, 1),
        dependent=True,
    )


def workspace(config: GemmSm90LargeConfig, problem: Problem) -> Workspace:
    if not config.stream_k_units:
        return Workspace()
    ctas = config.stream_k_clusters * config.cluster
    counters = config.stream_k_units * config.cluster * config.warpgroups
    return Workspace(ctas * config.block_m * config.block_n * 4, counters)


def describe_work(config: GemmSm90LargeConfig, problem: Problem) -> str:
    """Return how the tiles of y and their k tiles are divided among the clusters, which `explain` prints.

    A stream-K unit is shared if the share of one cluster ends, and that of the next begins, within its k tiles; the
    shares are those of ``StreamKTileScheduler`` in ``cuda_src/common/tile_scheduler.cuh``.

    >>> config = GemmSm90LargeConfig(1, 132, stream_k_units=159, stream_k_clusters=132, block_m=240, m64_tiles=1)
    >>> describe_work(config, Problem(700, 17984, 4480, 128)).split("; ")  # doctest: +ELLIPSIS
    ['3 x 141 tiles of 240 x 128, 35 k tiles each', 'stream-K: 132 CTAs take 42-43 k tiles each of 159 tiles, ...',
     '132 CTAs take 2 of the other 264 tiles each']
    """
    clusters, k_tiles = config.ctas // config.cluster, ceil_div(problem.k, WEIGHT_TILE_K)
    columns, units = ceil_div(problem.n, config.block_n), config.units(problem)
    who, what = ("CTAs", "tiles") if config.cluster == 1 else ("pairs of CTAs", "pairs of tiles")
    text = f"{ceil_div(problem.m, config.block_m)} x {columns} tiles of {config.block_m} x {config.block_n}"
    text += f", {k_tiles} k tiles each"
    shared = config.stream_k_units
    if shared:
        total, sharers = shared * k_tiles, config.stream_k_clusters
        borders = [total * i // sharers for i in range(sharers + 1)]
        shares = sorted({end - begin for begin, end in itertools.pairwise(borders)})
        several = len({border // k_tiles for border in borders if border % k_tiles})
        text += f"; stream-K: {sharers} {who} take {_span(shares)} k tiles each of {shared} {what}"
        text += f", {several} of which are shared"
    if own := units - shared:
        counts = sorted({own // clusters, ceil_div(own, clusters)})
        text += f"; {clusters} {who} take {_span(counts)} of the {'other ' if shared else ''}{own} {what} each"
    return text


def _span(values: list[int]) -> str:
    """Return ascending values as text: "3", or "1-3" for the range that they span."""
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


def time_parts(config: GemmSm90LargeConfig, problem: Problem, device: Device) -> TimeParts:
    """Return the modelled run time and its parts, which `explain` prints.

    The time on the SMs is that of the cluster with the most k tiles; it overlaps with reading the weight.
    """
    clusters = config.ctas // config.cluster
    k_tiles = ceil_div(problem.k, WEIGHT_TILE_K)
    waves = ceil_div(config.units(problem) - config.stream_k_units, clusters)
    share = config.stream_k_units * k_tiles / config.stream_k_clusters if config.stream_k_units else 0.0
    tensor_cycles = COSTS.tensor * config.block_m * 128 * WEIGHT_TILE_K / device.rates.tensor
    k_tile_cycles = p_norm((COSTS.conversion_cycles[config.m64_tiles], tensor_cycles), COSTS.k_tile_norm)
    k_tile_cycles *= config.block_n / 128
    tiles = waves + (max(1.0, share / k_tiles) if config.stream_k_units else 0.0)
    elements, clock = config.block_m * config.block_n, device.rates.clock_mhz
    cycles = k_tile_cycles * (waves * k_tiles + COSTS.stream_k_factor * share) + COSTS.store_cycles * tiles * elements
    work = power_limited_us(cycles / clock, problem, device)
    overlapping = {"SM": work, "weight": COSTS.stream_factor * device.read_us(problem.weight_bytes)}
    reduction = 0.0
    if config.stream_k_units:
        reduction = (COSTS.reduction_cycles + COSTS.reduction_split_cycles * config.split_k) * elements / clock
    fixed = {"launch": COSTS.launch_us, "stream-K": reduction}
    return TimeParts(sum(fixed.values()) + p_norm(overlapping.values(), COSTS.norm), fixed, overlapping)


def estimate_us(config: GemmSm90LargeConfig, problem: Problem, device: Device) -> float:
    return time_parts(config, problem, device).us


GEMM_SM90_LARGE = FunctionFamily(
    NAME,
    configs,
    estimate_us,
    plan,
    refusal,
    needs=HOPPER,
    layout=FRAGMENTS,
    workspace=workspace,
    reduction=reduction,
    describe_work=describe_work,
    time_parts=time_parts,
)
