# SPDX-License-Identifier: Apache-2.0
"""Views of any library's GPU arrays as CuPy arrays, and their memory layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupy_awq.check import Array, is_device_array
from cupy_awq.runtime import placement


def views(**arrays: Any) -> list[Any]:
    """Each array as a CuPy array of the same memory if it lies on a GPU; all else as it is, for `check` to judge.

    Raises:
        TypeError: an array of a GPU that CuPy cannot view.
        ValueError: a null pointer, or an ``out`` that its library calls read-only.
    """
    return [_view(a, name) for name, a in arrays.items()]


def _view(a: Any, name: str) -> Any:
    if a is None or isinstance(a, np.ndarray) or type(a).__module__.startswith("cupy") or not is_device_array(a):
        return a
    import cupy

    interface = getattr(a, "__cuda_array_interface__", None)
    try:
        if interface is None:
            return cupy.from_dlpack(a)
        pointer, read_only = interface["data"]
        if pointer and not (read_only and name == "out"):
            # An interface that names no stream leaves open when the array's values are there; DLPack waits for them.
            if interface.get("stream") is None and hasattr(a, "__dlpack__"):
                return cupy.from_dlpack(a)
            # CuPy would copy what is not on the current device.
            with placement.use_device(cupy.cuda.runtime.pointerGetAttributes(pointer).device):
                return cupy.asarray(a)
        empty = 0 in interface["shape"]
    except Exception as error:  # whatever a foreign library or CuPy raises
        raise TypeError(f"{name}: expected an array that CuPy can view, got {type(a).__name__}: {error}") from error
    if pointer:
        raise ValueError(f"{name}: expected a writable array, got a read-only {type(a).__name__}")
    if not empty:
        raise ValueError(f"{name}: expected an array in memory, got a {type(a).__name__} with a null pointer")
    return cupy.empty(interface["shape"], interface["typestr"])


def address(a: Array | None) -> int:
    return 0 if a is None else int(a.data.ptr)


def aligned(*arrays: Array | None) -> bool:
    """Whether all arrays start at, and step along their rows by, multiples of what the widest access moves."""
    return all(a is None or (a.data.ptr | _row_bytes(a)) % width(a) == 0 for a in arrays)


def width(a: Array) -> int:
    """Bytes of four words or of eight values."""
    return 32 if a.dtype == np.float32 else 16


def _row_bytes(a: Array) -> int:
    if rows(a) == 1:
        return 0
    step = row_step(a)
    return int(a.strides[0] if step is None else step * a.dtype.itemsize)


def layout(a: Array | None) -> Any:
    """All of a CuPy array that checks and kernels depend on; equal for arrays that one launch can serve.

    Raises AttributeError for an array of another library, or ValueError, as NumPy's of bfloat16 do.
    """
    if a is None:
        return None
    data = a.data
    return a.shape, a.strides, a.dtype, data.device_id, data.ptr % 32


def row_step(a: Array) -> int | None:
    """Elements from one row of [..., N] to the next, if each row is contiguous and one step leads through all of them.

    >>> x = np.zeros((4, 6, 8), np.float16)
    >>> row_step(x), row_step(x[:, 0]), row_step(x[..., 2:4]), row_step(x[:, :3]), row_step(x[..., ::2])
    (8, 48, 8, None, None)
    """
    (*leading, n), (*strides, last) = a.shape, a.strides
    size = a.dtype.itemsize
    if n > 1 and last != size:
        return None
    step = None
    expected = 0
    for count, stride in zip(reversed(leading), reversed(strides), strict=True):
        if count == 1:
            continue
        if step is None:
            step = stride
        elif stride != expected:
            return None
        expected = stride * count
    if step is None:
        return int(n)
    return None if step < 0 or step % size else int(step // size)


def readable_rows(a: Array) -> bool:
    """Whether kernels can read the rows of [..., N] where they are, as fast as they could read a copy.

    Rows that overlap are not among them: a tensor map has none.
    """
    step = row_step(a)
    apart = step is not None and (rows(a) == 1 or step >= a.shape[-1])
    return apart and (aligned(a) or a.shape[-1] * a.dtype.itemsize % width(a) != 0)


def rows(a: Array) -> int:
    """M of [..., N]."""
    return math.prod(a.shape[:-1])


def row_stride(a: Array | None) -> int:
    """Elements from one row of a matrix to the next, with any sign; 0 for no matrix."""
    return 0 if a is None else int(a.strides[0]) // a.dtype.itemsize
