# SPDX-License-Identifier: Apache-2.0
"""Device memory that launches share: the split-K workspace of each stream, and scratch arrays between two launches."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cupy_awq.runtime import placement

if TYPE_CHECKING:
    import cupy

WORKSPACE_BYTES = 32 * 2**20
"""The size of a workspace's partial sums in bytes; configurations that need more are not legal."""
COUNTERS = 4096
"""The number of counters per workspace; configurations that need more are not legal."""
COUNTER_BYTES = 4 * COUNTERS
"""The size of a workspace's counters in bytes; the counters precede the partial sums and are zero between launches."""

PER_THREAD_STREAM = 2
"""The value of cudaStreamPerThread: the stream handle that stands for the calling thread's default stream."""


def allocate_zeros(nbytes: int, *, on_current_stream: bool = False) -> cupy.ndarray:
    """Return zero-filled device memory, usable from any stream.

    With ``on_current_stream``, which is impossible during stream capture, freed memory returns to CuPy's memory pool
    for later arrays of the current stream. Otherwise, freed memory stays reserved for a stream that no longer exists,
    so only memory that is never freed should be allocated in this way.
    """
    import cupy

    # Wait for the memset, so that other streams see the zeros. By default, the memset runs on a new
    # stream to stay out of a graph that the current stream captures.
    stream = cupy.cuda.get_current_stream() if on_current_stream else cupy.cuda.Stream(non_blocking=True)
    with stream:
        memory = cupy.zeros(nbytes, cupy.uint8)
    stream.synchronize()
    return memory


_workspaces: dict[tuple[int, int, int], tuple[cupy.ndarray, int]] = {}
_workspaces_lock = threading.Lock()


def workspace_address(index: int, stream: int) -> int:
    """Return the address of the workspace of a stream on the current GPU, whose device ordinal is ``index``.

    The workspace is allocated on first use. Launches on one stream run in order, so they can share a workspace;
    launches on different streams cannot. A workspace is never freed, because a captured CUDA graph may contain its
    address.

    Raises:
        MemoryError: the memory of the GPU is exhausted.
    """
    key = index, stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0
    found = _workspaces.get(key)
    if found is None:
        with _workspaces_lock:
            found = _workspaces.get(key)
            if found is None:
                with placement.use_device(index):
                    memory = allocate_zeros(COUNTER_BYTES + WORKSPACE_BYTES)
                found = _workspaces[key] = memory, int(memory.data.ptr)
    return found[1]


_scratch: dict[tuple[int, int, int], list[cupy.ndarray]] = {}


def scratch_array(index: int, stream: int, nbytes: int) -> cupy.ndarray:
    """Return at least ``nbytes`` bytes, uint8, of GPU ``index`` for the launches of this thread on a stream.

    The array passes data from one launch to the next one of the same operation; later operations overwrite it. Like a
    workspace, the array is never freed. Raises MemoryError if the GPU has no memory for it.
    """
    # One array per thread, because other threads may launch on the same stream between the two launches.
    arrays = _scratch.setdefault((index, stream, threading.get_ident()), [])
    if not arrays or arrays[-1].nbytes < nbytes:
        with placement.use_device(index):
            arrays.append(allocate_zeros(1 << (nbytes - 1).bit_length()))
    return arrays[-1]
