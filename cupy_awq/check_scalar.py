# SPDX-License-Identifier: Apache-2.0
"""Validation of scalar arguments: integers, flags, scales and shapes.

The functions and their error messages have the form that `cupy_awq.check` describes.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

INT32_MAX = 2**31 - 1
"""The largest size of an axis: kernels index with int32."""
MAX_AXES = 32
"""The largest number of axes that CuPy supports."""


def shorten(value: object) -> str:
    """Return the repr of an argument for error messages, or a short description if the repr is long or fails.

    >>> shorten(10**400)
    'an integer of 1329 bits'
    """
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, (type, np.generic)):
        return f"an array {type(value).__name__}"
    try:
        text = repr(value)
    except Exception:  # a class may raise any error in __repr__, and Python raises ValueError for huge integers
        text = ""
    return text if 0 < len(text) <= 100 else type(value).__name__


def validate_integer(value: Any, name: str, least: int, most: int = INT32_MAX) -> int:
    """Return ``value``, a Python or NumPy integer from ``least`` to ``most``, as an int.

    Raises TypeError for any other type, including bool, and ValueError for an integer out of range. As in all functions
    of this module, ``name`` is the name of the argument for the error message.

    >>> validate_integer(np.int64(3), "m", 1)
    3
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {shorten(value)}")
    if not least <= value <= most:
        limits = f"at least {least}" if value < least else f"at most {most}"
        raise ValueError(f"{name}: expected {limits}, got {shorten(value)}")
    return int(value)


def validate_flag(value: Any, name: str) -> bool:
    """Return ``value``, a Python or NumPy bool, as a bool. Raises TypeError for any other type.

    >>> validate_flag(np.True_, "symmetric")
    True
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {shorten(value)}")
    return bool(value)


def validate_positive_scale(value: Any, name: str) -> np.float32:
    """Return ``value``, a positive number, as float32.

    Raises TypeError for anything but a real number, ValueError for a number that is not positive and normal in float32.

    >>> validate_positive_scale(2, "x_scale")
    np.float32(2.0)
    """
    is_real = isinstance(value, (numbers.Real, np.floating)) and not isinstance(value, (bool, np.bool_))
    if not is_real:
        raise TypeError(f"{name}: expected a number, got {shorten(value)}")
    limits = np.finfo(np.float32)
    try:
        number = float(value)
    except OverflowError:  # the integer is beyond the range of float64
        number = math.inf
    if not float(limits.tiny) <= number <= float(limits.max):
        raise ValueError(f"{name}: expected a number from {limits.tiny:.4g} to {limits.max:.4g}, got {shorten(value)}")
    return np.float32(number)


def validate_shape(value: tuple[Any, ...], name: str) -> tuple[int, ...]:
    """Return ``value``, a shape, as a tuple of ints.

    Raises TypeError unless all sizes are integers, ValueError for more than `MAX_AXES` axes or a size that is negative
    or above `INT32_MAX`.

    >>> validate_shape((2, np.int64(32)), "x")
    (2, 32)
    """
    if len(value) > MAX_AXES:
        raise ValueError(f"{name}: expected a shape of at most {MAX_AXES} axes, got {len(value)}")
    return tuple(validate_integer(size, name, 0) for size in value)


def validate_group_size(k: int, group_size: Any) -> int:
    """Return the number of rows of W [K, N] per group: ``group_size``, or K if ``group_size`` is -1.

    Raises TypeError unless ``group_size`` is an integer, ValueError unless it is -1 or a divisor of K.

    >>> validate_group_size(4096, -1)
    4096
    """
    g = validate_integer(group_size, "group_size", -INT32_MAX)
    if g == -1:
        return k
    if g < 1 or k % g:
        raise ValueError(f"group_size: expected a divisor of K = {k}, or -1 for K itself, got {shorten(g)}")
    return g
