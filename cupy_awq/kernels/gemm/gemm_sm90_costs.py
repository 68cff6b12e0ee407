# SPDX-License-Identifier: Apache-2.0
"""The cost models of ``gemm_sm90``: the run time of a launch in a chain of dependent launches (PDL).

Each model adds fixed times of a launch to the p-norm of times that overlap: computation on the busiest SM, the loop of
its slowest consumer, the copies, and reading the weight from device memory. A p-norm is a smooth maximum.

The constants are fitted on an H100 to times of random problems (``tests/peers/sweep.py``, group size 128): those of
mma to 32954 times of 638 problems with M <= 8, but `MmaCosts.latency_cycles` and `MmaCosts.issue_cycles` of 16 rows to
problems with M <= 16, those of wgmma to 55125 times of 2213 problems with M >= 9. The fit (``tests/peers/fit.py``)
minimizes squared errors of log(estimate / time), mostly of ratios within a problem; the RMS error of configurations
within 10% of the fastest one is 4% to 6%. The first choice is slower than the fastest of about 40 measured
configurations by 2.9% (M <= 8), 2.2% (M <= 16), 2% (M <= 64) and 1.1% (larger M; geometric means).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from cupy_awq.kernels.gemm.fragments import power_limited_us
from cupy_awq.kernels.gemm.gemm_sm90_config import GemmSm90Config
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.kernels.hopper import (
    SCHEDULERS,
    costs_by_rows,
    costs_table,
    in_turn,
    p_norm,
    prefetch_waits,
    resident_clusters,
    wgmma_cycles,
)
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device


@dataclass(frozen=True)
class MmaCosts:
    """Constants of the cost model of the mma kernel.

    Attributes:
        launch_us: fixed time of a launch, counted from the end of the preceding kernel.
        queue_us: longest time for which x waits behind the weights that are copied before it; see `prefetch_waits`.
        wave_us: additional time per additional wave of CTAs.
        reduction_us: time of the split-K reduction.
        cluster_us: additional time of the reduction per CTA of a cluster beyond two.
        odd_cluster_us: additional time of clusters of 3 or 5 CTAs if the next kernel starts late.
        imbalance: additional time, relative to the p-norm, if some SMs have two CTAs and the others one.
        consumer_us: time per consumer to add up the accumulators of a CTA.
        uneven_us: additional time with 3, 6 or more warps per consumer, most of which copy x in several passes.
        shared_us: time saved if an SM holds several CTAs, as one computes while another starts or ends.
        long_us: shortest time to read the weight with which all of ``shared_us`` is saved; with shorter times, the
            saving is proportional to the time.
        stream_factor: time to read the weight, relative to the time at the nominal bandwidth.
        refill_us: time from the release of a stage until its next copies have landed, before its k tiles are computed.
        norm: exponent of the p-norm that combines the times that overlap.
        gather_us: fixed time to gather the columns of x, with ``gathers_x``.
        gather_kib_us: further time per KiB of x that the CTAs of an SM copy, with ``gathers_x``.
        gather_split_us: further time with ``gathers_x`` and split-K.
        latency_cycles: cycles per weight tile of a warp that is alone on its scheduler, by ``x_rows``.
        issue_cycles: cycles in which a scheduler issues the instructions of one warp for a weight tile, by ``x_rows``.
    """

    launch_us: float = 1.513
    queue_us: float = 0.744
    wave_us: float = 1.005
    reduction_us: float = 0.11
    cluster_us: float = 0.0241
    odd_cluster_us: float = 0.0943
    imbalance: float = 0.0062
    consumer_us: float = 0.0164
    uneven_us: float = 0.225
    shared_us: float = 0.293
    long_us: float = 3.0
    stream_factor: float = 0.948
    refill_us: float = 0.389
    norm: float = 1.15
    gather_us: float = 1.4
    gather_kib_us: float = 0.002
    gather_split_us: float = 0.34
    latency_cycles: dict[int, float] = field(
        default_factory=lambda: {1: 166.25, 2: 176.75, 4: 208.25, 8: 194.25, 16: 367.5}
    )
    issue_cycles: dict[int, float] = field(default_factory=lambda: {1: 64.05, 2: 60.2, 4: 67.2, 8: 65.8, 16: 143.5})


@dataclass(frozen=True)
class MmaInvariantCosts:
    """Constants of the cost model of the batch-invariant mma kernel, fitted on an H100 to 191 times of three problems.

    The RMS error is 9%, where faster configurations have a larger weight.

    Attributes:
        launch_us, wave_us, reduction_us, cluster_us, stream_factor, norm: as in `MmaCosts`.
        nonresident_us: as in `WgmmaCosts`.
        chain_cycles: cycles per k tile of a warp that is alone on its scheduler, by ``scaled``.
        stage_cycles: additional cycles per pipeline stage.
        issue_cycles: cycles in which a scheduler issues the instructions of one warp for a k tile, by ``scaled``.
        many_rows: factor on ``issue_cycles`` for more than 8 rows.
        x_gbs: bandwidth of copies of x to an SM, in GB/s.
        k_tile_us: additional time until the first stage has landed, per k tile of a stage beyond the first.
    """

    launch_us: float = 1.236
    nonresident_us: float = 1.905
    wave_us: float = 1.12
    reduction_us: float = 0.155
    cluster_us: float = 0.156
    stream_factor: float = 1.006
    norm: float = 2.2
    chain_cycles: dict[bool, float] = field(default_factory=lambda: {True: 308.0, False: 199.5})
    stage_cycles: float = 262.5
    issue_cycles: dict[bool, float] = field(default_factory=lambda: {True: 185.5, False: 152.25})
    many_rows: float = 1.15
    x_gbs: float = 59.6
    k_tile_us: float = 0.328


@dataclass(frozen=True)
class WgmmaCosts:
    """Constants of the cost model of the wgmma kernel. Cycles are per k tile and m64 tile (128 x 64 weights).

    Attributes:
        launch_us, queue_us, wave_us, stream_factor, norm: as in `MmaCosts`; ``queue_us`` only with
            ``prefetch_weights``.
        nonresident_us: delay if none of the next kernel's CTAs can become resident during the launch.
        room_us: time saved with `Occupancy.has_room`.
        pause_us: longest time between the first copies and those that refill the stages, with ``prefetch_weights``; see
            `prefetch_waits`.
        late_us: ``nonresident_us`` without ``prefetch_weights``, for any number of resident CTAs.
        late_stream_factor: time to read the weight without ``prefetch_weights``, when all CTAs start to read at the
            same time, relative to that with it.
        reduction_us: fixed time of the split-K reduction.
        cluster_us, odd_cluster_us: as in `MmaCosts`, but ``odd_cluster_us`` also if the next kernel starts early.
        exchange_ns: time of the split-K reduction per accumulator that a CTA sends, in nanoseconds.
        consumer_ns: time to add up the accumulators of a CTA, per consumer and accumulator, in nanoseconds.
        tensor_factor: fraction of the tensor-core cycles that does not overlap with issuing other instructions.
        dequantize_cycles: issue cycles to dequantize weights.
        scale_cycles: additional issue cycles to scale weights, with ``scaled``.
        accumulate_cycles: issue cycles to scale accumulators, per row of the CTA tile, without ``scaled``.
        turn_cycles: issue cycles per pipeline stage, without ``scaled`` and without setmaxnreg, times the square of the
            number of consumers beyond two, which take turns at the stages.
        alone_us: additional time per iteration of a consumer that is alone on its SM, in which nothing overlaps.
        iteration_cycles: cycles per k tile of a consumer that is alone on its SM, for any number of m64 tiles.
        consumer_cycles: cycles per m64 tile of a consumer that is alone on its SM.
        consumer_row_cycles: increase of ``consumer_cycles`` per row of the CTA tile.
        unscaled_row_cycles: further increase per row of the CTA tile, without ``scaled``.
        refill_us: time from the release of a stage until its next copies have landed.
        first_stage_ns: additional time until the first stage has landed, per row (of up to 64) and per 64 columns x
            128 k of a stage beyond the first, in nanoseconds.
        copy_bytes_per_cycle: bandwidth of copies to the shared memory of an SM, in bytes per cycle.
    """

    launch_us: float = in_turn(1.33, 1.66, 1.19, 1.77)
    nonresident_us: float = in_turn(0.289, 1.2, 0.764, 0.689)
    room_us: float = in_turn(0.0636, 0.287, 0.109, 0.384)
    queue_us: float = in_turn(0.761, 0.253, 0.383, 0.449)
    pause_us: float = in_turn(0.426, 1.05, 0.378, 0.232)
    late_us: float = in_turn(0.19, 0.166, 0.185, 0.156)
    late_stream_factor: float = in_turn(1.1, 1.1, 0.951, 0.812)
    wave_us: float = in_turn(1.86, 2.28, 3.79, 3.37)
    reduction_us: float = in_turn(0.0566, 0.0916, 0.262, 0.296)
    cluster_us: float = in_turn(0.00978, 0.0604, 0.0631, 0.0771)
    odd_cluster_us: float = in_turn(0.154, 0.0547, 0.0832, 0.0136)
    exchange_ns: float = in_turn(0.143, 0.147, 0.128, 0.14)
    consumer_ns: float = in_turn(0.0161, 0.0006, 0.0286, 0.0179)
    stream_factor: float = in_turn(1.13, 0.93, 0.981, 1.15)
    norm: float = in_turn(2.14, 1.98, 1.58, 3.19)
    tensor_factor: float = in_turn(0.414, 0.329, 0.725, 0.477)
    dequantize_cycles: float = in_turn(68.1, 101, 15.3, 195)
    scale_cycles: float = in_turn(72.4, 72.4, 64.9, 41.6)
    accumulate_cycles: float = in_turn(1.16, 0.919, 1.11, 0.819)
    turn_cycles: float = in_turn(2.25, 8.99, 12.4, 12.4)
    alone_us: float = in_turn(0.0102, 0.0157, 0.016, 0.00378)
    iteration_cycles: float = in_turn(102, 83.9, 60, 4.11)
    consumer_cycles: float = in_turn(121, 116, 107, 329)
    consumer_row_cycles: float = in_turn(1.1, 0.746, 0.646, 1.33)
    unscaled_row_cycles: float = in_turn(1.61, 0.825, 1.08, 1.59)
    refill_us: float = in_turn(0.545, 0.0306, 0.387, 0.87)
    first_stage_ns: float = in_turn(2.79, 4.14, 2.55, 1.69)
    copy_bytes_per_cycle: float = in_turn(285, 393, 500, 326)


MMA_COSTS, MMA_INVARIANT_COSTS = MmaCosts(), MmaInvariantCosts()
WGMMA_COSTS_16, WGMMA_COSTS_32, WGMMA_COSTS_64, WGMMA_COSTS = costs_table(WgmmaCosts)
"""The constants for M up to 16, up to 32, up to 64, and for larger M."""


@dataclass(frozen=True)
class Occupancy:
    """The occupancy of the GPU by the CTAs of a launch.

    Attributes:
        resident: largest number of resident CTAs per SM.
        busiest: number of CTAs on the SM with the most CTAs.
        waves: number of waves of resident CTAs in which the busiest SM runs its CTAs.
        concurrent: largest number of CTAs that the busiest SM runs at the same time.
        used: ratio of the launch's CTAs to those that can be resident at once; more than 1 with several waves.
        nonresident: 0 if half of the next kernel's CTAs can become resident during the launch, 1 if none can, linear
            between.
        has_room: whether several CTAs per SM can be resident and the next kernel starts late.
    """

    resident: int
    busiest: int
    waves: int
    concurrent: int
    used: float
    nonresident: float
    has_room: bool

    @classmethod
    def of(cls, config: GemmSm90Config, problem: Problem, device: Device) -> Occupancy:
        """Return the occupancy of a configuration's launch."""
        ctas, resident = math.prod(config.grid(problem)), config.resident(problem, device)
        sms = resident_clusters(device, config.split_k) * config.split_k
        busiest = ceil_div(ctas, sms)
        used = ctas / (resident * sms)
        nonresident = 1 - min(1.0, max(0.0, 2 / used - 2))
        has_room = resident > 1 and config.starts_next_late(problem, device)
        waves, concurrent = ceil_div(busiest, resident), min(busiest, resident)
        return cls(resident, busiest, waves, concurrent, used, nonresident, has_room)


