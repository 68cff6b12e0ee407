# SPDX-License-Identifier: Apache-2.0
"""The 4-bit grid of a group of weights (the scale in the stored dtype and the zero point), and rounding to the grid."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.packing import find_maximum, namespace, pack_int4
from cupy_awq.weight import PackedWeight

SYMMETRIC_ZERO = 8
"""The zero point of every group of a symmetric weight."""

LIMITS = {check.FLOAT16: (2.0**-24, 65504.0), check.BFLOAT16: (2.0**-126, (2 - 2.0**-7) * 2.0**127)}
"""(smallest scale, largest finite value) for each dtype of scales.

The smallest bfloat16 scale is a normal number, because GPUs may flush bfloat16 subnormals to zero.
"""


class Grid(NamedTuple):
    """The grids (scales and zero points) of several groups: arrays of one shape with one element per group.

    The representable values of a group are (q - zero) * scale for codes q from ``bottom`` to ``top``.
    """

    scale: Array
    """The scales in the dtype in which they are stored, float16 or bfloat16."""
    zero: Array
    """The zero points, integers from 0 to 15 in float64."""
    bottom: Array
    """The smallest code whose value is finite in the dtype of the scales, nearly always 0, in float64."""
    top: Array
    """The largest code whose value is finite in the dtype of the scales, nearly always 15, in float64."""

    def expand(self, axis: int, dtype: Any) -> Grid:
        """Return the grids with all arrays in a float dtype and a new axis of length 1, to broadcast over weights."""
        xp = namespace(self.zero)
        return Grid(*(xp.expand_dims(a.astype(np.float64).astype(dtype), axis) for a in self))

    def nearest_codes(self, w: Array) -> Array:
        """Return the codes, as floats, of the representable values nearest to ``w``.

        The arrays of this grid must have the dtype of ``w`` and broadcast to its shape.
        """
        xp = namespace(w)
        codes = w / self.scale
        xp.rint(codes, out=codes)
        codes += self.zero
        return xp.clip(codes, self.bottom, self.top, out=codes)


def fit_grid(low: Array, high: Array, scale_dtype: np.dtype[Any], *, symmetric: bool) -> Grid:
    """Return the grids of groups, given the range of the weights in each group. Ranges are extended to include 0.

    The scale is rounded to its dtype first; the zero point is then computed from the rounded scale.

    Args:
        low, high: the smallest and the largest weight of each group, finite floats of any shape.
        scale_dtype: float16 or bfloat16.
        symmetric: True to make every zero point 8.

    Raises:
        ValueError: a group needs a scale beyond the range of ``scale_dtype``.

    >>> grid = fit_grid(np.array([-1.0]), np.array([2.0]), np.dtype(np.float16), symmetric=False)
    >>> float(grid.scale[0]), float(grid.zero[0])
    (0.199951171875, 5.0)
    """
    xp = namespace(low)
    high, low = xp.maximum(high.astype(np.float64), 0), xp.minimum(low.astype(np.float64), 0)
    ideal = xp.maximum(high / 7, low / -8) if symmetric else high / 15 - low / 15
    smallest, largest = LIMITS[scale_dtype]
    if ideal.size and (most := float(find_maximum(ideal))) > largest:
        raise ValueError(
            f"w: expected values with scales up to {largest:.3g} ({scale_dtype}), got a scale of {most:.3g}"
        )
    s = xp.maximum(ideal, smallest).astype(np.float32).astype(scale_dtype)
    # If rounding reduces a scale by more than 1/32, the outermost weight is clipped by about half a step: take the next
    # larger scale instead. Only subnormal float16 scales are that coarse.
    coarse = s.astype(np.float64) * 32 < ideal * 31
    s = (s.view(np.uint16) + coarse.astype(np.uint16)).view(scale_dtype)
    step = s.astype(np.float64)
    zero = xp.full_like(step, SYMMETRIC_ZERO) if symmetric else xp.clip(xp.rint(-low / step), 0, 15)
    return make_grid(s, zero)


def make_grid(scale: Array, zero: Array) -> Grid:
    """Return the grids for scales in their stored dtype and zero points (integers from 0 to 15 in float64)."""
    xp = namespace(zero)
    # If the scale was rounded up, 15 steps may exceed the range of its dtype: allow fewer codes.
    reach = xp.floor(LIMITS[scale.dtype][1] / scale.astype(np.float64))
    return Grid(scale, zero, xp.maximum(zero - reach, 0), xp.minimum(zero + reach, 15))


def select_grid(condition: Array, grid: Grid, other: Grid) -> Grid:
    """Return the grids of ``grid`` for groups whose ``condition`` is True, and those of ``other`` for all others."""
    xp = namespace(condition)
    bits = xp.where(condition, grid.scale.view(np.uint16), other.scale.view(np.uint16))
    rest = (xp.where(condition, a, b) for a, b in zip(grid[1:], other[1:], strict=True))
    return Grid(bits.view(grid.scale.dtype), *rest)


class QuantizedRows(NamedTuple):
    """A quantized weight [N, K] in the orientation of ``nn.Linear``, with one code per byte."""

    codes: Array
    """The codes, uint8 [N, K], from 0 to 15."""
    grid: Grid
    """The grids [N, K/G] of all groups."""

    def dequantize(self) -> Array:
        """Return the dequantized weight, float32 [N, K]."""
        n, k = self.codes.shape
        grid = self.grid.expand(-1, np.float32)
        codes = self.codes.reshape(n, grid.scale.shape[1], -1).astype(np.float32)
        result: Array = ((codes - grid.zero) * grid.scale).reshape(n, k)
        return result

    def pack(self) -> PackedWeight:
        """Return the weight in the AWQ layout, [K, N]. N must be a multiple of 8."""
        xp = namespace(self.codes)
        zeros = self.grid.zero.astype(np.uint8)
        qweight, qzeros = (pack_int4(xp.ascontiguousarray(a.T)) for a in (self.codes, zeros))
        return PackedWeight(qweight, xp.ascontiguousarray(self.grid.scale.T), qzeros)


def fit_rows(w: Array, group_size: int, scale_dtype: np.dtype[Any], *, symmetric: bool) -> Grid:
    """Return the grids [N, K/G] that cover the full range of each group of a weight [N, K]."""
    grouped = w.reshape(len(w), -1, group_size)
    return fit_grid(grouped.min(axis=-1), grouped.max(axis=-1), scale_dtype, symmetric=symmetric)


def round_rows(w: Array, grid: Grid) -> QuantizedRows:
    """Round a weight, float32 [N, K], to the nearest values of its grids [N, K/G].

    >>> w = np.linspace(-1, 2, 16, dtype=np.float32).reshape(1, 16)
    >>> rows = round_rows(w, fit_rows(w, 16, np.dtype(np.float16), symmetric=False))
    >>> rows.codes[0].tolist() == list(range(16))
    True
    """
    grouped = w.reshape(len(w), grid.zero.shape[1], -1)
    codes = grid.expand(-1, w.dtype).nearest_codes(grouped)
    return QuantizedRows(codes.reshape(w.shape).astype(np.uint8), grid)
