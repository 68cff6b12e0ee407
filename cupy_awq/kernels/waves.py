# SPDX-License-Identifier: Apache-2.0
"""The parts of cost models that all kernels below sm_90 share: waves of CTAs and the reduction of split-K."""

from __future__ import annotations

from typing import NamedTuple

from cupy_awq.kernels.hopper import p_norm
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.rates import READ_FRACTION

NORM = 3.0
"""The exponent of the p-norm of times that overlap in a wave."""
REDUCTION_LATENCIES, SPLIT_LATENCIES = 1.7, 0.28
"""The fixed time of a split-K reduction and the additional time per split, in latencies of device memory."""


class CtaWork(NamedTuple):
    """The work of one CTA, which computes k tiles one after the other.

    Attributes:
        k_tiles: number of k tiles.
        latency_us: time of a k tile of a CTA that is alone on its SM.
        cycles: clock cycles per k tile for which an SM is occupied; those of its CTAs add up.
        l2_bytes: bytes per k tile that are read from L2.
        dram_bytes: bytes per k tile that no other CTA has read from device memory before.
        end_us: time to start and to finish the CTA, which the other CTAs of an SM hide.
    """

    k_tiles: float
    latency_us: float
    cycles: float
    l2_bytes: float
    dram_bytes: float
    end_us: float = 0.0


def waves_us(
    ctas: int, ctas_per_sm: int, work: CtaWork, device: Device, readers: int | None = None, step: int | None = None
) -> float:
    """Return the time in microseconds of ``ctas`` CTAs, of which an SM holds ``ctas_per_sm`` at a time.

    Within a wave, the times of the busiest SM, of L2 and of device memory overlap.

    Of the CTAs, ``readers`` (by default all) have different weights; the others are further rows of the same tiles of
    the weight, and M adds ``step`` CTAs at a time (by default ``readers``). If M grows, each wave reads less of the
    weight, until the next wave begins with few CTAs. The time is therefore at least that of the fewest CTAs that take
    as many waves, and of the most that take one less, so that it never falls.
    """
    rates, resident = device.rates, ctas_per_sm * device.sm_count

    def wave_us(count: int) -> float:
        per_sm = ceil_div(count, device.sm_count)
        sm_us = max(work.latency_us, per_sm * work.cycles / rates.clock_mhz)
        l2_us = count * work.l2_bytes / (rates.l2_gbs * 1e3)
        dram_us = count * work.dram_bytes / (READ_FRACTION * rates.read_gbs * 1e3)
        return work.k_tiles * p_norm((sm_us, l2_us, dram_us), NORM)

    full = ceil_div(ctas, resident) - 1
    ends = full / ctas_per_sm + 1
    us = (full * wave_us(resident) if full else 0.0) + wave_us(ctas - full * resident) + ends * work.end_us
    readers = readers or ctas
    step = step or readers
    fewest = (full * resident // step + 1) * step
    for fewer in (fewest - step, fewest):
        if readers <= fewer < ctas:
            part = work._replace(dram_bytes=work.dram_bytes * ctas / fewer)
            us = max(us, waves_us(fewer, ctas_per_sm, part, device))
    return us


def reduction_us(split_k: int, partial_bytes: float, device: Device) -> float:
    """Return the time in microseconds to write and read ``partial_bytes`` of partial sums, and to wait for them."""
    if split_k == 1:
        return 0.0
    rates = device.rates
    gbs = rates.l2_gbs if partial_bytes <= device.l2_bytes else rates.read_gbs
    return (REDUCTION_LATENCIES + SPLIT_LATENCIES * split_k) * rates.latency_us + 2 * partial_bytes / (gbs * 1e3)
