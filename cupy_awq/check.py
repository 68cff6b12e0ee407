# SPDX-License-Identifier: Apache-2.0
"""Validation of arguments: every shape, dtype, stride and device rule of the package, and every message.

Arrays are recognised by their attributes (`shape`, `dtype`, `strides`), so one function serves NumPy and CuPy and
neither CuPy nor a GPU is needed here. Each function returns what the caller goes on to use, and raises TypeError or
ValueError naming the argument, what was expected and what came.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = Any
"""A NumPy or CuPy array; the two share no base class."""

HOST = -1
"""Where NumPy arrays live; GPUs count from 0."""

INT8 = np.dtype(np.int8)
UINT8 = np.dtype(np.uint8)
UINT16 = np.dtype(np.uint16)
INT32 = np.dtype(np.int32)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
FLOATS = (FLOAT16, BFLOAT16, FLOAT32)
SCALES = (FLOAT16, BFLOAT16)

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged in dlpack.h


class Weight(NamedTuple):
    """The facts of a valid (qweight, scales, qzeros)."""

    k: int
    n: int
    group_size: int
    zeros: str
    """"packed" (int32 words), "symmetric" (none stored: zero = 8) or "float" (offsets: w = q*s + o)."""
    dtype: np.dtype[Any]
    """Of the scales."""
    device: int
    """HOST, or the number of the GPU."""


class Activation(NamedTuple):
    """What an epilogue applies to x @ W + bias."""

    kind: str | None = None
    """"clamp" (to ``limits``), "silu", "gelu" (its tanh form) or None."""
    limits: tuple[float, float] = (0.0, 0.0)
    gated: bool = False
    """The activated first half of the columns multiplies the second half."""


ACTIVATIONS = {
    "relu": Activation("clamp", (0.0, math.inf)),
    "relu6": Activation("clamp", (0.0, 6.0)),
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "swiglu": Activation("silu", gated=True),
}
"""The activations that have a name."""


class Product(NamedTuple):
    """The facts of a valid y = activation(x @ W + bias) + residual."""

    element: np.dtype[Any]
    """Of x and y, whose dtype is uint16 where they hold bfloat16 as bits."""
    shape: tuple[int, ...]
    """Of y."""
    bias: np.dtype[Any] | None
    activation: Activation


def is_device_array(a: object) -> bool:
    """Whether `a` is memory of a CUDA device, told by the array protocols and not by importing a library.

    >>> is_device_array(np.zeros(3)), is_device_array([1, 2])
    (False, False)
    """
    if isinstance(a, np.ndarray):
        return False
    if _is_cupy(a) or hasattr(a, "__cuda_array_interface__"):
        return True
    dlpack_device = getattr(a, "__dlpack_device__", None)
    return dlpack_device is not None and int(dlpack_device()[0]) in _DLPACK_CUDA


def device_id(a: Array, name: str) -> int:
    """HOST for a NumPy array, the GPU's number for a CuPy array.

    Raises:
        TypeError: `a` is neither, a list for example: nothing is converted silently.

    >>> device_id(np.zeros(3), "x")
    -1
    """
    if isinstance(a, np.ndarray):
        return HOST
    if _is_cupy(a):
        return int(a.data.device_id)  # CuPy's __cuda_array_interface__ would build a dictionary for each call
    hint = ": cupy.asarray or cupy.from_dlpack views it without a copy" if is_device_array(a) else ""
    raise TypeError(f"{name} must be a NumPy or CuPy array, got {type(a).__name__}{hint}")


def float_dtype(dtype: Any, name: str = "dtype") -> np.dtype[Any]:
    """`dtype` as one of float16, bfloat16, float32.

    >>> float_dtype("float16")
    dtype('float16')
    """
    found: np.dtype[Any]
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = FLOAT64  # as np.dtype(None) is
    if found not in FLOATS:
        raise TypeError(f"{name} must be {_names(FLOATS)}, got {dtype!r}")
    return found


def weight(qweight: Array, scales: Array, qzeros: Array | None) -> Weight:
    """The facts of a weight in the canonical layout (see `PackedWeight`).

    Raises:
        TypeError: not arrays of one device, or a dtype that the layout does not have.
        ValueError: shapes that do not fit each other, or a last axis that is not contiguous (rows may have any stride).

    >>> weight(np.zeros((64, 2), np.int32), np.ones((4, 16), np.float16), None)[:4]
    (64, 16, 16, 'symmetric')
    """
    device = device_id(qweight, "qweight")
    k, words = _matrix(qweight, "qweight", "[K, N/8]", (INT32,))
    _on_device(scales, "scales", device, "qweight")
    groups, n = _matrix(scales, "scales", "[K/G, N]", SCALES)
    if k == 0 or words == 0:
        raise ValueError(f"qweight must have at least one row and one column, got shape {(k, words)}")
    if n != 8 * words:
        raise ValueError(f"N={n} in scales is not N={8 * words} in qweight ({words} words of 8 columns)")
    if groups == 0 or k % groups:
        raise ValueError(f"K={k} in qweight is not a multiple of the {groups} groups (rows) of scales")
    if qzeros is None:
        zeros = "symmetric"
    else:
        _on_device(qzeros, "qzeros", device, "qweight")
        zeros = "packed" if qzeros.dtype == INT32 else "float"
        layout, expected = ("[K/G, N/8]", (groups, words)) if zeros == "packed" else ("[K/G, N]", (groups, n))
        shape = _matrix(qzeros, "qzeros", layout, (INT32, scales.dtype))
        if shape != expected:
            raise ValueError(f"qzeros must be {layout} = {expected} for dtype {qzeros.dtype}, got shape {shape}")
    return Weight(k, n, k // groups, zeros, scales.dtype, device)


def activations(x: Array, k: int, dtype: Any = None, device: int | None = None) -> np.dtype[Any]:
    """The element type of x [..., K]: its own, or bfloat16 for uint16 bits with `dtype=bfloat16`.

    `device` is where the weight lives (`Weight.device`), None for anywhere. Strides are free.

    >>> activations(np.zeros((3, 64), np.float16), 64)
    dtype('float16')
    """
    where = device_id(x, "x")
    if device is not None and where != device:
        raise TypeError(f"x is on {place(where)}, but the weight is on {place(device)}")
    found: np.dtype[Any] = _element(x, "x", dtype)
    shape = x.shape
    if not shape:
        raise ValueError("x must have at least one axis, [..., K], got shape ()")
    if shape[-1] != k:
        raise ValueError(f"K={shape[-1]} in x is not K={k} in qweight")
    return found


def bias(bias: Array, n: int, dtype: Any = None, device: int | None = None) -> np.dtype[Any]:
    """The element type of a contiguous bias [N]: its own, or bfloat16 for uint16 bits where x's `dtype` is bfloat16.

    >>> bias(np.zeros(16, np.float32), 16)
    dtype('float32')
    """
    where = device_id(bias, "bias")
    if device is not None and where != device:
        raise TypeError(f"bias is on {place(where)}, but the weight is on {place(device)}")
    found: np.dtype[Any] = bias.dtype
    if found == UINT16 and dtype == BFLOAT16:
        found = BFLOAT16
    if found not in FLOATS:
        raise TypeError(f"bias must be {_names(FLOATS)}, got {found}")
    if bias.shape != (n,):
        raise ValueError(f"bias must be [N] = ({n},), got shape {bias.shape}")
    if bias.strides[0] != bias.dtype.itemsize:
        raise ValueError(f"bias must be contiguous, got a stride of {bias.strides[0]} bytes")
    return found


def out(out: Array, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> None:
    """`out` can take a result of this shape, dtype and place; its strides are free.

    >>> out(np.empty((3, 16), np.float16), (3, 16), np.dtype(np.float16), HOST)
    """
    _like_result(out, "out", shape, dtype, device)
    if device == HOST and not out.flags.writeable:
        raise ValueError("out must be writable, got a read-only array")


def activation(activation: Any) -> Activation:
    """The epilogue's activation that a name, a pair of limits (low, high) or None means.

    >>> activation((0, 6)) == activation("relu6")
    True
    """
    if activation is None:
        return Activation()
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be {', '.join(ACTIVATIONS)}, (low, high) or None, got {activation!r}")
        return ACTIVATIONS[activation]
    pair = activation if isinstance(activation, tuple) else ()
    if len(pair) != 2 or not all(isinstance(limit, numbers.Real) for limit in pair):
        raise TypeError(f"activation must be {', '.join(ACTIVATIONS)}, (low, high) or None, got {activation!r}")
    with np.errstate(over="ignore"):
        low, high = (float(np.float32(limit)) for limit in pair)  # what epilogues compute in; beyond it is infinity
    if not low <= high:
        raise ValueError(f"activation must be (low, high) with low <= high, got {activation!r}")
    return Activation("clamp", (low, high))


def out_features(n: int, activation: Activation) -> int:
    """Columns of y, of a weight with n.

    >>> out_features(32, ACTIVATIONS["swiglu"])
    16
    """
    if not activation.gated:
        return n
    _multiple(n, 16, "N", "qweight (half gate, half up, each of whole words)")
    return n // 2


_bias, _out, _activation = bias, out, activation  # `product` has parameters of these names


def product(
    x: Array,
    weight: Weight,
    /,
    *,
    bias: Array | None = None,
    activation: Any = None,
    residual: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
) -> Product:
    """The facts of y = activation(x @ W + bias) + residual, when all its arrays fit the weight's facts.

    >>> product(np.zeros((3, 64), np.float16), Weight(64, 32, 16, "packed", FLOAT16, HOST), activation="swiglu").shape
    (3, 16)
    """
    element = activations(x, weight.k, dtype, weight.device)
    bias_dtype = None if bias is None else _bias(bias, weight.n, element, weight.device)
    form = _activation(activation)
    shape = (*x.shape[:-1], out_features(weight.n, form))
    if residual is not None:
        _like_result(residual, "residual", shape, x.dtype, weight.device)
    if out is not None:
        _out(out, shape, x.dtype, weight.device)
    return Product(element, shape, bias_dtype, form)


def group_size(k: int, group_size: Any) -> int:
    """A group size that divides K; -1 stands for K.

    >>> group_size(4096, -1)
    4096
    """
    if isinstance(group_size, (bool, np.bool_)):
        raise TypeError(f"group_size must be an integer, got {group_size!r}")
    try:
        g = operator.index(group_size)
    except TypeError:
        raise TypeError(f"group_size must be an integer, got {group_size!r}") from None
    if g == -1:
        return k
    if g < 1:
        raise ValueError(f"group_size must be positive, or -1 for K, got {g}")
    if k % g:
        raise ValueError(f"K={k} is not a multiple of group_size={g}")
    return g


def dense_weight(w: Array) -> tuple[int, int]:
    """(K, N) of a weight to quantize: [K, N] float16, bfloat16, float32 or float64, any strides.

    >>> dense_weight(np.zeros((64, 16), np.float32))
    (64, 16)
    """
    device_id(w, "w")
    if w.dtype not in FLOATS and w.dtype != FLOAT64:
        raise TypeError(f"w must be {_names((*FLOATS, FLOAT64))}, got {w.dtype}")
    if w.ndim != 2 or 0 in w.shape:
        raise ValueError(f"w must be [K, N] with at least one element, got shape {w.shape}")
    k, n = w.shape
    _multiple(n, 8, "N", "w")
    return k, n


def packable(a: Array, name: str, dtype: np.dtype[Any], multiple: int) -> None:
    """`a` is an array [..., N] of `dtype` with N a multiple of `multiple`.

    >>> packable(np.zeros((2, 16), np.uint8), "codes", UINT8, 8)
    """
    device_id(a, name)
    if a.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {a.dtype}")
    if a.ndim == 0:
        raise ValueError(f"{name} must have at least one axis, got shape ()")
    _multiple(a.shape[-1], multiple, "N", name)


def _is_cupy(a: object) -> bool:
    return type(a).__module__.partition(".")[0] == "cupy"


def place(device: int) -> str:
    """What messages call a device.

    >>> place(HOST), place(1)
    ('the CPU', 'GPU 1')
    """
    return "the CPU" if device == HOST else f"GPU {device}"


def _names(dtypes: tuple[Any, ...]) -> str:
    names = [str(dtype) for dtype in dtypes]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _on_device(a: Array, name: str, device: int, other: str) -> None:
    where = device_id(a, name)
    if where != device:
        raise TypeError(f"{name} is on {place(where)}, but {other} is on {place(device)}")


def _like_result(a: Array, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> None:
    where = device_id(a, name)
    if where != device:
        raise TypeError(f"{name} is on {place(where)}, but the result is on {place(device)}")
    if a.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {a.dtype}")
    if a.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {a.shape}")


def _multiple(size: int, multiple: int, axis: str, name: str) -> None:
    if size % multiple:
        raise ValueError(f"{axis}={size} in {name} is not a multiple of {multiple}")


def _matrix(a: Array, name: str, layout: str, dtypes: tuple[np.dtype[Any], ...]) -> tuple[int, int]:
    """Shape of a matrix whose rows are contiguous."""
    dtype = a.dtype
    if dtype not in dtypes:
        raise TypeError(f"{name} must be {_names(dtypes)}, got {dtype}")
    shape = a.shape
    if len(shape) != 2:
        raise ValueError(f"{name} must be {layout}, got shape {shape}")
    rows, columns = shape
    if columns > 1 and a.strides[1] != dtype.itemsize:
        raise ValueError(f"{name} must be contiguous in its last axis, got a stride of {a.strides[1]} bytes")
    return rows, columns


def _element(a: Array, name: str, dtype: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = a.dtype
    if dtype is None:
        if found in FLOATS:
            return found
        hint = " (dtype=bfloat16 reads uint16 as bits)" if found == UINT16 else ""
        raise TypeError(f"{name} must be {_names(FLOATS)}, got {found}{hint}")
    meant = float_dtype(dtype)
    if meant != found and (meant, found) != (BFLOAT16, UINT16):
        raise TypeError(f"dtype={meant} says how to read {name}, which is {found}: they must agree")
    return meant
