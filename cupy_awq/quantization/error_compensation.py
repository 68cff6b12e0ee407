# SPDX-License-Identifier: Apache-2.0
"""GPTQ's error compensation: after a channel is rounded, the channels not yet rounded are changed to reduce the error.

Grids are computed in advance ("static groups"), so channels can be rounded in any order without reordering the stored
weight.
"""

from __future__ import annotations

import numpy as np

from cupy_awq.check import Array
from cupy_awq.packing import namespace
from cupy_awq.quantization.grid import Grid, QuantizedRows

BLOCK = 64
"""The number of channels that are rounded between two updates of all channels not yet rounded."""


def compensate_errors(w: Array, second: Array, grid: Grid) -> QuantizedRows:
    """Round a weight to its grids by GPTQ, which reduces the output error trace(D H D^T).

    Input channels are rounded in decreasing order of diag H. After channel j is rounded to q_j, every later channel w_k
    is reduced by (w_j - q_j) / U_jj * U_jk, where U is the upper Cholesky factor of H^-1.

    Args:
        w: the weight, float32 [N, K]; it is not modified.
        second: the second moments H of the inputs, float32 [K, K], positive definite (`Moments.damp`).
        grid: the grids [N, K/G] of all groups.
    """
    xp = namespace(w)
    n, k = w.shape
    order = xp.argsort(-xp.diagonal(second), kind="stable")
    factor = inverse_factor(second[order][:, order])
    work = xp.ascontiguousarray(w.T[order])  # [K, N]: each input channel is a contiguous row
    steps, group_size = transpose_grid(grid), k // grid.zero.shape[1]
    groups = (order // group_size).tolist()
    codes = xp.empty((k, n), np.uint8)
    ranks = order.tolist()
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        errors = xp.empty((stop - start, n), np.float32)
        for j in range(start, stop):
            g = groups[j]
            step = Grid(*(a[g] for a in steps))
            rounded = step.nearest_codes(work[j])
            codes[ranks[j]] = rounded.astype(np.uint8)
            error = (work[j] - (rounded - step.zero) * step.scale) / factor[j, j]
            work[j + 1 : stop] -= factor[j, j + 1 : stop, None] * error
            errors[j - start] = error
        work[stop:] -= factor[start:stop, stop:].T @ errors
    return QuantizedRows(xp.ascontiguousarray(codes.T), grid)


def inverse_factor(second: Array) -> Array:
    """Return the upper Cholesky factor U of H^-1 = U^T U for H [K, K], as float32 computed in float64.

    >>> inverse_factor(np.diag([4.0, 1.0])).tolist()
    [[0.5, 0.0], [0.0, 1.0]]
    """
    xp = namespace(second)
    # Let J be the matrix that reverses the order of rows. If J H J = L L^T, then U = J L^-1 J.
    lower = xp.linalg.cholesky(second[::-1, ::-1].astype(np.float64))
    return xp.ascontiguousarray(xp.linalg.inv(lower)[::-1, ::-1].astype(np.float32))


def transpose_grid(grid: Grid) -> Grid:
    """Return grids [N, K/G] with all arrays transposed to [K/G, N] in float32."""
    xp = namespace(grid.zero)
    return Grid(*(xp.ascontiguousarray(a.T.astype(np.float32)) for a in grid))
