# SPDX-License-Identifier: Apache-2.0
"""The canonical layout of a quantized weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array


@dataclass(frozen=True, slots=True, eq=False, repr=False, init=False)
class PackedWeight:
    """A weight W [K, N] as 4-bit codes, in AutoAWQ's "gemm" layout: the one form that the package computes with.

        W[k, n] = (q[k, n] - z[g, n]) * s[g, n],  g = k // group_size

    Args:
        qweight: [K, N/8] int32. Bits 4p..4p+3 of word c hold the code, 0..15, of column 8c + PACK_ORDER[p], with
            `cupy_awq.packing.PACK_ORDER` = (0, 2, 4, 6, 1, 3, 5, 7).
        scales: [K/G, N] float16 or bfloat16; the group size G is K divided by its rows.
        qzeros: [K/G, N/8] int32, zero points packed as the codes are; or None, where every zero point is 8; or
            [K/G, N] offsets o of the scales' dtype, for W = q*s + o.

    The arrays, NumPy or CuPy, are kept as they are, without copying: slices of rows or of columns of larger tensors are
    welcome, only the last axis must be contiguous. `x @ weight` is `gemm`.

    Raises:
        TypeError: not arrays of one device, or another dtype.
        ValueError: shapes that do not fit each other, or a last axis that is not contiguous.

    >>> weight = PackedWeight(np.zeros((64, 2), np.int32), np.ones((4, 16), np.float16), None)
    >>> weight
    PackedWeight(K=64, N=16, group_size=16, float16, symmetric zeros, 640 B)
    >>> weight.shape, weight.group_size
    ((64, 16), 16)
    """

    qweight: Array
    scales: Array
    qzeros: Array | None
    spec: check.WeightSpec

    __array_ufunc__ = None  # NumPy and CuPy then leave `x @ weight` to __rmatmul__

    def __init__(self, qweight: Array, scales: Array, qzeros: Array | None, /) -> None:
        facts = check.weight(qweight, scales, qzeros)
        for name, value in (("qweight", qweight), ("scales", scales), ("qzeros", qzeros), ("spec", facts)):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.spec.k, self.spec.n

    @property
    def group_size(self) -> int:
        """Rows of W that share a scale."""
        return self.spec.group_size

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the scales: float16 or bfloat16."""
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        zeros = 0 if self.qzeros is None else self.qzeros.nbytes
        return int(self.qweight.nbytes + self.scales.nbytes + zeros)

    def __rmatmul__(self, x: Array) -> Array:
        import cupy_awq  # the package imports `gemm`, from a layer above this one, when it is called

        return cupy_awq.gemm(x, self.qweight, self.scales, self.qzeros)

    def __repr__(self) -> str:
        k, n, group_size, zeros, dtype, device = self.spec
        place = "" if device == check.HOST else f", GPU {device}"
        size = self.nbytes
        bytes_ = f"{size / 1e6:.2f} MB" if size >= 10_000 else f"{size} B"
        return f"PackedWeight(K={k}, N={n}, group_size={group_size}, {dtype}, {zeros} zeros, {bytes_}{place})"


def check_packed(weight: object) -> None:
    """TypeError for an argument ``weight`` that is no `PackedWeight`."""
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight: expected a PackedWeight, got {type(weight).__name__}")
