# SPDX-License-Identifier: Apache-2.0
"""Tests of the public operations: the NumPy path, and with a GPU the kernels against float64 formulas."""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_awq
from cupy_awq import PackedWeight, check, reference
from cupy_awq.kernels import select
from cupy_awq.kernels.dequantize.int_to_fp16 import Conversion
from cupy_awq.packing import pack_int8
from cupy_awq.runtime import arrays, device
from cupy_awq.tools.testing import random_activations, random_weight
from tests.backends import BACKENDS, runner
from tests.products import FLOAT16, ZEROS, check_product, gemm, nan_like, put, tensors
from tests.test_reference import float64_weight

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))


def words_of(name: str, key: str) -> np.ndarray:
    return np.array([int(VECTORS[name][key], 16)], np.uint32).view(np.int32)


def halves(names: list[str]) -> list[float]:
    return np.array([int(name, 16) for name in names], np.uint16).view(np.float16).tolist()


def test_golden_conversions() -> None:
    codes = cupy_awq.dequantize_s4_to_fp16x2(words_of("s4_to_fp16x2", "source_word"))
    assert codes.tolist() == halves(VECTORS["s4_to_fp16x2"]["out_fp16_hex_in_memory_order"])
    values = cupy_awq.int8_to_fp16(words_of("int8_to_fp16_prmt", "input_word"))
    assert values.tolist() == halves(VECTORS["int8_to_fp16_prmt"]["out_fp16_hex"])


def test_conversions_keep_leading_axes_and_every_value() -> None:
    values = np.arange(-128, 128, dtype=np.int8).reshape(2, 8, 16)
    np.testing.assert_array_equal(cupy_awq.int8_to_fp16(pack_int8(values)), values)
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64) % 16
    words = cupy_awq.pack_int4(codes)
    out = np.full((4, 128), np.nan, np.float16)[:, ::2]
    assert cupy_awq.dequantize_s4_to_fp16x2(words, out=out) is out
    np.testing.assert_array_equal(out, codes)
    assert cupy_awq.dequantize_s4_to_fp16x2(words[:0]).shape == (0, 64)


@pytest.mark.parametrize("function", [cupy_awq.dequantize_s4_to_fp16x2, cupy_awq.int8_to_fp16])
def test_bad_words_to_convert_are_named(function: Any) -> None:
    words = np.zeros((2, 4), np.int32)
    with pytest.raises(TypeError, match=r"^words: expected a NumPy or CuPy array, got list$"):
        function([1])
    with pytest.raises(TypeError, match=r"^words: expected int32 \[\.\.\., N\], got uint32 "):
        function(words.view(np.uint32))
    with pytest.raises(ValueError, match=r"^words: expected int32 \[\.\.\., N\], got int32 \[\]$"):
        function(words[0, 0, ...])
    with pytest.raises(TypeError, match=r"^out: expected float16 .*, got float32 "):
        function(words, out=function(words).astype(np.float32))
    with pytest.raises(ValueError, match=r"^out: expected float16 \["):
        function(words, out=np.zeros((2, 4), np.float16))


@pytest.mark.parametrize("zeros", ZEROS)
def test_slices_of_a_weight_are_used_where_they_lie(zeros: str) -> None:
    weight = random_weight(np.random.default_rng(0), 96, 64, 16, zeros=zeros)
    x = random_activations(np.random.default_rng(1), 3, 96)
    qweight, scales, qzeros = tensors(weight)
    per = 8 if zeros == "float" else 1
    part = (
        qweight[32:80, 2:5],
        scales[2:5, 16:40],
        None if qzeros is None else qzeros[2:5, 2 * per : 5 * per],
    )
    w = float64_weight(*tensors(weight))[32:80, 16:40]
    np.testing.assert_array_equal(cupy_awq.dequantize(*part), w.astype(np.float16))
    check_product(cupy_awq.gemm(x[:, 32:80], *part), x[:, 32:80], PackedWeight(*part))
    check_product(x[:, 32:80] @ PackedWeight(*part), x[:, 32:80], PackedWeight(*part))


