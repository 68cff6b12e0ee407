# SPDX-License-Identifier: Apache-2.0
"""NumPy and CuPy views of arrays of other libraries, and the layout properties on which kernels depend."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np

from cupy_awq.check import BFLOAT16, HOST, Array, StridedArray, is_device_array
from cupy_awq.runtime import placement


def views(**arrays: Any) -> list[Any]:
    """Return all arguments in order, with arrays of other libraries replaced by NumPy or CuPy views.

    An argument that is not an array is returned unchanged; `cupy_awq.check` rejects it later.

    Raises:
        TypeError: NumPy or CuPy cannot create a view of an array.
        ValueError: an array has a null pointer, or ``out`` is read-only.
    """
    return [_view(a, name) for name, a in arrays.items()]


class _Writable:
    """An object whose ``__array_interface__`` exposes the memory of a read-only NumPy view as writable."""

    def __init__(self, view: np.ndarray[Any, Any]) -> None:
        self.view = view
        self.__array_interface__ = view.__array_interface__ | {"data": (view.ctypes.data, False)}


_TENSOR_OFFSETS = {b"dltensor": 0, b"dltensor_versioned": 32}
"""The offset of the DLTensor in the structure of a capsule, by the name of the capsule (dlpack.h)."""

_DTYPE_OFFSET = 20
"""The offset of the dtype in a DLTensor: code and bits in one byte each, lanes in two."""

_DLPACK_BFLOAT16, _DLPACK_UINT16 = bytes([4, 16, 1, 0]), bytes([1, 16, 1, 0])


class _Bits:
    """A DLPack export that declares bfloat16 as uint16, since NumPy's import does not know bfloat16.

    Args:
        array: the array of another library, in host memory.

    Attributes:
        is_bfloat16: whether the last export was changed.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self._dtype: Any = None

    @property
    def is_bfloat16(self) -> bool:
        return self._dtype is not None

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        api = ctypes.pythonapi
        api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        name = api.PyCapsule_GetName(capsule)
        address = api.PyCapsule_GetPointer(capsule, name) + _TENSOR_OFFSETS[name] + _DTYPE_OFFSET
        dtype = (ctypes.c_char * 4).from_address(address)
        if dtype.raw == _DLPACK_BFLOAT16:
            dtype.raw = _DLPACK_UINT16
            self._dtype = dtype
        return capsule

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def restore(self) -> None:
        """Undo the change: the structure may belong to the array, which may export it again."""
        if self._dtype is not None:
            self._dtype.raw = _DLPACK_BFLOAT16


def _host_view(a: Any, name: str) -> Any:
    """Return a NumPy view of an array in host memory that supports DLPack; raise TypeError if NumPy cannot view it."""
    try:
        bits = _Bits(a)
        view = np.from_dlpack(bits)
        bits.restore()
        if name == "out" and not view.flags.writeable:
            a.__dlpack__()  # This call fails for read-only memory, which DLPack before version 1 cannot express.
            view = np.asarray(_Writable(view))
    except Exception as error:  # foreign code may raise any exception
        raise TypeError(f"{name}: expected an array that NumPy can view, got {type(a).__name__}: {error}") from error
    return view.view(BFLOAT16) if bits.is_bfloat16 else view


def _view(a: Any, name: str) -> Any:
    if a is None or isinstance(a, np.ndarray) or type(a).__module__.startswith("cupy"):
        return a
    if not is_device_array(a):
        return _host_view(a, name) if hasattr(a, "__dlpack__") else a
    import cupy

    interface = getattr(a, "__cuda_array_interface__", None)
    try:
        if interface is None:
            return cupy.from_dlpack(a)
        pointer, read_only = interface["data"]
        if pointer and not (read_only and name == "out"):
            # Without a stream in __cuda_array_interface__, cupy.asarray cannot wait for the kernels that write the
            # array; DLPack's exchange of streams can.
            if interface.get("stream") is None and hasattr(a, "__dlpack__"):
                return cupy.from_dlpack(a)
            # cupy.asarray copies an array that is not on the current device.
            with placement.use_device(cupy.cuda.runtime.pointerGetAttributes(pointer).device):
                return cupy.asarray(a)
        is_empty = 0 in interface["shape"]
    except Exception as error:  # Another library or CuPy may raise any exception.
        raise TypeError(f"{name}: expected an array that CuPy can view, got {type(a).__name__}: {error}") from error
    if pointer:
        raise ValueError(f"{name}: expected a writable array, got a read-only {type(a).__name__}")
    if not is_empty:
        raise ValueError(f"{name}: expected an array in memory, got a {type(a).__name__} with a null pointer")
    return cupy.empty(interface["shape"], interface["typestr"])


