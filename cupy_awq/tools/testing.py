# SPDX-License-Identifier: Apache-2.0
"""The error metric and the random data that the tests, the demo and the benchmarks use."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq import check, check_scalar
from cupy_awq.check import Array
from cupy_awq.packing import pack_int4, unpack_int4
from cupy_awq.weight import PackedWeight

_BLOCK = 1 << 22  # the number of weights that are converted to float64 at a time, which bounds the memory


def relative_error(y: Array, x: Array, weight: PackedWeight, /) -> float:
    """Return norm(y - ref) / norm(sqrt(x**2 @ W**2)), where ref = x @ W in float64.

    The denominator is the norm of all products x[m, k] * W[k, n], not of their sums, so the metric is stable under
    cancellation. x [..., K] and y [..., N] may be on a GPU; the computation uses NumPy. The result is NaN if y contains
    a NaN.

    >>> rng = np.random.default_rng(0)
    >>> weight, x = random_weight(rng, 64, 16, 32), random_activations(rng, 4, 64)
    >>> from cupy_awq.reference import matmul
    >>> 0 < relative_error(matmul(x, weight.qweight, weight.scales, weight.qzeros), x, weight) < 5e-4
    True
    """
    k, n = weight.shape
    rows = _float64(x).reshape(-1, k)
    codes, scales = _host(weight.qweight), _float64(weight.scales)
    zeros: Array = np.broadcast_to(8.0, scales.shape)
    offsets: Array = np.broadcast_to(0.0, scales.shape)
    if weight.spec.zeros == "packed":
        zeros = unpack_int4(_host(weight.qzeros)).astype(np.float64)
    elif weight.spec.zeros == "float":
        zeros, offsets = offsets, _float64(weight.qzeros)
    reference, squares = np.zeros((len(rows), n)), np.zeros((len(rows), n))
    step = max(1, _BLOCK // n)
    for start in range(0, k, step):
        some = slice(start, min(start + step, k))
        group = np.arange(some.start, some.stop) // weight.group_size
        w = (unpack_int4(codes[some]) - zeros[group]) * scales[group] + offsets[group]
        reference += rows[:, some] @ w
        squares += rows[:, some] ** 2 @ w**2
    error = np.linalg.norm(_float64(y).reshape(-1, n) - reference)
    return float(error / np.sqrt(squares.sum())) if error else 0.0


def random_weight(
    rng: np.random.Generator, k: int, n: int, group_size: int, /, *, dtype: Any = np.float16, zeros: str = "packed"
) -> PackedWeight:
    """Return a random weight [K, N] with zero points of the form ``zeros``: "packed", "symmetric" or "float".

    The weight is scaled so that elements of x @ W are about as large as those of x.

    >>> random_weight(np.random.default_rng(0), 64, 16, 32, zeros="symmetric")
    PackedWeight(K=64, N=16, group_size=32, float16, symmetric zeros, 576 B)
    """
    groups = k // check_scalar.validate_group_size(k, group_size)
    qweight = pack_int4(rng.integers(0, 16, (k, n), np.uint8))
    scales = (rng.uniform(0.5, 1.5, (groups, n)) / (8 * np.sqrt(k))).astype(dtype)
    qzeros = None
    if zeros == "packed":
        qzeros = pack_int4(rng.integers(0, 16, (groups, n), np.uint8))
    elif zeros == "float":
        qzeros = (-rng.uniform(6, 9, (groups, n)) * scales.astype(np.float64)).astype(scales.dtype)
    elif zeros != "symmetric":
        raise ValueError(f"zeros: expected 'packed', 'symmetric' or 'float', got {zeros!r}")
    return PackedWeight(qweight, scales, qzeros)


def random_activations(rng: np.random.Generator, *shape: int, dtype: Any = np.float16) -> npt.NDArray[Any]:
    """Return activations of shape [..., K] from the standard normal distribution.

    >>> random_activations(np.random.default_rng(0), 2, 64).shape
    (2, 64)
    """
    return rng.standard_normal(shape, np.float32).astype(dtype)


def _host(a: Array) -> npt.NDArray[Any]:
    host: npt.NDArray[Any] = a.get() if check.is_device_array(a) else a
    return host


def _float64(a: Array) -> npt.NDArray[Any]:
    return _host(a).astype(np.float64)