def test_gemm_takes_a_packed_weight_for_its_three_tensors() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x, bias = random_activations(np.random.default_rng(1), 3, 64), np.ones(32, np.float16)
    expected = cupy_awq.gemm(x, *tensors(weight), bias=bias, activation="gelu")
    np.testing.assert_array_equal(cupy_awq.gemm(x, weight, bias=bias, activation="gelu"), expected)
    np.testing.assert_array_equal(cupy_awq.gemv(x[0], weight, bias=bias, activation="gelu"), expected[0])
    qweight, scales, qzeros = tensors(weight)
    wrong = "expected a PackedWeight, or the arrays qweight, scales and qzeros, got"
    for operation, rows in ((cupy_awq.gemm, x), (cupy_awq.gemv, x[0])):
        for arguments, message in (
            ((), f"weight: {wrong} nothing"),
            ((qweight,), f"weight: {wrong} ndarray"),
            ((qweight, scales), f"weight: {wrong} ndarray, ndarray"),
            ((weight, scales), f"weight: {wrong} PackedWeight, ndarray"),
            ((qweight, scales, qzeros, None), f"weight: {wrong} ndarray, ndarray, ndarray, NoneType"),
            (
                (weight, scales, qzeros),
                "qweight: expected an array before scales and qzeros, got a PackedWeight, which includes them",
            ),
            ((qweight, weight, None), "scales: expected a NumPy or CuPy array, got PackedWeight"),
        ):
            with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
                operation(rows, *arguments)


def test_x_is_validated_once_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call validates x once and a weight's tensors once: twice would cost time, never would admit wrong arguments."""
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    layer = cupy_awq.AwqLinear(weight)
    x, out = random_activations(np.random.default_rng(1), 3, 64), np.empty((3, 32), np.float16)
    plan = layer.plan(x)
    seen: list[str] = []

    def recorded(name: str, real: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(name)
        return real(*arguments, **options)

    for name in ("validate_x", "validate_product", "validate_weight"):
        monkeypatch.setattr(check, name, functools.partial(recorded, name, getattr(check, name)))
    product = ["validate_product", "validate_x"]
    for call, expected in (
        (lambda: layer(x), product),
        (lambda: plan(x, out), product),
        (lambda: cupy_awq.gemm(x, weight), product),
        (lambda: cupy_awq.gemm(x, *tensors(weight)), ["validate_weight", *product]),
        (lambda: cupy_awq.dequantize(*tensors(weight)), ["validate_weight"]),
    ):
        seen.clear()
        call()
        assert seen == expected


def test_gemv_takes_one_vector_and_every_epilogue() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x = random_activations(np.random.default_rng(1), 64)
    options: dict[str, Any] = {
        "bias": np.ones(32, np.float16),
        "activation": "silu",
        "residual": np.full(32, 2, np.float16),
    }
    y = cupy_awq.gemv(x, *tensors(weight), **options)
    np.testing.assert_array_equal(y, gemm(x[None], weight, **options | {"residual": options["residual"][None]})[0])
    with pytest.raises(ValueError, match=r"^x: expected one vector \[K\], got shape \(1, 64\)$"):
        cupy_awq.gemv(x[None], *tensors(weight))
    with pytest.raises(TypeError, match=r"^x: expected a NumPy or CuPy array, got list$"):
        cupy_awq.gemv([1.0] * 64, *tensors(weight))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": "gemm"}, ValueError, "kernel: expected one of gemv, "),
        ({"split_k": 3}, ValueError, "split_k: expected a power of two, got 3"),
        ({"split_k": 2.0}, TypeError, "split_k: expected an integer, got 2.0"),
        ({"split_k": True}, TypeError, "split_k: expected an integer, got True"),
        ({"activation": "elu"}, ValueError, "activation: expected relu, "),
        (
            {"residual": np.zeros((3, 32), np.float32)},
            TypeError,
            "residual: expected float16 [3, 32], got float32 [3, 32]",
        ),
        (
            {"residual": np.zeros((1, 32), np.float16)},
            ValueError,
            "residual: expected float16 [3, 32], got float16 [1, 32]",
        ),
        ({"bias": [0.0] * 32}, TypeError, "bias: expected a NumPy or CuPy array, got list"),
        ({"dtype": "bfloat16"}, TypeError, "dtype: expected float16 for x of float16, got bfloat16"),
    ],
)
def test_bad_options_of_a_product_are_named(options: Any, error: type[Exception], message: str) -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x = np.zeros((3, 64), np.float16)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        gemm(x, weight, **options)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        cupy_awq.plan(x, weight, **options)


