# SPDX-License-Identifier: Apache-2.0
"""Tests of validation: the results of valid calls, and the exact message of every error."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_awq import check, check_scalar
from cupy_awq.activation import Activation

K, N, G = 64, 32, 16

QWEIGHT = np.zeros((K, N // 8), np.int32)
SCALES = np.ones((K // G, N), np.float16)
QZEROS = np.zeros((K // G, N // 8), np.int32)
BFLOAT16 = ml_dtypes.bfloat16


class OnGpu:
    """A stand-in for a CuPy array that has only the attributes that validation may read."""

    def __init__(self, a: np.ndarray, device: int = 0) -> None:
        self.shape, self.dtype, self.strides, self.ndim = a.shape, a.dtype, a.strides, a.ndim
        self.data, self.flags = SimpleNamespace(device_id=device), a.flags

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AssertionError("CuPy would build a dictionary here, which is slow")


OnGpu.__module__ = "cupy"


class Foreign:
    """An array of another library that supports only DLPack."""

    def __init__(self, device: tuple[int, int]) -> None:
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_is_device_array_goes_by_the_array_protocols() -> None:
    assert check.is_device_array(OnGpu(SCALES))
    assert check.is_device_array(SimpleNamespace(__cuda_array_interface__={}))
    assert check.is_device_array(Foreign((2, 0)))
    assert check.is_device_array(Foreign((13, 0)))
    for other in (SCALES, [1.0], 3, None, Foreign((1, 0))):
        assert not check.is_device_array(other)


def test_device_id_of_numpy_and_cupy_arrays() -> None:
    assert check.device_id(SCALES, "x") == check.HOST
    assert check.device_id(OnGpu(SCALES, 3), "x") == 3


@pytest.mark.parametrize("to", [lambda a: a, OnGpu])
def test_summary_of_a_weight_tells_the_form_of_its_zeros(to: Any) -> None:
    device = to(SCALES).data.device_id if to is OnGpu else check.HOST
    for qzeros, form in ((QZEROS, "packed"), (None, "symmetric"), (SCALES, "float")):
        spec = check.validate_weight(to(QWEIGHT), to(SCALES), qzeros if qzeros is None else to(qzeros))
        assert spec == (K, N, G, form, np.float16, device, 4)


def test_weight_rows_may_have_any_stride() -> None:
    wide = np.zeros((3 * K, N // 4), np.int32)
    for rows in (slice(None, K), slice(None, None, 3), slice(None, K - 1, -1)):
        part = wide[rows][:K, 1 : 1 + N // 8]
        assert check.validate_weight(part, SCALES, QZEROS).k == K
    assert check.validate_weight(np.zeros((K, 2), np.int32)[:, ::2], SCALES[:, :8], QZEROS[:, :1]).n == 8


BAD_SCALES = (
    "scales: expected float16 or bfloat16 [K/G, N] with N = 32 and K/G a divisor of K = 64, as in qweight, got "
)
BAD_QZEROS = "qzeros: expected int32 [K/G, N/8] = [4, 4] or float16 [K/G, N] = [4, 32], got "
BAD_X = "x: expected float16, bfloat16 or float32 [..., K], got "


def spoiled(**changes: Any) -> dict[str, Any]:
    return {"qweight": QWEIGHT, "scales": SCALES, "qzeros": QZEROS} | changes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (spoiled(qweight=[[1]]), TypeError, "qweight: expected a NumPy or CuPy array, got list"),
        (spoiled(scales=(1.0,)), TypeError, "scales: expected a NumPy or CuPy array, got tuple"),
        (spoiled(qzeros=8), TypeError, "qzeros: expected a NumPy or CuPy array, got int"),
        (spoiled(qweight=Foreign((1, 0))), TypeError, "qweight: expected a NumPy or CuPy array, got Foreign"),
        (
            spoiled(qweight=Foreign((2, 0))),
            TypeError,
            "qweight: expected a NumPy or CuPy array, got Foreign"
            "; cupy.asarray or cupy.from_dlpack views it without a copy",
        ),
        (spoiled(qweight=QWEIGHT.view(np.uint32)), TypeError, "qweight: expected int32 [K, N/8], got uint32 [64, 4]"),
        (spoiled(qweight=QWEIGHT.astype(">i4")), TypeError, "qweight: expected int32 [K, N/8], got >i4 [64, 4]"),
        (spoiled(qweight=QWEIGHT.astype(np.int64)), TypeError, "qweight: expected int32 [K, N/8], got int64 [64, 4]"),
        (spoiled(qweight=QWEIGHT[0]), ValueError, "qweight: expected int32 [K, N/8], got int32 [4]"),
        (spoiled(qweight=QWEIGHT[None]), ValueError, "qweight: expected int32 [K, N/8], got int32 [1, 64, 4]"),
        (
            spoiled(qweight=QWEIGHT[:0]),
            ValueError,
            "qweight: expected int32 [K, N/8] with K > 0 and N > 0, got int32 [0, 4]",
        ),
        (
            spoiled(qweight=QWEIGHT[:, :0]),
            ValueError,
            "qweight: expected int32 [K, N/8] with K > 0 and N > 0, got int32 [64, 0]",
        ),
        (
            spoiled(qweight=np.zeros((K, N // 4), np.int32)[:, ::2]),
            ValueError,
            "qweight: expected a contiguous last axis, got a stride of 8 bytes",
        ),
        (
            spoiled(qweight=np.asfortranarray(QWEIGHT)),
            ValueError,
            "qweight: expected a contiguous last axis, got a stride of 256 bytes",
        ),
        (
            spoiled(scales=SCALES.astype(np.float32)),
            TypeError,
            "scales: expected float16 or bfloat16 [K/G, N], got float32 [4, 32]",
        ),
        (spoiled(scales=SCALES[0]), ValueError, "scales: expected float16 or bfloat16 [K/G, N], got float16 [32]"),
        (
            spoiled(scales=SCALES[:, ::-1]),
            ValueError,
            "scales: expected a contiguous last axis, got a stride of -2 bytes",
        ),
        (
            spoiled(scales=SCALES[:, :20]),
            ValueError,
            BAD_SCALES + "float16 [4, 20]",
        ),
        (
            spoiled(scales=np.ones((3, N), np.float16)),
            ValueError,
            BAD_SCALES + "float16 [3, 32]",
        ),
        (
            spoiled(scales=SCALES[:0]),
            ValueError,
            BAD_SCALES + "float16 [0, 32]",
        ),
        (
            spoiled(qzeros=QZEROS[:2]),
            ValueError,
            BAD_QZEROS + "int32 [2, 4]",
        ),
        (
            spoiled(qzeros=SCALES[:, :4]),
            ValueError,
            BAD_QZEROS + "float16 [4, 4]",
        ),
        (
            spoiled(qzeros=SCALES.astype(BFLOAT16)),
            TypeError,
            BAD_QZEROS + "bfloat16 [4, 32]",
        ),
        (
            spoiled(qzeros=QZEROS.astype(np.int8)),
            TypeError,
            BAD_QZEROS + "int8 [4, 4]",
        ),
        (
            spoiled(qzeros=QZEROS[0]),
            ValueError,
            BAD_QZEROS + "int32 [4]",
        ),
        (
            spoiled(scales=OnGpu(SCALES)),
            TypeError,
            "scales: expected an array on the CPU like qweight, got one on GPU 0",
        ),
        (
            spoiled(qweight=OnGpu(QWEIGHT, 1)),
            TypeError,
            "scales: expected an array on GPU 1 like qweight, got one on the CPU",
        ),
        (
            spoiled(qweight=OnGpu(QWEIGHT), scales=OnGpu(SCALES), qzeros=OnGpu(QZEROS, 1)),
            TypeError,
            "qzeros: expected an array on GPU 0 like qweight, got one on GPU 1",
        ),
    ],
)
def test_invalid_weight_raises_the_documented_message(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.validate_weight(**arguments)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32])
@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 3, K)])
def test_x_of_each_type_and_rank(dtype: Any, shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, dtype)
    assert check.validate_x(x, K) == dtype
    assert check.validate_x(x, K, dtype, check.HOST) == dtype
    assert check.validate_x(OnGpu(x, 2), K, device=2) == dtype
    assert check.validate_x(x[..., ::-1].T.T, K) == dtype


def test_uint16_means_bfloat16_only_with_a_dtype() -> None:
    bits = np.zeros((2, K), np.uint16)
    assert check.validate_x(bits, K, "bfloat16") == BFLOAT16
    assert check.validate_bias(bits[0, :N], N, check.BFLOAT16) == BFLOAT16


X = np.zeros((2, K), np.float16)


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        ([0.0] * K, {}, TypeError, "x: expected a NumPy or CuPy array, got list"),
        (
            X.astype(np.complex64),
            {},
            TypeError,
            BAD_X + "complex64 [2, 64]",
        ),
        (X.astype(np.int32), {}, TypeError, BAD_X + "int32 [2, 64]"),
        (X.astype(bool), {}, TypeError, BAD_X + "bool [2, 64]"),
        (X.astype(np.float64), {}, TypeError, BAD_X + "float64 [2, 64]"),
        (X.astype(object), {}, TypeError, BAD_X + "object [2, 64]"),
        (
            X.view(np.uint16),
            {},
            TypeError,
            BAD_X + "uint16 [2, 64]; pass dtype=bfloat16 if it holds the bits of bfloat16",
        ),
        (
            X.view(np.uint16),
            {"dtype": "float16"},
            TypeError,
            "dtype: expected bfloat16 for x of uint16, got float16",
        ),
        (X, {"dtype": "float32"}, TypeError, "dtype: expected float16 for x of float16, got float32"),
        (X, {"dtype": "int8"}, TypeError, "dtype: expected float16, bfloat16 or float32, got 'int8'"),
        (X[:, 1:], {}, ValueError, "x: expected float16 [..., K] with K = 64, got float16 [2, 63]"),
        (X[0, 0, ...], {}, ValueError, "x: expected float16 [..., K] with K = 64, got float16 []"),
        (X, {"device": 0}, TypeError, "x: expected an array on GPU 0 like the weight, got one on the CPU"),
        (OnGpu(X, 1), {"device": 0}, TypeError, "x: expected an array on GPU 0 like the weight, got one on GPU 1"),
        (
            OnGpu(X),
            {"device": check.HOST},
            TypeError,
            "x: expected an array on the CPU like the weight, got one on GPU 0",
        ),
    ],
)
def test_invalid_x_raises_the_documented_message(x: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.validate_x(x, K, **options)


BIAS = np.zeros(N, np.float16)


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        ([0.0] * N, TypeError, "bias: expected a NumPy or CuPy array, got list"),
        (BIAS[1:], ValueError, "bias: expected float16, bfloat16 or float32 [N] = [32], got float16 [31]"),
        (BIAS[None], ValueError, "bias: expected float16, bfloat16 or float32 [N] = [32], got float16 [1, 32]"),
        (BIAS.astype(np.int16), TypeError, "bias: expected float16, bfloat16 or float32 [N] = [32], got int16 [32]"),
        (BIAS.view(np.uint16), TypeError, "bias: expected float16, bfloat16 or float32 [N] = [32], got uint16 [32]"),
        (np.zeros(2 * N, np.float16)[::2], ValueError, "bias: expected a contiguous array, got a stride of 4 bytes"),
        (OnGpu(BIAS), TypeError, "bias: expected an array on the CPU like the weight, got one on GPU 0"),
    ],
)
def test_invalid_bias_raises_the_documented_message(bias: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.validate_bias(bias, N, check.FLOAT16, check.HOST)


def read_only(a: np.ndarray) -> np.ndarray:
    a.flags.writeable = False
    return a


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ([[0.0]], TypeError, "out: expected a NumPy or CuPy array, got list"),
        (np.zeros((2, N), np.float32), TypeError, "out: expected float16 [2, 32], got float32 [2, 32]"),
        (np.zeros((N, 2), np.float16), ValueError, "out: expected float16 [2, 32], got float16 [32, 2]"),
        (read_only(np.zeros((2, N), np.float16)), ValueError, "out: expected a writable array, got a read-only one"),
        (
            OnGpu(np.zeros((2, N), np.float16)),
            TypeError,
            "out: expected an array on the CPU like the result, got one on GPU 0",
        ),
    ],
)
def test_invalid_out_raises_the_documented_message(out: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.validate_out(out, (2, N), check.FLOAT16, check.HOST)


def test_out_may_be_on_a_gpu_and_strided() -> None:
    check.validate_out(OnGpu(np.zeros((2, N), np.float16), 1), (2, N), check.FLOAT16, 1)
    check.validate_out(np.zeros((2, 2 * N), np.float16)[:, ::2], (2, N), check.FLOAT16, check.HOST)


@pytest.mark.parametrize(("given", "expected"), [(16, 16), (-1, K), (K, K), (1, 1), (np.int64(32), 32)])
def test_group_size_divides_k_or_is_minus_one(given: Any, expected: int) -> None:
    assert check_scalar.validate_group_size(K, given) == expected


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (0, ValueError, "group_size: expected a divisor of K = 64, or -1 for K itself, got 0"),
        (-2, ValueError, "group_size: expected a divisor of K = 64, or -1 for K itself, got -2"),
        (48, ValueError, "group_size: expected a divisor of K = 64, or -1 for K itself, got 48"),
        (128, ValueError, "group_size: expected a divisor of K = 64, or -1 for K itself, got 128"),
        (16.0, TypeError, "group_size: expected an integer, got 16.0"),
        ("16", TypeError, "group_size: expected an integer, got '16'"),
        (True, TypeError, "group_size: expected an integer, got True"),
        (None, TypeError, "group_size: expected an integer, got None"),
    ],
)
def test_invalid_group_size_raises_the_documented_message(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check_scalar.validate_group_size(K, given)


@pytest.mark.parametrize("given", ["float64", None, "int8", "nonsense", 3.5, np.complex64, object()])
def test_unsupported_dtype_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^dtype: expected float16, bfloat16 or float32, got "):
        check.validate_float_dtype(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (None, (0, 0), False)),
        ("relu", ("clamp", (0, np.inf), False)),
        ("relu6", ("clamp", (0, 6), False)),
        ((-1, 2.5), ("clamp", (-1, 2.5), False)),
        ((np.float16(-1), np.int32(3)), ("clamp", (-1, 3), False)),
        ((-1e300, 1e300), ("clamp", (-np.inf, np.inf), False)),
        ((-np.inf, np.inf), ("clamp", (-np.inf, np.inf), False)),
        ("silu", ("silu", (0, 0), False)),
        ("gelu", ("gelu", (0, 0), False)),
        ("swiglu", ("silu", (0, 0), True)),
    ],
)
def test_activation_from_a_name_or_from_limits(given: Any, expected: Any) -> None:
    assert check.validate_activation(given) == expected


NAMES = "activation: expected relu, relu6, silu, gelu, swiglu, (low, high) or None, got "


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("tanh", ValueError, NAMES + "'tanh'"),
        ("", ValueError, NAMES + "''"),
        (np.maximum, TypeError, NAMES + "<ufunc 'maximum'>"),
        (6, TypeError, NAMES + "6"),
        ((0, 1, 2), TypeError, NAMES + "(0, 1, 2)"),
        ((0, "6"), TypeError, NAMES + "(0, '6')"),
        ((0, None), TypeError, NAMES + "(0, None)"),
        ((1, 0), ValueError, "activation: expected (low, high) with low <= high, got (1, 0)"),
        ((0.0, float("nan")), ValueError, "activation: expected (low, high) with low <= high, got (0.0, nan)"),
    ],
)
def test_invalid_activation_raises_the_documented_message(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.validate_activation(given)


SPEC = check.validate_weight(QWEIGHT, SCALES, QZEROS)


def test_summary_of_a_product() -> None:
    x = np.zeros((2, 3, K), np.uint16)
    found = check.validate_product(x, SPEC, bias=BIAS, activation="swiglu", residual=x[..., : N // 2], dtype="bfloat16")
    assert found == (BFLOAT16, (2, 3, N // 2), np.float16, ("silu", (0, 0), True))
    assert check.validate_product(X, SPEC, out=X[:, :N]) == (np.float16, (2, N), None, Activation())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"residual": [0.0]}, TypeError, "residual: expected a NumPy or CuPy array, got list"),
        (
            {"residual": np.zeros((2, N), np.float32)},
            TypeError,
            "residual: expected float16 [2, 32], got float32 [2, 32]",
        ),
        ({"residual": X[0, :N]}, ValueError, "residual: expected float16 [2, 32], got float16 [32]"),
        (
            {"residual": OnGpu(X[:, :N])},
            TypeError,
            "residual: expected an array on the CPU like the result, got one on GPU 0",
        ),
        (
            {"residual": X[:, :N], "activation": "swiglu"},
            ValueError,
            "residual: expected float16 [2, 16], got float16 [2, 32]",
        ),
        ({"out": X[:, :N], "activation": "swiglu"}, ValueError, "out: expected float16 [2, 16], got float16 [2, 32]"),
        ({"activation": "swish"}, ValueError, NAMES + "'swish'"),
    ],
)
def test_invalid_part_of_a_product_raises_the_documented_message(
    options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.validate_product(X, SPEC, **options)


def test_gated_weight_needs_halves_of_whole_words() -> None:
    spec = check.validate_weight(QWEIGHT[:, :3], SCALES[:, :24], QZEROS[:, :3])
    message = "qweight: expected N divisible by 16 for a gated activation, got N = 24"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check.validate_product(X, spec, activation="swiglu")


def test_messages_show_scalars_and_classes_of_numpy_and_name_arrays() -> None:
    for value in (np.float64(32.0), np.float64, np.int64):
        assert check_scalar.shorten(value) == repr(value)
    assert check_scalar.shorten(np.ones(2)) == "an array ndarray"
