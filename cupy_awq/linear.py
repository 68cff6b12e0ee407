# SPDX-License-Identifier: Apache-2.0
"""`AwqLinear`: a linear layer over a quantized weight."""

from __future__ import annotations

from typing import Any

from cupy_awq import check, device, ops, select
from cupy_awq.check import Array
from cupy_awq.kernels.problem import Problem
from cupy_awq.weight import PackedWeight


class AwqLinear:
    """y = x @ W + bias for a `PackedWeight`, on the device where the weight lies.

    Args:
        weight: the weight [K, N], on the CPU or on a GPU.
        bias: [N] float16, bfloat16 or float32, on the same device; or None.

    ``layer(x, out=None)`` takes x [..., K] in float16, bfloat16 or float32 and gives [..., N] of x's dtype.

    Raises:
        TypeError, ValueError: a bias, an x or an out that does not fit the weight; the message names it.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> layer = cupy_awq.AwqLinear(weight, bias=np.ones(16, np.float32))
    >>> layer(np.ones((2, 32), np.float16))[:, 0]
    array([2., 2.], dtype=float16)
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: PackedWeight, /, *, bias: Array | None = None) -> None:
        if not isinstance(weight, PackedWeight):
            raise TypeError(f"weight must be a PackedWeight, got {type(weight).__name__}")
        if bias is not None:
            check.bias(bias, weight.shape[1], None, weight.facts.device)
        self.weight = weight
        self.bias = bias

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.weight.shape

    @property
    def group_size(self) -> int:
        """Rows of W that share a scale."""
        return self.weight.group_size

    def __call__(self, x: Array, /, *, out: Array | None = None) -> Array:
        weight = self.weight
        return ops.gemm(x, weight.qweight, weight.scales, weight.qzeros, bias=self.bias, out=out)

    def kernel_for(self, m: int, dtype: Any = "float16") -> str:
        """The name of the kernel that makes ``m`` rows of x; "numpy" on the CPU."""
        facts = self.weight.facts
        if facts.device == check.HOST:
            return "numpy"
        element = check.float_dtype(dtype).name
        problem = Problem(m, facts.n, facts.k, facts.group_size, element, facts.dtype.name, facts.zeros)
        return select.choose(problem, device.of(facts.device)).name

    def __repr__(self) -> str:
        return f"AwqLinear({self.weight}{', bias' if self.bias is not None else ''})"
