# SPDX-License-Identifier: Apache-2.0
"""`PackedWeight`: a quantized weight in the AWQ layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from cupy_awq import check
from cupy_awq.array_types import ArrayT, CudaArray
from cupy_awq.check import Array, StridedArray


@dataclass(frozen=True, slots=True, eq=False, repr=False, init=False)
class PackedWeight:
    """A weight W [K, N] as 4-bit codes q with scales s and zero points z, in AutoAWQ's "gemm" layout.

        W[k, n] = (q[k, n] - z[g, n]) * s[g, n],  g = k // group_size

    ``x @ weight`` calls `gemm`. The arrays are NumPy or CuPy arrays and are not copied. They may be slices of larger
    tensors; only the last axis must be contiguous.

    Args:
        qweight: the codes, int32 [K, N/8]. Bits 4p..4p+3 of word c of a row are the code, 0 to 15, of column
            8c + PACK_ORDER[p], where `cupy_awq.packing.PACK_ORDER` is (0, 2, 4, 6, 1, 3, 5, 7).
        scales: the scales, float16 or bfloat16 [K/G, N]. They determine the group size G.
        qzeros: the zero points, int32 [K/G, N/8], packed like the codes; None if every zero point is 8; or offsets o
            [K/G, N] in the dtype of the scales, for W = q * s + o.

    Attributes:
        qweight, scales, qzeros: the arrays.
        spec: the properties of the arrays: K, N, group size, form of the zero points, dtype and device.

    Raises:
        TypeError: an argument is not an array, lies on another device than the others, or has an unsupported dtype.
        ValueError: the shapes contradict each other, or the last axis of an array is not contiguous.

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

    __array_ufunc__ = None  # makes NumPy and CuPy call __rmatmul__ for `x @ weight`

    def __init__(self, qweight: StridedArray, scales: StridedArray, qzeros: StridedArray | None, /) -> None:
        spec = check.validate_weight(qweight, scales, qzeros)
        assign = object.__setattr__  # the dataclass is frozen, but must set its own fields
        assign(self, "qweight", qweight)
        assign(self, "scales", scales)
        assign(self, "qzeros", qzeros)
        assign(self, "spec", spec)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (K, N)."""
        return self.spec.k, self.spec.n

    @property
    def tensors(self) -> dict[str, Array | None]:
        """The arrays by name: qweight, scales and qzeros."""
        return {"qweight": self.qweight, "scales": self.scales, "qzeros": self.qzeros}

    @property
    def group_size(self) -> int:
        """The number of rows of W per group; each column of a group has one scale and one zero point."""
        return self.spec.group_size

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the scales, float16 or bfloat16."""
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        """The total size of codes, scales and zero points in bytes."""
        zeros = 0 if self.qzeros is None else self.qzeros.nbytes
        return int(self.qweight.nbytes + self.scales.nbytes + zeros)

    @overload
    def __rmatmul__(self, x: ArrayT) -> ArrayT: ...
    @overload
    def __rmatmul__(self, x: CudaArray) -> Array: ...
    def __rmatmul__(self, x: Array) -> Array:
        import cupy_awq  # imported here, since `gemm` imports this module

        return cupy_awq.gemm(x, self)

    def __repr__(self) -> str:
        k, n, group_size, zeros, dtype, device, _ = self.spec
        place = "" if device == check.HOST else f", GPU {device}"
        size = self.nbytes
        bytes_ = f"{size / 1e6:.2f} MB" if size >= 10_000 else f"{size} B"
        return f"PackedWeight(K={k}, N={n}, group_size={group_size}, {dtype}, {zeros} zeros, {bytes_}{place})"


def check_packed(weight: object) -> None:
    """Raise TypeError unless ``weight`` is a `PackedWeight`."""
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight: expected a PackedWeight, got {type(weight).__name__}")
