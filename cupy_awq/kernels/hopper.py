# SPDX-License-Identifier: Apache-2.0
"""Host code shared by the kernels for Hopper: capabilities, residency of CTAs, tile heights, clusters."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, fields
from typing import Any, TypeVar

from cupy_awq.kernels.tiling import RESERVED_BYTES, ceil_div
from cupy_awq.runtime.device import Capability, Device

HOPPER = Capability.WGMMA, Capability.TMA, Capability.CLUSTERS, Capability.DEPENDENT_LAUNCH
"""The capabilities that the kernels for Hopper need."""
T = TypeVar("T")
CLUSTER_SMS = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.91, 5: 0.84, 6: 0.78, 8: 0.91}
"""The fraction of an H100's SMs that clusters can occupy at the same time, by CTAs per cluster."""
MIN_TENSOR_CYCLES = 13
"""The smallest number of tensor-core cycles per wgmma, reached with few rows of x."""
WGMMA_PRODUCTS = 64 * 16
"""The number of multiply-adds of a wgmma of 16-bit values per row of x."""
REGISTERS_PER_SM, THREADS_PER_SM = 65536, 2048
"""The number of 32-bit registers per SM, and the largest number of resident threads per SM."""
SCHEDULERS = 4
"""The number of warp schedulers per SM, each with the same share of the registers."""
CONVERSION_ROWS = 77
"""The number of rows of x whose wgmma instructions take as long as a tile's other work, such as converting weights."""


LONGER_WAVES = 1.3
"""The modelled time of all waves of tiles, relative to the shortest, up to which their height is tried."""
ROW_BORDERS, BORDER = (16, 32, 64), 1.25
"""The largest M of the ranges of M that have constants of their own, and the factor within which two of them mix."""


def p_norm(values: Iterable[float], exponent: float) -> float:
    """Return the p-norm of times, a smooth maximum: the run time of work that partly overlaps."""
    return float(sum(value**exponent for value in values) ** (1 / exponent))


def wgmma_cycles(rows: int, device: Device) -> float:
    """Return the tensor-core cycles of a wgmma with ``rows`` rows of x."""
    return max(rows * WGMMA_PRODUCTS / device.rates.tensor, MIN_TENSOR_CYCLES)


def tile_heights(m: int, most: int, columns: int, resident: int) -> list[int]:
    """Return the values of ``block_m`` that split M rows into tiles of nearly equal height.

    They are multiples of 8: first the highest one, then others down to about a third of it, in the order of the time of
    all waves of tiles, which is modelled as proportional to ``block_m + CONVERSION_ROWS``. Those that take more than
    LONGER_WAVES times the shortest time are left out.

    Args:
        m: number of rows of y.
        most: the largest value.
        columns: number of tiles along n.
        resident: number of tiles that are computed at the same time.

    >>> tile_heights(48, 128, 32, 132), tile_heights(200, 128, 32, 132)
    ([48, 16, 24], [104, 56, 72])
    >>> tile_heights(2300, 256, 16, 132)[:3]  # 16 x 16 tiles of 144 rows, 15 x 16 tiles of 160 rows: two waves
    [256, 144, 160]
    """
    fewest = ceil_div(m, most)
    # With all numbers of tiles into which one more row could be split, its estimate is not lower.
    counts = range(fewest, 3 * fewest + 2)
    highest, *others = dict.fromkeys(ceil_div(ceil_div(m, count), 8) * 8 for count in counts)

    def wave_rows(height: int) -> int:
        return ceil_div(ceil_div(m, height) * columns, resident) * (height + CONVERSION_ROWS)

    most_rows = LONGER_WAVES * min(map(wave_rows, [highest, *others]))
    return [highest, *sorted((height for height in others if wave_rows(height) <= most_rows), key=wave_rows)]


