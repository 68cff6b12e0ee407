# SPDX-License-Identifier: Apache-2.0
"""Exact folding of channel scales t into adjacent layers, so that x is not divided by t at run time.

A linear layer whose input is x / t needs the weight W * t (`scale_columns`). The layer that computes x absorbs 1 / t:
the weight of an RMSNorm (`divide_norm`), or the last rows of a linear layer (`divide_rows`), are divided by t.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq.check import Array
from cupy_awq.packing import namespace


def scale_columns(w: Array, t: Array) -> Array:
    """Return the weight W * t, float32 [N, K], for channel scales t [K]."""
    result: Array = w.astype(np.float32) * t
    return result


def divide_norm(norm_weight: Array, t: Array, dtype: Any) -> tuple[Array, Array]:
    """Return the weight of an RMSNorm divided by t and rounded to ``dtype``, and the t that corresponds to the result.

    If the columns of the following layers are scaled by the returned t, the folding is exact in spite of the rounding.
    Channels whose norm weight is 0, or would become 0 or infinite, are not scaled: the returned t is 1.

    >>> weight, t = divide_norm(np.ones(2, np.float32), np.array([4.0, 0.5], np.float32), np.float16)
    >>> weight.tolist(), t.tolist()
    ([0.25, 2.0], [4.0, 0.5])
    """
    xp = namespace(norm_weight)
    original = norm_weight.astype(np.float32)
    with np.errstate(over="ignore"):
        divided = (original / t).astype(dtype).astype(np.float32)
    # A subnormal float16 result is imprecise but usable: the returned t is computed from the rounded value.
    is_usable = (divided != 0) & xp.isfinite(divided)
    divided = xp.where(is_usable, divided, original.astype(dtype).astype(np.float32))
    exact_t = xp.where(is_usable, original / xp.where(is_usable, divided, 1), 1).astype(np.float32)
    return divided.astype(dtype), exact_t


def divide_rows(w: Array, bias: Array | None, t: Array) -> tuple[Array, Array | None]:
    """Return a weight [N, K] and a bias [N] in float32 with their last len(t) rows divided by t.

    For a merged QKV projection, the last rows are those of v.
    """
    result = w.astype(np.float32)
    result[-len(t) :] /= t[:, None]
    if bias is None:
        return result, None
    shifted = bias.astype(np.float32)
    shifted[-len(t) :] /= t
    return result, shifted


def value_scales(t: Array, tied: tuple[int, int, int]) -> Array:
    """Return the scales [kv_heads * head_dim] for the rows of v_proj, given the channel scales t [K] of o_proj.

    ``tied`` is (kv_heads, query heads per key-value head, head_dim). All query heads of a key-value head must have
    equal scales.

    >>> value_scales(np.array([1.0, 2.0, 1.0, 2.0]), (1, 2, 2)).tolist()
    [1.0, 2.0]
    """
    return namespace(t).ascontiguousarray(t.reshape(tied)[:, 0]).reshape(-1)
