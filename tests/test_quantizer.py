# SPDX-License-Identifier: Apache-2.0
"""Tests of `quantize`: error bounds, extreme values, and the messages for invalid input."""

from __future__ import annotations

import re
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq import quantizer, reference
from cupy_awq.packing import unpack_int4
from cupy_awq.quantizer import quantize
from cupy_awq.weight import PackedWeight

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]


def decoded(weight: PackedWeight) -> np.ndarray:
    """Return the dequantized weight, rounded to the dtype of the scales, as float64."""
    return reference.dequantize(weight.qweight, weight.scales, weight.qzeros).astype(np.float64)


def steps(weight: PackedWeight) -> np.ndarray:
    """Return the quantization step of each element of a weight, which is its group's scale, float64 [K, N]."""
    return np.repeat(weight.scales.astype(np.float64), weight.group_size, axis=0)


@st.composite
def dense(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Draw a dense weight w [K, N] of random dtype and layout, and a group size that divides K.

    Groups have both signs, one sign or zeros, magnitudes from 1e-3 to 1e3, and any strides.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group_size, groups, n = draw(st.integers(1, 40)), draw(st.integers(1, 4)), 8 * draw(st.integers(1, 4))
    w = rng.standard_normal((groups, group_size, n)) * 10.0 ** rng.uniform(-3, 3, (groups, 1, n))
    kind = rng.integers(0, 4, (groups, 1, n))
    w = np.select([kind == 0, kind == 1, kind == 2], [w, np.abs(w), -np.abs(w)], 0.0)
    w = w.reshape(groups * group_size, n).astype(draw(st.sampled_from(DTYPES)))
    layout = draw(st.sampled_from(["contiguous", "transposed", "reversed"]))
    if layout == "transposed":
        w = np.ascontiguousarray(w.T).T
    elif layout == "reversed":
        w = w[::-1, ::-1]
    return w, group_size


@given(dense(), st.booleans())
def test_error_of_every_weight_is_at_most_half_a_step(problem: tuple[np.ndarray, int], symmetric: bool) -> None:
    w, group_size = problem
    weight = quantize(w, group_size=group_size, symmetric=symmetric)
    assert weight.shape == w.shape
    assert weight.group_size == group_size
    assert weight.dtype == (BFLOAT16 if w.dtype == BFLOAT16 else np.float16)
    if symmetric:
        assert (unpack_int4(weight.qzeros) == 8).all()
    exact = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32).astype(np.float64)
    # A scale that was rounded down leaves the extremes beyond the outermost codes: by 15 rounding errors of the
    # scale, or by half a step for subnormal scales.
    half_unit = 2.0**-8 if weight.dtype == BFLOAT16 else 2.0**-11
    subnormal = (weight.dtype == np.float16) & (steps(weight) < 2.0**-14)
    slack = np.where(subnormal, 1.0, 0.5 + 15 * half_unit + 1e-5)
    assert np.all(np.abs(exact - w.astype(np.float64)) <= slack * steps(weight))


