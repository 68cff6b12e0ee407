# SPDX-License-Identifier: Apache-2.0
"""The contract of a checkpoint format: validated tensors of one module become a `Pending` module.

Validation reads headers, scales, zero points and permutations; codes are repacked when the module is first accessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq import check
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.tensors import Module, Tensor

Array = npt.NDArray[Any]

INT32 = (np.dtype(np.int32),)
INT64 = (np.dtype(np.int64),)
UINT8 = (np.dtype(np.uint8),)
SCALES = check.SCALES

_EXPONENTS = {np.dtype(np.float16): 0x7C00, check.BFLOAT16: 0x7F80}
_CHUNK = 1 << 20


@dataclass(frozen=True)
class ModuleSpec:
    """The shape and form of a quantized module, known before its codes are repacked.

    Attributes:
        k: rows of W [K, N], the in features.
        n: columns of W, the out features.
        group_size: rows of W that share a scale in the packed weight.
        zeros: "packed", "symmetric" or "float", as in `PackedWeight`.
        dtype: the dtype of the scales, and of a dense weight.
        has_order: whether x is permuted (activation order).
        bias_dtype: the dtype of the bias, or None.
        bits: bits of a code in the file. Only codes of 4 bits stay packed; others become a dense tensor [N, K].
        rounding: what the conversion rounds, or "" where the dense weight is exactly that of the file.
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
        """The bytes of the packed weight, the bias and the order."""
        groups, itemsize = self.k // self.group_size, self.dtype.itemsize
        zeros = {"symmetric": 0, "packed": groups * self.n // 2, "float": groups * self.n * itemsize}[self.zeros]
        bias = 0 if self.bias_dtype is None else self.n * self.bias_dtype.itemsize
        return self.k * self.n // 2 + groups * self.n * itemsize + zeros + bias + (4 * self.k if self.has_order else 0)


class Pending(NamedTuple):
    """A validated module whose codes are not repacked yet."""

    spec: ModuleSpec
    """Its shape and form."""
    convert: Callable[[], Module | Tensor]
    """A function that repacks it; a Tensor where the weight becomes dense."""
    warning: str = ""
    """A warning for the user about the file, or ""."""
    is_dense: bool = False
    """Whether `convert` returns a dense Tensor [N, K]."""


class Format(Protocol):
    """A checkpoint format with the settings of one checkpoint.

    Attributes:
        name: the format's name, such as "gptq".
        codes: the last part of the name of a tensor of codes, such as "qweight".
        parts: the last parts of the names of the other tensors that a module may have.
        orphans: the parts that must not be there without codes.
    """

    @property
    def name(self) -> str: ...
    @property
    def codes(self) -> str: ...
    @property
    def parts(self) -> Sequence[str]: ...
    @property
    def orphans(self) -> Sequence[str]: ...

    def is_codes(self, array: Array) -> bool:
        """Return whether a tensor with the name of codes holds codes."""
        ...

    def open_module(self, parts: Parts) -> Pending:
        """Return a validated module. Raises CheckpointError for tensors that contradict each other."""
        ...


class Parts:
    """The tensors of one module by the last part of their names, with checks that name file and module.

    Args:
        name: the module's name in the file and its configuration.
        file: the file of the tensor of codes.
        codes: the last part of the name of the tensor of codes.
        tensors: all tensors of the module by the last part of their names, the codes included.
        expert: the number of the expert whose slice of the module's tensors ``tensors`` are, or None.
    """

    def __init__(
        self, name: str, file: Path, codes: str, tensors: Mapping[str, Tensor], expert: int | None = None
    ) -> None:
        self.name = name
        self.file = file
        self.where = f"{file}: module {name!r:.200}" + ("" if expert is None else f", expert {expert}")
        self._codes = codes
        self._tensors = tensors

    def __contains__(self, part: str) -> bool:
        return part in self._tensors

    def refuse(self, text: str) -> CheckpointError:
        """Return the error of this module; ``text`` is what follows the module's name in its message."""
        return CheckpointError(f"{self.where}: {text}")

    def raw(self, part: str) -> Array:
        """Return a tensor that must be there. Raises CheckpointError if it is missing or empty."""
        if part not in self._tensors:
            raise self.refuse(f"{part}: expected a tensor beside {self._codes}, got none")
        array = self._tensors[part].array
        if 0 in array.shape:
            raise self.refuse(f"{part}: expected at least one element, got {_describe(array)}")
        return array

    def matrix(self, part: str, dtypes: Sequence[np.dtype[Any]], layout: str) -> Array:
        """Return a contiguous tensor of rank 2. Raises CheckpointError for another dtype or rank."""
        array = self.raw(part)
        if array.dtype not in dtypes or array.ndim != 2:
            raise self.refuse(f"{part}: expected {_join(dtypes)} {layout}, got {_describe(array)}")
        return np.ascontiguousarray(array)

    def array(self, part: str, dtypes: Sequence[np.dtype[Any]], layout: str, shape: tuple[int, ...]) -> Array:
        """Return a contiguous tensor of this shape. Raises CheckpointError for another dtype or shape."""
        array = self.raw(part)
        if array.dtype not in dtypes or array.shape != shape:
            expected = f"{_join(dtypes)} {layout} = {list(shape)}"
            raise self.refuse(f"{part}: expected {expected}, got {_describe(array)}")
        return np.ascontiguousarray(array)

    def bias(self, n: int) -> Array | None:
        """Return the bias [N] or None. Raises CheckpointError for another shape or dtype."""
        if "bias" not in self._tensors:
            return None
        return self.finite("bias", self.array("bias", check.FLOATS, "[N]", (n,)))

    def finite(self, part: str, values: Array) -> Array:
        """Return ``values``. Raises CheckpointError if one of them is NaN or infinite."""
        if not is_finite(values):
            raise self.refuse(f"{part}: expected finite values, got NaN or infinity")
        return values

    def bias_dtype(self) -> np.dtype[Any] | None:
        """Return the dtype of the bias, or None."""
        return self._tensors["bias"].array.dtype if "bias" in self._tensors else None

    def integer(self, part: str) -> int:
        """Return the integer in a tensor of one element. Raises CheckpointError for any other tensor."""
        array = self.raw(part)
        if array.size != 1 or array.dtype.kind not in "iu":
            raise self.refuse(f"{part}: expected one integer, got {_describe(array)}")
        return int(array.reshape(()))


def check_columns(parts: Parts, n: int) -> int:
    """Return N. Raises CheckpointError unless it is a multiple of 8."""
    if n % 8:
        raise parts.refuse(f"N={n} is not a multiple of 8")
    return n


def resolve_group_size(parts: Parts, k: int, group_size: int | None) -> int:
    """Return the group size of a module with K rows from a setting that may be -1 or None for K.

    Raises CheckpointError for a setting that is neither.
    """
    if group_size is None or group_size == -1:
        return k
    if type(group_size) is not int or group_size < 1:
        raise parts.refuse(f"group_size: expected -1 or a positive integer, got {group_size!r:.80}")
    return group_size


def is_finite(values: Array) -> bool:
    """Return whether no value is NaN or infinite, without an array of flags.

    >>> is_finite(np.array([1, np.inf], np.float16))
    False
    """
    flat = values.reshape(-1)
    mask = _EXPONENTS.get(values.dtype)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if mask is None:
            finite = bool(np.isfinite(chunk).all())
        else:
            finite = int((chunk.view(np.uint16) & np.uint16(mask)).max()) != mask
        if not finite:
            return False
    return True


class Groups(NamedTuple):
    """The groups of W's rows that a packed weight has, and the order of its rows."""

    size: int
    """Rows of a group."""
    repeats: tuple[int, int] | None
    """(number of repeats, number of rows kept) of scales and zero points, where a short last group splits them."""
    order: npt.NDArray[np.int32] | None
    """The permutation of x [..., K], or None."""

    def expand(self, values: Array) -> Array:
        """Return scales or zero points [groups, ...] for the groups of the packed weight."""
        if self.repeats is None:
            return values
        times, rows = self.repeats
        return np.repeat(values, times, axis=0)[:rows]


def regroup(parts: Parts, k: int, group_size: int, g_idx: Array | None, name: str) -> Groups:
    """Return the groups of a module from its group size and the group of each row.

    A short last group is split, as all others, into groups of gcd(G, K mod G) rows, which is exact.

    Args:
        g_idx: int32 [K], the group of each row; None where row k is in group k // G.
        name: the tensor's name, for messages.

    Raises:
        CheckpointError: a group that does not exist, or an activation order with groups of different sizes.
    """
    group_size = min(group_size, k)  # a group beyond K ends with it
    count = -(-k // group_size)
    order = None if g_idx is None else _find_order(parts, k, group_size, count, g_idx, name)
    if k % group_size == 0:
        return Groups(group_size, None, order)
    size = math.gcd(group_size, k % group_size)
    return Groups(size, (group_size // size, k // size), order)


def _find_order(
    parts: Parts, k: int, group_size: int, count: int, g_idx: Array, name: str
) -> npt.NDArray[np.int32] | None:
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= count:
        raise parts.refuse(f"{name}: expected groups 0 to {count - 1}, got {low if low < 0 else high}")
    if high == 0 or np.array_equal(g_idx, np.arange(k, dtype=np.int64) // group_size):
        return None  # old files without activation order hold zeros
    sizes = np.bincount(g_idx, minlength=count)
    if (sizes != group_size).any():
        found = f"{sizes.min()} and {sizes.max()} rows"
        raise parts.refuse(f"{name}: expected groups of {group_size} rows, got groups of {found}")
    return np.argsort(g_idx, kind="stable").astype(np.int32)


def _join(dtypes: Sequence[np.dtype[Any]]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def _describe(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
