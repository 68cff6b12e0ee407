# SPDX-License-Identifier: Apache-2.0
"""Statistics of the inputs of a linear layer over all calibration tokens.

With the second moments H = X^T X / tokens of inputs X [tokens, K] and D = W_quantized - W [N, K], the mean squared
error of the outputs is trace(D H D^T) / N. So the searches need only H, not the activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cupy_awq.check import Array
from cupy_awq.packing import is_finite, namespace, to_host

HOST_BLOCK, DEVICE_BLOCK = 1 << 18, 1 << 25
"""The number of weights processed at a time: on the CPU, where temporaries fit in a core's L2 cache, and on a GPU."""


class Moments(NamedTuple):
    """The moments of the inputs X [tokens, K] of one or several linear layers."""

    second: Array
    """The second moments H = X^T X / tokens, float32 [K, K]."""
    absolute: Array
    """The mean of |X| for each input channel, float32 [K]."""
    tokens: int
    """The number of tokens."""

    def rescale(self, t: Array) -> Moments:
        """Return the moments of the inputs X / t for channel scales t, float32 [K]."""
        return Moments(self.second / t / t[:, None], self.absolute / t, self.tokens)

    def regularize(self, shrinkage: float, damping: float) -> Moments:
        """Return the moments with H = (1 - shrinkage) * H + shrinkage * diag(H) + damping * mean(diag H) * I.

        Estimates from few, similar calibration tokens exaggerate the correlations of channels; shrinkage reduces
        these. The result is positive definite for damping > 0.

        >>> Moments(np.array([[5.0, -1.0], [-1.0, 3.0]], np.float32), None, 2).regularize(0.5, 0.25).second.tolist()
        [[6.0, -0.5], [-0.5, 4.0]]
        """
        xp = namespace(self.second)
        diagonal = xp.diagonal(self.second)
        mean = float(diagonal.mean(dtype=np.float64))
        second = self.second * np.float32(1 - shrinkage)
        each = xp.arange(len(second))
        second[each, each] = diagonal + np.float32(damping * mean or 1.0)
        return self._replace(second=second)


class MomentSum:
    """An accumulator of `Moments`: call `add` for each batch of inputs, then `mean`.

    Attributes:
        tokens: the number of tokens that were added.

    >>> sums = MomentSum()
    >>> sums.add(np.array([[1.0, -2.0], [3.0, 0.0]], np.float32))
    >>> moments = sums.mean()
    >>> moments.second.tolist(), moments.absolute.tolist(), moments.tokens
    ([[5.0, -1.0], [-1.0, 2.0]], [2.0, 1.0], 2)
    """

    def __init__(self) -> None:
        self._second: Array | None = None
        self._absolute: Array | None = None
        self.tokens = 0

    def add(self, x: Array) -> None:
        """Add inputs [..., K] of any float dtype to the sums.

        Raises ValueError if inputs are NaN or infinite, or if sums of their squares overflow float32.
        """
        xp = namespace(x)
        rows = x.reshape(-1, x.shape[-1]).astype(np.float32)
        second = rows.T @ rows
        absolute = xp.abs(rows).sum(axis=0)
        if self._second is not None and self._absolute is not None:
            with np.errstate(over="ignore"):  # overflow gives infinity, for which the check below raises
                second += self._second
                absolute += self._absolute
        if not is_finite(to_host(xp.diagonal(second))):
            raise ValueError("inputs: expected finite values with finite squares, got NaN, infinity or an overflow")
        self._second, self._absolute = second, absolute
        self.tokens += len(rows)

    def mean(self) -> Moments:
        """Return the moments of all inputs added so far. Raises ValueError if no inputs were added."""
        if self._second is None or self._absolute is None or not self.tokens:
            raise ValueError("inputs: expected at least one token, got 0")
        count = np.float32(self.tokens)
        return Moments(self._second / count, self._absolute / count, self.tokens)


def row_blocks(w: Array) -> Iterator[slice]:
    """Yield slices of rows of a weight [N, K], each with about `HOST_BLOCK` (or, for CuPy, `DEVICE_BLOCK`) weights."""
    step = max(1, (HOST_BLOCK if namespace(w) is np else DEVICE_BLOCK) // w.shape[1])
    for start in range(0, len(w), step):
        yield slice(start, min(start + step, len(w)))


def row_errors(difference: Array, second: Array) -> Array:
    """Return the output error of each row, diag(D H D^T) as float32 [N], for D = W_quantized - W and second moments H.

    >>> row_errors(np.array([[1.0, 1.0], [0.0, 2.0]]), np.array([[5.0, -1.0], [-1.0, 2.0]])).tolist()
    [5.0, 8.0]
    """
    xp = namespace(difference)
    parts = [((difference[rows] @ second) * difference[rows]).sum(axis=1) for rows in row_blocks(difference)]
    result: Array = xp.concatenate(parts).astype(np.float32)
    return result


def output_error(difference: Array, second: Array) -> float:
    """Return the output error trace(D H D^T) for D = W_quantized - W [N, K] and second moments H [K, K].

    >>> output_error(np.array([[1.0, 1.0]]), np.array([[5.0, -1.0], [-1.0, 2.0]]))
    5.0
    """
    return float(to_host(row_errors(difference, second)).sum(dtype=np.float64))
