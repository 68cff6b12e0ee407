# SPDX-License-Identifier: Apache-2.0
"""Search of a clipped range for each group: most weights get a finer scale, but extreme weights get larger errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq.check import Array
from cupy_awq.packing import namespace
from cupy_awq.quantization.grid import Grid, fit_grid, select_grid
from cupy_awq.quantization.moments import Moments, row_blocks

FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
"""The factors by which asymmetric ranges are reduced: at both ends together, then at each end alone."""
SYMMETRIC_FACTORS = (1.0, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.825, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55)
"""The factors by which symmetric ranges are reduced."""


def search_clipping(
    w: Array, moments: Moments, *, group_size: int, scale_dtype: np.dtype[Any], symmetric: bool = False
) -> Grid:
    """Search the range of each group that minimizes the group's output error; return the grids [N, K/G].

    The output error of a group is d^T H_g d, where d are the rounding errors of its weights and H_g is its diagonal
    block of H. The error never exceeds that of the full range. An asymmetric range is reduced at both ends together,
    then at each end alone.

    Args:
        w: the weight, float32 [N, K]; it is not modified.
        moments: the moments of the inputs.
        group_size: the number of input channels per group, a divisor of K.
        scale_dtype: the stored dtype of scales, float16 or bfloat16.
        symmetric: whether every zero point is 8.
    """
    xp = namespace(w)
    groups = w.shape[1] // group_size
    blocks = diagonal_blocks(moments.second, group_size)
    parts = []
    for rows in row_blocks(w):
        # [K/G, n, G]: batched by group, as the blocks of H are
        grouped = xp.ascontiguousarray(w[rows].reshape(-1, groups, group_size).swapaxes(0, 1))
        parts.append(_search(grouped, blocks, scale_dtype, symmetric))
    return Grid(*(xp.ascontiguousarray(xp.concatenate([part[i] for part in parts], axis=1).T) for i in range(4)))


def diagonal_blocks(second: Array, group_size: int) -> Array:
    """Return the diagonal blocks [K/G, G, G] of H [K, K]."""
    xp = namespace(second)
    starts = range(0, len(second), group_size)
    return xp.stack([second[i : i + group_size, i : i + group_size] for i in starts])


def group_errors(grouped: Array, blocks: Array, grid: Grid) -> Array:
    """Return the output error d^T H_g d of each group, float32 [K/G, n], of weights rounded to their grids.

    ``grouped`` holds the weights [K/G, n, G], ``blocks`` the matrices H_g [K/G, G, G], and ``grid`` the grids [K/G, n].
    """
    expanded = grid.expand(-1, np.float32)
    d = expanded.nearest_codes(grouped)
    d -= expanded.zero
    d *= expanded.scale
    d -= grouped
    result: Array = ((d @ blocks) * d).sum(axis=-1)
    return result


def _search(grouped: Array, blocks: Array, scale_dtype: np.dtype[Any], symmetric: bool) -> Grid:
    xp = namespace(grouped)
    low, high = xp.minimum(grouped.min(axis=-1), 0), xp.maximum(grouped.max(axis=-1), 0)
    best = fit_grid(low, high, scale_dtype, symmetric=symmetric)
    best_error = group_errors(grouped, blocks, best)
    low_factor, high_factor = xp.ones_like(low), xp.ones_like(high)

    def try_factors(lows: Any, highs: Any) -> None:
        nonlocal best, best_error, low_factor, high_factor
        grid = fit_grid(low * lows, high * highs, scale_dtype, symmetric=symmetric)
        error = group_errors(grouped, blocks, grid)
        is_better = error < best_error
        best = select_grid(is_better, grid, best)
        best_error = xp.where(is_better, error, best_error)
        low_factor, high_factor = xp.where(is_better, lows, low_factor), xp.where(is_better, highs, high_factor)

    for factor in map(np.float32, SYMMETRIC_FACTORS[1:] if symmetric else FACTORS[1:]):
        try_factors(factor, factor)
    if not symmetric:
        for factor in map(np.float32, FACTORS):
            try_factors(factor, high_factor)
        for factor in map(np.float32, FACTORS):
            try_factors(low_factor, factor)
    return best
