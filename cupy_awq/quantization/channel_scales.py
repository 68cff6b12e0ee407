# SPDX-License-Identifier: Apache-2.0
"""AWQ's search for a scale t of each input channel: the quantized layer has the weight W * t and the input x / t.

The loss is the squared error of a linear layer's output, summed over all linear layers that share the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupy_awq.check import Array
from cupy_awq.packing import namespace, to_host
from cupy_awq.quantization.grid import fit_rows
from cupy_awq.quantization.moments import Moments, row_blocks

FLOOR = 1e-4
"""The smallest t before normalization, and the number added to w^(1 - r) to avoid division by 0, as in AutoAWQ."""
COARSE, FINE = 0.1, (0.05, 0.025)
"""The step of the exponent r in the first pass, from 0 to 1, and the steps around the best r in the later passes."""

PARTS = 4
"""The number of blocks into which each axis of the symmetric H is split: with 4, only 10 of 16 blocks are multiplied.
"""


class ChannelScales(NamedTuple):
    """The channel scales that `search_channel_scales` has found, and the losses with and without them."""

    t: Array
    """The channel scales, float32 [K], positive; 1 for channels whose inputs are all 0."""
    loss: float
    """The squared error of the outputs with these scales, trace(D H D^T), summed over the layers that share x."""
    identity_loss: float
    """The loss without scales (t = 1): the loss of rounding to nearest."""


def search_channel_scales(
    weights: Sequence[Array],
    moments: Moments,
    *,
    group_size: int,
    scale_dtype: np.dtype[Any],
    symmetric: bool = False,
    tied: tuple[int, int, int] | None = None,
) -> ChannelScales:
    """Search the channel scales t with the smallest output error among t = 1, x^r and x^r / w^(1 - r).

    x is the mean of a channel's |inputs|, w the mean of its |weight| / (largest |weight| in the group). The exponents r
    are 0 to 1 in steps of 0.1, then the neighbors of the best r at distances 0.05 and 0.025. t = 1 is tried first and
    replaced only by a smaller loss, so the loss never exceeds that of rounding to nearest.

    Args:
        weights: the weights of all linear layers that share the input, float32 [N, K]; they are not modified.
        moments: the moments of the input.
        group_size: the number of input channels per group, a divisor of K.
        scale_dtype: the stored dtype of scales, float16 or bfloat16.
        symmetric: whether every zero point is 8.
        tied: None for independent channels. For o_proj, (kv_heads, query heads per key-value head, head_dim), whose
            product is K: all query heads of a key-value head get the same t, so that v_proj can be divided by t.

    Example::

        found = search_channel_scales([wq, wk, wv], moments, group_size=128, scale_dtype=np.dtype(np.float16))
        norm_weight / found.t, wq * found.t
    """
    xp = namespace(moments.second)
    x_mean, w_mean = to_host(moments.absolute), to_host(mean_magnitude(weights, group_size))
    is_live = x_mean > 0
    if tied is not None:
        x_mean, w_mean = (_share(a, tied) for a in (x_mean, w_mean))
        is_live = x_mean > 0

    upper = moments.second.copy()  # the blocks above the diagonal are doubled below, as `rounding_error` expects
    for start, stop in _column_blocks(len(upper)):
        upper[:start, start:stop] *= 2

    def loss_of(t: Array) -> float:
        device_t = xp.asarray(t)
        scaled = upper / device_t / device_t[:, None]
        return sum(rounding_error(w, device_t, scaled, group_size, scale_dtype, symmetric=symmetric) for w in weights)

    best_t = np.ones(len(x_mean), np.float32)
    identity_loss = best_loss = loss_of(best_t)
    best_point: tuple[bool, float] | None = None
    points = _coarse_points()
    for step in (*FINE, None):
        for duo, r in points:
            t = candidate(x_mean, w_mean, is_live, r, duo=duo)
            loss = loss_of(t)
            if loss < best_loss:
                best_t, best_loss, best_point = t, loss, (duo, r)
        if best_point is None or step is None:
            break
        duo, r = best_point
        points = [(duo, near) for near in (r - step, r + step) if 0 <= near <= 1]
    return ChannelScales(xp.asarray(best_t), best_loss, identity_loss)


def candidate(x_mean: Array, w_mean: Array, is_live: Array, r: float, *, duo: bool) -> Array:
    """Return AWQ's channel scales t [K] for the exponent r: x^r, or x^r / w^(1 - r) if ``duo``.

    x is ``x_mean`` and w is ``w_mean``; all arrays are NumPy arrays. The scales are normalized to sqrt(max * min) = 1.
    Channels that are not live, because their inputs are all 0, have t = 1.

    >>> one = np.ones(2, np.float32)
    >>> candidate(np.array([4.0, 1.0], np.float32), one, one > 0, 0.5, duo=False).tolist()
    [1.4142135381698608, 0.7071067690849304]
    """
    t = np.where(is_live, x_mean, 1).astype(np.float32) ** np.float32(r)
    if duo:
        t /= w_mean ** np.float32(1 - r) + np.float32(FLOOR)
    t = np.maximum(t, np.float32(FLOOR))
    if not bool(is_live.any()):
        return np.ones_like(t)
    most, least = np.where(is_live, t, 0).max(), np.where(is_live, t, np.inf).min()
    result: Array = np.where(is_live, t / np.sqrt(most * least), 1).astype(np.float32)
    return result


def mean_magnitude(weights: Sequence[Array], group_size: int) -> Array:
    """Return the mean of |w| / (largest |w| in the group + 1e-6) over all rows of all weights, float32 [K]."""
    xp = namespace(weights[0])
    k = weights[0].shape[1]
    total = xp.zeros(k, np.float32)
    for w in weights:
        for rows in row_blocks(w):
            size = xp.abs(w[rows]).reshape(-1, k // group_size, group_size)
            total += (size / (size.max(axis=-1, keepdims=True) + np.float32(1e-6))).sum(axis=0).reshape(k)
    result: Array = total / np.float32(sum(len(w) for w in weights))
    return result


def rounding_error(
    w: Array, t: Array, upper: Array, group_size: int, scale_dtype: np.dtype[Any], *, symmetric: bool
) -> float:
    """Return trace(D H D^T) for D = Q(W * t) - W * t, where Q rounds to nearest.

    ``w`` is the weight W [N, K], and ``upper`` holds the second moments H of the scaled inputs x / t in blocks. H is
    symmetric, so the caller has doubled the blocks above the diagonal, and the blocks below it are not read.
    """
    xp = namespace(w)
    total = 0.0
    for rows in row_blocks(w):
        scaled = w[rows] * t
        grid = fit_rows(scaled, group_size, scale_dtype, symmetric=symmetric).expand(-1, np.float32)
        d = grid.nearest_codes(scaled.reshape(len(scaled), -1, group_size))
        d -= grid.zero
        d *= grid.scale
        d = d.reshape(scaled.shape)
        d -= scaled
        parts = [d[:, :stop] @ upper[:stop, start:stop] for start, stop in _column_blocks(len(upper))]
        total += float(xp.vdot(xp.concatenate(parts, axis=1), d))
    return total


def _column_blocks(k: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each of at most `PARTS` blocks of K columns."""
    size = -(-k // PARTS)
    for start in range(0, k, size):
        yield start, min(start + size, k)


def _coarse_points() -> list[tuple[bool, float]]:
    """Return (duo, r) for all candidates of the first pass, except for t = 1 (r = 0 without duo)."""
    count = round(1 / COARSE)
    return [(False, i * COARSE) for i in range(1, count + 1)] + [(True, i * COARSE) for i in range(count + 1)]


def _share(a: Array, tied: tuple[int, int, int]) -> Array:
    """Return ``a`` [K] with each value replaced by the mean over all query heads of its key-value head."""
    shared = a.reshape(tied).mean(axis=1, keepdims=True)
    return np.ascontiguousarray(np.broadcast_to(shared, tied)).reshape(-1)
