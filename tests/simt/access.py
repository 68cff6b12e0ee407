# SPDX-License-Identifier: Apache-2.0
"""The encoding of a memory access as one integer: later accesses have larger codes.

The fields, from the top bit down: the clock of its warp, whether the generic proxy wrote, its thread, its instruction.
"""

from __future__ import annotations

from typing import Any

Array = Any
NEVER, PENDING = 0, 2**22 - 1
"""The times before and after every access. A pending access is ordered with nothing."""

AT_BITS, THREAD_BITS = 20, 20
GENERIC = 1 << (AT_BITS + THREAD_BITS)
TIME_SHIFT = AT_BITS + THREAD_BITS + 1


def access_code(time: Array, threads: Array, at: int) -> Array:
    return (time << TIME_SHIFT) | (threads << AT_BITS) | at


def thread_of(access: Array) -> Array:
    return access >> AT_BITS & ((1 << THREAD_BITS) - 1)
