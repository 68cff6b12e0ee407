# SPDX-License-Identifier: Apache-2.0
"""Host code shared by the kernels for Hopper: tensor map of x, constants, power limit, tile heights, clusters."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import TypeVar

from cupy_awq.kernels.gemm.problem import ITEMSIZE, Problem, ceil_div
from cupy_awq.kernels.gemm.repack import RepackedLayout
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan, TensorMap

T = TypeVar("T")
CLUSTER_SMS = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.91, 5: 0.84, 6: 0.78, 8: 0.91}
"""The fraction of an H100's SMs that clusters can occupy at the same time, by CTAs per cluster."""
CLOCK_MHZ = 1750
"""The SM clock in MHz that converts cycles of cost models to time."""
MIN_TENSOR_CYCLES = 13
"""The smallest number of tensor-core cycles per wgmma, reached with few rows of x."""
POWER_LIMITED_TFLOPS = 877.0
"""The throughput in TFLOPS at which an H100 or H200 reaches the power limit of 700 W."""
ROUNDED_MIN_M = 33
"""The smallest M for rounded products of weights and scales, as fewer rows promise the bits of unrounded weights."""
CONVERSION_ROWS = 77
"""The number of rows of x whose wgmma instructions take as long as a tile's other work, such as converting weights."""


def x_tensor_map(problem: Problem, block_m: int, boxes: int) -> TensorMap:
    """Return the tensor map of x, viewed as [k / 64][m][64], with TMA boxes of shape [boxes][block_m][64]."""
    m, itemsize = problem.m, ITEMSIZE[problem.dtype]
    return TensorMap(
        "x",
        problem.dtype,
        dims=(64, m, problem.k // 64),
        strides=(problem.row_strides.x * itemsize, 64 * itemsize),
        box=(64, block_m, boxes),
        swizzle=128,
    )


def repacked_defines(problem: Problem) -> tuple[tuple[str, int | str], ...]:
    """Return the compile-time constants (name, value) of a problem for the kernels that read the repacked layout."""
    return (
        *(item for item in problem.defines() if item[0] not in ("SCALE", "ZEROS")),
        *RepackedLayout.of(problem).defines(),
        ("ALIGNED", int(problem.aligned)),
    )


def prepare_weight(problem: Problem, device: Device, strides: tuple[int, int, int] | None = None) -> LaunchPlan:
    """Return the launch plan that repacks the weight of a problem; see `RepackedLayout.plan`."""
    return RepackedLayout.of(problem).plan(device, strides)


def p_norm(values: Iterable[float], exponent: float) -> float:
    """Return the p-norm of times that overlap, a smooth maximum."""
    return float(sum(value**exponent for value in values) ** (1 / exponent))


def power_limited_us(work_us: float, problem: Problem) -> float:
    """Return the run time in microseconds, under the power limit, of work that takes ``work_us`` at full clock.

    The result is a smooth maximum of ``work_us`` and the time at POWER_LIMITED_TFLOPS: the clock rises while some SMs
    are idle, so the limit is gradual.
    """
    power_us = 2 * problem.m * problem.n * problem.k / (POWER_LIMITED_TFLOPS * 1e6)
    return p_norm((work_us, power_us), 3)


def tile_heights(m: int, most: int, columns: int, resident: int) -> list[int]:
    """Return the values of ``block_m`` that split M rows into tiles of nearly equal height.

    They are multiples of 8: first the highest one, then others down to about half of it, in the order of the time of
    all waves of tiles, which is modelled as proportional to ``block_m + CONVERSION_ROWS``.

    Args:
        m: number of rows of y.
        most: the largest value.
        columns: number of tiles along n.
        resident: number of tiles that are computed at the same time.

    >>> tile_heights(48, 128, 32, 132), tile_heights(200, 128, 32, 132)
    ([48, 24], [104, 56, 72])
    >>> tile_heights(2300, 256, 16, 132)[:3]  # 16 x 16 tiles of 144 rows, 15 x 16 tiles of 160 rows: two waves
    [256, 144, 160]
    """
    fewest = ceil_div(m, most)
    counts = range(fewest, 2 * fewest + 1)
    highest, *others = dict.fromkeys(ceil_div(ceil_div(m, count), 8) * 8 for count in counts)

    def wave_rows(height: int) -> int:
        return ceil_div(ceil_div(m, height) * columns, resident) * (height + CONVERSION_ROWS)

    return [highest, *sorted(others, key=wave_rows)]


def resident_clusters(device: Device, size: int) -> int:
    """Return the number of clusters of ``size`` CTAs that can be resident if each SM holds one CTA.

    A cluster stays within one GPC, so large clusters do not fill all SMs.
    """
    return max(1, int(CLUSTER_SMS[size] * device.sm_count) // size)


def costs_table(kind: type[T], **columns: tuple[float, ...]) -> tuple[T, ...]:
    """Return instances of a dataclass of constants; each keyword gives the values of one field in all of them."""
    return tuple(kind(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True))


def costs_by_rows(m: int, costs: Sequence[T]) -> T:
    """Return the constants for M = m out of those for M up to 16, up to 32, up to 64, and for larger M."""
    return costs[bisect.bisect_left((16, 32, 64), m)]


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


def has_split_scales(problem: Problem) -> bool:
    """Return whether each float16 scale is split into two bfloat16 values, at two more instructions per weight pair."""
    return (problem.dtype, problem.scales_dtype) == ("bfloat16", "float16")
