# SPDX-License-Identifier: Apache-2.0
"""NumPy semantics of the operations on blocks of INT4 and INT8 codes: exact integers, and float64 around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupy_awq import check
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.int8.arguments import Geometry, Quantized
from cupy_awq.reference import _round

Array = npt.NDArray[Any]
F32 = np.float32

SMALLEST_SCALE = F32(1e-5)
"""Asymmetric blocks whose scale is not above it have scale 1 and their maximum as offset, as in MNN."""
SMALLEST_WEIGHT_SCALE = F32(1e-6)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SMALLEST_FP8_ROW = F32(2.0**-100)
"""Rows are quantized to e4m3 as if their largest value was at least that."""


def quantize(x: Array, block: int, symmetric: bool, rounding: str) -> tuple[Array, Array, Array | None, Array]:
    """As `cupy_awq.int8.quantize_activations`, all in float32, each operation rounded."""
    m, k = x.shape
    blocks = -(-k // block)
    codes, sums = np.empty((m, k), np.int8), np.empty((m, blocks), np.int32)
    scale, offset = np.empty((m, blocks), F32), np.empty((m, blocks), F32)
    for b in range(blocks):
        part = x[:, b * block : (b + 1) * block].astype(F32)
        with np.errstate(all="ignore"):
            if symmetric:
                s, o = np.abs(part).max(1) / F32(127), np.zeros(m, F32)
            else:
                high = part.max(1)
                s = (high - part.min(1)) / F32(255)
                wide = s > SMALLEST_SCALE
                o = np.where(wide, high - F32(127) * s, high)
                s = np.where(wide | ~np.isfinite(s), s, F32(1))
            finite = np.isfinite(s)
            s[~finite] = o[~finite] = np.nan
            ratio = (part - o[:, None]) / s[:, None]
            ratio[~finite | (s == 0)] = 0
        if rounding == "half_even":
            q = np.rint(ratio)
        else:
            q = np.copysign(np.floor(np.abs(ratio.astype(np.float64)) + 0.5), ratio)
        q = np.clip(q, -128, 127).astype(np.int8)
        codes[:, b * block : (b + 1) * block] = q
        scale[:, b], offset[:, b], sums[:, b] = s, o, q.sum(1, dtype=np.int32)
    return codes, scale, None if symmetric else offset, sums


def quantize_fp8(x: Array, unit: int) -> tuple[Array, Array, Array]:
    """x [M, K] as codes of e4m3, uint8 [M, K], a scale [M], and sums [M, units] of what the codes stand for, float32.

    scale = max|x| / 448 and code = e4m3(x * (448 / max|x|)), each operation in float32. A row with an infinity or a NaN
    has scale NaN and codes 0.
    """
    rows = x.astype(F32)
    largest = np.abs(rows).max(1, keepdims=True)
    finite = np.isfinite(largest)
    size = np.where(finite, np.maximum(largest, SMALLEST_FP8_ROW), F32(np.nan))
    values = np.where(finite, rows * (F32(448) / size), F32(0)).astype(E4M3)
    sums = np.add.reduceat(values.astype(np.float64), range(0, x.shape[1], unit), axis=1)
    return values.view(np.uint8), (size / F32(448))[:, 0], sums.astype(F32)


def linear_fp8(
    x: Array, weight: BlockQuantizedWeight, facts: Quantized, bias: Array | None, form: check.Activation, out: Array
) -> Array:
    """As `cupy_awq.int8.linear_fp8`, in float64 but for the codes."""
    codes, scale, sums = quantize_fp8(x, facts.block)
    scales = np.broadcast_to(scale[:, None], sums.shape)
    return gemm(codes.view(E4M3), scales, None, sums, weight, facts, bias, form, out)


def gemm(
    xq: Array,
    x_scale: Array,
    x_offset: Array | None,
    x_sums: Array,
    weight: BlockQuantizedWeight,
    facts: Quantized,
    bias: Array | None,
    form: check.Activation,
    out: Array,
) -> Array:
    """y = sum over blocks of sA*(C*sB + sumA*oB) + oA*(sumB*sB + k*oB), with C = A_q B_q^T and sumB exact integers."""
    codes = weight.codes.reshape(facts.n, facts.k).astype(np.float64) - 2.0 ** (weight.bits - 1)
    rows = xq.astype(np.float64)  # sums below 2**53 are exact
    scales = weight.scale.astype(np.float64)
    offsets = None if weight.offset is None else weight.offset.astype(np.float64)
    y = np.zeros((facts.m, facts.n))
    for b, begin in enumerate(range(0, facts.k, facts.block)):
        end = min(begin + facts.block, facts.k)
        at = begin // weight.block_size
        w = codes[:, begin:end]
        s = x_scale[:, b, None].astype(np.float64)
        y += s * (rows[:, begin:end] @ w.T) * scales[:, at]
        if offsets is not None:
            y += s * x_sums[:, b, None] * offsets[:, at]
        if x_offset is not None:
            column = w.sum(1) * scales[:, at]
            if offsets is not None:
                column = column + (end - begin) * offsets[:, at]
            y += x_offset[:, b, None].astype(np.float64) * column
    return finish(y, bias, form, out)


def conv2d(
    x: Array, weight: BlockQuantizedWeight, sizes: Geometry, bias: Array | None, form: check.Activation, out: Array
) -> Array:
    """As `cupy_awq.int8.conv2d`, in float64."""
    codes = weight.codes.astype(np.float64) - 2.0 ** (weight.bits - 1)
    at = np.arange(weight.shape[3]) // weight.block_size
    values = codes * weight.scale.astype(np.float64)[:, None, None, at]
    if weight.offset is not None:
        values += weight.offset.astype(np.float64)[:, None, None, at]
    y = correlate(x.astype(np.float64), values, sizes, 0.0)
    return finish(y if sizes.nhwc else y.transpose(0, 3, 1, 2), _per_output(bias, sizes), form, out)


def conv2d_int8(
    x: Array,
    codes: Array,
    sizes: Geometry,
    fused: Array,
    multiplier: Array,
    x_zero: int,
    limits: tuple[int, int],
    out: Array,
) -> Array:
    """As `cupy_awq.int8.conv2d_int8`, from its per-channel integers ``fused`` and float32 multipliers."""
    sums = correlate(x.astype(np.float64), codes.astype(np.float64), sizes, float(x_zero))
    v = (sums + fused).astype(F32) * multiplier
    q = np.clip(np.rint(np.clip(v, F32(limits[0]), F32(limits[1]))), -128, 127).astype(np.int8)
    out[...] = q if sizes.nhwc else q.transpose(0, 3, 1, 2)
    return out


def correlate(x: Array, w: Array, sizes: Geometry, fill: float) -> Array:
    """[batch, out height, out width, Co]: w [Co, Kh, Kw, Ci/groups] over x in its layout, ``fill`` around it."""
    pixels = x if sizes.nhwc else x.transpose(0, 2, 3, 1)
    pixels = np.pad(pixels, ((0, 0), *sizes.padding, (0, 0)), constant_values=fill)
    groups = sizes.groups
    split = w.reshape(groups, sizes.outputs // groups, *w.shape[1:])
    y = np.zeros((groups, sizes.batch * sizes.out[0] * sizes.out[1], sizes.outputs // groups))
    for (dy, dx), tap in _taps(pixels, sizes):
        columns = tap.reshape(y.shape[1], groups, w.shape[3]).transpose(1, 0, 2)
        y += columns @ split[:, :, dy, dx].transpose(0, 2, 1)
    return y.transpose(1, 0, 2).reshape(sizes.batch, *sizes.out, sizes.outputs)


def _taps(pixels: Array, sizes: Geometry) -> Iterator[tuple[tuple[int, int], Array]]:
    """The pixels that each tap of the kernel meets."""
    (sy, sx), (wide_y, wide_x), (oh, ow) = sizes.stride, sizes.dilation, sizes.out
    for dy in range(sizes.kernel[0]):
        for dx in range(sizes.kernel[1]):
            top, left = dy * wide_y, dx * wide_x
            yield (dy, dx), pixels[:, top : top + (oh - 1) * sy + 1 : sy, left : left + (ow - 1) * sx + 1 : sx]


def _per_output(bias: Array | None, sizes: Geometry) -> Array | None:
    return bias if bias is None or sizes.nhwc else bias[:, None, None]


def finish(y: Array, bias: Array | None, form: check.Activation, out: Array) -> Array:
    """Bias, activation, and one rounding into ``out``."""
    if bias is not None:
        y = y + bias.astype(np.float64)
    if form.kind == "clamp":
        y = np.clip(y, *form.limits)
    with np.errstate(over="ignore"):
        out[...] = _round(y, out.dtype)
    return out