def empty(shape: tuple[int, ...], dtype: Any, index: int) -> Array:
    """Return an uninitialized array on GPU ``index``, or a NumPy array for `check.HOST`."""
    if index == HOST:
        return np.empty(shape, dtype)
    import cupy

    with placement.use_device(index):
        return cupy.empty(shape, dtype)


def deliver(y: Array, out: Array | None) -> Array:
    """Return ``out``, after copying ``y`` to it unless both are the same object; return ``y`` if ``out`` is None."""
    if out is None:
        return y
    if out is not y:
        out[...] = y
    return out


def address(a: Array | None) -> int:
    """Return the address of the first element of a CuPy array, or 0 for None."""
    pointer: int = 0 if a is None else a.data.ptr
    return pointer


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, such as "float16"; NumPy's own property takes 2 us.

    >>> dtype_name(np.dtype(np.float16))
    'float16'
    """
    return dtype.name


def vector_bytes(a: StridedArray) -> int:
    """Return the alignment in bytes that vector accesses to ``a`` require: 32 for float32 (8 values), otherwise 16."""
    return 32 if a.dtype == np.float32 else 16


def is_aligned(*arrays: Array | None) -> bool:
    """Return whether the address and the row stride of every array are multiples of its `vector_bytes`."""
    return all(a is None or (a.data.ptr | _row_stride_bytes(a)) % vector_bytes(a) == 0 for a in arrays)


def _row_stride_bytes(a: StridedArray) -> int:
    if count_rows(a) == 1:
        return 0
    stride = row_stride(a)
    return int(a.strides[0] if stride is None else stride * a.dtype.itemsize)


def layout_key(a: Array | None) -> Any:
    """Return a hashable key: all properties of a CuPy array on which validation and kernel selection depend.

    A launch can be reused for all arrays with equal keys. The key of None is None.

    Raises:
        AttributeError: ``a`` is not a CuPy array.
        ValueError: ``a`` is a NumPy array of bfloat16, whose memory NumPy cannot export.
    """
    if a is None:
        return None
    data = a.data
    return a.shape, a.strides, a.dtype, data.device_id, data.ptr % 32


def count_rows(a: StridedArray) -> int:
    """Return M, the number of rows of an array [..., N].

    >>> count_rows(np.zeros((4, 6, 8)))
    24
    """
    return math.prod(a.shape[:-1])


def row_stride(a: StridedArray) -> int | None:
    """Return the row stride of an array [..., N] in elements, or None if kernels cannot read the rows in place.

    Kernels require contiguous rows and the same stride >= 0 between all adjacent rows.

    >>> x = np.zeros((4, 6, 8), np.float16)
    >>> row_stride(x), row_stride(x[:, 0]), row_stride(x[..., 2:4]), row_stride(x[:, :3]), row_stride(x[..., ::2])
    (8, 48, 8, None, None)
    """
    (*leading, n), (*strides, last) = a.shape, a.strides
    size = a.dtype.itemsize
    if n > 1 and last != size:
        return None
    row_bytes = None
    expected = 0
    for count, stride in zip(reversed(leading), reversed(strides), strict=True):
        if count == 1:
            continue
        if row_bytes is None:
            row_bytes = stride
        elif stride != expected:
            return None
        expected = stride * count
    if row_bytes is None:
        return int(n)
    return None if row_bytes < 0 or row_bytes % size else int(row_bytes // size)


def has_readable_rows(a: Array) -> bool:
    """Return whether kernels can read the rows of an array [..., N] in place and a copy would not be better aligned.

    The result is False for overlapping rows, which a tensor map cannot describe.
    """
    stride = row_stride(a)
    is_disjoint = stride is not None and (count_rows(a) == 1 or stride >= a.shape[-1])
    return is_disjoint and (is_aligned(a) or a.shape[-1] * a.dtype.itemsize % vector_bytes(a) != 0)


def leading_dimension(a: StridedArray | None) -> int:
    """Return the row stride of a matrix in elements, which may be negative, or 0 for None.

    >>> leading_dimension(np.zeros((4, 8))[::-2])
    -16
    """
    return 0 if a is None else int(a.strides[0]) // a.dtype.itemsize
