# SPDX-License-Identifier: Apache-2.0
"""The tensors of one module by suffix, with the checks that formats share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.tensors import Array, Tensor, is_finite

INT32 = (np.dtype(np.int32),)
INT64 = (np.dtype(np.int64),)
UINT8 = (np.dtype(np.uint8),)
SCALES = check.SCALES


class ModuleTensors:
    """The tensors of one module by suffix, with checks whose errors name the file and the module.

    Args:
        name: the name of the module in the file and its configuration.
        file: the path of the file that holds the codes.
        codes: the suffix of the codes.
        tensors: all tensors of the module by suffix, including the codes.
        expert: the index of the expert if ``tensors`` are the slices of a fused module for one expert, else None.

    Attributes:
        name: the name of the module.
        file: the path of the file.
        where: the start of error messages: file, module and expert.
    """

    def __init__(
        self, name: str, file: Path, codes: str, tensors: Mapping[str, Tensor], expert: int | None = None
    ) -> None:
        self.name = name
        self.file = file
        self.where = f"{file}: module {name!r:.200}" + ("" if expert is None else f", expert {expert}")
        self._codes = codes
        self._tensors = tensors

    def __contains__(self, suffix: str) -> bool:
        return suffix in self._tensors

    def error(self, text: str) -> CheckpointError:
        """Return a CheckpointError whose message names the file and the module, followed by ``text``."""
        return CheckpointError(f"{self.where}: {text}")

    def raw(self, suffix: str) -> Array:
        """Return a required tensor by suffix. Raises CheckpointError if the tensor is missing or empty."""
        if suffix not in self._tensors:
            raise self.error(f"{suffix}: expected a tensor beside {self._codes}, got none")
        array = self._tensors[suffix].array
        if 0 in array.shape:
            raise self.error(f"{suffix}: expected at least one element, got {_describe(array)}")
        return array

    def matrix(self, suffix: str, dtypes: Sequence[np.dtype[Any]], layout: str) -> Array:
        """Return a required matrix as a contiguous array.

        Raises CheckpointError if the dtype is not in ``dtypes`` or the tensor is not 2-D.

        ``layout`` describes the axes in the error message, such as "[K, N/8]".
        """
        array = self.raw(suffix)
        if array.dtype not in dtypes or array.ndim != 2:
            raise self.error(f"{suffix}: expected {_join(dtypes)} {layout}, got {_describe(array)}")
        return np.ascontiguousarray(array)

    def array(self, suffix: str, dtypes: Sequence[np.dtype[Any]], layout: str, shape: tuple[int, ...]) -> Array:
        """Return a required tensor as a contiguous array.

        Raises CheckpointError if the dtype is not in ``dtypes`` or the shape is not ``shape``.

        ``layout`` describes the axes in the error message, such as "[K, N/8]".
        """
        array = self.raw(suffix)
        if array.dtype not in dtypes or array.shape != shape:
            expected = f"{_join(dtypes)} {layout} = {list(shape)}"
            raise self.error(f"{suffix}: expected {expected}, got {_describe(array)}")
        return np.ascontiguousarray(array)

    def bias(self, n: int) -> Array | None:
        """Return the bias [N], or None without a bias.

        Raises CheckpointError if the shape is not [N], the dtype is not a supported float, or a value is NaN or
        infinite.
        """
        if "bias" not in self._tensors:
            return None
        return self.finite("bias", self.array("bias", check.FLOATS, "[N]", (n,)))

    def finite(self, suffix: str, values: Array) -> Array:
        """Return ``values`` unchanged. Raises CheckpointError, which names ``suffix``, for a NaN or an infinity."""
        if not is_finite(values):
            raise self.error(f"{suffix}: expected finite values, got NaN or infinity")
        return values

    def bias_dtype(self) -> np.dtype[Any] | None:
        """Return the dtype of the bias, or None without a bias."""
        return self._tensors["bias"].array.dtype if "bias" in self._tensors else None

    def integer(self, suffix: str) -> int:
        """Return the value of a required integer tensor of one element.

        Raises CheckpointError if the dtype is not an integer type or the tensor does not have exactly one element.
        """
        array = self.raw(suffix)
        if array.size != 1 or array.dtype.kind not in "iu":
            raise self.error(f"{suffix}: expected one integer, got {_describe(array)}")
        return int(array.reshape(()))


def check_columns(tensors: ModuleTensors, n: int) -> int:
    """Return ``n``, the number of columns of W. Raises CheckpointError unless ``n`` is a multiple of 8."""
    if n % 8:
        raise tensors.error(f"N={n} is not a multiple of 8")
    return n


def _join(dtypes: Sequence[np.dtype[Any]]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def _describe(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
