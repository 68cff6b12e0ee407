# SPDX-License-Identifier: Apache-2.0
"""Validation of array arguments (shape, dtype, strides, device) and of activations.

A function ``validate_x`` raises TypeError or ValueError if the argument ``x`` is invalid, with a message of the form
``x: expected ..., got ...``. Otherwise it returns what its callers need next, such as a dtype or a summary.

Only attributes of arrays are read (`shape`, `dtype`, `strides`), so the functions work for NumPy and CuPy arrays and
need neither CuPy nor a GPU.
"""

from __future__ import annotations

import contextlib
import numbers
from typing import Any, NamedTuple, Protocol, TypeAlias

import ml_dtypes
import numpy as np

from cupy_awq import check_scalar, overlap
from cupy_awq.activation import ACTIVATIONS, Activation

Array: TypeAlias = Any
"""The type of a NumPy or CuPy array. It is Any because CuPy has no type annotations for mypy to check."""


class StridedArray(Protocol):
    """The type of an array parameter: the attributes that NumPy and CuPy arrays share."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data(self) -> Any: ...
    @property
    def flags(self) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...


HOST = -1
"""The device ordinal that stands for the CPU, where NumPy arrays are. GPUs have their CUDA ordinals, 0 and up."""

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

_DTYPE_NAMES = {name: dtype for dtype in FLOATS for name in (dtype.name, dtype.str, dtype.str[1:], dtype.char)}
_DTYPE_NAMES |= {"half": FLOAT16, "single": FLOAT32}

_DLPACK_CUDA = (2, 13)  # the device types kDLCUDA and kDLCUDAManaged of dlpack.h


class WeightSpec(NamedTuple):
    """The properties of a validated weight (qweight, scales, qzeros): shape, group size, dtype and device."""

    k: int
    """The number of rows of W [K, N]."""
    n: int
    """The number of columns of W [K, N]."""
    group_size: int
    """The number of rows of W per group; a group has one scale per column."""
    zeros: str
    """The form of the zero points.

    "packed": 4-bit codes in int32 words; "symmetric": qzeros is None and every zero point is 8; "float": offsets o in
    W = code * scale + o.
    """
    dtype: np.dtype[Any]
    """The dtype of the scales, float16 or bfloat16."""
    device: int
    """The device ordinal, or `HOST`."""
    bits: int = 4
    """The number of bits per code; the arrays of an 8-bit weight are those of `Int8Weight`."""


class Product(NamedTuple):
    """The dtypes and the shape of a validated product y = activation(x @ W + bias) + residual."""

    element: np.dtype[Any]
    """The element type of x and y; bfloat16 if their dtype is uint16, which holds the bits of bfloat16."""
    shape: tuple[int, ...]
    """The shape of y."""
    bias: np.dtype[Any] | None
    """The element type of the bias, or None without a bias."""
    activation: Activation
    """The activation of the epilogue."""


def is_device_array(a: object) -> bool:
    """Return whether `a` is an array in CUDA device memory, of any library, as its array protocols state.

    >>> is_device_array(np.zeros(3)), is_device_array([1, 2])
    (False, False)
    """
    if isinstance(a, np.ndarray):
        return False
    if _is_cupy(a) or hasattr(a, "__cuda_array_interface__"):
        return True
    try:
        return int(a.__dlpack_device__()[0]) in _DLPACK_CUDA  # type: ignore[attr-defined]
    except Exception:  # no __dlpack_device__, or it failed: a foreign library may raise any exception
        return False


def device_id(a: Any, name: str) -> int:
    """Return the device ordinal of a CuPy array, or `HOST` for a NumPy array.

    Raises TypeError for any other object. Lists are not converted.

    >>> device_id(np.zeros(3), "x")
    -1
    """
    if isinstance(a, np.ndarray):
        if isinstance(a, (np.ma.MaskedArray, np.matrix)):  # the kernels would ignore a mask; an np.matrix is never 1-D
            raise TypeError(f"{name}: expected a plain NumPy array, got {type(a).__name__}")
        return HOST
    if _is_cupy(a):
        return int(a.data.device_id)  # faster than __cuda_array_interface__, for which CuPy builds a dictionary
    hint = ""
    if is_device_array(a):
        hint = "; cupy.asarray or cupy.from_dlpack views it without a copy"
    elif hasattr(a, "__dlpack__"):
        hint = "; numpy.from_dlpack views it without a copy"
    raise TypeError(f"{name}: expected a NumPy or CuPy array, got {type(a).__name__}{hint}")


def validate_device(a: Any, name: str, device: int | None, like: str) -> None:
    """Raise TypeError unless `a` is a NumPy or CuPy array on `device`, an ordinal or `HOST`; None accepts any device.

    The error message contains `name`, the name of `a`, and `like`, the name of the array that is on `device`.

    >>> validate_device(np.zeros(3), "bias", HOST, "the weight")
    """
    found = device_id(a, name)
    if device is not None and found != device:
        places = ["the CPU" if number == HOST else f"GPU {number}" for number in (device, found)]
        raise TypeError(f"{name}: expected an array on {places[0]} like {like}, got one on {places[1]}")


def describe(a: StridedArray) -> str:
    """Return the dtype and shape of an array as text for error messages.

    >>> describe(np.zeros((4096, 500), np.int32))
    'int32 [4096, 500]'
    """
    return f"{a.dtype} {_brackets(a.shape)}"


def validate_float_dtype(dtype: Any, name: str = "dtype") -> np.dtype[Any]:
    """Return a NumPy dtype for `dtype`, which is a dtype, a scalar type or a name.

    Raises TypeError unless the dtype is float16, bfloat16 or float32.

    >>> validate_float_dtype("float16")
    dtype('float16')
    """
    found: np.dtype[Any] | None = None
    if isinstance(dtype, str):
        found = _DTYPE_NAMES.get(dtype)
    elif isinstance(dtype, (type, np.dtype)):
        with contextlib.suppress(TypeError):  # np.dtype raises TypeError for a type without a dtype
            found = np.dtype(dtype)
    if found not in FLOATS:
        raise TypeError(f"{name}: expected {_names(FLOATS)}, got {check_scalar.shorten(dtype)}")
    return found


def validate_weight(qweight: StridedArray, scales: StridedArray, qzeros: StridedArray | None) -> WeightSpec:
    """Validate the arrays of a weight in the layout of `PackedWeight` and return its properties.

    Raises:
        TypeError: an argument is not an array, lies on another device than `qweight`, or has an unsupported dtype.
        ValueError: shapes contradict each other, or a last axis is not contiguous (rows may have any stride).

    >>> validate_weight(np.zeros((64, 2), np.int32), np.ones((4, 16), np.float16), None)[:4]
    (64, 16, 16, 'symmetric')
    """
    device = device_id(qweight, "qweight")
    k, words = _matrix(qweight, "qweight", (INT32,), "[K, N/8]")
    if k == 0 or words == 0:
        raise ValueError(f"qweight: expected int32 [K, N/8] with K > 0 and N > 0, got {describe(qweight)}")
    n = 8 * words
    validate_device(scales, "scales", device, "qweight")
    groups, columns = _matrix(scales, "scales", SCALES, "[K/G, N]")
    if columns != n or groups == 0 or k % groups:
        raise ValueError(
            f"scales: expected {_names(SCALES)} [K/G, N] with N = {n} and K/G a divisor of K = {k}, as in qweight, "
            f"got {describe(scales)}"
        )
    if qzeros is None:
        zeros = "symmetric"
    else:
        validate_device(qzeros, "qzeros", device, "qweight")
        zeros = "packed" if qzeros.dtype == INT32 else "float"
        shape = (groups, words) if zeros == "packed" else (groups, n)
        if qzeros.dtype not in (INT32, scales.dtype) or qzeros.shape != shape:
            error = ValueError if qzeros.dtype in (INT32, scales.dtype) else TypeError
            raise error(
                f"qzeros: expected int32 [K/G, N/8] = {_brackets((groups, words))} or {scales.dtype} [K/G, N] = "
                f"{_brackets((groups, n))}, got {describe(qzeros)}"
            )
        _contiguous_rows(qzeros, "qzeros")
    return WeightSpec(k, n, k // groups, zeros, scales.dtype, device)


def validate_x(x: StridedArray, k: int, dtype: Any = None, device: int | None = None) -> np.dtype[Any]:
    """Validate x [..., K] and return its element type.

    The element type is the dtype of x, or bfloat16 if x is uint16 and `dtype` is bfloat16. `device` is the ordinal of
    the weight's device, or None for any device. Any strides are accepted.

    Raises:
        TypeError: x is not an array, does not lie on `device`, or has a dtype that is unsupported or contradicts
            `dtype`.
        ValueError: the length of the last axis is not `k`.

    >>> validate_x(np.zeros((3, 64), np.float16), 64)
    dtype('float16')
    """
    validate_device(x, "x", device, "the weight")
    found = _element(x, "x", dtype)
    if not x.shape or x.shape[-1] != k:
        raise ValueError(f"x: expected {found} [..., K] with K = {k}, got {describe(x)}")
    return found


def validate_bias(bias: StridedArray, n: int, dtype: Any = None, device: int | None = None) -> np.dtype[Any]:
    """Validate a bias [N] and return its element type.

    The element type is the dtype of the bias, or bfloat16 if the bias is uint16 and `dtype`, the element type of x, is
    bfloat16. `device` is the ordinal of the weight's device, or None for any device.

    Raises:
        TypeError: the bias is not an array, does not lie on `device`, or has an unsupported dtype.
        ValueError: the shape is not [N], or the bias is not contiguous.

    >>> validate_bias(np.zeros(16, np.float32), 16)
    dtype('float32')
    """
    validate_device(bias, "bias", device, "the weight")
    found = bias.dtype
    if found == UINT16 and dtype == BFLOAT16:
        found = BFLOAT16
    if found not in FLOATS or bias.shape != (n,):
        error = TypeError if found not in FLOATS else ValueError
        raise error(f"bias: expected {_names(FLOATS)} [N] = [{n}], got {describe(bias)}")
    if bias.strides[0] != bias.dtype.itemsize:
        raise ValueError(f"bias: expected a contiguous array, got a stride of {bias.strides[0]} bytes")
    return found


def validate_out(out: StridedArray, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> None:
    """Check that `out` has the given shape, dtype and device, and that no two elements share memory.

    All other strides are accepted.

    Raises TypeError if the type, the dtype or the device differs, and ValueError if the shape differs, elements share
    memory, or `out` is a read-only NumPy array.

    >>> validate_out(np.empty((3, 16), np.float16), (3, 16), np.dtype(np.float16), HOST)
    """
    validate_like_result(out, "out", shape, dtype, device)
    if device == HOST and not out.flags.writeable:
        raise ValueError("out: expected a writable array, got a read-only one")
    if overlap.shares_elements(out):
        raise ValueError(f"out: expected elements that do not share memory, got strides {out.strides}")


def validate_activation(activation: Any) -> Activation:
    """Return the `Activation` for a name in `ACTIVATIONS`, a pair of bounds (low, high) or None.

    Raises TypeError for a value of any other type, and ValueError for an unknown name or for a low that is NaN or above
    high.

    >>> validate_activation((0, 6)) == validate_activation("relu6")
    True
    """
    if activation is None:
        return Activation()
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return ACTIVATIONS[activation]
    pair = activation if isinstance(activation, tuple) else ()
    got = check_scalar.shorten(activation)
    if len(pair) != 2 or not all(isinstance(limit, numbers.Real) for limit in pair):
        error = ValueError if isinstance(activation, str) else TypeError
        raise error(f"activation: expected {', '.join(ACTIVATIONS)}, (low, high) or None, got {got}")
    try:
        with np.errstate(over="ignore"):
            low, high = (float(np.float32(limit)) for limit in pair)  # kernels clamp in float32, where 1e300 is inf
    except OverflowError:  # the integer is beyond the range of float64
        low, high = np.nan, np.nan
    if not low <= high:
        raise ValueError(f"activation: expected (low, high) with low <= high, got {got}")
    return Activation("clamp", (low, high))


def out_features(n: int, activation: Activation, name: str = "qweight") -> int:
    """Return the number of columns of y for a weight of `n` columns: n, or n / 2 with a gated activation.

    Raises ValueError, which names the argument `name`, if the activation is gated and n / 2 is not a multiple of 8.

    >>> out_features(32, ACTIVATIONS["swiglu"])
    16
    """
    if activation.gated and n % 16:
        raise ValueError(f"{name}: expected N divisible by 16 for a gated activation, got N = {n}")
    return n // 2 if activation.gated else n


def validate_product(
    x: StridedArray,
    weight: WeightSpec,
    /,
    *,
    bias: StridedArray | None = None,
    activation: Any = None,
    residual: StridedArray | None = None,
    out: StridedArray | None = None,
    dtype: Any = None,
) -> Product:
    """Validate the arguments of y = activation(x @ W + bias) + residual and return the properties of the product.

    `weight` has the properties of W; the other arguments have the meaning that they have in `cupy_awq.gemm`.

    Raises:
        TypeError, ValueError: an argument is invalid, as stated by `validate_x`, `validate_bias`, `validate_activation`
            and `validate_out`; `residual` is validated like `out`.

    >>> spec = WeightSpec(64, 32, 16, "packed", FLOAT16, HOST)
    >>> validate_product(np.zeros((3, 64), np.float16), spec, activation="swiglu").shape
    (3, 16)
    """
    element = validate_x(x, weight.k, dtype, weight.device)
    if weight.bits == 8 and element != weight.dtype:
        raise TypeError(f"x: expected {weight.dtype}, the dtype of the 8-bit layer, got {element}")
    bias_dtype = None if bias is None else validate_bias(bias, weight.n, element, weight.device)
    form = validate_activation(activation)
    shape = (*x.shape[:-1], out_features(weight.n, form))
    if residual is not None:
        validate_like_result(residual, "residual", shape, x.dtype, weight.device)
    if out is not None:
        validate_out(out, shape, x.dtype, weight.device)
    return Product(element, shape, bias_dtype, form)


def validate_dense_weight(w: StridedArray) -> tuple[int, int]:
    """Return (K, N) of a dense weight `w` that is to be quantized.

    `w` is float16, bfloat16, float32 or float64 [K, N] with any strides.

    Raises:
        TypeError: w is not an array of one of these dtypes.
        ValueError: w does not have two axes, has no elements, or N is not a multiple of 8.

    >>> validate_dense_weight(np.zeros((64, 16), np.float32))
    (64, 16)
    """
    device_id(w, "w")
    dtypes = *FLOATS, FLOAT64
    if w.dtype not in dtypes:
        raise TypeError(f"w: expected {_names(dtypes)} [K, N], got {describe(w)}")
    if w.ndim != 2 or 0 in w.shape or w.shape[1] % 8:
        raise ValueError(f"w: expected [K, N] with K > 0, N > 0 and N divisible by 8, got {describe(w)}")
    return w.shape[0], w.shape[1]


def validate_packable(a: StridedArray, name: str, dtype: np.dtype[Any], multiple: int) -> None:
    """Check that `a`, the argument called `name`, is an array [..., N] of `dtype` with N divisible by `multiple`.

    Raises TypeError if `a` is not an array of `dtype`, and ValueError if `a` has no axis or N is not divisible.

    >>> validate_packable(np.zeros((2, 16), np.uint8), "codes", UINT8, 8)
    """
    device_id(a, name)
    if a.dtype != dtype or a.ndim == 0 or a.shape[-1] % multiple:
        error = TypeError if a.dtype != dtype else ValueError
        divisible = f" with N divisible by {multiple}" if multiple > 1 else ""
        raise error(f"{name}: expected {dtype} [..., N]{divisible}, got {describe(a)}")


def _is_cupy(a: object) -> bool:
    return type(a).__module__.partition(".")[0] == "cupy"


def _brackets(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _names(dtypes: tuple[np.dtype[Any], ...]) -> str:
    """Return the names of dtypes as text, such as "float16, bfloat16 or float32"."""
    *most, last = map(str, dtypes)
    return f"{', '.join(most)} or {last}" if most else last


def validate_like_result(a: StridedArray, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> None:
    """Raise TypeError or ValueError unless `a` has the given shape, dtype and device."""
    validate_device(a, name, device, "the result")
    if a.dtype != dtype or a.shape != shape:
        error = TypeError if a.dtype != dtype else ValueError
        raise error(f"{name}: expected {dtype} {_brackets(shape)}, got {describe(a)}")


def _matrix(a: StridedArray, name: str, dtypes: tuple[np.dtype[Any], ...], layout: str) -> tuple[int, int]:
    """Return the shape of the matrix `a`. `layout` describes its axes in error messages, such as "[K, N/8]".

    Raises TypeError if the dtype is not in `dtypes`, and ValueError if `a` is not 2-D or its rows are not contiguous.
    """
    dtype = a.dtype
    if dtype not in dtypes or len(a.shape) != 2:
        error = TypeError if dtype not in dtypes else ValueError
        raise error(f"{name}: expected {_names(dtypes)} {layout}, got {describe(a)}")
    _contiguous_rows(a, name)
    return a.shape[0], a.shape[1]


def _contiguous_rows(a: StridedArray, name: str) -> None:
    """Raise ValueError unless the rows of a matrix are contiguous."""
    if a.shape[1] > 1 and a.strides[1] != a.dtype.itemsize:
        raise ValueError(f"{name}: expected a contiguous last axis, got a stride of {a.strides[1]} bytes")


def _element(a: StridedArray, name: str, dtype: Any) -> np.dtype[Any]:
    """Return the element type of `a`: its dtype, or bfloat16 if `a` is uint16 and the user's `dtype` is bfloat16.

    Raises TypeError if the element type is not a float, or if `dtype` is neither None nor the element type.
    """
    found = a.dtype
    bits = found == UINT16
    element = found if dtype is None else validate_float_dtype(dtype)
    if found not in FLOATS and (dtype is None or not bits):
        hint = "; pass dtype=bfloat16 if it holds the bits of bfloat16" if bits else ""
        raise TypeError(f"{name}: expected {_names(FLOATS)} [..., K], got {describe(a)}{hint}")
    if element != (BFLOAT16 if bits else found):
        raise TypeError(f"dtype: expected {BFLOAT16 if bits else found} for {name} of {found}, got {element}")
    return element
