# SPDX-License-Identifier: Apache-2.0
"""`quantize`: quantization of a dense weight to 4 bits, by rounding to nearest or with calibration inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq import check, check_scalar
from cupy_awq.check import Array, StridedArray
from cupy_awq.packing import is_finite, namespace, pack_int4
from cupy_awq.quantization import MomentSum, Recipe, quantize_rows
from cupy_awq.quantization.grid import fit_grid
from cupy_awq.weight import PackedWeight

_BLOCK = 1 << 22
"""The number of weights that are quantized at a time, which bounds the memory for float copies."""


def quantize(
    w: StridedArray,
    /,
    *,
    group_size: int = 128,
    bits: int = 4,
    symmetric: bool = False,
    inputs: Array | None = None,
) -> PackedWeight:
    """Quantize a dense weight W [K, N] to 4 bits, with one scale and zero point per column and group of rows.

    Each scale s is first rounded to its dtype. Zero points z and codes q are computed with the rounded scale:

    - asymmetric: s = (max - min) / 15, z = round(-min / s), q = round(w / s) + z, where max and min are taken over the
      group and 0. (AutoAWQ's quantizer does not include 0, and clips groups whose weights have one sign.)
    - symmetric: z = 8 (stored), s = max(max / 7, -min / 8), the smallest scale for which [-8 s, 7 s] covers the group.

    The error |W - dequantize(...)| is at most s/2, plus 1% of s (bfloat16: 6%) for the rounding of s. It is at most s
    where s is a subnormal float16 number, or where the outermost code would exceed the range of the scales' dtype. A
    group whose weights are all 0 has the smallest scale and dequantizes to 0.

    Args:
        w: a NumPy or CuPy array, float16, bfloat16, float32 or float64 [K, N] with any strides; N divisible by 8.
        group_size: the number of rows of W per group, a divisor of K; -1 means K.
        bits: the number of bits per code; only 4 is supported.
        symmetric: whether every zero point is 8.
        inputs: calibration inputs of the layer, floats [..., K] on the device of `w`, for which the error of the output
            is minimized instead of that of W (see `cupy_awq.quantization`); None to round to nearest.

    Returns:
        The quantized weight on the device of `w`. Its scales are bfloat16 for a bfloat16 `w`, else float16.

    Raises:
        TypeError: w is not an array of floats, or group_size is not an integer.
        ValueError: a shape, group size or number of bits is not supported; w or inputs contain NaN or infinity, or w
            needs a scale beyond the range of the scales' dtype.

    >>> w = np.linspace(-1, 2, 32, dtype=np.float32).reshape(4, 8)
    >>> weight = quantize(w, group_size=4)
    >>> weight
    PackedWeight(K=4, N=8, group_size=4, float16, packed zeros, 36 B)
    >>> from cupy_awq.reference import dequantize
    >>> bool(np.max(np.abs(dequantize(weight.qweight, weight.scales, weight.qzeros) - w)) < 0.09)
    True
    """
    k, n = check.validate_dense_weight(w)
    if not isinstance(bits, (int, np.integer)) or bits != 4:
        raise ValueError(f"bits: expected 4, got {check_scalar.shorten(bits)}")
    symmetric = check_scalar.validate_flag(symmetric, "symmetric")
    group_size = check_scalar.validate_group_size(k, group_size)
    groups = k // group_size
    xp = namespace(w)
    scale_dtype = check.BFLOAT16 if w.dtype == check.BFLOAT16 else check.FLOAT16
    if inputs is not None:
        recipe = Recipe(group_size, symmetric=symmetric, scale_dtype=scale_dtype)
        return _quantize_calibrated(w, inputs, recipe)
    qweight = xp.empty((k, n // 8), np.int32)
    scales = xp.empty((groups, n), scale_dtype)
    qzeros = xp.empty((groups, n // 8), np.int32)
    step_g = max(1, _BLOCK // (group_size * n))
    step_n = n if group_size * n <= _BLOCK else max(8, _BLOCK // group_size // 8 * 8)
    for g in range(0, groups, step_g):
        rows = slice(g * group_size, (g + step_g) * group_size)
        for column in range(0, n, step_n):
            columns = slice(column, column + step_n)
            words = slice(column // 8, (column + step_n) // 8)
            block = w[rows, columns]
            block = block.reshape(-1, group_size, block.shape[1])
            codes, s, zeros = _quantize_groups(block, scale_dtype, symmetric)
            qweight[rows, words] = pack_int4(codes.reshape(-1, codes.shape[2]))
            scales[g : g + step_g, columns] = s
            qzeros[g : g + step_g, words] = pack_int4(zeros)
    return PackedWeight(qweight, scales, qzeros)


def _quantize_calibrated(w: Any, inputs: Array, recipe: Recipe) -> PackedWeight:
    dense = namespace(w).ascontiguousarray(w.T).astype(np.float32)
    if not is_finite(dense):
        raise ValueError("w: expected finite values, got NaN or infinity")
    _check_inputs(inputs, dense.shape[1], w)
    sums = MomentSum()
    sums.add(inputs)
    return quantize_rows(dense, sums.mean(), recipe).pack()


def _check_inputs(inputs: Array, k: int, w: Array) -> None:
    """Raise TypeError or ValueError unless ``inputs`` are floats [..., K], not empty, on the device of ``w``."""
    if check.device_id(inputs, "inputs") != check.device_id(w, "w"):
        raise TypeError("inputs: expected an array on the device of w, got one on another device")
    dtypes = *check.FLOATS, check.FLOAT64
    if inputs.dtype not in dtypes:
        raise TypeError(f"inputs: expected {', '.join(map(str, dtypes))} [..., K], got {check.describe(inputs)}")
    if inputs.ndim == 0 or inputs.shape[-1] != k or 0 in inputs.shape:
        found = check.describe(inputs)
        raise ValueError(f"inputs: expected [..., K] with K = {k} and at least one token, got {found}")


def _quantize_groups(w: Array, scale_dtype: np.dtype[Any], symmetric: bool) -> tuple[Array, Array, Array]:
    """Quantize groups of weights, ``w`` [groups, group_size, n].

    Returns:
        The codes, uint8 [groups, group_size, n], the scales, ``scale_dtype`` [groups, n], and the zero points, uint8
        [groups, n].
    """
    w = w.astype(np.float64 if w.dtype == np.float64 else np.float32)
    high, low = w.max(axis=1).astype(np.float64), w.min(axis=1).astype(np.float64)
    if not (is_finite(high) and is_finite(low)):  # NaN and infinity in w propagate to max or min
        raise ValueError("w: expected finite values, got NaN or infinity")
    grid = fit_grid(low, high, scale_dtype, symmetric=symmetric)
    codes = grid.expand(1, w.dtype).nearest_codes(w)
    return codes.astype(np.uint8), grid.scale, grid.zero.astype(np.uint8)
