# SPDX-License-Identifier: Apache-2.0
"""The split-K workspace of each stream: counters and partial sums that its launches share."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import cupy

WORKSPACE_BYTES = 32 * 2**20
"""The bytes for partial sums in each stream's workspace; a configuration that needs more is not legal."""
COUNTERS = 4096
"""The number of counters: the largest number of output tiles that split-K can share between CTAs."""
COUNTER_BYTES = 4 * COUNTERS
"""The bytes of the counters. They come first in a workspace; every kernel leaves them zero for the next."""

PER_THREAD_STREAM = 2
"""The handle cudaStreamPerThread: the default stream of the calling thread."""


def allocate_zeros(nbytes: int) -> cupy.ndarray:
    """Return zero-filled memory on the current device that any stream may use, also during stream capture."""
    import cupy

    # The memset runs on its own stream and is complete on return: no capture records it, and no stream races with it.
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        memory = cupy.zeros(nbytes, cupy.uint8)
    stream.synchronize()
    return memory


_workspaces: dict[tuple[int, int, int], tuple[cupy.ndarray, int]] = {}
_workspaces_lock = threading.Lock()


def workspace_address(index: int, stream: int) -> int:
    """Return the address of a stream's workspace on GPU ``index``, which must be current; allocate it at first use.

    Launches on one stream run one after another and can share a workspace; those of two streams cannot. A workspace is
    never freed or moved, because a captured graph may hold its address.
    """
    key = index, stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0
    found = _workspaces.get(key)
    if found is None:
        with _workspaces_lock:
            found = _workspaces.get(key)
            if found is None:
                memory = allocate_zeros(COUNTER_BYTES + WORKSPACE_BYTES)
                found = _workspaces[key] = memory, int(memory.data.ptr)
    return found[1]
