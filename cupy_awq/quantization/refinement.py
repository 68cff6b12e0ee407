# SPDX-License-Identifier: Apache-2.0
"""Coordinate descent on the output error trace(D H D^T) after rounding, over scales, zero points and codes.

Each step finds the exact minimum along one coordinate, among values that can be stored, so the error never increases.
"""

from __future__ import annotations

import numpy as np

from cupy_awq.check import Array
from cupy_awq.packing import namespace
from cupy_awq.quantization.error_compensation import channel_blocks, round_channels, transpose_grid
from cupy_awq.quantization.grid import LIMITS, SYMMETRIC_ZERO, Grid, QuantizedRows, make_grid


def refine(w: Array, second: Array, rows: QuantizedRows, *, passes: int, symmetric: bool) -> QuantizedRows:
    """Reduce the output error trace(D H D^T) of a quantized weight by adjusting scales, zero points and codes in turn.

    Args:
        w: the weight, float32 [N, K]; it is not modified.
        second: the second moments H of the inputs, float32 [K, K], with a positive diagonal (`Moments.regularize`).
        rows: the quantized weight; it is not modified.
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
        gradient = second @ (_dequantize(codes, grid) - dense)  # recomputed, so that rounding errors do not accumulate
        refine_codes(codes, gradient, second, grid)
    return QuantizedRows(xp.ascontiguousarray(codes.T.astype(np.uint8)), grid)


def refine_grid(codes: Array, gradient: Array, second: Array, grid: Grid, *, symmetric: bool) -> Grid:
    """Return grids with the best scale and zero point of each group, given the codes; groups are updated in order.

    For each zero point, the least-squares scale is rounded to its stored dtype before the errors are compared.

    Args:
        codes: the codes, float32 [K, N].
        gradient: H D^T, float32 [K, N], half the gradient of the output error; updated in place.
        second: the second moments H, float32 [K, K].
        grid: the current grids [N, K/G].
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
        # For each output, the quadratic forms q H q and q H 1 of the group's codes q, float64 [N]; then the products of
        # the gradient with q and with ones. The scalar 1 H 1 is the sum of the block of H.
        qq, q1 = (curved * q).sum(axis=0, dtype=np.float64), curved.sum(axis=0, dtype=np.float64)
        rq, r1 = (slope * q).sum(axis=0, dtype=np.float64), slope.sum(axis=0, dtype=np.float64)
        ones = float(block.sum(dtype=np.float64))
        s, z = scale[:, g].astype(np.float64), zero[:, g]
        # For a zero point z' and y = q - z', the best scale is s' = (s * (q - z) H y - gradient y) / (y H y).
        curvature = qq - 2 * candidates * q1 + candidates**2 * ones
        mixed = qq - (candidates + z) * q1 + candidates * z * ones
        best = (s * mixed - (rq - candidates * r1)) / xp.maximum(curvature, 1e-300)
        is_valid = (best >= smallest) & (best * 15 <= largest) & (curvature > 0)
        stored = xp.where(is_valid, best, s).astype(np.float32).astype(scale.dtype)
        rounded = stored.astype(np.float64)
        # The change of the error if a * q - b is added to the dequantized weights of the group.
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
    """Set each code to its best value given all other codes, one input channel after the other.

    Args:
        codes: the codes, float32 [K, N]; updated in place.
        gradient: H D^T, float32 [K, N], half the gradient of the output error; overwritten.
        second: the second moments H, float32 [K, K].
        grid: the grids [N, K/G].
    """
    xp = namespace(codes)
    curvatures = xp.diagonal(second)
    for block, step in channel_blocks(len(codes), transpose_grid(grid)):
        # A code's best value is its value minus gradient / H_jj, in units of the scale.
        inverse = (1 / curvatures[block])[:, None]
        distance = gradient[block] * inverse
        with np.errstate(over="ignore"):  # inf for the tiny scale of a group of zeros
            distance /= step.scale
        old = codes[block]
        rounded, change = round_channels(old - distance, old, second[block, block] * inverse, step)
        codes[block] = rounded
        change *= step.scale
        gradient[block.stop :] += (
            second[block.stop :, block] @ change
        )  # rows of `gradient` before the block's end are not read again


def _dequantize(codes: Array, grid: Grid) -> Array:
    """Return the dequantized weight, float32 [K, N], for codes, float32 [K, N], and grids [N, K/G]."""
    xp = namespace(codes)
    steps = transpose_grid(grid)
    repeats = len(codes) // len(steps.scale)
    result: Array = (codes - xp.repeat(steps.zero, repeats, axis=0)) * xp.repeat(steps.scale, repeats, axis=0)
    return result
