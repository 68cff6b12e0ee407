# SPDX-License-Identifier: Apache-2.0
"""Device selection by ordinal: resolve a user's choice, make a GPU current, copy arrays to a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cupy_awq.check import HOST, Array


def resolve(device: Any = None) -> int:
    """Return the ordinal of the GPU that ``device`` selects, or ``check.HOST`` for the CPU.

    Args:
        device: an ordinal or a ``cupy.cuda.Device``; "cpu"; or None for CuPy's current GPU, or the CPU if CuPy has no
            usable GPU.

    Raises:
        TypeError: ``device`` has another type.
        ValueError: ``device`` is another string, or the GPU does not exist.

    >>> resolve("cpu")
    -1
    """
    if isinstance(device, str):
        if device == "cpu":
            return HOST
        raise ValueError(f"device: expected 'cpu', a GPU's number or None, got {device!r}")
    index = getattr(device, "id", device)  # the attribute of cupy.cuda.Device
    if index is not None and type(index) is not int:
        raise TypeError(f"device: expected None, 'cpu', an int or a cupy.cuda.Device, got {type(device).__name__}")
    count = gpu_count()
    if index is None:
        return _current() if count else HOST
    if not 0 <= index < count:
        raise ValueError(f"device: expected the number of one of the {count} GPUs that CuPy sees, got {index}")
    return index


def gpu_count() -> int:
    """Return the number of GPUs that CuPy can use; 0 without CuPy or a driver."""
    try:
        import cupy
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or one that is too old
        return 0


def use_device(index: int) -> AbstractContextManager[Any]:
    """Return a context manager that makes GPU ``index`` CuPy's current device; for ``check.HOST`` it does nothing."""
    if index == HOST:
        return nullcontext()
    import cupy

    device: AbstractContextManager[Any] = cupy.cuda.Device(index)
    return device


def to_device(array: Array, index: int) -> Array:
    """Return a copy of a NumPy array on GPU ``index``, or the array itself for ``check.HOST``."""
    if index == HOST:
        return array
    import cupy

    with use_device(index):
        return cupy.asarray(array)


def device_name(index: int) -> str:
    """Return the model name of GPU ``index`` for table headings, or the CPU's architecture for ``check.HOST``."""
    if index == HOST:
        import platform

        return f"CPU ({platform.machine()})"
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(index)["name"].decode())


def _current() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())
