# SPDX-License-Identifier: Apache-2.0
"""The interface of checkpoint formats: a `Format` validates the tensors of a module and returns a `Pending` module.

Validation reads headers, scales, zero points and permutations. When a module is accessed, its codes are repacked; the
scales of GGUF modules are also validated then.
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
from cupy_awq.packing import namespace

Array = npt.NDArray[Any]

INT32 = (np.dtype(np.int32),)
INT64 = (np.dtype(np.int64),)
UINT8 = (np.dtype(np.uint8),)
SCALES = check.SCALES

_EXPONENTS = {np.dtype(np.float16): 0x7C00, check.BFLOAT16: 0x7F80}
"""The bit mask of the exponent for each 16-bit float dtype: infinity and NaN have all of these bits set."""

_CHUNK = 1 << 20
"""The number of values that `is_finite` tests at a time."""


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


class Format(Protocol):
    """A reader of one checkpoint format, configured with the settings of one checkpoint.

    The tensors of a module are named ``<module>.<suffix>``.

    Attributes:
        name: the name of the format for messages, such as "gptq v1".
        codes_suffix: the suffix of the tensor of codes, such as "qweight".
        other_suffixes: the suffixes of all other tensors that a module may have.
        dependent_suffixes: the suffixes of tensors that are allowed only in a module with codes.
    """

    @property
    def name(self) -> str: ...
    @property
    def codes_suffix(self) -> str: ...
    @property
    def other_suffixes(self) -> Sequence[str]: ...
    @property
    def dependent_suffixes(self) -> Sequence[str]: ...

    def is_quantized(self, array: Array) -> bool:
        """Return whether ``array`` holds codes. It has the suffix `codes_suffix`, as dense weights also have in MLX."""
        ...

    def open_module(self, tensors: ModuleTensors) -> Pending:
        """Validate the tensors of a module and return the module, whose codes are not repacked yet.

        Raises CheckpointError if the tensors contradict each other or the settings.
        """
        ...


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


def resolve_group_size(tensors: ModuleTensors, k: int, group_size: int | None) -> int:
    """Return the group size of a module with K rows: the setting ``group_size``, or K if the setting is -1 or None.

    Raises CheckpointError for a setting that is neither -1, None nor a positive integer.
    """
    if group_size is None or group_size == -1:
        return k
    if type(group_size) is not int or group_size < 1:
        raise tensors.error(f"group_size: expected -1 or a positive integer, got {group_size!r:.80}")
    return group_size


def is_finite(values: Array) -> bool:
    """Return whether all values are finite, testing one chunk at a time to keep the temporary arrays small.

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
    """The groups and the row order of a packed weight, and the mapping from the groups of the file to these groups."""

    size: int
    """The number of rows of W per group in the packed weight."""
    repeats: tuple[int, int] | None
    """(The number of packed groups per group of the file, the total number of packed groups).

    None if the groups of the file are not split into smaller groups of the packed weight.
    """
    order: npt.NDArray[np.int32] | None
    """The permutation of the last axis of x, int32 [K]; None without an activation order."""

    def expand(self, values: Array) -> Array:
        """Return scales or zero points [groups of the file, ...], repeated to [groups of the packed weight, ...]."""
        if self.repeats is None:
            return values
        times, rows = self.repeats
        repeated: Array = namespace(values).repeat(values, times, axis=0)
        return repeated[:rows]


def regroup(tensors: ModuleTensors, k: int, group_size: int, g_idx: Array | None, name: str) -> Groups:
    """Return the groups that a packed weight needs to represent the groups of a file exactly.

    If the last group is short, all groups are split into groups of gcd(G, K mod G) rows. For G = 128, the new groups
    have 64 rows, which the fastest kernels support, if K is a multiple of 64; else 32 or 16 rows if K is a multiple of
    32 or 16.

    Args:
        tensors: the module, for error messages.
        k: the number of rows of W.
        group_size: the group size G of the file.
        g_idx: int32 [K], the group index of each row; None if row k belongs to group k // G.
        name: the suffix of the tensor ``g_idx``, for error messages.

    Raises:
        CheckpointError: an index is out of range, or an activation order has groups of different sizes.
    """
    group_size = min(group_size, k)  # a group size above K means one group
    count = -(-k // group_size)
    order = None if g_idx is None else _find_order(tensors, k, group_size, count, g_idx, name)
    if k % group_size == 0:
        return Groups(group_size, None, order)
    size = math.gcd(group_size, k % group_size)
    return Groups(size, (group_size // size, k // size), order)


def _find_order(
    tensors: ModuleTensors, k: int, group_size: int, count: int, g_idx: Array, name: str
) -> npt.NDArray[np.int32] | None:
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= count:
        raise tensors.error(f"{name}: expected groups 0 to {count - 1}, got {low if low < 0 else high}")
    if high == 0 or np.array_equal(g_idx, np.arange(k, dtype=np.int64) // group_size):
        return None  # no activation order; older files then store a g_idx of zeros
    sizes = np.bincount(g_idx, minlength=count)
    if (sizes != group_size).any():
        found = f"{sizes.min()} and {sizes.max()} rows"
        raise tensors.error(f"{name}: expected groups of {group_size} rows, got groups of {found}")
    return np.argsort(g_idx, kind="stable").astype(np.int32)


def _join(dtypes: Sequence[np.dtype[Any]]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def _describe(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
