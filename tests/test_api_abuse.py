# SPDX-License-Identifier: Apache-2.0
"""Tests with invalid arguments: every public function raises TypeError or ValueError and names an argument.

One or two arguments of a valid call are replaced. The error must start with the name of a parameter, ``out`` must keep
its values, and a call that succeeds must not warn.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cupy_awq
from cupy_awq import AwqLinear, BlockQuantizedWeight, PackedWeight, packing
from cupy_awq.tools.demo import SMOLLM2_MLP
from tests import backends

F16, F32 = np.float16, np.float32
SENTINEL = 85
"""The value of every byte of ``out`` before a call; after a refused call, all bytes must still have it."""


class Call(NamedTuple):
    """A valid call of a public function, to be changed into invalid ones.

    Attributes:
        function: the function.
        arguments: the positional arguments by the names that errors must use.
        options: the keyword arguments.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    options: dict[str, Any]


def _out(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array for a result whose bytes are all SENTINEL."""
    return np.full(shape, SENTINEL, np.uint8).repeat(np.dtype(dtype).itemsize, -1).view(dtype)


def _calls() -> dict[str, Call]:
    """Return a valid call of each public function that takes arrays, by the function's name."""
    weight = cupy_awq.quantize(np.eye(32, 16, dtype=F32), group_size=16)
    packed = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros}
    block = cupy_awq.from_packed(weight)
    int8_block = BlockQuantizedWeight(np.ones((16, 1, 1, 32), np.uint8), np.ones((16, 2), F16), None, bits=8)
    x = np.ones((2, 32), F16)
    layer, int8_layer = AwqLinear(weight), cupy_awq.Int8Linear(int8_block)
    codes, scale, offset, sums = cupy_awq.quantize_activations(x, block_size=16)
    epilogue = {"bias": np.ones(16, F16), "activation": "relu", "out": _out((2, 16), F16)}
    product = {**epilogue, "residual": np.ones((2, 16), F16), "dtype": "float16"}
    chosen = {"kernel": None, "split_k": None}
    images, kernels = np.ones((1, 8, 5, 5), F16), np.full((8, 3, 3, 8), 9, np.uint8)
    filters = BlockQuantizedWeight(kernels, np.ones((8, 1), F16), None)
    window = {"stride": 1, "padding": 1, "dilation": 1, "groups": 1, "activation": None, "layout": "NCHW"}
    int8 = {"x": images.astype(np.int8), "codes": kernels.astype(np.int8), "weight_scale": np.ones(8, F32)}
    scales = {"x_scale": 0.5, "out_scale": 2.0, "x_zero": 1, "out_zero": -1, "bias": np.ones(8, F32)}
    mnn = {"packed": np.zeros((8, 9, 4), np.uint8), "scale": np.ones((8, 1), F16), "offset": np.ones((8, 1), F16)}
    parts = [layer, layer]
    return {
        "gemm": Call(cupy_awq.gemm, {"x": x, **packed}, {**product, **chosen}),
        "gemv": Call(
            cupy_awq.gemv,
            {"x": x[0], **packed},
            {**product, "residual": np.ones(16, F16), "out": _out((16,), F16), "kernel": None},
        ),
        "dequantize": Call(cupy_awq.dequantize, packed, {"dtype": "float32", "out": _out((32, 16), F32)}),
        "plan": Call(cupy_awq.plan, {"x": x, "weight": weight}, {**product, **chosen}),
        "plan of shapes": Call(
            cupy_awq.plan, {"x": (2, 32), "weight": weight}, {"residual": (2, 16), "out": (2, 16), "dtype": "float16"}
        ),
        "Plan": Call(
            cupy_awq.plan(x, weight, residual=x[:, :16]),
            {"x": x, "out": _out((2, 16), F16)},
            {"residual": x[:, :16], "workspace": None},
        ),
        "PackedWeight": Call(PackedWeight, packed, {}),
        "AwqLinear": Call(
            AwqLinear,
            {"weight": weight},
            {"bias": np.ones(16, F16), "activation": "relu", "x_dtype": None, "keep_weight": True},
        ),
        "AwqLinear()": Call(layer, {"x": x}, {k: product[k] for k in ("out", "residual", "dtype")}),
        "AwqLinear(int8)()": Call(AwqLinear(weight, x_dtype="int8"), {"x": x}, {"out": _out((2, 16), F16)}),
        "AwqLinear(fp8)()": Call(AwqLinear(weight, x_dtype="fp8"), {"x": x}, {"out": _out((2, 16), F16)}),
        "AwqLinear.concatenate": Call(AwqLinear.concatenate, {"parts": parts}, {"activation": None, "x_dtype": None}),
        "AwqLinear.split": Call(AwqLinear.concatenate(parts).split, {"y": np.ones((2, 32), F16)}, {}),
        "AwqLinear.kernel_for": Call(layer.kernel_for, {"m": 2}, {"dtype": "float16"}),
        "AwqLinear.plan": Call(layer.plan, {"x": x}, {k: product[k] for k in ("out", "residual", "dtype")}),
        "Int8Linear": Call(
            cupy_awq.Int8Linear,
            {"weight": int8_block},
            {"bias": np.ones(16, F16), "activation": "relu", "dtype": "float16", "batch_invariant": False},
        ),
        "Int8Linear()": Call(int8_layer, {"x": x}, {k: product[k] for k in ("out", "residual", "dtype")}),
        "Int8Linear.plan": Call(int8_layer.plan, {"x": x}, {k: product[k] for k in ("out", "residual", "dtype")}),
        "Int8Linear.kernel_for": Call(int8_layer.kernel_for, {"m": 2}, {"dtype": "float16"}),
        "quantize": Call(
            cupy_awq.quantize, {"w": np.ones((32, 16), F32)}, {"group_size": 16, "symmetric": False, "bits": 4}
        ),
        "pack_int4": Call(cupy_awq.pack_int4, {"codes": np.zeros((2, 8), np.uint8)}, {}),
        "unpack_int4": Call(cupy_awq.unpack_int4, {"words": np.zeros((2, 8), np.int32)}, {}),
        "pack_int8": Call(packing.pack_int8, {"values": np.zeros((2, 8), np.int8)}, {}),
        "unpack_int8": Call(packing.unpack_int8, {"words": np.zeros((2, 8), np.int32)}, {}),
        "dequantize_s4_to_fp16x2": Call(
            cupy_awq.dequantize_s4_to_fp16x2, {"words": np.zeros((2, 2), np.int32)}, {"out": _out((2, 16), F16)}
        ),
        "int8_to_fp16": Call(cupy_awq.int8_to_fp16, {"words": np.zeros((2, 4), np.int32)}, {"out": _out((2, 16), F16)}),
        "BlockQuantizedWeight": Call(
            BlockQuantizedWeight,
            {"codes": kernels, "scale": np.ones((8, 2), F16), "offset": np.ones((8, 2), F16)},
            {"bits": 4, "block_size": 4},
        ),
        "from_mnn": Call(cupy_awq.from_mnn, mnn, {"kernel": (3, 3), "in_channels": 8, "bits": 4}),
        "from_packed": Call(cupy_awq.from_packed, {"weight": weight}, {}),
        "quantize_activations": Call(
            cupy_awq.quantize_activations,
            {"x": x},
            {"block_size": 16, "symmetric": True, "rounding": "half_even"},
        ),
        "gemm_int8": Call(
            cupy_awq.gemm_int8,
            {"xq": codes, "x_scale": scale, "x_offset": offset, "x_sums": sums, "weight": block},
            {**epilogue, "block_size": 16},
        ),
        "linear_int8": Call(cupy_awq.linear_int8, {"x": x, "weight": block}, epilogue),
        "linear_fp8": Call(cupy_awq.linear_fp8, {"x": x, "weight": block}, epilogue),
        "conv2d": Call(
            cupy_awq.conv2d,
            {"x": images, "weight": filters},
            {**window, "bias": np.ones(8, F16), "out": _out((1, 8, 5, 5), F16)},
        ),
        "conv2d_int8": Call(cupy_awq.conv2d_int8, int8, {**scales, **window, "out": _out((1, 8, 5, 5), np.int8)}),
        "explain": Call(
            cupy_awq.explain,
            {"m": 2, "k": 128, "n": 64, "group_size": 32, "dtype": "float16"},
            {"arch": 80, "layer": True},
        ),
        "load": Call(cupy_awq.load, {"path": SMOLLM2_MLP}, {"device": "cpu", "group_size": None}),
    }


