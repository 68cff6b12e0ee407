# SPDX-License-Identifier: Apache-2.0
"""Coordinate descent on trace(D H D^T) after rounding: over each group's scale and zero point, and over each code.

Each step is the exact minimum over one coordinate, on the stored grid, so the error never increases.
"""

from __future__ import annotations

import numpy as np

from cupy_awq.check import Array
from cupy_awq.packing import namespace
from cupy_awq.quantization.error_compensation import channel_blocks, round_channels, transpose_grid
from cupy_awq.quantization.grid import LIMITS, SYMMETRIC_ZERO, Grid, QuantizedRows, make_grid


def refine(w: Array, second: Array, rows: QuantizedRows, *, passes: int, symmetric: bool) -> QuantizedRows:
    """Return a quantized weight with a smaller trace(D H D^T): scales, zero points and codes are adjusted in turn.

    Args:
        w: the weight float32 [N, K]; it is not modified.
        second: the second moments H of the inputs, float32 [K, K], with a positive diagonal (`Moments.damp`).
        rows: w, quantized.
        passes: the number of passes over all groups and all codes.
        symmetric: whether every zero point is 8.
    """
    xp = namespace(w)
    codes = xp.ascontiguousarray(rows.codes.T.astype(np.float32))
    dense = xp.ascontiguousarray(w.T)
    grid = rows.grid
    for _ in range(passes):
        gradient = second @ (_dequantize(codes, grid) - dense)
        grid = refine_grid(codes, gradient, second, grid, symmetric=symmetric)
        gradient = second @ (_dequantize(codes, grid) - dense)  # anew, so that rounding errors do not add up
        refine_codes(codes, gradient, second, grid)
    return QuantizedRows(xp.ascontiguousarray(codes.T.astype(np.uint8)), grid)


def refine_grid(codes: Array, gradient: Array, second: Array, grid: Grid, *, symmetric: bool) -> Grid:
    """Return a grid with the least-squares scale, and the best zero point, of one group after the other.

    Each scale is rounded to its stored dtype before it is compared.

    Args:
        codes: float32 [K, N].
        gradient: H D^T, float32 [K, N]; updated in place.
        second: H, float32 [K, K].
        grid: the present grid [N, K/G].
        symmetric: whether every zero point is 8.
    """
    xp = namespace(codes)
    k, groups = len(codes), grid.zero.shape[1]
    group_size = k // groups
    scale, zero = grid.scale.copy(), grid.zero.copy()
    smallest, largest = LIMITS[scale.dtype]
    zeros = xp.arange(16, dtype=np.float64)[:, None]
    candidates = zeros[SYMMETRIC_ZERO : SYMMETRIC_ZERO + 1] if symmetric else zeros
    columns = xp.arange(codes.shape[1])
    for g in range(groups):
        part = slice(g * group_size, (g + 1) * group_size)
        block, q, slope = second[part, part], codes[part], gradient[part]
        curved = block @ q
        # Sums over the group, float64 [N]: q H q, q H 1, gradient q and gradient 1; and the number 1 H 1.
        qq, q1 = (curved * q).sum(axis=0, dtype=np.float64), curved.sum(axis=0, dtype=np.float64)
        rq, r1 = (slope * q).sum(axis=0, dtype=np.float64), slope.sum(axis=0, dtype=np.float64)
        ones = float(block.sum(dtype=np.float64))
        s, z = scale[:, g].astype(np.float64), zero[:, g]
        # Along y = q - z' the error is least at s' = (s * y_old H y - gradient y) / (y H y).
        curvature = qq - 2 * candidates * q1 + candidates**2 * ones
        mixed = qq - (candidates + z) * q1 + candidates * z * ones
        best = (s * mixed - (rq - candidates * r1)) / xp.maximum(curvature, 1e-300)
        is_valid = (best >= smallest) & (best * 15 <= largest) & (curvature > 0)
        stored = xp.where(is_valid, best, s).astype(np.float32).astype(scale.dtype)
        rounded = stored.astype(np.float64)
        # The change of the error by the step a * q - b.
        a, b = rounded - s, rounded * candidates - s * z
        change = a * a * qq - 2 * a * b * q1 + b * b * ones + 2 * a * rq - 2 * b * r1
        change = xp.where(is_valid, change, np.inf)
        choice = change.argmin(axis=0)
        is_better = change[choice, columns] < 0
        a, b = (xp.where(is_better, c[choice, columns], 0).astype(np.float32) for c in (a, b))
        new_zero = xp.broadcast_to(candidates, change.shape)[choice, columns]
        zero[:, g] = xp.where(is_better, new_zero, z)
        old = scale[:, g].view(np.uint16)
        scale[:, g] = xp.where(is_better, stored.view(np.uint16)[choice, columns], old).view(scale.dtype)
        gradient += second[:, part] @ (a * q - b)
    return make_grid(scale, zero)


def refine_codes(codes: Array, gradient: Array, second: Array, grid: Grid) -> None:
    """Set each code to its best value, one channel after the other, given all other codes.

    Args:
        codes: float32 [K, N]; updated in place.
        gradient: H D^T, float32 [K, N]; overwritten.
        second: H, float32 [K, K].
        grid: the grid [N, K/G].
    """
    xp = namespace(codes)
    curvatures = xp.diagonal(second)
    for block, step in channel_blocks(len(codes), transpose_grid(grid)):
        # The best value of a code is its value less the gradient over H_jj, in units of the scale.
        inverse = (1 / curvatures[block])[:, None]
        distance = gradient[block] * inverse
        with np.errstate(over="ignore"):  # infinite for the smallest scale, that of a group of zeros
            distance /= step.scale
        old = codes[block]
        rounded, change = round_channels(old - distance, old, second[block, block] * inverse, step)
        codes[block] = rounded
        change *= step.scale
        gradient[block.stop :] += second[block.stop :, block] @ change  # no later channel reads the rows before


def _dequantize(codes: Array, grid: Grid) -> Array:
    """Return the weight float32 [K, N] of codes float32 [K, N] on a grid [N, K/G]."""
    xp = namespace(codes)
    steps = transpose_grid(grid)
    repeats = len(codes) // len(steps.scale)
    result: Array = (codes - xp.repeat(steps.zero, repeats, axis=0)) * xp.repeat(steps.scale, repeats, axis=0)
    return result
