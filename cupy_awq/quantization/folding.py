# SPDX-License-Identifier: Apache-2.0
"""Exact folding of channel scales t into neighboring layers, so that no division is left at run time.

A linear layer that gets x / t needs W * t (`scale_columns`). The layer that produces x is divided by t: a norm's weight
elementwise, a linear layer by its last rows (`divide_rows`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq.check import Array
from cupy_awq.packing import namespace


def scale_columns(w: Array, t: Array) -> Array:
    """Return W * t, float32 [N, K], for scales t [K] of the input channels."""
    result: Array = w.astype(np.float32) * t
    return result


def divide_norm(norm_weight: Array, t: Array, dtype: Any) -> tuple[Array, Array]:
    """Return a norm's weight divided by t and rounded to the stored dtype, and the t that this rounded weight has.

    Scaling the following layers by the returned t makes the folding exact in spite of the rounding. Channels whose
    norm weight is 0, or would become 0 or infinite, keep t = 1.

    >>> weight, t = divide_norm(np.ones(2, np.float32), np.array([4.0, 0.5], np.float32), np.float16)
    >>> weight.tolist(), t.tolist()
    ([0.25, 2.0], [4.0, 0.5])
    """
    xp = namespace(norm_weight)
    original = norm_weight.astype(np.float32)
    with np.errstate(over="ignore"):
        divided = (original / t).astype(dtype).astype(np.float32)
    # A subnormal float16 weight has lost digits, but t follows them.
    is_usable = (divided != 0) & xp.isfinite(divided)
    divided = xp.where(is_usable, divided, original.astype(dtype).astype(np.float32))
    exact_t = xp.where(is_usable, original / xp.where(is_usable, divided, 1), 1).astype(np.float32)
    return divided.astype(dtype), exact_t


def divide_rows(w: Array, bias: Array | None, t: Array) -> tuple[Array, Array | None]:
    """Return a weight [N, K] and bias [N] in float32 with the last len(t) outputs divided by t.

    In a merged QKV projection the last rows are those of v.
    """
    result = w.astype(np.float32)
    result[-len(t) :] /= t[:, None]
    if bias is None:
        return result, None
    shifted = bias.astype(np.float32)
    shifted[-len(t) :] /= t
    return result, shifted


def value_scales(t: Array, tied: tuple[int, int, int]) -> Array:
    """Return the scales [kv_heads * head_dim] of v_proj's rows that belong to the scales t [K] of o_proj's inputs.

    ``tied`` is (kv_heads, heads per kv_head, head_dim); the heads of a key-value head have equal scales.

    >>> value_scales(np.array([1.0, 2.0, 1.0, 2.0]), (1, 2, 2)).tolist()
    [1.0, 2.0]
    """
    return namespace(t).ascontiguousarray(t.reshape(tied)[:, 0]).reshape(-1)
