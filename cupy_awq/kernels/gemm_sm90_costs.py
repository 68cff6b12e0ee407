# SPDX-License-Identifier: Apache-2.0
"""The constants of the two cost models of ``gemm_sm90``."""

from __future__ import annotations

from dataclasses import dataclass, field

WGMMA, MMA = "gemm_sm90", "gemm_sm90_mma"
"""The names of the family's two kernels: wgmma and mma.sync."""


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
