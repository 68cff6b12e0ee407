# SPDX-License-Identifier: Apache-2.0
"""The NumPy reference implementation of convolutions and of int8 and FP8 GEMMs.

Sums of integers are exact; all other arithmetic is float64 unless a docstring states otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupy_awq.activation import Activation
from cupy_awq.block_check import ConvolutionShape, QuantizedProduct
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.packing import round_once
from cupy_awq.reference import _quiet

Array = npt.NDArray[Any]
F32 = np.float32

SMALLEST_SCALE = F32(1e-5)
"""The threshold for asymmetric blocks, as in MNN: a block with no larger scale gets scale 1 and offset max(x)."""
SMALLEST_WEIGHT_SCALE = F32(1e-6)
"""The smallest weight scale of `conv2d_int8`, as in MNN; smaller scales are replaced by this one."""
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SMALLEST_FP8_ROW = F32(2.0**-100)
"""The smallest max|x| from which the e4m3 scale of a row is computed; a smaller maximum is replaced by this one."""


def quantize(x: Array, block_size: int, symmetric: bool, rounding: str) -> tuple[Array, Array, Array | None, Array]:
    """Return the result of `cupy_awq.quantize_activations`, computed in float32, rounding after each operation."""
    m, k = x.shape
    blocks = -(-k // block_size)
    codes, sums = np.empty((m, k), np.int8), np.empty((m, blocks), np.int32)
    scale, offset = np.empty((m, blocks), F32), np.empty((m, blocks), F32)
    for b in range(blocks):
        part = x[:, b * block_size : (b + 1) * block_size].astype(F32)
        with np.errstate(all="ignore"):
            if symmetric:
                s, o = np.abs(part).max(1) / F32(127), np.zeros(m, F32)
            else:
                high = part.max(1)
                low = part.min(1)
                s = (high - low) / F32(255)
                s = np.where(np.isinf(s), high / F32(255) - low / F32(255), s)
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
        codes[:, b * block_size : (b + 1) * block_size] = q
        scale[:, b], offset[:, b], sums[:, b] = s, o, q.sum(1, dtype=np.int32)
    return codes, scale, None if symmetric else offset, sums


def quantize_fp8(x: Array, block_size: int) -> tuple[Array, Array, Array]:
    """Quantize each row of x [M, K] to e4m3.

        scale = max|x| / 448,  code = e4m3(x * (448 / max|x|)), rounded to float32 after each operation

    Returns:
        The bits of the codes, uint8 [M, K]; the scale of each row, float32 [M]; and the sum of the e4m3 values in each
        block of ``block_size`` columns, float32 [M, blocks]. A row with infinity or NaN has scale NaN and codes 0.
    """
    rows = x.astype(F32)
    largest = np.abs(rows).max(1, keepdims=True)
    finite = np.isfinite(largest)
    size = np.where(finite, np.maximum(largest, SMALLEST_FP8_ROW), F32(np.nan))
    values = np.where(finite, rows * (F32(448) / size), F32(0)).astype(E4M3)
    sums = np.add.reduceat(values.astype(np.float64), range(0, x.shape[1], block_size), axis=1)
    return values.view(np.uint8), (size / F32(448))[:, 0], sums.astype(F32)


@_quiet
def linear_fp8(
    x: Array,
    weight: BlockQuantizedWeight,
    product: QuantizedProduct,
    bias: Array | None,
    activation: Activation,
    out: Array,
) -> Array:
    """Compute `cupy_awq.linear_fp8`: quantize x as in `quantize_fp8`, multiply in float64, and write y to ``out``."""
    codes, scale, sums = quantize_fp8(x, product.block_size)
    scales = np.broadcast_to(scale[:, None], sums.shape)
    return gemm(codes.view(E4M3), scales, None, sums, weight, product, bias, activation, out)


@_quiet
def gemm(
    xq: Array,
    x_scale: Array,
    x_offset: Array | None,
    x_sums: Array,
    weight: BlockQuantizedWeight,
    product: QuantizedProduct,
    bias: Array | None,
    activation: Activation,
    out: Array,
) -> Array:
    """Compute `cupy_awq.gemm_int8` in float64 and write y to ``out``.

        y = sum over blocks b of  s_x * (C * s_w + sum_x * o_w) + o_x * (sum_w * s_w + size * o_w)

    In block b, s and o are the scales and offsets, C is the exact integer product of the codes, sum_x and sum_w are the
    sums of the codes, and size is the number of columns.
    """
    codes = weight.codes.reshape(product.n, product.k).astype(np.float64) - 2.0 ** (weight.bits - 1)
    rows = xq.astype(np.float64)  # sums of products of int8 codes are below 2**53, so float64 is exact
    scales = weight.scale.astype(np.float64)
    offsets = None if weight.offset is None else weight.offset.astype(np.float64)
    y = np.zeros((product.m, product.n))
    for b, begin in enumerate(range(0, product.k, product.block_size)):
        end = min(begin + product.block_size, product.k)
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
    return finish(y, bias, activation, out)


@_quiet
def conv2d(
    x: Array,
    weight: BlockQuantizedWeight,
    shape: ConvolutionShape,
    bias: Array | None,
    activation: Activation,
    out: Array,
) -> Array:
    """Compute `cupy_awq.conv2d` in float64 and write y to ``out``."""
    codes = weight.codes.astype(np.float64) - 2.0 ** (weight.bits - 1)
    at = np.arange(weight.shape[3]) // weight.block_size
    values = codes * weight.scale.astype(np.float64)[:, None, None, at]
    if weight.offset is not None:
        values += weight.offset.astype(np.float64)[:, None, None, at]
    y = correlate(x.astype(np.float64), values, shape, 0.0)
    return finish(y if shape.nhwc else y.transpose(0, 3, 1, 2), _per_output(bias, shape), activation, out)


@_quiet
def conv2d_int8(
    x: Array,
    codes: Array,
    shape: ConvolutionShape,
    fused: Array,
    multiplier: Array,
    x_zero: int,
    limits: tuple[int, int],
    out: Array,
) -> Array:
    """Compute `cupy_awq.conv2d_int8` and write y to ``out``.

    Args:
        x: the input, int8.
        codes: the weight codes [Co, Kh, Kw, Ci/groups].
        shape: the sizes of the convolution.
        fused: int32 [Co], the bias and the zero-point correction, which are added to the accumulators.
        multiplier: float32 [Co], the factor that converts accumulators to output codes.
        x_zero: the zero point of x, which is also the value of the padding.
        limits: the bounds (low, high) of the output codes.
        out: the output, int8.
    """
    sums = correlate(x.astype(np.float64), codes.astype(np.float64), shape, float(x_zero))
    v = (sums + fused).astype(F32) * multiplier
    q = np.clip(np.rint(np.clip(v, F32(limits[0]), F32(limits[1]))), -128, 127).astype(np.int8)
    out[...] = q if shape.nhwc else q.transpose(0, 3, 1, 2)
    return out


def correlate(x: Array, w: Array, shape: ConvolutionShape, fill: float) -> Array:
    """Return the convolution of x, padded with ``fill``, and w [Co, Kh, Kw, Ci/groups].

    The result is float64 [batch, height, width, Co].
    """
    pixels = x if shape.nhwc else x.transpose(0, 2, 3, 1)
    pixels = np.pad(pixels, ((0, 0), *shape.padding, (0, 0)), constant_values=fill)
    groups = shape.groups
    split = w.reshape(groups, shape.outputs // groups, *w.shape[1:])
    y = np.zeros((groups, shape.batch * shape.out[0] * shape.out[1], shape.outputs // groups))
    for (dy, dx), tap in _taps(pixels, shape):
        columns = tap.reshape(y.shape[1], groups, w.shape[3]).transpose(1, 0, 2)
        y += columns @ split[:, :, dy, dx].transpose(0, 2, 1)
    return y.transpose(1, 0, 2).reshape(shape.batch, *shape.out, shape.outputs)


def _taps(pixels: Array, shape: ConvolutionShape) -> Iterator[tuple[tuple[int, int], Array]]:
    """Yield ((row, column) of a filter tap, pixels that the tap multiplies).

    The pixels are a view [batch, height, width, Ci] of the padded input.
    """
    (sy, sx), (wide_y, wide_x), (oh, ow) = shape.stride, shape.dilation, shape.out
    for dy in range(shape.kernel[0]):
        for dx in range(shape.kernel[1]):
            top, left = dy * wide_y, dx * wide_x
            yield (dy, dx), pixels[:, top : top + (oh - 1) * sy + 1 : sy, left : left + (ow - 1) * sx + 1 : sx]


def _per_output(bias: Array | None, shape: ConvolutionShape) -> Array | None:
    return bias if bias is None or shape.nhwc else bias[:, None, None]


def finish(y: Array, bias: Array | None, activation: Activation, out: Array) -> Array:
    """Add the bias to y, apply the activation, write the result to ``out`` with one rounding, and return ``out``."""
    if bias is not None:
        y = y + bias.astype(np.float64)
    out[...] = round_once(activation(y), out.dtype)
    return out
