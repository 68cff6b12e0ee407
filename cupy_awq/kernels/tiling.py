# SPDX-License-Identifier: Apache-2.0
"""The integer arithmetic with which kernels divide a problem into tiles and splits."""

from __future__ import annotations

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