CALLS = _calls()


class Hostile:
    """An object that has the attributes of an array, with values of other types."""

    shape, strides, dtype, ndim, size, nbytes, flags, data = "shape", None, "float16", None, -1, -1, None, None

    def __len__(self) -> int:
        return 2


class Failing:
    """An array of another library whose protocols raise errors."""

    def __dlpack__(self, **_: object) -> None:
        raise RuntimeError("no memory")

    def __dlpack_device__(self) -> None:
        raise RuntimeError("no device")


VALUES: dict[str, Any] = {
    repr(value): value
    for value in (
        *(None, True, False, 0, 1, 2, 3, 7, 8, -1, -7, 2**31, 2**40, 10**400, -(10**400), 0.5, 1.5, -0.0, 1e40),
        *(1e-320, float("nan"), float("inf"), 1j, "", "x", "relu", "swiglu", "same", "float64", "é\ud800", b"relu"),
        *([], [0], [[1.0]], (), (1,), (2, 2), (2, 32), (-1, 32), (1, 2, 3), ((1, 1), (1, 1)), ((1,), (1, 1)), {}),
        *({1}, int, object(), np.int64(2), np.int64(-3), np.uint8(1), np.bool_(True), np.float16(1), np.float64("nan")),
        *((0.0, float("nan")), (3, 1), ("a", "b"), (None, None), (10**400, 10**401), np.dtype("float16"), Ellipsis),
        *(slice(None), Hostile(), Failing(), lambda: 0, memoryview(b"1234"), NotImplemented, range(3), np.str_("relu")),
    )
}
DTYPES = (
    *("float16", "float32", "float64", "longdouble", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"),
    *("bool", "complex64", "object", "S4", "U2", "datetime64[s]", ">f2", ">i4", ">f4", "V4"),
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    np.dtype([("a", "f2"), ("b", "i4")]),
)
SHAPES = ((), (0,), (1,), (2,), (16,), (0, 32), (2, 0), (2, 32), (2, 31), (32, 2), (1, 2, 32), (1, 8, 5, 5), (1,) * 33)


def _filled(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.zeros(shape, dtype)


ARRAYS = st.builds(_filled, st.sampled_from(SHAPES), st.sampled_from(DTYPES))

CHANGES: dict[str, Callable[[Any], Any]] = {
    "reversed": lambda a: a[..., ::-1],
    "transposed": lambda a: a.T,
    "every other": lambda a: a[..., ::2],
    "first axis dropped": lambda a: a[0],
    "axis added": lambda a: a[None],
    "empty": lambda a: a[:0],
    "one more": lambda a: np.concatenate([a, a[:1]]),
    "byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "column major": np.asfortranarray,
    "zero strides": lambda a: np.broadcast_to(a[:1], a.shape),
    "NaN": lambda a: (a * np.nan).astype(a.dtype) if a.dtype.kind == "f" else a,
    "infinite": lambda a: (a * np.inf).astype(a.dtype) if a.dtype.kind == "f" else a,
    "largest": lambda a: np.full_like(a, np.finfo(a.dtype).max if a.dtype.kind == "f" else np.iinfo(a.dtype).max),
    "smallest": lambda a: np.full_like(a, np.finfo(a.dtype).tiny if a.dtype.kind == "f" else np.iinfo(a.dtype).min),
    "masked": np.ma.masked_array,
    "list": lambda a: a.tolist(),
    "wider": lambda a: a.astype(np.float64),
    "object": lambda a: a.astype(object),
    "read-only view": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


def _changed(value: Any, change: str) -> Any:
    return CHANGES[change](value) if isinstance(value, np.ndarray) else value


def _names(call: Call) -> set[str]:
    """Return the names with which the error of a call may start: arguments, and what must agree with them."""
    names = {*call.arguments, *call.options}
    if inspect.signature(call.function).parameters.keys() & {"parts"}:
        names |= {"parts[0]", "parts[1]", "weight"}
    if "w" in names or "x" in names or "m" in names:  # a layer or a weight determines sizes, so an error may name it
        names |= {"weight"}
    return names


def check_call(name: str, changes: dict[str, Any]) -> str:
    """Make a call with some arguments replaced, check its error, and return the error's text ("" for success)."""
    call = CALLS[name]
    given_out = changes.get("out", call.options.get("out", call.arguments.get("out")))
    out = given_out.copy() if isinstance(given_out, np.ndarray) and given_out.flags.writeable else given_out
    before = out.tobytes() if isinstance(out, np.ndarray) and not out.dtype.hasobject else None
    arguments = {**call.arguments, **({"out": out} if "out" in call.arguments else {}), **changes}
    if "out" in arguments or "out" in call.options:
        arguments["out"] = out
    positional = [arguments[key] for key in call.arguments]
    options = {key: arguments.get(key, value) for key, value in call.options.items()}
    text = shown = ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            call.function(*positional, **options)
        except FileNotFoundError:
            assert name == "load"
        except (TypeError, ValueError) as error:
            text = str(error)
            shown = f"{type(error).__name__}: {text}"
    if shown.startswith("CheckpointError: "):  # the drawn path may be a file that exists, which the error then names
        assert text.startswith(f"{Path(arguments['path'])}: expected "), shown
    elif shown:
        found = re.match(r"([A-Za-z_]+(\[\d+\])?): expected ", text)
        assert found is not None, shown
        assert found[1] in _names(call), shown
        assert before is None or out.tobytes() == before, f"out was written before {shown}"
    return text


@pytest.mark.parametrize("name", CALLS)
def test_valid_calls_succeed(name: str) -> None:
    assert check_call(name, {}) == ""


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_replaced_by_each_value_is_an_error_that_names_it(name: str) -> None:
    call = CALLS[name]
    for key, original in {**call.arguments, **call.options}.items():
        for value in VALUES.values():
            check_call(name, {key: value})
        for change in CHANGES:
            try:
                changed = _changed(original, change)
            except (ValueError, TypeError, IndexError):  # NumPy does not allow this change for this array.
                continue
            check_call(name, {key: changed})


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=60 if backends.is_complete else 30, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_arguments_raise_errors_that_name_them(name: str, data: st.DataObject) -> None:
    call = CALLS[name]
    keys = data.draw(st.lists(st.sampled_from([*call.arguments, *call.options]), min_size=1, max_size=3, unique=True))
    changes = {}
    for key in keys:
        values = st.sampled_from(list(VALUES)).map(VALUES.__getitem__)
        changes[key] = data.draw(st.one_of(values, ARRAYS, st.integers(), st.floats(), st.text(max_size=3)))
    check_call(name, changes)