class TimeParts(NamedTuple):
    """A modelled run time and its parts, in microseconds.

    Attributes:
        us: run time.
        fixed: times that do not overlap, by name; their sum is a part of ``us``.
        overlapping: times that overlap, by name. The rest of ``us`` is their p-norm, with wgmma under the power limit.
    """

    us: float
    fixed: dict[str, float]
    overlapping: dict[str, float]

    def __str__(self) -> str:
        fixed, overlapping = (
            ", ".join(f"{name} {us:.1f}" for name, us in parts.items() if abs(us) >= 0.05)
            for parts in (self.fixed, self.overlapping)
        )
        return f"{fixed}, overlapping parts {self.us - sum(self.fixed.values()):.1f} (p-norm of {overlapping})"


def _k_tiles(config: GemmSm90Config, problem: Problem) -> tuple[int, int]:
    """Return the number of k tiles per CTA, and the number of k tiles that the CTA's busiest consumer computes."""
    k_tiles = ceil_div(ceil_div(problem.k, WEIGHT_TILE_K), config.split_k)
    return k_tiles, ceil_div(config.iterations(problem), config.consumers) * config.k_tiles


def mma_time(config: GemmSm90Config, problem: Problem, device: Device) -> TimeParts:
    """Return the modelled run time of the mma kernel by `MmaCosts`, and its parts."""
    costs, at = MMA_COSTS, Occupancy.of(config, problem, device)
    _, mine = _k_tiles(config, problem)
    stream = device.read_us(problem.weight_bytes)
    warps = at.concurrent * config.consumers * config.consumer_warps
    clock = device.rates.clock_mhz
    latency_us = costs.latency_cycles[config.x_rows] / clock
    issue_us = ceil_div(warps, SCHEDULERS) * costs.issue_cycles[config.x_rows] / clock
    iterations = config.iterations(problem)
    stage_us = costs.refill_us + config.k_tiles * max(issue_us, latency_us)
    overlapping = {
        "SM": at.waves * mine * issue_us,
        "consumer": at.waves * mine * latency_us,
        "stages": at.waves * max(0.0, iterations / config.stages - 1) * stage_us,
        "weight": costs.stream_factor * stream,
    }
    overlapping_us = p_norm(overlapping.values(), costs.norm)
    shared = costs.shared_us * min(1.0, stream / costs.long_us) if at.resident > 1 else 0.0
    split = costs.reduction_us + costs.cluster_us * (config.split_k - 2) if config.split_k > 1 else 0.0
    if config.split_k in (3, 5) and at.has_room:
        split += costs.odd_cluster_us
    passes_us = costs.uneven_us if config.weight_tiles == 3 or config.weight_tiles >= 6 else 0.0
    has_pairs = device.sm_count < math.prod(config.grid(problem)) < 2 * device.sm_count
    fixed = {
        "launch": costs.launch_us - shared,
        "waves": costs.wave_us * max(0.0, at.used - 1),
        "imbalance": costs.imbalance * overlapping_us if has_pairs else 0.0,
        "split-K": split,
        "consumers": costs.consumer_us * config.consumers,
        "x": costs.queue_us * prefetch_waits(at.used, config.stages, iterations)[0] + passes_us,
    }
    if problem.gathers_x:
        x_kib = at.concurrent * problem.m * problem.k * 2 / 1024
        fixed["gather"] = costs.gather_us + costs.gather_kib_us * x_kib + costs.gather_split_us * (config.split_k > 1)
    return TimeParts(sum(fixed.values()) + overlapping_us, fixed, overlapping)


