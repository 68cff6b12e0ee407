# SPDX-License-Identifier: Apache-2.0
"""Device selection by ordinal, and out-of-memory errors."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from types import NoneType, TracebackType
from typing import Any

import numpy as np

from cupy_awq.check import HOST, Array

OUT_OF_MEMORY = (
    "Out of memory allocating",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""The prefixes of the out-of-memory messages of CuPy, the CUDA runtime, the driver and cuBLAS."""


STAGED_VALUES = 1 << 23
"""The number of elements that `copy_to` copies at a time."""


def resolve(device: Any = None) -> int:
    """Return the ordinal of the GPU that ``device`` selects, or ``check.HOST`` for the CPU.

    Args:
        device: "cpu"; "cuda" or "cuda:0", the first GPU, "cuda:1", and so on; an ordinal, also as text; a
            ``cupy.cuda.Device``; or None, which selects CuPy's current GPU, or the CPU if CuPy has no usable GPU.

    Raises:
        TypeError: ``device`` is none of these types.
        ValueError: ``device`` is another string, or the GPU does not exist.
        MemoryError: the memory of the GPU is exhausted.

    >>> resolve("cpu")
    -1
    """
    index = getattr(device, "id", device)  # an ordinal, or a cupy.cuda.Device with the attribute `id`
    if isinstance(device, str):
        if device == "cpu":
            return HOST
        number = device.removeprefix("cuda:") if device != "cuda" else "0"
        if not re.fullmatch(r"[0-9]{1,9}", number):
            raise ValueError(f"device: expected cpu, cuda, cuda:N or the number of a GPU, got {device!r:.80}")
        index = int(number)
    if isinstance(index, bool) or not isinstance(index, (int, np.integer, NoneType)):
        raise TypeError(f"device: expected None, a str, an int or a cupy.cuda.Device, got {type(device).__name__}")
    count = gpu_count()
    if index is None:
        return _current() if count else HOST
    if not count:
        raise ValueError(f"device: expected cpu or None, as CuPy sees no GPU, got {device!r:.80}")
    if not 0 <= index < count:
        raise ValueError(f"device: expected the number of one of the {count} GPUs that CuPy sees, got {device!r:.80}")
    return int(index)


def gpu_count() -> int:
    """Return the number of GPUs that CuPy can use; 0 without CuPy, without a GPU or without a recent enough driver.

    Raises:
        MemoryError: the memory of the GPU is exhausted.
    """
    try:
        import cupy
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if is_out_of_memory(error):
            raise MemoryError(f"GPU: expected enough free memory, got {error}") from error
        return 0  # There is no GPU or no driver, or the driver is too old.


def use_device(index: int) -> AbstractContextManager[Any]:
    """Return a context manager that makes GPU ``index`` CuPy's current device; for ``check.HOST`` it does nothing.

    An out-of-memory error of any CUDA library in the context becomes a MemoryError that names the GPU.
    """
    return nullcontext() if index == HOST else _Current(index)


class _Current:
    """The context manager of `use_device` for a GPU: it switches the current device, and translates errors."""

    def __init__(self, index: int) -> None:
        import cupy

        self._index, self._device = index, cupy.cuda.Device(index)

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._device.__exit__(kind, error, traceback)
        if error is not None and is_out_of_memory(error):
            raise memory_error(self._index, error) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of CuPy or of a CUDA library is an out-of-memory error."""
    return isinstance(error, (RuntimeError, MemoryError)) and str(error).startswith(OUT_OF_MEMORY)


def memory_error(index: int, error: object) -> MemoryError:
    """Return a MemoryError which says that the memory of GPU ``index`` is exhausted; ``error`` is the cause."""
    return MemoryError(f"GPU {index}: expected enough free memory, got: {error}")


def to_device(array: Array, index: int, dtype: Any = None) -> Array:
    """Return a copy of a NumPy array on GPU ``index``, or the array itself for ``check.HOST``.

    A copy has the dtype ``dtype``, or that of the array for None. An array on the GPU is copied only to convert it.
    """
    if index == HOST:
        return array
    import cupy

    with use_device(index):
        if isinstance(array, cupy.ndarray):
            return array.astype(dtype or array.dtype, copy=False)
        out = cupy.empty(array.shape, dtype or array.dtype)
        copy_to(out, array)
        return out


def copy_to(out: Array, array: Array) -> None:
    """Copy an array to a contiguous array on the current GPU, converted to its dtype.

    Unlike ``cupy.asarray``, the function takes no page-locked memory of a NumPy array's size, which CuPy would keep. It
    converts `STAGED_VALUES` elements at a time.
    """
    import cupy

    if isinstance(array, cupy.ndarray):
        out[...] = array
        return
    source, target = array.reshape(-1), out.reshape(-1)
    for i in range(0, source.size, STAGED_VALUES):
        target[i : i + STAGED_VALUES].set(source[i : i + STAGED_VALUES].astype(out.dtype, copy=False))
        cupy.cuda.get_current_stream().synchronize()  # a GPU may read memory of the CPU after `set` has returned


def check_status(status: Any, function: str, detail: str = "") -> None:
    """Raise RuntimeError, or MemoryError for exhausted memory, if a function returned the status of an error.

    The function is one of the CUDA driver or of NVRTC.
    """
    if status == 0:
        return
    if status.name in OUT_OF_MEMORY:
        raise memory_error(_current(), f"{status.name} of {function}")
    raise RuntimeError(f"{function}: expected success, got {status.name}{detail}")


def device_name(index: int) -> str:
    """Return the model name of GPU ``index``, or "CPU" and its architecture for ``check.HOST``."""
    if index == HOST:
        import platform

        return f"CPU ({platform.machine()})"
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(index)["name"].decode())


def _current() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())
