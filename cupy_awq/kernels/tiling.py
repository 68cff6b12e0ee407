# SPDX-License-Identifier: Apache-2.0
"""The integer arithmetic with which kernels divide a problem into tiles and splits."""

from __future__ import annotations

from collections.abc import Iterator

MAX_SPLITS = 64
"""The largest split-K factor."""


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


class MmaStreamK:
    """The properties that configurations of mma.sync kernels with stream-K derive from their fields of these names."""

    block_m: int
    stream_k_units: int
    stream_k_ctas: int

    @property
    def split_k(self) -> int:
        """The average number of CTAs per stream-K tile, rounded up; 1 without stream-K."""
        return ceil_div(self.stream_k_ctas, self.stream_k_units) if self.stream_k_units else 1

    @property
    def pass_rows(self) -> int:
        """The number of rows of accumulators that shared memory holds at once."""
        return self.block_m if self.block_m <= 32 else 16 if self.block_m % 16 == 0 else 8
