# SPDX-License-Identifier: Apache-2.0
"""Coordinate descent on the output error trace(D H D^T) after rounding, over scales, zero points and codes.

Each step finds the exact minimum along one coordinate, among values that can be stored, so the error never increases.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq.check import Array
from cupy_awq.ops import rounding as device
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
    gradient = xp.empty_like(dense)
    grid = rows.grid
    for _ in range(passes):
        xp.matmul(second, _subtract(codes, grid, dense), out=gradient)
        grid = refine_grid(codes, gradient, second, grid, symmetric=symmetric)
        # Recompute the gradient, so that rounding errors do not accumulate.
        xp.matmul(second, _subtract(codes, grid, dense), out=gradient)
        refine_codes(codes, gradient, second, grid)
    return QuantizedRows(xp.ascontiguousarray(codes.T.astype(np.uint8)), grid)


def refine_grid(codes: Array, gradient: Array, second: Array, grid: Grid, *, symmetric: bool) -> Grid:
    """Return grids with the best scale and zero point of each group for the given codes, updating the groups in order.

    For each candidate zero point, the least-squares scale is rounded to its stored dtype before errors are compared.

    Args:
        codes: the codes, float32 [K, N].
        gradient: H D^T, float32 [K, N], half the gradient of the output error; overwritten. D [N, K] is the quantized
            weight minus W.
        second: the second moments H, float32 [K, K].
        grid: the current grids [N, K/G].
        symmetric: whether every zero point is 8.
    """
    k, groups = len(codes), grid.zero.shape[1]
    group_size = k // groups
    scale, zero = grid.scale.copy(), grid.zero.copy()
    for g in range(groups):
        part = slice(g * group_size, (g + 1) * group_size)
        block = second[part, part]
        step = refine_group(
            codes[part],
            block @ codes[part],
            gradient[part],
            block.sum(dtype=np.float64),
            scale[:, g],
            zero[:, g],
            symmetric=symmetric,
        )
        # The gradient's rows of this group and of earlier ones are not read again, so only later rows are updated.
        gradient[part.stop :] += second[part.stop :, part] @ step
    return make_grid(scale, zero)


def refine_group(
    codes: Array, curved: Array, gradient: Array, total: Any, scale: Array, zero: Array, *, symmetric: bool
) -> Array:
    """Update the scales and zero points of one group; return the change of the dequantized weights, float32 [G, N].

    Args:
        codes: the codes of the group, float32 [G, N].
        curved: H_g @ codes for the diagonal block H_g of the group, float32 [G, N].
        gradient: the rows of H D^T of the group, float32 [G, N].
        total: the sum of the elements of H_g in float64, a scalar or a 0-d array.
        scale: the scales in their stored dtype [N]; updated in place.
        zero: the zero points, float64 [N]; updated in place.
        symmetric: whether every zero point is 8.
    """
    smallest, largest = LIMITS[scale.dtype]
    if namespace(codes) is not np:
        limits = smallest, largest
        return device.refine_group(codes, curved, gradient, total, scale, zero, limits, symmetric=symmetric)
    # For each output, the quadratic forms q H q and q H 1 of the codes q, float64 [N]; then the products of the
    # gradient with q and with ones. The scalar 1 H 1 is `total`.
    qq, q1 = (curved * codes).sum(axis=0, dtype=np.float64), curved.sum(axis=0, dtype=np.float64)
    rq, r1 = (gradient * codes).sum(axis=0, dtype=np.float64), gradient.sum(axis=0, dtype=np.float64)
    ones = float(total)
    s, z = scale.astype(np.float64), zero.copy()
    zeros = np.arange(16, dtype=np.float64)[:, None]
    candidates = zeros[SYMMETRIC_ZERO : SYMMETRIC_ZERO + 1] if symmetric else zeros
    # For a zero point z' and y = q - z', the best scale is s' = (s * (q - z) H y - gradient y) / (y H y).
    curvature = qq - 2 * candidates * q1 + candidates**2 * ones
    mixed = qq - (candidates + z) * q1 + candidates * z * ones
    with np.errstate(over="ignore"):  # the quotient overflows where y H y is 0; `is_valid` excludes these scales
        best = (s * mixed - (rq - candidates * r1)) / np.maximum(curvature, 1e-300)
    is_valid = (best >= smallest) & (best * 15 <= largest) & (curvature > 0)
    stored = np.where(is_valid, best, s).astype(np.float32).astype(scale.dtype)
    rounded = stored.astype(np.float64)
    # The change of the error if a * q - b is added to the dequantized weights of the group.
    a, b = rounded - s, rounded * candidates - s * z
    change = a * a * qq - 2 * a * b * q1 + b * b * ones + 2 * a * rq - 2 * b * r1
    change = np.where(is_valid, change, np.inf)
    choice, columns = change.argmin(axis=0), np.arange(len(z))
    is_better = change[choice, columns] < 0
    a, b = (np.where(is_better, c[choice, columns], 0).astype(np.float32) for c in (a, b))
    zero[:] = np.where(is_better, candidates[choice, 0], z)
    scale[is_better] = stored[choice, columns][is_better]
    result: Array = a * codes - b
    return result


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
        # With all other codes fixed, the error is smallest if the weight is reduced by gradient / H_jj.
        inverse = (1 / curvatures[block])[:, None]
        distance = gradient[block] * inverse
        with np.errstate(over="ignore"):  # if all weights of a group are 0, its tiny scale can give infinity
            distance /= step.scale
        old = codes[block]
        rounded, change = round_channels(old - distance, old, second[block, block] * inverse, step)
        codes[block] = rounded
        change *= step.scale
        # The gradient's rows of this block and of earlier ones are not read again, so only later rows are updated.
        gradient[block.stop :] += second[block.stop :, block] @ change


def _subtract(codes: Array, grid: Grid, dense: Array) -> Array:
    """Return the dequantized weight minus the dense one, float32 [K, N], for codes, float32 [K, N], and grids [N, K/G].

    ``dense`` is the transposed weight, float32 [K, N].
    """
    steps = transpose_grid(grid).expand(1, np.float32)
    difference = codes.reshape(len(steps.zero), -1, codes.shape[1]) - steps.zero
    difference *= steps.scale
    result: Array = difference.reshape(codes.shape)
    result -= dense
    return result