def mma_invariant_time(config: GemmSm90Config, problem: Problem, device: Device) -> TimeParts:
    """Return the modelled run time of the batch-invariant mma kernel by `MmaInvariantCosts`, and its parts."""
    costs, at, clock = MMA_INVARIANT_COSTS, Occupancy.of(config, problem, device), device.rates.clock_mhz
    k_tiles, mine = _k_tiles(config, problem)
    warps = at.concurrent * config.consumers * config.consumer_warps
    issue_cycles = costs.issue_cycles[config.scaled] * (costs.many_rows if problem.m > 8 else 1.0)
    overlapping = {
        "SM": at.waves * ceil_div(warps, SCHEDULERS) * mine * issue_cycles / clock,
        "consumer": at.waves * mine * (costs.chain_cycles[config.scaled] + costs.stage_cycles / config.k_tiles) / clock,
        "weight": costs.stream_factor * device.read_us(problem.weight_bytes),
        "x": at.busiest * k_tiles * WEIGHT_TILE_K * 2 * problem.m / (costs.x_gbs * 1e3),
    }
    split = costs.reduction_us + costs.cluster_us * (config.split_k - 2) if config.split_k > 1 else 0.0
    fixed = {
        "launch": costs.launch_us + costs.nonresident_us * at.nonresident + costs.k_tile_us * (config.k_tiles - 1),
        "waves": costs.wave_us * max(0.0, at.used - 1),
        "split-K": split,
    }
    return TimeParts(sum(fixed.values()) + p_norm(overlapping.values(), costs.norm), fixed, overlapping)


