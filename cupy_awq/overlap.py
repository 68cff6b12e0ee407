# SPDX-License-Identifier: Apache-2.0
"""The memory of NumPy and CuPy arrays: where it begins and ends, and whether arrays or elements overlap."""

from __future__ import annotations

from typing import Any

import numpy as np


def byte_span(a: Any) -> tuple[int, int]:
    """Return where the memory of an array begins and ends, in bytes from its first element.

    >>> byte_span(np.zeros((3, 4), np.int16)), byte_span(np.zeros((3, 4), np.int16)[::-1])
    ((0, 24), (-16, 8))
    """
    if 0 in a.shape:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(a.shape, a.strides, strict=True)]
    return sum(min(0, r) for r in reach), sum(max(0, r) for r in reach) + a.dtype.itemsize


def shares_elements(a: Any) -> bool:
    """Return whether elements of an array may share memory: an axis has a smaller stride than its elements' extent.

    >>> shares_elements(np.zeros((3, 4))[:, ::-2].T), shares_elements(np.broadcast_to(np.zeros(4), (3, 4)))
    (False, True)
    """
    if a.flags.c_contiguous or 0 in a.shape:
        return False
    extent = a.dtype.itemsize  # the bytes of one element, then of all elements along the axes so far
    for stride, size in sorted((abs(stride), size) for stride, size in zip(a.strides, a.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def validate_disjoint(out: Any, **inputs: Any) -> None:
    """Raise ValueError if the memory of `out` overlaps that of an input, such as ``qweight=...``; None is ignored.

    The memory of an array extends from its lowest to its highest address. All arrays are on one device.

    >>> validate_disjoint(np.empty(4), w=np.empty(4), bias=None)
    """
    begin, end = _extent(out)
    for name, a in inputs.items():
        if a is not None:
            low, high = _extent(a)
            if low < end and begin < high:
                raise ValueError(f"out: expected memory that does not overlap {name}, got an array that does")


def _extent(a: Any) -> tuple[int, int]:
    """Return the addresses at which the memory of an array begins and ends."""
    address = a.__array_interface__["data"][0] if isinstance(a, np.ndarray) else a.data.ptr
    low, high = (0, a.nbytes) if a.flags.c_contiguous else byte_span(a)  # `byte_span` takes 3 us
    return address + low, address + high
