# SPDX-License-Identifier: Apache-2.0
"""The arrays of a concatenated layer, computed from the arrays of its parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array, WeightSpec
from cupy_awq.packing import namespace
from cupy_awq.weight import PackedWeight


def common_spec(weights: Sequence[PackedWeight]) -> WeightSpec:
    """Return the properties of the first weight. Raises ValueError if another weight cannot be concatenated to it."""
    first = weights[0].spec
    for i, weight in enumerate(weights):
        for name in ("k", "group_size", "dtype", "zeros", "device"):
            expected, found = getattr(first, name), getattr(weight.spec, name)
            if found != expected:
                raise ValueError(f"parts[{i}]: expected {name}={expected} as in parts[0], got {found}")
    return first


def common_order(orders: Sequence[Array | None]) -> Array | None:
    """Return the activation order that all parts of a concatenated layer share. Raises ValueError if orders differ."""
    first = orders[0]
    for i, order in enumerate(orders):
        if (order is None) != (first is None) or (order is not None and not bool((order == first).all())):
            raise ValueError(f"parts[{i}]: expected the activation order of parts[0], got another")
    return first


def joined(arrays: Sequence[Array]) -> Array:
    """Concatenate arrays along the last axis."""
    return namespace(arrays[0]).concatenate(arrays, axis=-1)


def joined_bias(weights: Sequence[PackedWeight], biases: Sequence[Array | None]) -> Array | None:
    """Concatenate biases along N; a missing bias counts as zeros.

    Returns:
        The bias in the common dtype of all biases, or in float32 if they differ; None if all are missing.
    """
    types = {bias.dtype for bias in biases if bias is not None}
    if not types:
        return None
    dtype = types.pop() if len(types) == 1 else check.FLOAT32
    columns = [weight.shape[1] for weight in weights]
    whole = namespace(weights[0].qweight).zeros(sum(columns), dtype)
    for bias, size, end in zip(biases, columns, np.cumsum(columns).tolist(), strict=True):
        if bias is not None:
            whole[end - size : end] = bias
    return whole
