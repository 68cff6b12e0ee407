# SPDX-License-Identifier: Apache-2.0
"""Tests of `AwqLinear` with ``x_dtype``: activations are quantized to int8 or fp8 in every call."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupy_awq import AwqLinear, PackedWeight, from_packed
from cupy_awq.ops import quantized_linear
from cupy_awq.runtime import device
from cupy_awq.tools.testing import random_activations, random_weight
from tests.products import ZEROS, put, tensors
from tests.test_reference import float64_epilogue, float64_weight


@pytest.mark.parametrize("backend", [np.asarray, pytest.param(put, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("activation", [None, "relu6", (-0.25, 0.5)])
@pytest.mark.parametrize("zeros", ZEROS)
def test_int8_layer_stays_within_its_error_bound(backend: Any, zeros: str, activation: Any) -> None:
    def bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return np.abs(x).reshape(66, 4, 32).max(axis=2) / 254 @ np.abs(w).reshape(4, 32, 40).sum(axis=1)

    check_bound(backend, zeros, activation, "int8", bound)


@pytest.mark.parametrize("backend", [np.asarray, pytest.param(put, marks=[pytest.mark.gpu, pytest.mark.sm90])])
@pytest.mark.parametrize("activation", [None, "relu6", (-0.25, 0.5)])
@pytest.mark.parametrize("zeros", ZEROS)
def test_fp8_layer_stays_within_its_error_bound(backend: Any, zeros: str, activation: Any) -> None:
    def bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return np.maximum(np.abs(x) / 17, np.abs(x).max(axis=1, keepdims=True) / 448 / 1024) @ np.abs(w)

    check_bound(backend, zeros, activation, "fp8", bound)


def check_bound(
    backend: Any,
    zeros: str,
    activation: Any,
    x_dtype: str,
    bound_of: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> None:
    """Check a layer's error against ``bound_of(x, w)``, also with a strided ``out``, concatenated, and pickled."""
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 128, 40, 32, zeros=zeros)
    x, bias = random_activations(rng, 2, 33, 128), rng.standard_normal(40).astype(np.float32)
    on_device = PackedWeight(*(None if a is None else backend(a) for a in tensors(weight)))
    options = {"bias": backend(bias), "activation": activation, "x_dtype": x_dtype}
    layer = AwqLinear(on_device, **options)
    wide = backend(np.full((2, 33, 48), np.nan, np.float16))
    out = wide[..., 4:44]
    y = layer(backend(x))
    assert layer(backend(x), out=out) is out
    wide, y = (a if isinstance(a, np.ndarray) else a.get() for a in (wide, y))
    np.testing.assert_array_equal(wide[..., 4:44], y)
    assert np.isnan(wide[..., :4]).all()
    assert np.isnan(wide[..., 44:]).all()
    w = float64_weight(*tensors(weight))
    rows = x.reshape(66, 128).astype(np.float64)
    bound, exact = bound_of(rows, w), rows @ w + bias
    low, high = (float64_epilogue(v, activation, 0.0) for v in (exact - bound, exact + bound))
    slack = 2e-3 * (1 + np.abs(exact))
    assert np.all((low - slack <= y.reshape(66, 40)) & (y.reshape(66, 40) <= high + slack))
    assert (layer.x_dtype, repr(layer).endswith(f"x_dtype='{x_dtype}')")) == (x_dtype, True)
    parts = AwqLinear.concatenate([on_device, on_device], x_dtype=x_dtype)
    first, second = (a if isinstance(a, np.ndarray) else a.get() for a in parts.split(parts(backend(x))))
    np.testing.assert_array_equal(first, second)
    again = pickle.loads(pickle.dumps(layer))
    assert again.x_dtype == x_dtype


def test_auto_multiplies_x_as_it_is_on_the_cpu() -> None:
    weight = random_weight(np.random.default_rng(0), 128, 40, 32)
    x = random_activations(np.random.default_rng(1), 33, 128)
    layer = AwqLinear(weight, x_dtype="auto", keep_weight=False)
    np.testing.assert_array_equal(layer(x), AwqLinear(weight)(x))
    assert (layer.x_dtype, pickle.loads(pickle.dumps(layer)).x_dtype, layer.kernel_for(8)) == ("auto", "auto", "numpy")


