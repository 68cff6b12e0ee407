# SPDX-License-Identifier: Apache-2.0
"""The integer arithmetic with which kernels divide a problem into tiles and splits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

from cupy_awq.runtime.device import Device

MAX_SPLITS = 64
"""The largest split-K factor."""
RESERVED_BYTES = 1024
"""The shared memory that the CUDA driver reserves per CTA, in bytes."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_two(m: int) -> int:
    """Return the smallest power of two that is at least ``m``.

    >>> next_power_of_two(1), next_power_of_two(48), next_power_of_two(64)
    (1, 64, 64)
    """
    return 1 << (m - 1).bit_length()


def next_tuned_m(m: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least ``m``: the values of M to tune.

    >>> [next_tuned_m(m) for m in (1, 2, 3, 5, 17, 25, 600)]
    [1, 2, 3, 6, 24, 32, 768]
    """
    power = next_power_of_two(m)
    return power * 3 // 4 if m <= power * 3 // 4 else power


def split_counts(limit: int) -> list[int]:
    """Return the split-K factors to try: the powers of two up to the smaller of ``limit`` and MAX_SPLITS.

    >>> split_counts(5)
    [1, 2, 4]
    """
    return [1 << i for i in range(MAX_SPLITS.bit_length()) if 1 << i <= max(1, min(limit, MAX_SPLITS))]


def stream_k_divisions(units: int, k_tiles: int, clusters: int) -> Iterator[tuple[int, int, int]]:
    """Yield the divisions of ``units`` units of ``k_tiles`` k tiles to try with stream-K, for persistent clusters.

    A division is (number of units whose k tiles are shared, number of clusters that share them, number of clusters of
    the launch, at most ``clusters``). Shared are the units of the last, partial wave, or of the last two waves.

    >>> list(stream_k_divisions(5, 64, 4))
    [(1, 2, 4), (1, 4, 4), (5, 4, 4)]
    """
    left = units % clusters
    for shared in sorted({left, left + clusters if units > clusters else left} - {0}):
        for sharers in sorted({min(clusters, 2 * shared), min(clusters, 4 * shared), clusters}):
            if sharers != shared and shared * k_tiles >= 2 * sharers:
                yield shared, sharers, sharers if units == shared else clusters


class Staged(Protocol):
    """A configuration with the fields ``ctas_per_sm`` and ``stages``, which determine its shared memory."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def shared_bytes(self, problem: Any) -> int: ...


StagedT = TypeVar("StagedT", bound=Staged)


def with_stages(
    shape: StagedT, ctas_per_sm: int, stages: int, problem: Any, device: Device, reserved: int = RESERVED_BYTES
) -> StagedT | None:
    """Return the shape with as many CTAs per SM, then stages, as fit in shared memory, or None if two stages do not.

    ``ctas_per_sm`` and ``stages`` are the largest values to try; ``reserved`` bytes of each CTA have other uses.
    """
    for ctas in range(ctas_per_sm, 0, -1):
        limit = min(device.shared_bytes_per_sm // ctas - reserved, device.shared_bytes_per_block)
        for count in range(stages, 1, -1):
            config = replace(shape, ctas_per_sm=ctas, stages=count)
            if config.shared_bytes(problem) <= limit:
                return config
    return None


class MmaStreamK:
    """The properties that configurations of mma.sync kernels with stream-K derive from their fields of these names."""

    block_m: int
    stream_k_units: int
    stream_k_ctas: int

    @property
    @abstractmethod
    def block_n(self) -> int:
        """The number of columns per CTA tile."""

    def units(self, problem: Any) -> int:
        """Return the number of CTA tiles of y."""
        return ceil_div(problem.m, self.block_m) * ceil_div(problem.n, self.block_n)

    @property
    def split_k(self) -> int:
        """The average number of CTAs per stream-K tile, rounded up; 1 without stream-K."""
        return ceil_div(self.stream_k_ctas, self.stream_k_units) if self.stream_k_units else 1

    @property
    def pass_rows(self) -> int:
        """The number of rows of accumulators that shared memory holds at once."""
        return self.block_m if self.block_m <= 32 else 16 if self.block_m % 16 == 0 else 8
