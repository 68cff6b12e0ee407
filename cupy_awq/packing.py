# SPDX-License-Identifier: Apache-2.0
"""Packing of 4- and 8-bit integers into 32-bit words: AWQ's INT4 order, and an INT8 order for conversion by PRMT.

`round_once` rounds float64 values to 16 bits.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array

PACK_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column (0..7 within the word) that each nibble holds; nibble p is bits 4p..4p+3."""

UNPACK_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble that holds each column (0..7 within the word): the inverse of `PACK_ORDER`."""

INT8_ORDER = (0, 2, 1, 3)
"""The element (0..3 within the word) that each byte holds. This permutation is its own inverse."""

SYMMETRIC = 0x88888888
"""The word that packs eight zero points of 8, the zero point of a symmetric weight."""


def namespace(a: Array) -> Any:
    """Return the module ``numpy`` or ``cupy`` that an array belongs to, without importing CuPy.

    >>> namespace(np.zeros(3)).__name__
    'numpy'
    """
    return np if isinstance(a, np.ndarray) else sys.modules["cupy"]


def to_host(a: Array) -> Any:
    """Return a NumPy or CuPy array as a NumPy array; the copy of a CuPy array synchronizes with its stream.

    >>> to_host(np.arange(3)).tolist()
    [0, 1, 2]
    """
    return a if isinstance(a, np.ndarray) else a.get()


def find_maximum(a: Array) -> Any:
    """Return the largest element of an array, as a NumPy scalar.

    CuPy takes 5 s to compile a reduction over all axes, but a fraction of a second for one over the first axis, so only
    the first axis is reduced on the GPU, and the others on the host.

    >>> int(find_maximum(np.arange(6).reshape(2, 3)))
    5
    """
    return to_host(a.max(axis=0, keepdims=True)).max()


def is_finite(a: Array) -> bool:
    """Return whether all elements of an array of floats are finite, reducing the axes like `find_maximum`.

    >>> is_finite(np.array([1.0, np.inf]))
    False
    """
    return bool(to_host(namespace(a).isfinite(a).all(axis=0, keepdims=True)).all())


def pack_int4(codes: Array, /) -> Array:
    """Pack codes, uint8 [..., N] from 0 to 15, into words, int32 [..., N/8], in AWQ order.

    Args:
        codes: a NumPy or CuPy array; N divisible by 8.

    Raises:
        TypeError: codes is not a uint8 array.
        ValueError: N is not divisible by 8, or a code exceeds 15.

    >>> [hex(word) for word in pack_int4(np.arange(8, dtype=np.uint8))]
    ['0x75316420']
    """
    check.validate_packable(codes, "codes", check.UINT8, 8)
    if codes.size and (top := int(find_maximum(codes))) > 15:
        raise ValueError(f"codes: expected values from 0 to 15, got {top}")
    words = namespace(codes).zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for column, nibble in enumerate(UNPACK_ORDER):
        words |= codes[..., column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


def unpack_int4(words: Array, /) -> Array:
    """Unpack words in AWQ order, int32 [..., N/8], into codes, uint8 [..., N]: the inverse of `pack_int4`.

    Args:
        words: a NumPy or CuPy array.

    Raises:
        TypeError: words is not an int32 array.
        ValueError: words has no axis.

    >>> unpack_int4(np.array([0x75316420], np.int32))
    array([0, 1, 2, 3, 4, 5, 6, 7], dtype=uint8)
    """
    check.validate_packable(words, "words", check.INT32, 1)
    codes = namespace(words).empty((*words.shape, 8), np.uint8)
    for column, nibble in enumerate(UNPACK_ORDER):
        codes[..., column] = (words >> np.int32(4 * nibble)) & np.int32(15)  # the mask clears the sign extension
    return codes.reshape(*words.shape[:-1], 8 * words.shape[-1])


def pack_int8(values: Array, /) -> Array:
    """Pack values, int8 [..., N], into words, int32 [..., N/4], as bytes value + 128 in the order `INT8_ORDER`.

    A kernel can convert two elements with one PRMT instruction: a byte b with 0x64 above it is the float16 1024 + b.

    Args:
        values: a NumPy or CuPy array; N divisible by 4.

    Raises:
        TypeError: values is not an int8 array.
        ValueError: N is not divisible by 4.

    >>> hex(pack_int8(np.array([-128, -1, 0, 127], np.int8)).view(np.uint32)[0])
    '0xff7f8000'
    """
    check.validate_packable(values, "values", check.INT8, 4)
    words = namespace(values).zeros((*values.shape[:-1], values.shape[-1] // 4), np.uint32)
    for byte, element in enumerate(INT8_ORDER):
        biased = values[..., element::4].view(np.uint8) ^ np.uint8(128)  # XOR with 128 adds 128 modulo 256
        words |= biased.astype(np.uint32) << np.uint32(8 * byte)
    return words.view(np.int32)


def unpack_int8(words: Array, /) -> Array:
    """Unpack words, int32 [..., N/4], into values, int8 [..., N]: the inverse of `pack_int8`.

    Args:
        words: a NumPy or CuPy array.

    Raises:
        TypeError: words is not an int32 array.
        ValueError: words has no axis.

    >>> unpack_int8(np.array([-8421376], np.int32))  # 0xff7f8000
    array([-128,   -1,    0,  127], dtype=int8)
    """
    check.validate_packable(words, "words", check.INT32, 1)
    values = namespace(words).empty((*words.shape, 4), np.int8)
    for byte, element in enumerate(INT8_ORDER):
        values[..., element] = ((words >> np.int32(8 * byte)) & np.int32(255)) - np.int32(128)
    return values.reshape(*words.shape[:-1], 4 * words.shape[-1])


def round_once(a: Array, dtype: np.dtype[Any]) -> Array:
    """Return `a` converted to `dtype`, rounded once to nearest, ties to even."""
    if a.dtype == np.float64 and dtype == check.BFLOAT16:
        # ml_dtypes rounds to float32 first, and rounding to nearest twice can give a wrong result. With round-to-odd as
        # the first rounding (truncate, and set the last bit if inexact), the second one is correct.
        short = a.astype(np.float32)
        bits = short.view(np.uint32)
        away = np.abs(short) > np.abs(a)
        bits -= away
        bits |= short != a
        a = short
    return a.astype(dtype, copy=False)
