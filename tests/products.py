# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of GEMMs: copies to the GPU, and the error bound of each element."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import cupy_awq
from cupy_awq import PackedWeight
from tests.test_reference import float64_epilogue, float64_weight

FLOAT16, BFLOAT16, FLOAT32 = (np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))
ELEMENTS = [FLOAT16, BFLOAT16, FLOAT32]
ZEROS = ["packed", "symmetric", "float"]


def tensors(weight: PackedWeight) -> tuple[Any, Any, Any]:
    """Return a weight's tensors as the arguments (qweight, scales, qzeros) of `cupy_awq.gemm`."""
    return weight.qweight, weight.scales, weight.qzeros


def put(a: Any) -> Any:
    """Return a copy of a NumPy array or a weight on the current GPU."""
    import cupy

    if isinstance(a, PackedWeight):
        return PackedWeight(*map(put, tensors(a)))
    return a if a is None else cupy.asarray(a)


def nan_like(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a GPU array full of NaN, in which elements that a kernel does not write stand out."""
    return put(np.full(shape, np.nan, dtype))


def gemm(x: Any, weight: PackedWeight, **options: Any) -> Any:
    """Return x @ W by `cupy_awq.gemm`, which takes the weight's three tensors."""
    return cupy_awq.gemm(x, *tensors(weight), **options)


def check_product(
    y: Any,
    x: np.ndarray,
    weight: PackedWeight,
    bias: np.ndarray | None = None,
    activation: Any = None,
    residual: np.ndarray | None = None,
    *,
    rounded: bool = False,
) -> None:
    """Check each element of y against the float64 formula, within the error of float32 accumulation and one rounding.

    With ``rounded`` the kernel may also round each weight, code times scale, to x's dtype before it multiplies.
    """
    y = y if isinstance(y, np.ndarray) else y.get()
    k, n = weight.shape
    w = float64_weight(*tensors(weight))
    x64 = x.astype(np.float64).reshape(-1, k)
    added = np.zeros(n) if bias is None else bias.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        v = x64 @ w + added
        # Kernels may accumulate x * q * s and x * o apart, which may cancel in W = q * s + o. So the bound is a sum
        # over more than |q * s|, not over |W|.
        sizes = np.abs(w)
        if weight.spec.zeros == "float":
            sizes = np.abs(float64_weight(weight.qweight, weight.scales, None)) + 8 * np.repeat(
                np.abs(weight.scales.astype(np.float64)), weight.group_size, axis=0
            )
        error = 2.0**-24 * ((8 + 4 * np.sqrt(k)) * (np.abs(x64) @ sizes + np.abs(added)) + 32 * np.abs(v))
        if rounded:
            error += (2.0**-9 if x.dtype == BFLOAT16 else 2.0**-11) * (np.abs(x64) @ sizes)
        if activation == "swiglu":
            (gate, up), (gate_error, up_error) = np.split(v, 2, axis=1), np.split(error, 2, axis=1)
            error = 1.2 * gate_error * (np.abs(up) + up_error) + (np.abs(gate) + 1) * up_error
        elif activation is not None:
            error = 1.2 * error
        more = 0.0 if residual is None else residual.astype(np.float64).reshape(len(x64), -1)
        expected = float64_epilogue(v, activation, more)
        error += 2.0**-23 * np.abs(expected)
        low, high = (expected - error).astype(x.dtype), (expected + error).astype(x.dtype)
    y = y.reshape(expected.shape)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert np.all((low <= y) & (y <= high) | np.isnan(expected)), np.count_nonzero((y < low) | (y > high))
