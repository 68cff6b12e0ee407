# SPDX-License-Identifier: Apache-2.0
"""Tests of the NumPy reference against float64 formulas that share no code with it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq import reference
from cupy_awq.activation import FUNCTIONS
from cupy_awq.tools.testing import random_activations, random_weight, relative_error
from cupy_awq.weight import PackedWeight

GOLDEN = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))["awq_gemm_k8_n16_g4"]

FLOAT16, BFLOAT16, FLOAT32 = (np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))
SIGNIFICANT_BITS = {FLOAT16: 11, BFLOAT16: 8, FLOAT32: 24}
LEAST_EXPONENT = {FLOAT16: -24, BFLOAT16: -133, FLOAT32: -149}  # the binary exponent of the smallest subnormal number


class Problem(NamedTuple):
    """The operands and options of a GEMM in NumPy."""

    qweight: np.ndarray
    scales: np.ndarray
    qzeros: np.ndarray | None
    x: np.ndarray
    element: np.dtype[Any]
    """The element type of x; bfloat16 if x is uint16, which then holds its bits."""


def float64_weight(qweight: np.ndarray, scales: np.ndarray, qzeros: np.ndarray | None) -> np.ndarray:
    """Return W [K, N] in float64 by the formula, with the bit shifts of the format's specification."""

    def codes(words: np.ndarray) -> np.ndarray:
        shifts = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)
        unpacked = words.astype(np.int64).astype(np.uint32)[..., None] >> shifts & 15
        return unpacked.reshape(words.shape[0], -1).astype(np.float64)

    def rows(groups: np.ndarray) -> np.ndarray:
        return np.repeat(groups.astype(np.float64), len(qweight) // len(scales), axis=0)

    q, s = codes(qweight), rows(scales)
    if qzeros is None:
        return (q - 8) * s
    return (q - rows(codes(qzeros))) * s if qzeros.dtype == np.int32 else q * s + rows(qzeros)


def rounded(a: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return ``a`` rounded to ``dtype``, to nearest with ties to even, as float64. Overflow is not handled."""
    _, exponent = np.frexp(a)
    unit = np.maximum(exponent - SIGNIFICANT_BITS[dtype], LEAST_EXPONENT[dtype])
    return np.ldexp(np.rint(np.ldexp(a, -unit)), unit)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a GEMM of any size and any form of zero points, on contiguous tensors and slices of larger ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group_size, groups = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    words = draw(st.integers(1, 7))
    k, n = group_size * groups, 8 * words
    scale_dtype = draw(st.sampled_from([FLOAT16, BFLOAT16]))
    above, left = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    order = draw(st.sampled_from([1, -1]))  # -1 reverses the order of the rows, so that strides are negative

    def part(a: np.ndarray, per_word: int) -> np.ndarray:
        return a[above:, left * per_word : (left + words) * per_word][::order]

    def any_words(rows: int) -> np.ndarray:
        return part(rng.integers(-(2**31), 2**31, (rows + above, words + 2 * left)).astype(np.int32), 1)

    scales = part(rng.normal(0, 0.1, (groups + above, n + 16 * left)).astype(scale_dtype), 8)
    form = draw(st.sampled_from(["packed", "symmetric", "float"]))
    qzeros = None
    if form == "packed":
        qzeros = any_words(groups)
    elif form == "float":
        qzeros = part(rng.normal(0, 1, (groups + above, n + 16 * left)).astype(scale_dtype), 8)

    element = draw(st.sampled_from([FLOAT16, BFLOAT16, FLOAT32]))
    leading = draw(st.sampled_from([(), (0,), (1,), (3,), (11,), (2, 2), (2, 0), (1, 2, 2)]))
    x = rng.standard_normal((*leading, k)).astype(element)
    layout = draw(st.sampled_from(["contiguous", "columns of a wider one", "reversed", "transposed"]))
    if layout == "columns of a wider one":
        x = np.repeat(x, 3, axis=-1)[..., ::3]
    elif layout == "reversed":
        x = np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    elif layout == "transposed":
        x = np.ascontiguousarray(x.T).T
    if element == BFLOAT16 and draw(st.booleans()):
        x = x.view(np.uint16)
    return Problem(any_words(k), scales, qzeros, x, element)


@given(problems(), st.sampled_from([None, FLOAT16, BFLOAT16, FLOAT32]))
def test_dequantize_is_the_formula_rounded_once(problem: Problem, dtype: np.dtype[Any] | None) -> None:
    w = reference.dequantize(*problem[:3], dtype=dtype)
    to = dtype or problem.scales.dtype
    assert w.dtype == to
    np.testing.assert_array_equal(w.astype(np.float64), rounded(float64_weight(*problem[:3]), to))


@given(problems(), st.sampled_from([None, FLOAT16, BFLOAT16, FLOAT32]), st.booleans(), st.data())
def test_matmul_is_the_float64_product(
    problem: Problem, bias_dtype: np.dtype[Any] | None, into_out: bool, data: st.DataObject
) -> None:
    qweight, scales, qzeros, x, element = problem
    n = scales.shape[1]
    bias = None if bias_dtype is None else np.linspace(-3, 3, n).astype(bias_dtype)
    out = None
    if into_out:
        out = np.full((*x.shape[:-1], 2 * n), np.nan, element).view(x.dtype)[
            ..., data.draw(st.sampled_from([0, 1])) :: 2
        ]
    dtype = element if x.dtype == np.uint16 else data.draw(st.sampled_from([None, element]))
    y = reference.matmul(x, qweight, scales, qzeros, bias=bias, out=out, dtype=dtype)
    assert y.shape == (*x.shape[:-1], n)
    assert y.dtype == x.dtype
    assert y is out or not into_out
    x64, w64 = x.view(element).astype(np.float64), float64_weight(qweight, scales, qzeros)
    b64 = np.zeros(n) if bias is None else bias.astype(np.float64)
    expected = x64 @ w64 + b64
    # The bound: at most K + 2 float32 operations, each rounded once, then one rounding of the result.
    half_unit = 2.0 ** -SIGNIFICANT_BITS[element]
    bound = 2.0 ** LEAST_EXPONENT[element] + half_unit * np.abs(expected)
    bound += (len(w64) + 2) * 2.0**-24 * 1.01 * (np.abs(x64) @ np.abs(w64) + np.abs(b64))
    error = np.abs(y.view(element).astype(np.float64) - expected)
    assert np.all(error <= bound), f"largest error / bound: {np.max(error / bound)}"


FORMULAS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda v: v / (1 + np.exp(-v)),
    "gelu": lambda v: 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
}
"""The activation functions in float64, by the names of `cupy_awq.activation.FUNCTIONS`, for tests of all epilogues."""


def float64_epilogue(v: np.ndarray, activation: Any, residual: np.ndarray | float = 0.0) -> np.ndarray:
    """Return activation(v) + residual in float64; "swiglu" multiplies SiLU of v's left half by its right half."""
    if activation == "swiglu":
        gate, up = np.split(v, 2, axis=-1)
        v = FORMULAS["silu"](gate) * up
    elif activation in FUNCTIONS:
        v = FORMULAS[activation](v)
    elif activation is not None:
        v = np.clip(v, *{"relu": (0, np.inf), "relu6": (0, 6)}.get(activation, activation))
    return v + residual


ACTIVATIONS = [None, "relu", "relu6", *FUNCTIONS, (-0.5, 0.75), "swiglu"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("element", [FLOAT16, BFLOAT16, FLOAT32])
@pytest.mark.parametrize("residual", [None, "strided", "out"])
def test_epilogues_are_the_float64_formulas_rounded_once(
    activation: Any, element: np.dtype[Any], residual: str | None
) -> None:
    rng = np.random.default_rng(7)
    weight = random_weight(rng, 64, 32, 16)
    x = 3 * random_activations(rng, 2, 5, 64).astype(element)
    n = 16 if activation == "swiglu" else 32
    bias = rng.standard_normal(32).astype(np.float32)
    extra = rng.standard_normal((2, 5, 2 * n)).astype(element)[..., ::2] if residual else None
    added = 0.0 if extra is None else extra.astype(np.float64)
    out = extra if residual == "out" else None
    w = float64_weight(weight.qweight, weight.scales, weight.qzeros)
    expected = float64_epilogue(x.astype(np.float64) @ w + bias, activation, added)
    tensors = weight.qweight, weight.scales, weight.qzeros
    y = reference.matmul(x, *tensors, bias=bias, activation=activation, residual=extra, out=out)
    assert y.shape == (2, 5, n)
    assert y.dtype == element
    assert residual != "out" or y is extra
    half_unit = 2.0 ** -SIGNIFICANT_BITS[element]
    size = np.abs(expected - added) + np.abs(added)
    assert np.all(np.abs(y.astype(np.float64) - expected) <= half_unit * np.abs(expected) + 1e-5 * size + 1e-5)


def test_activations_of_extreme_values() -> None:
    # codes 9, zero points 8 and scales 1: every element of W is 1
    qweight, scales = np.full((1, 1), 0x99999999, np.uint32).view(np.int32), np.ones((1, 8), np.float16)
    v = np.array([-np.inf, -60000, -100, -0.0, 0.0, 100, 60000, np.inf, np.nan], np.float16)

    def activated(activation: Any) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return reference.matmul(v[:, None], qweight, scales, None, activation=activation)[:, 0]

    nan, inf = np.nan, np.inf
    np.testing.assert_array_equal(activated("relu"), [0, 0, 0, 0, 0, 100, 60000, inf, nan])
    np.testing.assert_array_equal(activated("relu6"), [0, 0, 0, 0, 0, 6, 6, 6, nan])
    np.testing.assert_array_equal(activated((-inf, 7)), [-inf, -60000, -100, 0, 0, 7, 7, 7, nan])
    np.testing.assert_array_equal(activated("silu"), [nan, 0, 0, 0, 0, 100, 60000, inf, nan])
    np.testing.assert_array_equal(activated("gelu"), [nan, 0, 0, 0, 0, 100, 60000, inf, nan])


@pytest.mark.parametrize("block", [1, 20, 100, 1000])
@pytest.mark.parametrize("zeros", ["packed", "symmetric", "float"])
def test_block_that_splits_or_joins_groups_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, block: int, zeros: str
) -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 77, 24, 11, zeros=zeros)
    tensors = weight.qweight, weight.scales, weight.qzeros
    whole = reference.dequantize(*tensors)
    x = random_activations(rng, 13, 77)
    monkeypatch.setattr(reference, "_BLOCK", block)
    monkeypatch.setattr(reference, "_LARGE_BLOCK", block)
    np.testing.assert_array_equal(reference.dequantize(*tensors), whole)
    for rows in (x, x[:1]):
        assert relative_error(reference.matmul(rows, *tensors), rows, weight) < 5e-4


@pytest.mark.parametrize(("element", "bound"), [(FLOAT16, 5e-4), (BFLOAT16, 4e-3), (FLOAT32, 2e-6)])
@pytest.mark.parametrize("scale_dtype", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("m", [1, 9])
def test_error_stays_in_bounds_at_a_large_k(
    element: np.dtype[Any], bound: float, scale_dtype: np.dtype[Any], m: int
) -> None:
    rng = np.random.default_rng(1)
    weight = random_weight(rng, 28672, 64, 128, dtype=scale_dtype)
    x = random_activations(rng, m, 28672, dtype=element)
    y = reference.matmul(x, weight.qweight, weight.scales, weight.qzeros)
    assert relative_error(y, x, weight) < bound


def test_autoawq_tensors_dequantize_bit_for_bit() -> None:
    def bits(name: str) -> np.ndarray:
        return np.array([int(h, 16) for h in GOLDEN[name]["hex"]], np.uint32).reshape(GOLDEN[name]["shape"])

    qweight, qzeros = bits("qweight").view(np.int32), bits("qzeros").view(np.int32)
    scales = bits("scales_fp16").astype(np.uint16).view(np.float16)
    w = reference.dequantize(qweight, scales, qzeros)
    np.testing.assert_array_equal(w.view(np.uint16), bits("dequant_fp16"))
    x = bits("x_fp16").astype(np.uint16).view(np.float16)
    expected = np.array(GOLDEN["y_float64"]["v"]).reshape(GOLDEN["y_float64"]["shape"])
    np.testing.assert_allclose(x.astype(np.float64) @ w.astype(np.float64), expected, atol=1e-9)
    y = reference.matmul(x, qweight, scales, qzeros)
    assert np.linalg.norm(y - expected) < 1e-3 * np.linalg.norm(expected)
    assert relative_error(y, x, PackedWeight(qweight, scales, qzeros)) < 5e-4


@pytest.mark.parametrize(
    ("dtype", "scale", "offset", "expected"),
    [
        (FLOAT16, 683, 2.0**-20, 2050),
        (BFLOAT16, 87, 2.0**-30, 262),
        (BFLOAT16, -87, -(2.0**-30), -262),
        (BFLOAT16, 89, -(2.0**-30), 266),
    ],
)
def test_offset_below_float32_precision_decides_a_rounding_tie(
    dtype: np.dtype[Any], scale: float, offset: float, expected: float
) -> None:
    # 3 * scale is half-way between two values of `dtype`; float32 would lose the offset, which decides the rounding.
    qweight = np.full((1, 1), 0x33333333, np.int32)
    scales, offsets = np.full((1, 8), scale, dtype), np.full((1, 8), offset, dtype)
    assert (reference.dequantize(qweight, scales, offsets) == expected).all()
    exact = reference.dequantize(qweight, scales, offsets, dtype=np.float32)
    assert (exact == 3 * scale).all()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_extreme_scales_neither_warn_nor_vanish(dtype: np.dtype[Any]) -> None:
    qweight = np.array([[0x75316420]], np.int32)
    codes = np.arange(8.0) - 8
    least = np.full((1, 8), 2.0 ** LEAST_EXPONENT[dtype], dtype)
    most = np.full((1, 8), ml_dtypes.finfo(dtype).max, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small = reference.dequantize(qweight, least, None)
        large = reference.dequantize(qweight, most, None)
        y = reference.matmul(np.ones(1, dtype), qweight, most, None)
    np.testing.assert_array_equal(small[0].astype(np.float64), codes * float(least[0, 0]))
    assert np.isneginf(large[0, :7].astype(np.float32)).all()
    assert large[0, 7] == -most[0, 7]
    np.testing.assert_array_equal(y, large[0])


def test_inf_or_nan_in_a_row_stays_in_that_row() -> None:
    rng = np.random.default_rng(2)
    weight = random_weight(rng, 64, 16, 32)
    x = random_activations(rng, 4, 64)
    clean = reference.matmul(x, weight.qweight, weight.scales, weight.qzeros)
    x[1, 5], x[2, 7] = np.inf, np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = reference.matmul(x, weight.qweight, weight.scales, weight.qzeros)
    sign = np.sign(float64_weight(weight.qweight, weight.scales, weight.qzeros)[5])
    assert (sign == 0).any()
    expected = {-1: -np.inf, 0: np.nan, 1: np.inf}  # infinity times a weight of 0 is NaN
    np.testing.assert_array_equal(y[1], [expected[s] for s in sign])
    assert np.isnan(y[2]).all()
    np.testing.assert_array_equal(y[[0, 3]], clean[[0, 3]])


def test_results_are_the_same_from_run_to_run() -> None:
    rng = np.random.default_rng(3)
    weight = random_weight(rng, 512, 256, 64)
    x = random_activations(rng, 20, 512)
    runs = [reference.matmul(x, weight.qweight, weight.scales, weight.qzeros).tobytes() for _ in range(3)]
    assert len(set(runs)) == 1


def test_dequantize_fills_out_and_refuses_another_dtype() -> None:
    weight = random_weight(np.random.default_rng(4), 32, 16, 8)
    tensors = weight.qweight, weight.scales, weight.qzeros
    out = np.full((16, 64), np.nan, np.float16).T[::2]
    assert reference.dequantize(*tensors, out=out) is out
    np.testing.assert_array_equal(out, reference.dequantize(*tensors))
    with pytest.raises(TypeError, match=r"^out: expected float32 \[.*\], got float16 \["):
        reference.dequantize(*tensors, dtype=np.float32, out=out)
    with pytest.raises(TypeError, match=r"^dtype: expected float16, bfloat16 or float32, got 'float64'$"):
        reference.dequantize(*tensors, dtype="float64")


def test_matmul_refuses_arguments_that_do_not_fit() -> None:
    weight = random_weight(np.random.default_rng(5), 32, 16, 8)
    tensors = weight.qweight, weight.scales, weight.qzeros
    x = np.ones((2, 32), np.float16)
    with pytest.raises(ValueError, match=r"^x: expected \w+ \[\.\.\., K\] with K = 32, got \w+ \[.*31\]$"):
        reference.matmul(x[:, 1:], *tensors)
    with pytest.raises(TypeError, match=r"^x: expected a NumPy or CuPy array, got list$"):
        reference.matmul([1.0] * 32, *tensors)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^bias: expected .* \[N\] = \[16\], got \w+ \[8\]$"):
        reference.matmul(x, *tensors, bias=np.zeros(8, np.float16))
    with pytest.raises(ValueError, match=r"^out: expected \w+ \[2, 16\], got \w+ \[16\]$"):
        reference.matmul(x, *tensors, out=np.zeros(16, np.float16))


def test_relative_error_detects_wrong_and_missing_results() -> None:
    rng = np.random.default_rng(6)
    for zeros in ("packed", "symmetric", "float"):
        weight = random_weight(rng, 64, 32, 16, zeros=zeros)
        x = random_activations(rng, 3, 64)
        w = float64_weight(weight.qweight, weight.scales, weight.qzeros)
        exact = x.astype(np.float64) @ w
        assert relative_error(exact, x, weight) < 1e-14
        size = np.sqrt((x.astype(np.float64) ** 2 @ w**2).sum())
        wrong = exact.copy()
        wrong[1, 3] += 0.01 * size
        assert relative_error(wrong, x, weight) == pytest.approx(0.01, rel=1e-6)
        wrong[2, 0] = np.nan
        assert np.isnan(relative_error(wrong, x, weight))
        assert relative_error(exact[:0], x[:0], weight) == 0
