# SPDX-License-Identifier: Apache-2.0
"""A memory access as one integer, so that it is stored at once and later ones are larger.

From the top: the time of its warp, whether it is a store (and not a copy), its thread, its instruction.
"""

from __future__ import annotations

from typing import Any

Array = Any
NEVER, PENDING = 0, 2**22 - 1
"""Times before every access and after: an access that is under way is ordered with nothing."""

AT_BITS, THREAD_BITS = 20, 20
GENERIC = 1 << (AT_BITS + THREAD_BITS)
TIME_SHIFT = AT_BITS + THREAD_BITS + 1


def access_code(time: Array, threads: Array, at: int) -> Array:
    return (time << TIME_SHIFT) | (threads << AT_BITS) | at


def thread_of(access: Array) -> Array:
    return access >> AT_BITS & ((1 << THREAD_BITS) - 1)
