# SPDX-License-Identifier: Apache-2.0
"""Tests of calibrated quantization against brute force over tokens, rows and groups in float64."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq import quantize, reference
from cupy_awq.quantization import (
    Moments,
    MomentSum,
    QuantizedRows,
    Recipe,
    channel_scales,
    folding,
    output_error,
    quantize_rows,
    search_channel_scales,
)
from cupy_awq.quantization.clipping import FACTORS, search_clipping
from cupy_awq.quantization.error_compensation import compensate_errors, inverse_factor
from cupy_awq.quantization.grid import fit_grid, fit_rows, round_rows
from cupy_awq.quantization.refinement import refine

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def calibrate(x: np.ndarray) -> Moments:
    sums = MomentSum()
    for part in np.array_split(x, 3):
        sums.add(part)
    return sums.mean()


@st.composite
def layers(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw (w [N, K], x [tokens, K], group_size) with outlier channels, channels of zeros, and one-signed groups."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group_size, groups, n = draw(st.sampled_from([4, 8, 16])), draw(st.integers(1, 4)), 8 * draw(st.integers(1, 3))
    k = group_size * groups
    w = rng.standard_normal((n, k)) * np.exp(rng.standard_normal(k) * 0.5)
    kind = rng.integers(0, 6, (n, groups, 1))
    grouped = w.reshape(n, groups, group_size)
    w = np.select([kind == 0, kind == 1], [np.abs(grouped), 0 * grouped], grouped).reshape(n, k)
    mix = rng.standard_normal((k, k)) / k**0.5 + np.eye(k)
    x = rng.standard_normal((draw(st.integers(3, 90)), k)) @ mix * np.exp(rng.standard_normal(k))
    x[:, rng.random(k) < draw(st.sampled_from([0.0, 0.2]))] = 0
    return w.astype(np.float32), x.astype(np.float32), group_size


def brute_error(w: np.ndarray, quantized: np.ndarray, x: np.ndarray) -> float:
    """Return the squared error of the outputs per token, computed in float64."""
    difference = quantized.astype(np.float64) - w
    return float(np.square(x.astype(np.float64) @ difference.T).sum() / len(x))


def brute_nearest(w: np.ndarray, group_size: int, dtype: Any = np.float16, ends: tuple[float, float] = (1, 1)) -> Any:
    """Return a weight [N, K] rounded to nearest on asymmetric grids, one row and group at a time, in float64."""
    result = np.empty(w.shape)
    for row, start in itertools.product(range(len(w)), range(0, w.shape[1], group_size)):
        group = w[row, start : start + group_size].astype(np.float64)
        low, high = min(group.min() * ends[0], 0), max(group.max() * ends[1], 0)
        s = float(np.array(max((high - low) / 15, 2.0**-24)).astype(np.float32).astype(dtype))
        z = np.clip(np.rint(-low / s), 0, 15)
        result[row, start : start + group_size] = (np.clip(np.rint(group / s) + z, 0, 15) - z) * s
    return result


@given(layers())
def test_second_moments_equal_those_of_all_tokens_at_once(layer: Any) -> None:
    w, x, _ = layer
    moments = calibrate(x)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(moments.second, exact.T @ exact / len(x), rtol=1e-4, atol=1e-4 * np.square(x).max())
    np.testing.assert_allclose(moments.absolute, np.abs(exact).mean(0), rtol=1e-5)
    assert moments.tokens == len(x)
    difference = (brute_nearest(w, w.shape[1]) - w).astype(np.float32)
    assert output_error(difference, moments.second) == pytest.approx(
        brute_error(w, w + difference.astype(np.float64), x), rel=1e-3, abs=1e-5
    )


@given(layers())
@settings(max_examples=30)
def test_scale_search_finds_the_least_error_of_the_brute_force_grid(layer: Any) -> None:
    w, x, group_size = layer
    moments = calibrate(x)
    parts = [w[:8], w[8:]] if len(w) > 8 else [w]
    before = [part.copy() for part in parts]
    found = search_channel_scales(parts, moments, group_size=group_size, scale_dtype=FLOAT16)
    # the search must leave the weights as they are, which AutoAWQ's does not on CPUs
    for part, copy in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part.view(np.uint32), copy.view(np.uint32))

    def loss(t: np.ndarray) -> float:
        return brute_error(w, brute_nearest(w * t, group_size) / t, x)

    x_mean = np.abs(x.astype(np.float64)).mean(0)
    sizes = np.abs(w.astype(np.float64)).reshape(len(w), -1, group_size)
    w_mean = (sizes / (sizes.max(-1, keepdims=True) + 1e-6)).mean(0).reshape(-1)
    live, losses = x_mean > 0, [loss(np.ones(w.shape[1], np.float32))]
    for duo, r in itertools.product([False, True], np.arange(11) / 10):
        t = np.where(live, x_mean, 1) ** r / (w_mean ** (1 - r) + 1e-4 if duo else 1)
        t = np.maximum(t, 1e-4)
        if live.any():
            t = np.where(live, t / np.sqrt(t[live].max() * t[live].min()), 1)
            losses.append(loss(t.astype(np.float32)))
    # A tie may round either way in float32, so the losses agree to within the error of one weight.
    assert found.loss <= min(losses) * 1.02 + 1e-6
    assert found.loss <= found.identity_loss
    assert found.loss == pytest.approx(loss(found.t), rel=2e-2, abs=1e-6)
    assert (found.t[~live] == 1).all()
    assert np.isfinite(found.t).all()
    assert (found.t > 0).all()


@given(layers(), st.booleans())
@settings(max_examples=30)
def test_clipping_never_increases_the_error_of_a_group(layer: Any, symmetric: bool) -> None:
    w, x, group_size = layer
    options: dict[str, Any] = {"scale_dtype": FLOAT16, "symmetric": symmetric}
    clipped = round_rows(w, search_clipping(w, calibrate(x), group_size=group_size, **options)).dequantize()
    full = round_rows(w, fit_rows(w, group_size, **options)).dequantize()
    for start in range(0, w.shape[1], group_size):
        part = slice(start, start + group_size)
        for row in range(len(w)):
            errors = [brute_error(w[row : row + 1, part], q[row : row + 1, part], x[:, part]) for q in (clipped, full)]
            assert errors[0] <= errors[1] * 1.001 + 1e-6


def test_clipping_by_second_moments_is_nearly_as_good_as_all_pairs_of_ends_by_tokens() -> None:
    rng = np.random.default_rng(0)
    w = (rng.standard_t(4, (16, 64)) * 0.1).astype(np.float32)
    x = (rng.standard_normal((200, 64)) @ rng.standard_normal((64, 64))).astype(np.float32)
    grid = search_clipping(w, calibrate(x), group_size=32, scale_dtype=FLOAT16)
    found = round_rows(w, grid).dequantize()
    all_pairs = [brute_nearest(w, 32, ends=pair) for pair in itertools.product(FACTORS, FACTORS)]
    total, best, plain = 0.0, 0.0, 0.0
    for row, start in itertools.product(range(16), (0, 32)):
        at = slice(row, row + 1), slice(start, start + 32)
        errors = [brute_error(w[at], q[at], x[:, at[1]]) for q in all_pairs]
        total, best, plain = total + brute_error(w[at], found[at], x[:, at[1]]), best + min(errors), plain + errors[0]
    assert best <= total <= best + 0.15 * (plain - best)


def brute_gptq(w: np.ndarray, second: np.ndarray, scale: np.ndarray, zero: np.ndarray, group_size: int) -> np.ndarray:
    """Return weights dequantized after GPTQ, channel by channel in float64, with the inverse Hessian by elimination."""
    w, inverse = w.astype(np.float64), np.linalg.inv(second.astype(np.float64))
    result = np.empty_like(w)
    for j in range(len(second)):
        s, z = scale[:, j // group_size].astype(np.float64), zero[:, j // group_size]
        result[:, j] = (np.clip(np.rint(w[:, j] / s) + z, 0, 15) - z) * s
        w -= np.outer((w[:, j] - result[:, j]) / inverse[j, j], inverse[j])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, j] = 1  # channel j is eliminated and takes part in no later step
    return result


def test_error_compensation_equals_the_formula_channel_by_channel() -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((24, 160)).astype(np.float32)
    x = (rng.standard_normal((400, 160)) @ rng.standard_normal((160, 160)) * 0.1).astype(np.float32)
    second = calibrate(x).regularize(0.1, 0.05).second
    grid = fit_rows(w, 32, FLOAT16, symmetric=False)
    found = compensate_errors(w, second, grid).dequantize()
    expected = brute_gptq(w, second, grid.scale, grid.zero, 32)
    is_equal = np.isclose(found, expected, atol=1e-6)
    assert is_equal.mean() > 0.98  # In float32 a tie may round either way, which changes the channels after it.
    assert brute_error(w, found, x) == pytest.approx(brute_error(w, expected, x), rel=0.02)


@given(layers(), st.booleans())
@settings(max_examples=30)
def test_refinement_never_increases_the_error(layer: Any, symmetric: bool) -> None:
    w, x, group_size = layer
    second = calibrate(x).regularize(0.1, 0.05).second
    start = round_rows(w, fit_rows(w, group_size, FLOAT16, symmetric=symmetric))
    errors = [output_error(start.dequantize() - w, second)]
    for passes in (1, 2, 4):
        rows = refine(w, second, start, passes=passes, symmetric=symmetric)
        errors.append(output_error(rows.dequantize() - w, second))
        assert rows.codes.max() <= 15
        assert ((rows.grid.zero >= 0) & (rows.grid.zero <= 15)).all()
        assert not symmetric or (rows.grid.zero == 8).all()
    assert all(later <= earlier * 1.001 + 1e-6 for earlier, later in itertools.pairwise(errors))


def test_refined_scale_is_the_least_squares_scale() -> None:
    rng = np.random.default_rng(2)
    true = 0.0371
    codes = rng.integers(0, 16, (8, 16)).astype(np.uint8)
    w = ((codes - 5.0) * true).astype(np.float32)
    wrong = fit_rows(w * np.float32(1.1), 16, FLOAT16, symmetric=False)
    found = refine(w, np.eye(16, dtype=np.float32), QuantizedRows(codes, wrong), passes=1, symmetric=False)
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_array_equal(found.grid.scale, np.full((8, 1), true, np.float16))
    np.testing.assert_array_equal(found.grid.zero, np.full((8, 1), 5))


@given(layers(), st.sampled_from([FLOAT16, BFLOAT16]), st.booleans(), st.booleans())
@settings(max_examples=30)
def test_calibrated_weight_is_never_worse_than_round_to_nearest(
    layer: Any, dtype: Any, symmetric: bool, compensates: bool
) -> None:
    w, x, group_size = layer
    recipe = Recipe(group_size, symmetric=symmetric, scale_dtype=dtype, compensates=compensates)
    moments = calibrate(x)
    before = w.copy(), moments.second.copy()
    rows = quantize_rows(w, moments, recipe)
    np.testing.assert_array_equal(w, before[0])
    np.testing.assert_array_equal(moments.second, before[1])
    nearest = quantize_rows(w, None, recipe)
    assert rows.codes.dtype == np.uint8
    assert rows.codes.max() <= 15
    assert np.isfinite(rows.dequantize().astype(dtype)).all()
    for row in range(len(w)):
        one = slice(row, row + 1)
        errors = [brute_error(w[one], q.dequantize()[one], x) for q in (rows, nearest)]
        assert errors[0] <= errors[1] * 1.001 + 1e-6
    again = quantize_rows(w, moments, recipe)
    np.testing.assert_array_equal(again.codes, rows.codes)
    np.testing.assert_array_equal(again.grid.scale.view(np.uint16), rows.grid.scale.view(np.uint16))
    weight = rows.pack()
    decoded = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32)
    np.testing.assert_allclose(decoded, rows.dequantize().T, rtol=1e-6)


def test_quantize_with_inputs_reduces_the_error_of_the_products() -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((128, 32)).astype(np.float16)
    x = (rng.standard_normal((4, 100, 128)) @ rng.standard_normal((128, 128))).astype(np.float32)
    errors = []
    for weight in (quantize(w, group_size=32), quantize(w, group_size=32, inputs=x)):
        assert weight.dtype == np.float16
        values = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32)
        errors.append(brute_error(w.T.astype(np.float64), values.T, x.reshape(-1, 128)))
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (
            np.zeros((3, 60), np.float32),
            ValueError,
            r"^inputs: expected \[\.\.\., K\] with K = 64 and at least one token",
        ),
        (
            np.zeros((0, 64), np.float32),
            ValueError,
            r"^inputs: expected \[\.\.\., K\] with K = 64 and at least one token",
        ),
        (np.zeros((3, 64), np.int32), TypeError, r"^inputs: expected float16.*, got"),
        ([[0.0] * 64], TypeError, r"^inputs: expected"),
        (np.full((3, 64), np.nan, np.float32), ValueError, r"^inputs: expected finite values"),
        (np.full((3, 64), 1e30, np.float32), ValueError, r"^inputs: expected finite values .* overflow$"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_invalid_inputs_are_refused(inputs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize(np.ones((64, 8), np.float32), group_size=32, inputs=inputs)


@pytest.mark.parametrize("inputs", [None, np.ones((3, 64), np.float32)])
def test_weights_with_nan_are_refused(inputs: Any) -> None:
    with pytest.raises(ValueError, match=r"^w: expected finite values, got NaN or infinity$"):
        quantize(np.full((64, 8), np.nan, np.float32), group_size=32, inputs=inputs)


def test_layer_without_any_live_channel_is_rounded_to_nearest() -> None:
    w = np.random.default_rng(4).standard_normal((8, 64)).astype(np.float32)
    moments = calibrate(np.zeros((10, 64), np.float32))
    assert (search_channel_scales([w], moments, group_size=32, scale_dtype=FLOAT16).t == 1).all()
    rows = quantize_rows(w, moments, Recipe(32))
    assert np.isfinite(rows.dequantize()).all()


def test_folded_norm_and_linear_layers_give_the_same_outputs() -> None:
    rng = np.random.default_rng(5)
    kv_heads, repeats, head_dim, hidden = 2, 3, 4, 24
    tied = kv_heads, repeats, head_dim
    h, norm = rng.standard_normal((7, hidden)).astype(np.float32), rng.standard_normal(hidden).astype(np.float16)
    norm[3] = 0
    v, bias = rng.standard_normal((kv_heads * head_dim, hidden)), rng.standard_normal(kv_heads * head_dim)
    o = rng.standard_normal((hidden, kv_heads * repeats * head_dim))

    def run(norm: np.ndarray, v: np.ndarray, bias: np.ndarray, o: np.ndarray) -> np.ndarray:
        values = (h * norm.astype(np.float64)) @ v.T + bias
        heads = np.repeat(values.reshape(-1, kv_heads, 1, head_dim), repeats, axis=2)
        return heads.reshape(len(h), -1) @ o.T

    t = np.exp(rng.standard_normal(hidden)).astype(np.float32)
    moments = calibrate(np.exp(rng.standard_normal((50, kv_heads * repeats * head_dim))).astype(np.float32))
    found = search_channel_scales([o.astype(np.float32)], moments, group_size=4, scale_dtype=FLOAT16, tied=tied)
    heads = found.t.reshape(tied)
    np.testing.assert_array_equal(heads, np.broadcast_to(heads[:, :1], tied))
    folded_norm, exact_t = folding.divide_norm(norm, t, np.float16)
    assert folded_norm.dtype == np.float16
    folded_v, folded_bias = folding.divide_rows(
        folding.scale_columns(v, exact_t), bias, folding.value_scales(heads, tied)
    )
    result = run(folded_norm, folded_v, folded_bias, folding.scale_columns(o, found.t))
    np.testing.assert_allclose(result, run(norm, v, bias, o), rtol=1e-5, atol=1e-5)


def test_merged_projection_has_only_its_last_rows_divided() -> None:
    w, bias = folding.divide_rows(np.ones((6, 2)), np.ones(6), np.array([2.0, 4.0], np.float32))
    assert w[:, 0].tolist() == bias.tolist() == [1, 1, 1, 1, 0.5, 0.25]
    assert folding.divide_rows(np.ones((6, 2)), None, np.ones(2, np.float32))[1] is None


def test_norm_weights_beyond_float16_are_not_scaled() -> None:
    norm, t = folding.divide_norm(
        np.array([1, 6e4, 1e-7], np.float32), np.array([1e9, 1e-3, 1], np.float32), np.float16
    )
    assert np.isfinite(norm).all()
    assert t[:2].tolist() == [1, 1]


def test_scales_are_those_of_a_plain_exponent_for_one_outlier_channel() -> None:
    one = np.ones(4, np.float32)
    x_mean = np.array([16, 1, 1, 0], np.float32)
    t = channel_scales.candidate(x_mean, one, x_mean > 0, 0.5, duo=False)
    np.testing.assert_allclose(t, [2, 0.5, 0.5, 1], rtol=1e-6)


def test_inverse_factor_is_the_cholesky_factor_of_the_inverse() -> None:
    a = np.random.default_rng(6).standard_normal((800, 600))  # so large that the factor is inverted in blocks
    second = a.T @ a
    u = inverse_factor(second)
    assert (np.tril(u, -1) == 0).all()
    np.testing.assert_allclose(u.T @ u, np.linalg.inv(second), rtol=1e-4, atol=1e-7)


def test_inputs_whose_sum_overflows_are_refused_and_not_added() -> None:
    sums, x = MomentSum(), np.full((1, 2), 1.5e19, np.float32)
    sums.add(x)
    with pytest.raises(ValueError, match=r"^inputs: expected finite values .* overflow$"):
        sums.add(x)
    assert sums.mean().tokens == 1
    assert np.isfinite(sums.mean().second).all()


def test_one_sided_ranges_include_zero() -> None:
    grid = fit_grid(np.array([1.0]), np.array([1.5]), FLOAT16, symmetric=False)
    assert (grid.zero[0], float(grid.scale[0])) == (0, pytest.approx(0.1, rel=1e-3))


@pytest.mark.gpu
def test_quantizing_with_inputs_on_the_gpu_is_as_good_as_on_the_cpu() -> None:
    import cupy

    rng = np.random.default_rng(7)
    w, x = rng.standard_normal((64, 256), np.float32), rng.standard_normal((500, 256), np.float32)
    on_cpu = calibrate(x)
    sums = MomentSum()
    sums.add(cupy.asarray(x))
    on_gpu = sums.mean()
    found = search_channel_scales([cupy.asarray(w)], on_gpu, group_size=64, scale_dtype=FLOAT16)
    expected = search_channel_scales([w], on_cpu, group_size=64, scale_dtype=FLOAT16)
    assert found.loss == pytest.approx(expected.loss, rel=0.01)
    rows = quantize_rows(cupy.asarray(w), on_gpu, Recipe(64))
    error = brute_error(w, rows.dequantize().get(), x)
    assert error == pytest.approx(brute_error(w, quantize_rows(w, on_cpu, Recipe(64)).dequantize(), x), rel=0.02)
