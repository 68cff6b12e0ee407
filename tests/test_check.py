# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_awq import check

K, N, G = 64, 32, 16

QWEIGHT = np.zeros((K, N // 8), np.int32)
SCALES = np.ones((K // G, N), np.float16)
QZEROS = np.zeros((K // G, N // 8), np.int32)
BFLOAT16 = ml_dtypes.bfloat16


class OnGpu:
    """The attributes of a CuPy array that validation may read."""

    def __init__(self, a: np.ndarray, device: int = 0) -> None:
        self.shape, self.dtype, self.strides, self.ndim = a.shape, a.dtype, a.strides, a.ndim
        self.data = SimpleNamespace(device_id=device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AssertionError("CuPy would build a dictionary here, which is slow")


OnGpu.__module__ = "cupy"


class Foreign:
    """An array of another library, known by its protocols only."""

    def __init__(self, device: tuple[int, int]) -> None:
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_device_arrays_are_known_by_their_protocols() -> None:
    assert check.is_device_array(OnGpu(SCALES))
    assert check.is_device_array(SimpleNamespace(__cuda_array_interface__={}))
    assert check.is_device_array(Foreign((2, 0)))
    assert check.is_device_array(Foreign((13, 0)))
    for other in (SCALES, [1.0], 3, None, Foreign((1, 0))):
        assert not check.is_device_array(other)


def test_device_numbers() -> None:
    assert check.device_id(SCALES, "x") == check.HOST
    assert check.device_id(OnGpu(SCALES, 3), "x") == 3


@pytest.mark.parametrize("to", [lambda a: a, OnGpu])
def test_the_facts_of_each_form_of_zeros(to: Any) -> None:
    device = to(SCALES).data.device_id if to is OnGpu else check.HOST
    for qzeros, form in ((QZEROS, "packed"), (None, "symmetric"), (SCALES, "float")):
        facts = check.weight(to(QWEIGHT), to(SCALES), qzeros if qzeros is None else to(qzeros))
        assert facts == (K, N, G, form, np.float16, device)


def test_rows_may_have_any_stride() -> None:
    wide = np.zeros((3 * K, N // 4), np.int32)
    for rows in (slice(None, K), slice(None, None, 3), slice(None, K - 1, -1)):
        part = wide[rows][:K, 1 : 1 + N // 8]
        assert check.weight(part, SCALES, QZEROS).k == K
    assert check.weight(np.zeros((K, 2), np.int32)[:, ::2], SCALES[:, :8], QZEROS[:, :1]).n == 8


def spoiled(**changes: Any) -> dict[str, Any]:
    return {"qweight": QWEIGHT, "scales": SCALES, "qzeros": QZEROS} | changes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (spoiled(qweight=[[1]]), TypeError, "qweight must be a NumPy or CuPy array, got list"),
        (spoiled(scales=(1.0,)), TypeError, "scales must be a NumPy or CuPy array, got tuple"),
        (spoiled(qzeros=8), TypeError, "qzeros must be a NumPy or CuPy array, got int"),
        (spoiled(qweight=Foreign((1, 0))), TypeError, "qweight must be a NumPy or CuPy array, got Foreign"),
        (
            spoiled(qweight=Foreign((2, 0))),
            TypeError,
            "qweight must be a NumPy or CuPy array, got Foreign:"
            " cupy.asarray or cupy.from_dlpack views it without a copy",
        ),
        (spoiled(qweight=QWEIGHT.view(np.uint32)), TypeError, "qweight must be int32, got uint32"),
        (spoiled(qweight=QWEIGHT.astype(">i4")), TypeError, "qweight must be int32, got >i4"),
        (spoiled(qweight=QWEIGHT.astype(np.int64)), TypeError, "qweight must be int32, got int64"),
        (spoiled(qweight=QWEIGHT[0]), ValueError, "qweight must be [K, N/8], got shape (4,)"),
        (spoiled(qweight=QWEIGHT[None]), ValueError, "qweight must be [K, N/8], got shape (1, 64, 4)"),
        (
            spoiled(qweight=QWEIGHT[:0]),
            ValueError,
            "qweight must have at least one row and one column, got shape (0, 4)",
        ),
        (
            spoiled(qweight=QWEIGHT[:, :0]),
            ValueError,
            "qweight must have at least one row and one column, got shape (64, 0)",
        ),
        (
            spoiled(qweight=np.zeros((K, N // 4), np.int32)[:, ::2]),
            ValueError,
            "qweight must be contiguous in its last axis, got a stride of 8 bytes",
        ),
        (
            spoiled(qweight=np.asfortranarray(QWEIGHT)),
            ValueError,
            "qweight must be contiguous in its last axis, got a stride of 256 bytes",
        ),
        (
            spoiled(scales=SCALES.astype(np.float32)),
            TypeError,
            "scales must be float16 or bfloat16, got float32",
        ),
        (spoiled(scales=SCALES[0]), ValueError, "scales must be [K/G, N], got shape (32,)"),
        (
            spoiled(scales=SCALES[:, ::-1]),
            ValueError,
            "scales must be contiguous in its last axis, got a stride of -2 bytes",
        ),
        (
            spoiled(scales=SCALES[:, :20]),
            ValueError,
            "N=20 in scales is not N=32 in qweight (4 words of 8 columns)",
        ),
        (
            spoiled(scales=np.ones((3, N), np.float16)),
            ValueError,
            "K=64 in qweight is not a multiple of the 3 groups (rows) of scales",
        ),
        (
            spoiled(scales=SCALES[:0]),
            ValueError,
            "K=64 in qweight is not a multiple of the 0 groups (rows) of scales",
        ),
        (
            spoiled(qzeros=QZEROS[:2]),
            ValueError,
            "qzeros must be [K/G, N/8] = (4, 4) for dtype int32, got shape (2, 4)",
        ),
        (
            spoiled(qzeros=SCALES[:, :4]),
            ValueError,
            "qzeros must be [K/G, N] = (4, 32) for dtype float16, got shape (4, 4)",
        ),
        (spoiled(qzeros=SCALES.astype(BFLOAT16)), TypeError, "qzeros must be int32 or float16, got bfloat16"),
        (spoiled(qzeros=QZEROS.astype(np.int8)), TypeError, "qzeros must be int32 or float16, got int8"),
        (spoiled(qzeros=QZEROS[0]), ValueError, "qzeros must be [K/G, N/8], got shape (4,)"),
        (spoiled(scales=OnGpu(SCALES)), TypeError, "scales is on GPU 0, but qweight is on the CPU"),
        (spoiled(qweight=OnGpu(QWEIGHT, 1)), TypeError, "scales is on the CPU, but qweight is on GPU 1"),
        (
            spoiled(qweight=OnGpu(QWEIGHT), scales=OnGpu(SCALES), qzeros=OnGpu(QZEROS, 1)),
            TypeError,
            "qzeros is on GPU 1, but qweight is on GPU 0",
        ),
    ],
)
def test_bad_weights_are_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.weight(**arguments)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32])
@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 3, K)])
def test_activations_of_each_type_and_rank(dtype: Any, shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, dtype)
    assert check.activations(x, K) == dtype
    assert check.activations(x, K, dtype, check.HOST) == dtype
    assert check.activations(OnGpu(x, 2), K, device=2) == dtype
    assert check.activations(x[..., ::-1].T.T, K) == dtype


def test_uint16_is_bfloat16_only_on_request() -> None:
    bits = np.zeros((2, K), np.uint16)
    assert check.activations(bits, K, "bfloat16") == BFLOAT16
    assert check.bias(bits[0, :N], N, check.BFLOAT16) == BFLOAT16


X = np.zeros((2, K), np.float16)


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        ([0.0] * K, {}, TypeError, "x must be a NumPy or CuPy array, got list"),
        (X.astype(np.complex64), {}, TypeError, "x must be float16, bfloat16 or float32, got complex64"),
        (X.astype(np.int32), {}, TypeError, "x must be float16, bfloat16 or float32, got int32"),
        (X.astype(bool), {}, TypeError, "x must be float16, bfloat16 or float32, got bool"),
        (X.astype(np.float64), {}, TypeError, "x must be float16, bfloat16 or float32, got float64"),
        (X.astype(object), {}, TypeError, "x must be float16, bfloat16 or float32, got object"),
        (
            X.view(np.uint16),
            {},
            TypeError,
            "x must be float16, bfloat16 or float32, got uint16 (dtype=bfloat16 reads uint16 as bits)",
        ),
        (
            X.view(np.uint16),
            {"dtype": "float16"},
            TypeError,
            "dtype=float16 says how to read x, which is uint16: they must agree",
        ),
        (X, {"dtype": "float32"}, TypeError, "dtype=float32 says how to read x, which is float16: they must agree"),
        (X, {"dtype": "int8"}, TypeError, "dtype must be float16, bfloat16 or float32, got 'int8'"),
        (X[:, 1:], {}, ValueError, "K=63 in x is not K=64 in qweight"),
        (X[0, 0, ...], {}, ValueError, "x must have at least one axis, [..., K], got shape ()"),
        (X, {"device": 0}, TypeError, "x is on the CPU, but the weight is on GPU 0"),
        (OnGpu(X, 1), {"device": 0}, TypeError, "x is on GPU 1, but the weight is on GPU 0"),
        (OnGpu(X), {"device": check.HOST}, TypeError, "x is on GPU 0, but the weight is on the CPU"),
    ],
)
def test_bad_activations_are_named(x: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.activations(x, K, **options)


BIAS = np.zeros(N, np.float16)


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        ([0.0] * N, TypeError, "bias must be a NumPy or CuPy array, got list"),
        (BIAS[1:], ValueError, "bias must be [N] = (32,), got shape (31,)"),
        (BIAS[None], ValueError, "bias must be [N] = (32,), got shape (1, 32)"),
        (BIAS.astype(np.int16), TypeError, "bias must be float16, bfloat16 or float32, got int16"),
        (BIAS.view(np.uint16), TypeError, "bias must be float16, bfloat16 or float32, got uint16"),
        (np.zeros(2 * N, np.float16)[::2], ValueError, "bias must be contiguous, got a stride of 4 bytes"),
        (OnGpu(BIAS), TypeError, "bias is on GPU 0, but the weight is on the CPU"),
    ],
)
def test_bad_bias_is_named(bias: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.bias(bias, N, check.FLOAT16, check.HOST)


def read_only(a: np.ndarray) -> np.ndarray:
    a.flags.writeable = False
    return a


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ([[0.0]], TypeError, "out must be a NumPy or CuPy array, got list"),
        (np.zeros((2, N), np.float32), TypeError, "out must be float16, got float32"),
        (np.zeros((N, 2), np.float16), ValueError, "out must have shape (2, 32), got (32, 2)"),
        (read_only(np.zeros((2, N), np.float16)), ValueError, "out must be writable, got a read-only array"),
        (OnGpu(np.zeros((2, N), np.float16)), TypeError, "out is on GPU 0, but the result is on the CPU"),
    ],
)
def test_bad_out_is_named(out: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.out(out, (2, N), check.FLOAT16, check.HOST)


def test_out_on_a_gpu_and_with_strides() -> None:
    check.out(OnGpu(np.zeros((2, N), np.float16), 1), (2, N), check.FLOAT16, 1)
    check.out(np.zeros((2, 2 * N), np.float16)[:, ::2], (2, N), check.FLOAT16, check.HOST)


@pytest.mark.parametrize(("given", "expected"), [(16, 16), (-1, K), (K, K), (1, 1), (np.int64(32), 32)])
def test_group_sizes(given: Any, expected: int) -> None:
    assert check.group_size(K, given) == expected


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (0, ValueError, "group_size must be positive, or -1 for K, got 0"),
        (-2, ValueError, "group_size must be positive, or -1 for K, got -2"),
        (48, ValueError, "K=64 is not a multiple of group_size=48"),
        (128, ValueError, "K=64 is not a multiple of group_size=128"),
        (16.0, TypeError, "group_size must be an integer, got 16.0"),
        ("16", TypeError, "group_size must be an integer, got '16'"),
        (True, TypeError, "group_size must be an integer, got True"),
        (None, TypeError, "group_size must be an integer, got None"),
    ],
)
def test_bad_group_sizes_are_named(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.group_size(K, given)


@pytest.mark.parametrize("given", ["float64", None, "int8", "nonsense", 3.5, np.complex64, object()])
def test_other_float_types_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^dtype must be float16, bfloat16 or float32, got "):
        check.float_dtype(given)


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
def test_activations_by_name_and_by_limits(given: Any, expected: Any) -> None:
    assert check.activation(given) == expected


NAMES = "activation must be relu, relu6, silu, gelu, swiglu, (low, high) or None, got "


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
        ((1, 0), ValueError, "activation must be (low, high) with low <= high, got (1, 0)"),
        ((0.0, float("nan")), ValueError, "activation must be (low, high) with low <= high, got (0.0, nan)"),
    ],
)
def test_bad_activations_of_the_epilogue_are_named(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.activation(given)


FACTS = check.weight(QWEIGHT, SCALES, QZEROS)


def test_facts_of_a_product() -> None:
    x = np.zeros((2, 3, K), np.uint16)
    found = check.product(x, FACTS, bias=BIAS, activation="swiglu", residual=x[..., : N // 2], dtype="bfloat16")
    assert found == (BFLOAT16, (2, 3, N // 2), np.float16, ("silu", (0, 0), True))
    assert check.product(X, FACTS, out=X[:, :N]) == (np.float16, (2, N), None, check.Activation())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"residual": [0.0]}, TypeError, "residual must be a NumPy or CuPy array, got list"),
        ({"residual": np.zeros((2, N), np.float32)}, TypeError, "residual must be float16, got float32"),
        ({"residual": X[0, :N]}, ValueError, "residual must have shape (2, 32), got (32,)"),
        ({"residual": OnGpu(X[:, :N])}, TypeError, "residual is on GPU 0, but the result is on the CPU"),
        (
            {"residual": X[:, :N], "activation": "swiglu"},
            ValueError,
            "residual must have shape (2, 16), got (2, 32)",
        ),
        ({"out": X[:, :N], "activation": "swiglu"}, ValueError, "out must have shape (2, 16), got (2, 32)"),
        ({"activation": "swish"}, ValueError, NAMES + "'swish'"),
    ],
)
def test_bad_parts_of_a_product_are_named(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check.product(X, FACTS, **options)


def test_a_gated_weight_has_two_halves_of_whole_words() -> None:
    facts = check.weight(QWEIGHT[:, :3], SCALES[:, :24], QZEROS[:, :3])
    message = "N=24 in qweight (half gate, half up, each of whole words) is not a multiple of 16"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check.product(X, facts, activation="swiglu")