def resident_clusters(device: Device, size: int) -> int:
    """Return the number of clusters of ``size`` CTAs that can be resident if each SM holds one CTA.

    A cluster stays within one GPC, so large clusters do not fill all SMs.
    """
    return max(1, int(CLUSTER_SMS[size] * device.sm_count) // size)


def in_turn(*values: float) -> Any:
    """Return a field of a dataclass of constants, given its value in each instance of `costs_table`, in order."""
    return field(metadata={"values": values})


def costs_table(kind: type[T]) -> tuple[T, ...]:
    """Return the instances of a dataclass whose fields `in_turn` made: the i-th has the i-th value of each field."""
    dataclass: Any = kind
    columns = (part.metadata["values"] for part in fields(dataclass))
    return tuple(kind(*values) for values in zip(*columns, strict=True))


def costs_by_rows(m: int, costs: Sequence[T]) -> list[tuple[T, float]]:
    """Return the constants for M = m out of those for M up to 16, up to 32, up to 64, and for larger M.

    Each comes with the share of its modelled time. Near a border, within a factor of BORDER, the time is a mean of two,
    so that it does not jump: their shares are linear in log(m).

    >>> costs_by_rows(12, "abcd"), costs_by_rows(64, "abcd"), [x for x, _ in costs_by_rows(20, "abcd")]
    ([('a', 1.0)], [('c', 0.5), ('d', 0.5)], ['b'])
    """
    for index, border in enumerate(ROW_BORDERS):
        at = math.log(m / border) / math.log(BORDER)
        if -1 < at < 1:
            return [(costs[index], (1 - at) / 2), (costs[index + 1], (1 + at) / 2)]
    return [(costs[bisect.bisect_left(ROW_BORDERS, m)], 1.0)]


def prefetch_waits(used: float, stages: int, iterations: int) -> tuple[float, float]:
    """Return which fractions of a cost model's ``queue_us`` and ``pause_us`` apply to CTAs that prefetch weights.

    ``queue_us`` is the time for which x waits behind weights, if a CTA has copied all of its weights before and the GPU
    is crowded. ``pause_us`` is the time between the first copies and those that refill the stages, if the stages hold
    at most half of a CTA's weights and the GPU is not crowded.

    Args:
        used: ratio of the launch's CTAs to those that can be resident at once. The GPU is crowded from 1 on, and not at
            all up to 0.35; linear between.
        stages: number of pipeline stages.
        iterations: number of stages that a CTA computes.

    >>> prefetch_waits(1.2, 6, 24), prefetch_waits(0.3, 6, 24), prefetch_waits(0.3, 6, 9)
    ((0.25, 0.0), (0.0, 1.0), (0.0, 0.5))
    """
    crowded = min(1.0, max(0.0, (used - 0.35) / 0.65))
    return crowded * min(1.0, stages / iterations), (1 - crowded) * min(1.0, max(0.0, iterations / stages - 1))


def could_hold_three_launches(ctas: int, resident: int, device: Device) -> bool:
    """Return whether CTAs of three launches of ``ctas`` CTAs could be resident at once, ``resident`` CTAs per SM."""
    return 2 * ctas < resident * device.sm_count


def is_excessive(split_k: int, tiles: int, device: Device) -> bool:
    """Return whether clusters of more than two CTAs are pointless: the launch would have more CTAs than SMs."""
    return split_k > 2 and tiles * split_k > device.sm_count


def available_ctas(threads: int, registers: int) -> int:
    """Return how many CTAs an SM has registers for, with ``threads`` threads per CTA and ``registers`` per thread.

    Registers are counted for a multiple of four warps, one per scheduler, and of 8 registers per thread. That is a
    lower bound: warps of several CTAs may fill the schedulers evenly.

    >>> available_ctas(288, 72), available_ctas(544, 72)
    (2, 1)
    """
    return REGISTERS_PER_SM // (ceil_div(threads, 128) * 128 * (ceil_div(registers, 8) * 8))


def resident_ctas(device: Device, shared_bytes: int, threads: int, register_ctas: int) -> int:
    """Return the largest number of resident CTAs per SM, at least 1.

    Args:
        device: the GPU.
        shared_bytes: dynamic shared memory per CTA in bytes.
        threads: number of threads per CTA.
        register_ctas: number of CTAs for which an SM has registers.
    """
    fitting = device.shared_bytes_per_sm // (shared_bytes + RESERVED_BYTES)
    return max(1, min(fitting, THREADS_PER_SM // threads, register_ctas))


def most_stages(counts: range, ctas_per_sm: int, device: Device, shared_bytes: Callable[[int], int]) -> int | None:
    """Return the largest of ``counts`` with which ``ctas_per_sm`` CTAs fit in the shared memory of an SM, or None.

    ``shared_bytes`` returns the shared memory per CTA for a number of stages.
    """
    limit = min(device.shared_bytes_per_sm // ctas_per_sm - RESERVED_BYTES, device.shared_bytes_per_block)
    fitting = bisect.bisect_right(counts, limit, key=shared_bytes)
    return counts[fitting - 1] if fitting else None
