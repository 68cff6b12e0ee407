# SPDX-License-Identifier: Apache-2.0
"""Which device to work on, and arrays brought there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cupy_awq.check import HOST, Array


def resolve(device: Any = None) -> int:
    """The number of the GPU that ``device`` means, or ``check.HOST``.

    None is CuPy's current GPU, or the CPU where CuPy or a usable GPU is missing; "cpu" is the CPU; an int or a
    ``cupy.cuda.Device`` is that GPU.

    Raises:
        TypeError: another type.
        ValueError: another string, or a GPU that is not there.

    >>> resolve("cpu")
    -1
    """
    if isinstance(device, str):
        if device == "cpu":
            return HOST
        raise ValueError(f"device: expected 'cpu', a GPU's number or None, got {device!r}")
    index = getattr(device, "id", device)  # cupy.cuda.Device has its number there
    if index is not None and type(index) is not int:
        raise TypeError(f"device: expected None, 'cpu', an int or a cupy.cuda.Device, got {type(device).__name__}")
    count = gpu_count()
    if index is None:
        return _current() if count else HOST
    if not 0 <= index < count:
        raise ValueError(f"device: expected the number of one of the {count} GPUs that CuPy sees, got {index}")
    return index


def gpu_count() -> int:
    """GPUs that CuPy can use here; 0 without CuPy or a driver."""
    try:
        import cupy
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or none that is new enough
        return 0


def use_device(index: int) -> AbstractContextManager[Any]:
    """A context in which GPU ``index`` is CuPy's current device; nothing for ``check.HOST``."""
    if index == HOST:
        return nullcontext()
    import cupy

    device: AbstractContextManager[Any] = cupy.cuda.Device(index)
    return device


def to_device(array: Array, index: int) -> Array:
    """A NumPy array on GPU ``index``; the array itself for ``check.HOST``."""
    if index == HOST:
        return array
    import cupy

    with use_device(index):
        return cupy.asarray(array)


def device_name(index: int) -> str:
    """What a headline calls the device: the GPU's name, or the CPU's architecture."""
    if index == HOST:
        import platform

        return f"CPU ({platform.machine()})"
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(index)["name"].decode())


def _current() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())