def wgmma_costs(m: int) -> list[tuple[WgmmaCosts, float]]:
    """Return the constants of the wgmma kernel's cost model for M rows of x; see `costs_by_rows`."""
    return costs_by_rows(m, (WGMMA_COSTS_16, WGMMA_COSTS_32, WGMMA_COSTS_64, WGMMA_COSTS))


def wgmma_time(config: GemmSm90Config, problem: Problem, device: Device) -> TimeParts:
    """Return the modelled run time of the wgmma kernel by `wgmma_costs`, and its parts."""
    at = Occupancy.of(config, problem, device)
    found = [(_wgmma_time(costs, at, config, problem, device), share) for costs, share in wgmma_costs(problem.m)]

    def mean(times: list[dict[str, float]]) -> dict[str, float]:
        return {
            name: sum(time[name] * share for time, (_, share) in zip(times, found, strict=True)) for name in times[0]
        }

    us = sum(time.us * share for time, share in found)
    return TimeParts(us, mean([time.fixed for time, _ in found]), mean([time.overlapping for time, _ in found]))


def _wgmma_time(
    costs: WgmmaCosts, at: Occupancy, config: GemmSm90Config, problem: Problem, device: Device
) -> TimeParts:
    """Return the modelled run time of the wgmma kernel by one set of constants, and its parts."""
    clock = device.rates.clock_mhz
    k_tiles, mine = _k_tiles(config, problem)
    rows, columns = config.block_m, config.block_n
    tensor_cycles = costs.tensor_factor * wgmma_cycles(rows, device) * (WEIGHT_TILE_K // 16)
    issue_cycles = costs.dequantize_cycles
    issue_cycles += costs.scale_cycles if config.scaled else costs.accumulate_cycles * rows
    if not config.scaled and not config.consumer_registers:
        issue_cycles += costs.turn_cycles * max(0, config.consumers - 2) ** 2 / config.k_tiles
    row_cycles = costs.consumer_row_cycles + (0.0 if config.scaled else costs.unscaled_row_cycles)
    loop_cycles = costs.iteration_cycles + config.m64_tiles * (costs.consumer_cycles + row_cycles * rows)
    k_tile_bytes = 2 * WEIGHT_TILE_K * rows + problem.weight_bytes / problem.k / problem.n * WEIGHT_TILE_K * columns
    copy_us = k_tile_bytes / (costs.copy_bytes_per_cycle * clock)
    stream_factor = costs.stream_factor * (1.0 if config.prefetch_weights else costs.late_stream_factor)
    # With `scaled`, a consumer releases a stage one iteration later.
    free_stages = max(config.stages - (config.consumers if config.scaled else 0), 0.5)
    overlapping = {
        "SM": at.busiest * k_tiles * columns / 64 * (tensor_cycles + issue_cycles) / clock,
        "consumer": at.waves * mine * loop_cycles / clock,
        "copies": at.busiest * k_tiles * copy_us,
        "stages": at.waves * k_tiles * (costs.refill_us / config.k_tiles + at.concurrent * copy_us) / free_stages,
        "weight": stream_factor * device.read_us(problem.weight_bytes),
    }
    accumulators = rows * columns * 1e-3
    iterations = config.iterations(problem)
    late, queue, pause = costs.late_us, 0.0, 0.0
    if config.prefetch_weights:
        late = costs.nonresident_us * at.nonresident
        queue, pause = prefetch_waits(at.used, config.stages, iterations)
    alone_us = costs.alone_us * iterations / config.consumers if at.concurrent == 1 else 0.0
    first_stage_us = costs.first_stage_ns * min(rows, 64) * (config.k_tiles * columns / 64 - 1) * 1e-3
    split = 0.0
    if config.split_k > 1:
        sent = accumulators * (config.split_k - 1) / config.split_k
        split = costs.reduction_us + costs.cluster_us * (config.split_k - 2) + costs.exchange_ns * sent
        split += costs.odd_cluster_us * (config.split_k in (3, 5))
    fixed = {
        "launch": costs.launch_us + late - costs.room_us * at.has_room + first_stage_us,
        "waves": costs.wave_us * (at.waves - 1),
        "split-K": split,
        "consumers": costs.consumer_ns * config.consumers * accumulators + alone_us,
        "x": costs.queue_us * queue,
        "pause": costs.pause_us * pause,
    }
    us = sum(fixed.values()) + power_limited_us(p_norm(overlapping.values(), costs.norm), problem, device)
    return TimeParts(us, fixed, overlapping)