@given(dense())
def test_codes_are_those_of_the_formula(problem: tuple[np.ndarray, int]) -> None:
    w, group_size = problem
    weight = quantize(w, group_size=group_size)
    for g, rows in enumerate(np.split(w.astype(np.float64), len(w) // group_size)):
        s = weight.scales[g].astype(np.float64)
        low, high = np.minimum(rows.min(0), 0), np.maximum(rows.max(0), 0)
        normal = (high - low) / 15 > 2.0**-13
        half_unit = 2.0**-8 if w.dtype == BFLOAT16 else 2.0**-11
        np.testing.assert_allclose(s[normal], ((high - low) / 15)[normal], rtol=half_unit)
        z = np.clip(np.rint(-low / s), 0, 15)
        np.testing.assert_array_equal(unpack_int4(weight.qzeros[g]), z)
        exact = rows / s + z
        q = unpack_int4(weight.qweight[g * group_size : (g + 1) * group_size])
        # in float32 a quotient close to a tie may round to either side
        assert np.all(np.abs(q - np.clip(exact, 0, 15)) <= 0.5 + 1e-5 * (1 + np.abs(exact)))


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_weights_on_the_grid_are_quantized_exactly(seed: int, symmetric: bool) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (2, 16, 8))
    codes[:, 0], codes[:, 1] = 0, 15
    zeros = np.full((2, 1, 8), 8) if symmetric else rng.integers(0, 16, (2, 1, 8))
    s = 2.0 ** rng.integers(-20, 8, (2, 1, 8))
    w = ((codes - zeros) * s).reshape(32, 8).astype(np.float32)
    np.testing.assert_array_equal(decoded(quantize(w, group_size=16, symmetric=symmetric)), w)


def test_group_of_one_sign_does_not_saturate() -> None:
    w = np.linspace(1.0, 1.2, 32).reshape(4, 8)
    for sign in (1, -1):
        assert np.abs(decoded(quantize(sign * w, group_size=4)) - sign * w).max() < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_group_of_zeros_dequantizes_to_zeros_with_a_finite_scale(dtype: Any, symmetric: bool) -> None:
    weight = quantize(np.zeros((8, 8), dtype), group_size=4, symmetric=symmetric)
    assert (decoded(weight) == 0).all()
    scales = weight.scales.astype(np.float64)
    assert np.isfinite(scales).all()
    # GPU arithmetic keeps float16 subnormals but may flush bfloat16 subnormals to 0, and then divide by 0.
    assert (scales >= (2.0**-126 if dtype == BFLOAT16 else 2.0**-24)).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    "pair", [(0, 65504), (-65504, 0), (-65504, 65504), (65504, 65504), (-65504, 1), (-60000, 65504), (-3000, 65504)]
)
def test_largest_float16_weights_dequantize_to_finite_values(pair: tuple[float, float], symmetric: bool) -> None:
    w = np.tile(np.array(pair, np.float16)[:, None], (4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = quantize(w, group_size=8, symmetric=symmetric)
    error = np.abs(decoded(weight) - w.astype(np.float64))
    assert np.all(error <= steps(weight))


def test_largest_bfloat16_weights_dequantize_to_finite_values() -> None:
    most = ml_dtypes.finfo(BFLOAT16).max
    w = np.tile(np.array([-most, most, 0, most], BFLOAT16)[:, None], (1, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = quantize(w, group_size=2)
    assert np.all(np.abs(decoded(weight) - w.astype(np.float64)) <= steps(weight))


def test_subnormal_float16_weights_are_kept() -> None:
    least = 2.0**-24
    for count in (1, 7, 15, 16, 22, 23, 38, 100, 1000):
        w = (np.linspace(-count, count, 64).round() * least).reshape(8, 8).astype(np.float16)
        weight = quantize(w, group_size=8)
        error = np.abs(decoded(weight) - w.astype(np.float64))
        assert np.all(error <= steps(weight)), f"{count} units"
        assert count > 7 or not error.any()


def test_weights_below_the_smallest_scale_become_zeros() -> None:
    w = np.full((8, 8), 1e-30, np.float32)
    assert (decoded(quantize(w, group_size=8)) == 0).all()


@pytest.mark.parametrize("block", [1, 64, 700])
def test_result_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    w = np.random.default_rng(0).standard_normal((60, 40))
    whole = quantize(w, group_size=12)
    monkeypatch.setattr(quantizer, "_BLOCK", block)
    parts = quantize(w, group_size=12)
    for name in ("qweight", "scales", "qzeros"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


def test_group_size_minus_one_is_one_group() -> None:
    w = np.random.default_rng(0).standard_normal((48, 8))
    assert quantize(w, group_size=-1).group_size == 48
    assert quantize(np.zeros((256, 8), np.float16)).group_size == 128


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_quantizing_on_the_gpu_equals_the_cpu(dtype: Any, symmetric: bool) -> None:
    import cupy

    w = np.random.default_rng(0).standard_normal((96, 64)).astype(dtype)
    w[:32, :8], w[32:64, :8], w[64:, :8] = 0, np.abs(w[32:64, :8]), w[64:, :8] * dtype.type(1e-6)
    on_cpu = quantize(w, group_size=32, symmetric=symmetric)
    on_gpu = quantize(cupy.asarray(w), group_size=32, symmetric=symmetric)
    for name in ("qweight", "scales", "qzeros"):
        np.testing.assert_array_equal(getattr(on_gpu, name).get(), getattr(on_cpu, name))
    with pytest.raises(ValueError, match=r"^w: expected finite values, got NaN or infinity$"):
        quantize(cupy.asarray(np.full((8, 8), np.nan, dtype)), group_size=8)


W = np.zeros((128, 16), np.float32)


def with_value(value: float, dtype: Any = np.float32) -> np.ndarray:
    w = W.astype(dtype)
    w[100, 9] = value
    return w


BAD_SHAPE = "w: expected [K, N] with K > 0, N > 0 and N divisible by 8, got "
BAD_GROUP_SIZE = "group_size: expected a divisor of K = 128, or -1 for K itself, got "


@pytest.mark.parametrize(
    ("w", "options", "error", "message"),
    [
        (with_value(np.nan), {}, ValueError, "w: expected finite values, got NaN or infinity"),
        (with_value(np.inf), {}, ValueError, "w: expected finite values, got NaN or infinity"),
        (with_value(-np.inf, np.float16), {}, ValueError, "w: expected finite values, got NaN or infinity"),
        (with_value(np.nan, BFLOAT16), {}, ValueError, "w: expected finite values, got NaN or infinity"),
        (
            with_value(1.5e30),
            {},
            ValueError,
            "w: expected values with scales up to 6.55e+04 (float16), got a scale of 1e+29",
        ),
        (
            with_value(1e308, np.float64),
            {},
            ValueError,
            "w: expected values with scales up to 6.55e+04 (float16), got a scale of 6.67e+306",
        ),
        ([[0.0] * 8], {}, TypeError, "w: expected a NumPy or CuPy array, got list"),
        (
            W.astype(np.int8),
            {},
            TypeError,
            "w: expected float16, bfloat16, float32 or float64 [K, N], got int8 [128, 16]",
        ),
        (
            W.astype(np.complex64),
            {},
            TypeError,
            "w: expected float16, bfloat16, float32 or float64 [K, N], got complex64 [128, 16]",
        ),
        (W[0], {}, ValueError, BAD_SHAPE + "float32 [16]"),
        (W[:0], {}, ValueError, BAD_SHAPE + "float32 [0, 16]"),
        (W[:, :12], {}, ValueError, BAD_SHAPE + "float32 [128, 12]"),
        (W, {"group_size": 48}, ValueError, BAD_GROUP_SIZE + "48"),
        (W, {"group_size": 0}, ValueError, BAD_GROUP_SIZE + "0"),
        (W, {"group_size": 64.0}, TypeError, "group_size: expected an integer, got 64.0"),
        (W, {"bits": 8}, ValueError, "bits: expected 4, got 8"),
        (W, {"bits": "4"}, ValueError, "bits: expected 4, got '4'"),
    ],
)
def test_invalid_input_raises_the_documented_message(
    w: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        quantize(w, **options)
