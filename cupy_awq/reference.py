# SPDX-License-Identifier: Apache-2.0
"""The NumPy implementation of the operations: the reference for all kernels, and the implementation for the CPU.

For speed, codes are unpacked in plane order instead of column order: the low nibbles of all bytes of a row, followed by
the high nibbles. Plane order takes two contiguous passes over the bytes, column order eight strided passes. Column
i = 4a + 2b + d of a word (a, b, d are bits) is nibble UNPACK_ORDER[i] = 4d + 2a + b, that is, plane b of byte 2d + a.
So the two orders differ by a transposition of the axes (word, a, b, d), which is applied to the scales, the zero points
and the results, but not to the codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq import check, overlap
from cupy_awq.array_types import AnyActivation
from cupy_awq.packing import round_once, unpack_int4, unpack_int8
from cupy_awq.weight import PackedWeight

Array = npt.NDArray[Any]

# The number of weights that are dequantized at a time. _BLOCK, for up to _FEW_ROWS rows of x, fits in the cache of a
# core; _LARGE_BLOCK is for more rows of x, where larger matrix products are faster.
_BLOCK = 1 << 18
_LARGE_BLOCK = 1 << 21
_FEW_ROWS = 8

# An overflow gives infinity or NaN without a warning, as on a GPU.
_quiet = np.errstate(over="ignore", invalid="ignore")


def dequantize(
    qweight: Array, scales: Array, qzeros: Array | None, /, *, dtype: Any = None, out: Array | None = None
) -> Array:
    """Dequantize a weight: W[k, n] = (q[k, n] - z[g, n]) * s[g, n] with g = k // group_size, rounded once to `dtype`.

    Args:
        qweight, scales, qzeros: NumPy arrays as in `PackedWeight`. If qzeros are float offsets o, W = q * s + o.
        dtype: the dtype of W: float16, bfloat16 or float32; None for the dtype of the scales.
        out: an array [K, N] of `dtype` to fill and return, or None.

    Raises:
        TypeError, ValueError: the weight is invalid, as in `PackedWeight`, or dtype or out do not fit.

    >>> qweight = np.array([[0x75316420], [-1]], np.int32)  # codes 0..7, and 15 in each column
    >>> dequantize(qweight, np.full((1, 8), 0.5, np.float16), None)
    array([[-4. , -3.5, -3. , -2.5, -2. , -1.5, -1. , -0.5],
           [ 3.5,  3.5,  3.5,  3.5,  3.5,  3.5,  3.5,  3.5]], dtype=float16)
    """
    weight = PackedWeight(qweight, scales, qzeros)
    to = validate_dequantization(weight, dtype, out)
    return dequantize_validated(weight, np.empty(weight.shape, to) if out is None else out)


def validate_dequantization(weight: PackedWeight, dtype: Any, out: Any) -> np.dtype[Any]:
    """Return the dtype of W, for the arguments of `dequantize`.

    Raises:
        TypeError, ValueError: dtype or out do not fit the weight.
    """
    to = weight.dtype if dtype is None else check.validate_float_dtype(dtype)
    if out is not None:
        check.validate_out(out, weight.shape, to, weight.spec.device)
        overlap.validate_disjoint(out, **weight.tensors)
    return to


@_quiet
def dequantize_validated(weight: PackedWeight, out: Array) -> Array:
    """Dequantize a weight to ``out``, which `validate_dequantization` accepts, and return ``out``."""
    spec, to = weight.spec, out.dtype
    # q * s + o is exact in float64. In float32 it would be rounded, and then rounded again to `dtype`.
    exact = np.float64 if spec.zeros == "float" and to != check.FLOAT32 else np.float32
    _, columns = _orders(spec.n)
    for rows, block in _blocks(weight, _BLOCK, exact):
        out[rows] = round_once(block, to).take(columns, axis=1)
    return out


def matmul(
    x: Array,
    qweight: Array,
    scales: Array,
    qzeros: Array | None,
    /,
    *,
    bias: Array | None = None,
    activation: AnyActivation = None,
    residual: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    batch_invariant: bool = False,
) -> Array:
    """Return y = activation(x @ W + bias) + residual, rounded once to x's dtype.

    W, accumulators and epilogue are float32, which represents (q - z) * s exactly. The activations of a value v are:

        "relu"       max(v, 0); "relu6" clamps to 0 and 6, and (low, high) to its limits; NaN stays NaN
        "silu"       v / (1 + exp(-v))
        "gelu"       v/2 * (1 + tanh(sqrt(2/pi) * (v + 0.044715 * v**3)))
        "swiglu"     silu(gate) * up, where the first half of the columns of x @ W + bias is gate, the second half up

    Args:
        x: float16, bfloat16 or float32 [..., K] with any strides; or uint16 that holds the bits of bfloat16, with
            `dtype=bfloat16`.
        qweight, scales, qzeros: NumPy arrays as in `PackedWeight`.
        bias: float16, bfloat16 or float32 [N], or None.
        activation: None, one of these names, or (low, high).
        residual: an array of y's shape and dtype, any strides, or None.
        out: an array of y's shape and dtype to fill and return, any strides, or None.
        dtype: bfloat16 for a uint16 x; else None or x's dtype.
        batch_invariant: True to make the bits of each row of y independent of the other rows; slower for many rows.

    Returns:
        y [..., N] of x's dtype; [..., N/2] for "swiglu".

    Raises:
        TypeError, ValueError: the weight is invalid, as in `PackedWeight`, or another argument does not fit it.

    >>> qweight = np.array([[0x75316420], [-1]], np.int32)
    >>> matmul(np.array([1, 2], np.float16), qweight, np.full((1, 8), 0.5, np.float16), None, activation=(3.5, 5))
    array([3.5, 3.5, 4. , 4.5, 5. , 5. , 5. , 5. ], dtype=float16)
    """
    weight = PackedWeight(qweight, scales, qzeros)
    product = check.validate_product(
        x, weight.spec, bias=bias, activation=activation, residual=residual, out=out, dtype=dtype
    )
    if out is not None:
        overlap.validate_disjoint(out, **weight.tensors, bias=bias)
    return matmul_validated(x, weight, product, bias, residual, out, batch_invariant)


@_quiet
def matmul_validated(
    x: Array,
    weight: PackedWeight,
    product: check.Product,
    bias: Array | None,
    residual: Array | None,
    out: Array | None,
    batch_invariant: bool,
) -> Array:
    """Compute `matmul` for validated arguments, of which ``product`` is the result of `check.validate_product`."""
    spec = weight.spec
    element, shape, bias_dtype, form = product
    if out is None:
        out = np.empty(shape, x.dtype)
    rows_of_x = x.view(element).astype(np.float32).reshape(-1, spec.k)
    m = len(rows_of_x)
    total = np.zeros((m, spec.n), np.float32)
    if m:
        size = _BLOCK if m <= _FEW_ROWS or batch_invariant else _LARGE_BLOCK
        multiply = multiply_rows if batch_invariant else np.matmul
        for rows, block in _blocks(weight, size, np.float32):
            total += multiply(rows_of_x[:, rows], block)
    y = total if spec.bits == 8 else total.take(_orders(spec.n)[1], axis=1)
    if bias is not None and bias_dtype is not None:
        y += bias.view(bias_dtype)
    y = form(y).reshape(shape)
    if residual is not None:
        y += residual.view(element)
    out.view(element)[...] = round_once(y, element)
    return out


def multiply_rows(x: Array, w: Array) -> Array:
    """Return x @ w, computed by one vector-matrix product per row of x, so that no row affects the bits of another.

    In a matrix-matrix product, BLAS may choose the order of additions by the number of rows.
    """
    y = np.empty((len(x), w.shape[1]), w.dtype)
    row = np.empty(x.shape[1], x.dtype)  # one buffer, so that all rows have the same alignment
    for i in range(len(x)):
        row[:] = x[i]
        y[i] = row @ w
    return y


def dequantize_s4_to_fp16x2(words: Array, /) -> Array:
    """Unpack words in AWQ order, int32 [..., N/8], and return their codes, 0 to 15, as float16 [..., N].

    Raises:
        TypeError, ValueError: words is not an int32 array, or has no axis.

    >>> dequantize_s4_to_fp16x2(np.array([0x75316420], np.int32))
    array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float16)
    """
    codes: Array = unpack_int4(words)
    return codes.astype(np.float16)


def int8_to_fp16(words: Array, /) -> Array:
    """Unpack words packed by `cupy_awq.packing.pack_int8`, int32 [..., N/4], and return float16 values [..., N].

    Raises:
        TypeError, ValueError: words is not an int32 array, or has no axis.

    >>> int8_to_fp16(np.array([-8421376], np.int32))  # 0xff7f8000
    array([-128.,   -1.,    0.,  127.], dtype=float16)
    """
    values: Array = unpack_int8(words)
    return values.astype(np.float16)


def _blocks(weight: PackedWeight, size: int, exact: type[np.floating[Any]]) -> Iterator[tuple[slice, Array]]:
    """Dequantize a weight in consecutive slices of rows; yield (rows, W[rows]).

    W[rows] has the dtype `exact` and its columns are in plane order. A slice has about `size` weights: whole groups, or
    a part of one group. The columns of an 8-bit weight are in column order.
    """
    qweight, scales, qzeros, spec = weight.qweight, weight.scales, weight.qzeros, weight.spec
    k, n, group_size = spec.k, spec.n, spec.group_size
    if spec.bits == 8:
        step = max(1, size // n)
        for start in range(0, k, step):
            some = slice(start, min(k, start + step))
            group = np.arange(some.start, some.stop) // group_size
            w = (qweight[:, some].T.astype(exact) - 128) * scales.T[group].astype(exact)
            yield some, w if qzeros is None else w + qzeros.T[group].astype(exact)
        return
    groups = k // group_size
    words = qweight.reshape(groups, group_size, n // 8)
    planes, _ = _orders(n)
    s = scales.take(planes, axis=1).astype(exact)[:, None]
    offsets = None
    zeros = np.full((groups, 1, 1), 8, np.int8)
    if qzeros is not None and spec.zeros == "packed":
        zeros = _planes(qzeros)[:, None]
    elif qzeros is not None:
        zeros[:] = 0
        offsets = qzeros.take(planes, axis=1).astype(exact)[:, None]
    step_g = max(1, size // (group_size * n))
    step_k = max(1, min(group_size, size // n))
    for g in range(0, groups, step_g):
        some = slice(g, g + step_g)
        for row in range(0, group_size, step_k):
            q = _planes(words[some, row : row + step_k])
            q -= zeros[some]
            w = q.astype(exact)
            w *= s[some]
            if offsets is not None:
                w += offsets[some]
            start = g * group_size + row
            w = w.reshape(-1, n)
            yield slice(start, start + len(w)), w


def _planes(words: Array) -> Array:
    """Unpack little-endian words [..., N/8] into codes, int8 [..., N], in plane order."""
    data = words.view(np.uint8)
    codes = np.empty((*words.shape[:-1], 2, data.shape[-1]), np.uint8)
    np.bitwise_and(data, 15, out=codes[..., 0, :])
    np.right_shift(data, 4, out=codes[..., 1, :])
    return codes.reshape(*words.shape[:-1], -1).view(np.int8)


@lru_cache(maxsize=16)
def _orders(n: int) -> tuple[Array, Array]:
    """Return two permutations of N columns: from column order to plane order, and from plane order to column order."""
    columns = np.arange(n).reshape(n // 8, 2, 2, 2)  # column order: axes (word, a, b, d)
    planes = columns.transpose(2, 0, 3, 1).reshape(n)  # plane order: axes (b, word, d, a)
    return planes, np.argsort(planes)
