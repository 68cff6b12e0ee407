# SPDX-License-Identifier: Apache-2.0
"""What every operation needs of CuPy: arrays, their addresses, and memory for partial sums."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

from cupy_awq.check import Array, is_device_array
from cupy_awq.kernels.problem import COUNTERS, WORKSPACE_BYTES
from cupy_awq.launch import Launcher
from cupy_awq.launch_plan import LaunchPlan

if TYPE_CHECKING:
    import cupy

ALIGNMENT = 16
"""Bytes that the widest access moves at once."""


def as_cupy(a: Any) -> Any:
    """``a`` as a CuPy array of the same memory if it lies on a GPU, else ``a`` itself."""
    if type(a).__module__.startswith("cupy") or not is_device_array(a):
        return a
    import cupy

    return cupy.asarray(a) if hasattr(a, "__cuda_array_interface__") else cupy.from_dlpack(a)


def on_device(index: int) -> contextlib.AbstractContextManager[Any]:
    """Makes the GPU of the arrays the current one, if it is not."""
    import cupy

    if cupy.cuda.runtime.getDevice() == index:
        return contextlib.nullcontext()
    return cupy.cuda.Device(index)


def aligned(*arrays: Array | None) -> bool:
    """Whether all arrays start at, and step along their rows by, multiples of 16 bytes."""
    for a in arrays:
        if a is not None and (a.data.ptr | (a.strides[0] if a.shape[0] > 1 else 0)) % ALIGNMENT:
            return False
    return True


def row_stride(a: Array | None) -> int:
    """The step from one row of a matrix to the next, in elements."""
    return 0 if a is None else int(a.strides[0]) // a.dtype.itemsize


def address(a: Array | None) -> int:
    return 0 if a is None else int(a.data.ptr)


@functools.lru_cache(maxsize=4096)
def launcher(plan: LaunchPlan, index: int) -> Launcher:
    """The launcher of a plan on the GPU ``index``, which must be current."""
    return Launcher(plan)


_workspaces: dict[tuple[int, int], tuple[cupy.ndarray, cupy.ndarray]] = {}
_workspaces_lock = threading.Lock()


def workspace(index: int, stream: int) -> tuple[int, int]:
    """Addresses of the partial sums and of the counters that belong to a stream; allocated at its first use.

    Launches of one stream follow each other, so they can share them; those of two streams cannot.
    """
    import cupy

    found = _workspaces.get((index, stream))
    if found is None:
        with _workspaces_lock:
            found = _workspaces.setdefault(
                (index, stream),
                (cupy.empty(WORKSPACE_BYTES, cupy.uint8), cupy.zeros(COUNTERS, cupy.uint32)),
            )
    return found[0].data.ptr, found[1].data.ptr