@pytest.mark.parametrize(("m", "expected"), [(1, False), (16, False), (4096, True)])
def test_auto_quantizes_many_rows_on_hopper(monkeypatch: pytest.MonkeyPatch, m: int, expected: bool) -> None:
    weight = random_weight(np.random.default_rng(0), 4096, 4096, 128)
    monkeypatch.setattr(quantized_linear, "HOST", -2)
    monkeypatch.setattr(quantized_linear.device, "of", lambda index: device.nominal(90))
    x = np.broadcast_to(np.float16(1), (m, 4096))
    assert quantized_linear.int8_preference(weight, from_packed(weight), None, "relu")(x) == expected


def test_cost_models_are_compared_once_per_m_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(np.random.default_rng(0), 128, 64, 128)
    estimated = []

    def modelled_us(problem: Any, gpu: Any, kernel: str | None = None) -> float:
        estimated.append((type(problem).__name__, problem.m, problem.dtype))
        return 1.0

    monkeypatch.setattr(quantized_linear, "HOST", -2)
    monkeypatch.setattr(quantized_linear.device, "of", lambda index: device.nominal(90))
    monkeypatch.setattr(quantized_linear.select, "modelled_us", modelled_us)
    prefers_int8 = quantized_linear.int8_preference(weight, from_packed(weight), None, None)
    for x in (np.ones((2, 3, 128), np.float16), np.zeros((6, 128), np.float16), np.ones((6, 128), np.float32)):
        assert not prefers_int8(x)
        assert not prefers_int8(x[..., :64])
    families = "RowQuantization", "Int8Problem", "Problem"
    assert estimated == [(name, 6, dtype) for dtype in ("float16", "float32") for name in families]


@pytest.mark.gpu
@pytest.mark.sm90
def test_auto_on_a_gpu_gives_the_bits_of_the_faster_layer() -> None:
    weight = PackedWeight(*map(put, tensors(random_weight(np.random.default_rng(0), 4096, 4096, 128))))
    few, many = (put(random_activations(np.random.default_rng(1), m, 4096)) for m in (2, 8192))
    auto = AwqLinear(weight, x_dtype="auto")
    np.testing.assert_array_equal(auto(few).get(), AwqLinear(weight)(few).get())
    np.testing.assert_array_equal(auto(many, residual=many).get(), AwqLinear(weight)(many, residual=many).get())
    np.testing.assert_array_equal(auto(many).get(), AwqLinear(weight, x_dtype="int8")(many).get())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda w, x: AwqLinear(w, x_dtype="int4"), "x_dtype: expected None, 'int8', 'fp8' or 'auto', got 'int4'"),
        (
            lambda w, x: AwqLinear(w, x_dtype="fp8", activation="silu"),
            "activation: expected None, 'relu', 'relu6' or (low, high), got 'silu'",
        ),
        (
            lambda w, x: AwqLinear(w, x_dtype="fp8")(x, dtype="float16"),
            "dtype: expected None for a layer with x_dtype='fp8', got 'float16'",
        ),
        (
            lambda w, x: AwqLinear(w, x_dtype="fp8").plan((2, 32)),
            "x_dtype: expected None for a plan, which is one launch, got 'fp8'",
        ),
        (
            lambda w, x: AwqLinear(w, x_dtype="int8", activation="silu"),
            "activation: expected None, 'relu', 'relu6' or (low, high), got 'silu'",
        ),
        (
            lambda w, x: AwqLinear(w, x_dtype="int8")(x, residual=x[:, :16]),
            "residual: expected None for a layer with x_dtype='int8', got ndarray",
        ),
        (
            lambda w, x: AwqLinear(w, x_dtype="int8").plan((2, 32)),
            "x_dtype: expected None for a plan, which is one launch, got 'int8'",
        ),
        (
            lambda w, x: AwqLinear(w, x_dtype="int8")(x[:, :16]),
            "x: expected float16 [..., K] with K = 32, got float16 [2, 16]",
        ),
        (
            lambda w, x: AwqLinear.concatenate([AwqLinear(w, x_dtype="int8")]),
            "parts[0]: expected a layer without an x_dtype, got 'int8'",
        ),
    ],
)
def test_option_without_meaning_for_quantized_x_is_refused(act: Any, message: str) -> None:
    weight = random_weight(np.random.default_rng(0), 32, 16, 16)
    with pytest.raises(ValueError, match=re.escape(message)):
        act(weight, np.ones((2, 32), np.float16))
