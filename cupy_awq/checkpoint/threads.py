# SPDX-License-Identifier: Apache-2.0
"""Threads for NumPy conversions: NumPy releases the global interpreter lock while it processes a chunk."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MAX_THREADS = 8
"""The largest number of threads: this many reach the memory bandwidth of most hosts."""

MIN_BYTES = 1 << 21
"""The smallest number of bytes per thread: converting them takes ten times as long as starting a thread."""


def run_ranges(function: Callable[[int, int], object], length: int, nbytes: int, multiple: int = 1) -> None:
    """Call ``function(start, stop)`` for ranges that cover ``length`` items, on several threads if that pays off.

    Args:
        function: a function of a range, which several threads may call at the same time for different ranges.
        length: the number of items.
        nbytes: the size of all items in bytes.
        multiple: a divisor of the length of every range but the last.
    """
    count = min(MAX_THREADS, count_cores(), nbytes // MIN_BYTES)
    if count < 2:
        function(0, length)
        return
    step = -(-length // (count * multiple)) * multiple
    starts = range(0, length, step)
    with ThreadPoolExecutor(count) as pool:
        for result in [pool.submit(function, start, min(start + step, length)) for start in starts]:
            result.result()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
