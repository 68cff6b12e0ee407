# SPDX-License-Identifier: Apache-2.0
"""The encoding of a memory access as one integer, such that later accesses of a warp have larger integers.

The fields, from the highest bits down, are the clock of the warp, whether the generic proxy wrote, the thread, and the
instruction.
"""

from __future__ import annotations

from typing import Any

Array = Any
NEVER, PENDING = 0, 2**22 - 1
"""The code of "no access yet", below all others, and that of an asynchronous copy in flight, above all others.

Because it is the largest, a pending access is ordered before no other access: any access that meets it is a race.
"""

AT_BITS, THREAD_BITS = 20, 20
GENERIC = 1 << (AT_BITS + THREAD_BITS)
TIME_SHIFT = AT_BITS + THREAD_BITS + 1


def access_code(time: Array, threads: Array, at: int) -> Array:
    return (time << TIME_SHIFT) | (threads << AT_BITS) | at


def thread_of(access: Array) -> Array:
    return access >> AT_BITS & ((1 << THREAD_BITS) - 1)
