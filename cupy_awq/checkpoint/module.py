# SPDX-License-Identifier: Apache-2.0
"""A quantized module: its properties, the module before its codes are repacked, and the module itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint.tensors import Array, Tensor
from cupy_awq.weight import PackedWeight


class Module(NamedTuple):
    """A quantized linear module, on the CPU unless `Contents.convert` has placed it on a GPU."""

    weight: PackedWeight
    """The weight [K, N]; its arrays are views of the memory-mapped file if the format needs no conversion."""
    bias: npt.NDArray[Any] | None
    """The bias [N], or None without a bias."""
    order: npt.NDArray[np.int32] | None = None
    """The permutation of x (activation order), int32 [K]: y = x[..., order] @ W; None without an activation order."""


@dataclass(frozen=True)
class ModuleSpec:
    """The properties of a quantized module that are known before its codes are repacked.

    Attributes:
        k: the number of rows of W [K, N], the in features.
        n: the number of columns of W, the out features.
        group_size: the number of rows of W per group in the packed weight.
        zeros: the form of the zero points: "packed", "symmetric" or "float", as in `check.WeightSpec.zeros`.
        dtype: the dtype of the scales, and of the weight if it becomes dense.
        has_order: whether x is permuted (activation order).
        bias_dtype: the dtype of the bias, or None without a bias.
        bits: the number of bits per code in the file. Only 4-bit codes stay packed; others become a dense tensor
            [N, K].
        rounding: a description of what the conversion rounds, or "" if it is exact.
    """

    k: int
    n: int
    group_size: int
    zeros: str
    dtype: np.dtype[Any]
    has_order: bool = False
    bias_dtype: np.dtype[Any] | None = None
    bits: int = 4
    rounding: str = ""

    @property
    def nbytes(self) -> int:
        """The size of the packed weight, the bias and the permutation of x, in bytes."""
        groups, itemsize = self.k // self.group_size, self.dtype.itemsize
        zeros = {"symmetric": 0, "packed": groups * self.n // 2, "float": groups * self.n * itemsize}[self.zeros]
        bias = 0 if self.bias_dtype is None else self.n * self.bias_dtype.itemsize
        return self.k * self.n // 2 + groups * self.n * itemsize + zeros + bias + (4 * self.k if self.has_order else 0)


class Pending(NamedTuple):
    """A validated module whose codes have not been repacked yet."""

    spec: ModuleSpec
    """The shape, group size and dtypes of the module."""
    repack: Callable[..., Module | Tensor]
    """A function of ``arrays`` that repacks the codes and returns the module, or a Tensor if ``is_dense``."""
    warning: str = ""
    """A warning about the file for the user, or ""."""
    is_dense: bool = False
    """True if ``repack`` returns a dense Tensor."""
    arrays: tuple[Array | None, ...] = ()
    """The arrays that ``repack`` takes, on the CPU or a GPU; () if ``repack`` supports only the CPU."""
    shape: tuple[int, ...] = ()
    """The shape of the dense Tensor; () for [N, K]."""

    def convert(self, place: Callable[[Array], Array] | None = None) -> Module | Tensor:
        """Return the module, or a Tensor if ``is_dense``, with its codes repacked.

        Args:
            place: a function that copies an array to the device on which the codes are to be repacked; None for the
                CPU.
        """
        if place is None:
            return self.repack(*self.arrays)
        return self.repack(*(None if array is None else place(array) for array in self.arrays))
