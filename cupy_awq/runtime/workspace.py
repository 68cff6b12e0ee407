# SPDX-License-Identifier: Apache-2.0
"""The memory that a stream's launches share: counters, and partial sums of split-K kernels."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import cupy

WORKSPACE_BYTES = 32 * 2**20
"""What a stream sets aside for partial sums; configurations that need more are not legal."""
COUNTERS = 4096
"""Tiles that may share their sums among several blocks."""
COUNTER_BYTES = 4 * COUNTERS
"""A workspace begins with its counters, so that one which served a plan, and holds zeros there again, serves any."""

PER_THREAD_STREAM = 2
"""CUDA's handle of the default stream of whichever thread uses it."""


def zeroed(nbytes: int) -> cupy.ndarray:
    """Memory of zeros on the current device, for any stream; while one is captured into a graph, too."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        memory = cupy.zeros(nbytes, cupy.uint8)
    stream.synchronize()
    return memory


_workspaces: dict[tuple[int, int, int], tuple[cupy.ndarray, int]] = {}
_workspaces_lock = threading.Lock()


def workspace(index: int, stream: int) -> int:
    """Address of the workspace that belongs to a stream of the GPU ``index``, which must be current; made at first use.

    Launches of one stream follow each other, so they can share it; those of two streams cannot. It is never freed or
    moved, because a captured graph may hold its address.
    """
    key = index, stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0
    found = _workspaces.get(key)
    if found is None:
        with _workspaces_lock:
            found = _workspaces.get(key)
            if found is None:
                memory = zeroed(COUNTER_BYTES + WORKSPACE_BYTES)
                found = _workspaces[key] = memory, int(memory.data.ptr)
    return found[1]