@given(st.data())
def test_row_stride_leads_to_every_row_or_is_none(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple))
    base = np.arange(int(np.prod([3 * s for s in shape])), dtype=np.int32).reshape([3 * s for s in shape])
    a = base[tuple(slice(0, s * (step := data.draw(st.sampled_from([1, 2]))), step) for s in shape)]
    if data.draw(st.booleans()):
        a = a[::-1]
    if data.draw(st.booleans()) and a.ndim > 1:
        a = a.swapaxes(0, 1)
    if data.draw(st.booleans()):
        a = np.broadcast_to(a, (2, *a.shape))
    step = arrays.row_stride(a)
    starts = a.reshape(-1, a.shape[-1])[:, 0].tolist()
    contiguous = a.shape[-1] == 1 or a.strides[-1] == 4
    steps = {second - first for first, second in itertools.pairwise(starts)}
    if not contiguous or len(steps) > 1 or min(steps, default=0) < 0:
        assert step is None
    else:
        assert step == (steps.pop() if steps else a.shape[-1])


def test_no_rows_give_no_rows() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x, y = np.zeros((3, 0, 64), np.float16), np.zeros((3, 0, 32), np.float16)
    assert gemm(x, weight, activation="gelu", residual=y).shape == (3, 0, 32)
    assert cupy_awq.plan(x, weight)(x, y) is y


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", [60, 75, 80, 90])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("entry", "values"), [("s4_to_fp16x2", 8), ("int8_to_fp16", 4)])
def test_conversion_kernels(backend: str, arch: int, aligned: bool, entry: str, values: int) -> None:
    """Both code paths of the conversion kernels are right, with a partly empty last CTA and an unaligned result."""
    facts = device.nominal(arch)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, 700).astype(np.int32)
    base = np.full(700 * values + 1, np.nan, np.float16)
    out = base[:-1] if aligned else base[1:]
    runner(backend)(select.choose(Conversion(entry, words.size, aligned), facts).plan, {"words": words, "out": out})
    function = reference.dequantize_s4_to_fp16x2 if values == 8 else reference.int8_to_fp16
    np.testing.assert_array_equal(out, function(words))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "values"), [("dequantize_s4_to_fp16x2", 8), ("int8_to_fp16", 4)])
def test_conversions_of_cupy_arrays(name: str, values: int) -> None:
    function = getattr(cupy_awq, name)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 50, 10)).astype(np.int32)
    expected = function(words)
    np.testing.assert_array_equal(function(put(words)).get(), expected)
    strided = put(words)[:, ::2, ::-1]
    np.testing.assert_array_equal(function(strided).get(), function(words[:, ::2, ::-1]))
    for out in (
        nan_like(expected.shape, FLOAT16),
        nan_like((*expected.shape[:-1], 2 * values * 10), FLOAT16)[..., ::2],
    ):
        assert function(put(words), out=out) is out
        np.testing.assert_array_equal(out.get(), expected)
    misaligned = nan_like((expected.size + 1,), FLOAT16)[1:].reshape(expected.shape)
    np.testing.assert_array_equal(function(put(words), out=misaligned).get(), expected)
    assert function(put(words[:0])).shape == (0, 50, 10 * values)
