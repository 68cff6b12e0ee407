# SPDX-License-Identifier: Apache-2.0
"""GPTQ's error compensation: after a channel is rounded, the channels not yet rounded are changed to reduce the error.

Grids are computed in advance ("static groups"), and channels are rounded in storage order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupy_awq.check import Array
from cupy_awq.kernels.quantization.round_channels import MAX_CHANNELS
from cupy_awq.ops import rounding as device
from cupy_awq.packing import namespace
from cupy_awq.quantization.grid import Grid, QuantizedRows

BLOCK = MAX_CHANNELS
"""The largest number of channels that are rounded between two updates of all channels not yet rounded."""
SMALLEST = 256
"""The largest number of rows of a matrix whose Cholesky factor is inverted without splitting it into blocks."""


def compensate_errors(w: Array, second: Array, grid: Grid) -> QuantizedRows:
    """Round a weight to its grids by GPTQ, which reduces the output error trace(D H D^T).

    After channel j is rounded to q_j, every later channel w_k is reduced by (w_j - q_j) / U_jj * U_jk, where U is the
    upper Cholesky factor of H^-1.

    Args:
        w: the weight, float32 [N, K]; it is not modified.
        second: the second moments H of the inputs, float32 [K, K], positive definite (`Moments.regularize`).
        grid: the grids [N, K/G] of all groups.
    """
    xp = namespace(w)
    n, k = w.shape
    factor = inverse_factor(second)
    factor /= xp.diagonal(factor)[:, None].copy()  # element (j, k) is now U_jk / U_jj
    work = xp.ascontiguousarray(w.T)  # [K, N]: each input channel is a contiguous row
    codes = xp.empty((k, n), np.uint8)
    for block, step in channel_blocks(k, transpose_grid(grid)):
        target = work[block] / step.scale
        target += step.zero
        rounded, change = round_channels(target, target, -factor[block, block].T, step)
        codes[block] = rounded.astype(np.uint8)
        change *= step.scale
        work[block.stop :] += factor[block, block.stop :].T @ change
    return QuantizedRows(xp.ascontiguousarray(codes.T), grid)


def round_channels(target: Array, old: Array, weights: Array, step: Grid) -> tuple[Array, Array]:
    """Round the targets of a block of B channels one after the other; return (codes, changes), both float32 [B, N].

    The change of channel j is its code minus ``old[j]``. It reduces the target of every later channel k by
    weights[k, j] * change.

    Args:
        target: the codes before rounding, float32 [B, N]; on the CPU, overwritten by the reduced targets.
        old: the values that are subtracted from the codes to give the changes, float32 [B, N]. If it is ``target``
            itself, these are the reduced targets.
        weights: the factors weights[k, j] by which a change of channel j reduces channel k, float32 [B, B].
        step: the grids [N] of the block.
    """
    if namespace(target) is not np:
        return device.round_channels(target, old, weights, step.bottom, step.top)
    codes, changes = np.empty_like(target), np.empty_like(target)
    columns = np.ascontiguousarray(weights.T)[:, :, None]
    for j, (row, code, change) in enumerate(zip(target, codes, changes, strict=True)):
        np.rint(row, out=code)
        np.clip(code, step.bottom, step.top, out=code)
        np.subtract(code, old[j], out=change)
        later = target[j + 1 :]
        later -= columns[j, j + 1 :] * change
    return codes, changes


def channel_blocks(k: int, steps: Grid) -> Iterator[tuple[slice, Grid]]:
    """Split K channels into blocks of at most `BLOCK` channels of one group; yield (slice, grids [N]) per block."""
    groups = len(steps.zero)
    group_size = k // groups
    for g in range(groups):
        for start in range(0, group_size, BLOCK):
            stop = min(start + BLOCK, group_size)
            yield slice(g * group_size + start, g * group_size + stop), Grid(*(a[g] for a in steps))


def inverse_factor(second: Array) -> Array:
    """Return the upper Cholesky factor U of H^-1 = U^T U for H [K, K]: computed in float64, rounded to float32.

    >>> inverse_factor(np.diag([4.0, 1.0])).tolist()
    [[0.5, 0.0], [0.0, 1.0]]
    """
    xp = namespace(second)
    # Let J be the matrix that reverses the order of rows. If J H J = L L^T, then U = J L^-1 J.
    reversed_second = second[::-1, ::-1].astype(np.float64, order="C")
    invert_cholesky(reversed_second)
    return xp.ascontiguousarray(reversed_second[::-1, ::-1].astype(np.float32))


def invert_cholesky(matrix: Array) -> None:
    """Replace a symmetric positive definite matrix L L^T by L^-1 in place, to save the memory of a copy.

    >>> matrix = np.array([[4.0, 2.0], [2.0, 17.0]])
    >>> invert_cholesky(matrix)
    >>> matrix.tolist()
    [[0.5, 0.0], [-0.125, 0.25]]
    """
    half = len(matrix) // 2
    if len(matrix) <= SMALLEST:
        linalg = namespace(matrix).linalg
        matrix[:] = linalg.inv(linalg.cholesky(matrix))
        return
    first, last, below = matrix[:half, :half], matrix[half:, half:], matrix[half:, :half]
    invert_cholesky(first)
    below[:] = below @ first.T
    last -= below @ below.T
    invert_cholesky(last)
    below[:] = -(last @ below @ first)
    matrix[:half, half:] = 0


def transpose_grid(grid: Grid) -> Grid:
    """Return grids [N, K/G] with all arrays transposed to [K/G, N] in float32."""
    xp = namespace(grid.zero)
    return Grid(*(xp.ascontiguousarray(a.T.astype(np.float32)) for a in grid))
