# SPDX-License-Identifier: Apache-2.0
"""Random block-quantized weights, their values in float64, and a convolution written as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq import BlockQuantizedWeight


def random_weight(
    rng: np.random.Generator,
    shape: tuple[int, int, int, int],
    block_size: int,
    bits: int = 4,
    offsets: bool = True,
    dtype: Any = np.float32,
) -> BlockQuantizedWeight:
    """Return random codes, scales and offsets; scales are such that y has about the size of x."""
    codes = rng.integers(0, 2**bits, shape, np.uint8)
    blocks = -(-shape[3] // block_size)
    size = 2.0 ** (1 - bits) / np.sqrt(np.prod(shape[1:]))
    scale = (rng.uniform(0.5, 1.5, (shape[0], blocks)) * size).astype(dtype)
    offset = (rng.standard_normal((shape[0], blocks)) * size).astype(dtype) if offsets else None
    return BlockQuantizedWeight(codes, scale, offset, bits=bits, block_size=block_size)


def float64_values(weight: BlockQuantizedWeight) -> np.ndarray:
    """Return the values of a weight, float64 [Co, Kh, Kw, Ci/groups], computed channel by channel."""
    codes, values = weight.codes.astype(int), np.empty(weight.shape)
    for ci in range(weight.shape[3]):
        b = ci // weight.block_size
        scale = weight.scale[:, b].astype(np.float64)[:, None, None]
        offset = 0.0 if weight.offset is None else weight.offset[:, b].astype(np.float64)[:, None, None]
        values[..., ci] = (codes[..., ci] - 2 ** (weight.bits - 1)) * scale + offset
    return values


def naive_conv(x: np.ndarray, w: np.ndarray, stride, sides, dilation, groups: int, fill: float = 0.0) -> np.ndarray:
    """Return a convolution in NCHW, computed one output at a time and without a padded copy of x."""
    batch, _, height, width = x.shape
    co, kh, kw, ci = w.shape
    oh = (height + sum(sides[0]) - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    ow = (width + sum(sides[1]) - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((batch, co, oh, ow))
    for b, o, i, j in np.ndindex(y.shape):
        first = o // (co // groups) * ci
        for dy, dx in np.ndindex(kh, kw):
            row, column = i * stride[0] + dy * dilation[0] - sides[0][0], j * stride[1] + dx * dilation[1] - sides[1][0]
            inside = 0 <= row < height and 0 <= column < width
            pixel = x[b, first : first + ci, row, column] if inside else np.full(ci, fill)
            y[b, o, i, j] += pixel @ w[o, dy, dx]
    return y
