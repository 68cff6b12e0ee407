# SPDX-License-Identifier: Apache-2.0
"""`moe`, `gemm_grouped` and `topk` on NumPy arrays: against float64 formulas, and every invalid argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_awq
from cupy_awq import PackedExperts
from tests.experts import error_of, float64_layer, float64_rows, float64_topk, random_experts, vllm_arrays

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]
BOUNDS = dict(zip(DTYPES, (1e-3, 8e-3, 1e-5), strict=True))


@given(data=st.data())
@settings(max_examples=40)
def test_moe_is_the_weighted_sum_of_experts(data: st.DataObject) -> None:
    """`moe` is right with idle experts, one expert for all rows, repeated ids, biases, and M of 0 or 1."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    experts, top_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    m, dtype = data.draw(st.sampled_from([0, 1, 2, 7])), data.draw(st.sampled_from(DTYPES))
    options = {"zeros": data.draw(st.sampled_from(["packed", "symmetric", "float"]))}
    bias = data.draw(st.sampled_from([None, np.float16, np.float32]))
    gate_up = random_experts(rng, experts, 64, 32, 32, bias=bias, **options)
    down = random_experts(rng, experts, 16, 24, 16, bias=bias, **options)
    ids = rng.integers(0, data.draw(st.sampled_from([1, experts])), (m, top_k)).astype(np.int32)
    weights, x = rng.uniform(0, 1, (m, top_k)).astype(np.float32), rng.standard_normal((m, 64)).astype(dtype)
    shared = rng.standard_normal((m, 24)).astype(dtype) if data.draw(st.booleans()) else None
    activation = data.draw(st.sampled_from(["swiglu", "geglu", "clamped_swiglu"]))
    out = np.full((m, 24), np.nan, dtype)
    y = cupy_awq.moe(x, ids, weights, gate_up, down, activation=activation, shared=shared, out=out)
    assert y is out
    expected = float64_layer(x, ids, weights, gate_up, down, activation, shared)
    assert m == 0 or error_of(y, expected) < BOUNDS[dtype]


@given(data=st.data())
@settings(max_examples=40)
def test_grouped_product_of_sorted_rows(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    experts, dtype = data.draw(st.integers(1, 6)), data.draw(st.sampled_from(DTYPES))
    counts = data.draw(st.lists(st.sampled_from([0, 0, 1, 3, 9]), min_size=experts, max_size=experts))
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    weight = random_experts(rng, experts, 64, 32, 32)
    m, activation = int(offsets[-1]), data.draw(st.sampled_from([None, "swiglu"]))
    x, scale = rng.standard_normal((m, 64)).astype(dtype), rng.uniform(0, 1, m).astype(np.float32)
    y = cupy_awq.gemm_grouped(x, weight, offsets, activation=activation, row_scale=scale)
    expected = float64_rows(x, np.repeat(np.arange(experts), counts), weight, activation) * scale[:, None]
    assert m == 0 or error_of(y, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("top_k", [1, 3])
def test_grouped_product_takes_the_arrays_of_vllm(block: int, top_k: int) -> None:
    rng = np.random.default_rng(0)
    weight, x = random_experts(rng, 5, 64, 16, 32), rng.standard_normal((11, 64)).astype(np.float16)
    ids = rng.integers(0, 4, (11, top_k)).astype(np.int32)
    y = cupy_awq.gemm_grouped(x, weight, vllm_arrays(ids, 5, block), block_size=block, top_k=top_k)
    assert error_of(y, float64_rows(np.repeat(x, top_k, 0), ids.reshape(-1), weight, None)) < 1e-3


@given(data=st.data())
@settings(max_examples=60)
def test_topk_chooses_the_experts_of_the_formula(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    experts = data.draw(st.sampled_from([1, 8, 12, 64]))
    groups = data.draw(st.sampled_from([None, (4, 2)])) if experts >= 8 else None
    k = data.draw(st.integers(1, min(experts // (2 if groups else 1), 6)))
    logits = rng.standard_normal((data.draw(st.integers(0, 5)), experts)).astype(np.float32)
    bias = rng.standard_normal(experts).astype(np.float32) if data.draw(st.booleans()) else None
    options: dict[str, Any] = {
        "renormalize": data.draw(st.booleans()),
        "scoring": data.draw(st.sampled_from(["softmax", "sigmoid"])),
        "bias": bias,
        "groups": groups,
        "scale": data.draw(st.sampled_from([1.0, 2.5])),
    }
    ids, weights = cupy_awq.topk(logits, k, **options)
    expected_ids, expected = float64_topk(logits, k, **options)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_topk_takes_the_lowest_index_among_equals_and_no_nan() -> None:
    logits = np.array([[1, np.nan, 3, 3, 3], [np.nan] * 5], np.float32)
    ids, weights = cupy_awq.topk(logits, 3)
    np.testing.assert_array_equal(ids, [[2, 3, 4], [0, 1, 2]])
    np.testing.assert_allclose(weights, [[1 / 3] * 3, [0] * 3], rtol=1e-6)


def valid() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": np.zeros((2, 64), np.float16),
        "ids": np.zeros((2, 2), np.int32),
        "weights": np.ones((2, 2), np.float32),
        "gate_up": random_experts(rng, 3, 64, 32, 32),
        "down": random_experts(rng, 3, 16, 24, 16),
    }


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("x", np.zeros((2, 32), np.float16), ValueError, "x: expected float16 [..., K] with K = 64"),
        ("x", np.zeros((1, 2, 64), np.float16), ValueError, "x: expected [M, K]"),
        ("ids", np.zeros((2, 2), np.int64), TypeError, "topk_ids: expected int32"),
        ("ids", np.zeros((3, 2), np.int32), ValueError, "topk_ids: expected int32 [M, top_k] with M = 2"),
        ("ids", np.zeros((2, 0), np.int32), ValueError, "topk_ids: expected"),
        ("ids", np.full((2, 2), 3, np.int32), ValueError, "topk_ids: expected values from 0 to 2, got 3"),
        ("ids", np.full((2, 2), -1, np.int32), ValueError, "topk_ids: expected values from 0 to 2, got -1"),
        ("weights", np.ones((2, 3), np.float32), ValueError, "topk_weights: expected"),
        ("weights", np.ones((2, 2), np.float16), TypeError, "topk_weights: expected float32"),
        ("gate_up", None, TypeError, "gate_up: expected a PackedExperts, got NoneType"),
        ("down", random_experts(np.random.default_rng(0), 4, 16, 24, 16), ValueError, "down: expected 3 experts"),
        ("down", random_experts(np.random.default_rng(0), 3, 32, 24, 16), ValueError, "down: expected 3 experts"),
        ("activation", "relu", ValueError, "activation: expected one of swiglu, geglu, clamped_swiglu, got 'relu'"),
        ("activation", None, TypeError, "activation: expected"),
        ("shared", np.zeros((2, 16), np.float16), ValueError, "shared: expected float16 [2, 24]"),
        ("out", np.zeros((2, 24), np.float32), TypeError, "out: expected float16 [2, 24]"),
    ],
)
def test_invalid_arguments_of_moe(name: str, value: Any, error: type[Exception], message: str) -> None:
    arguments = valid()
    options = {name: value} if name in ("activation", "shared", "out") else {}
    arguments |= {} if options else {name: value}
    with pytest.raises(error) as found:
        cupy_awq.moe(*arguments.values(), **options)
    assert message in str(found.value)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [None, (2, 1)])
def test_topk_of_infinities_chooses_as_the_kernels_do_and_does_not_warn(scoring: str, groups: Any) -> None:
    logits = np.array([[0, 1, np.inf, 2], [-200, -200, -300, -np.inf]], np.float32)
    ids, weights = cupy_awq.topk(logits, 2, scoring=scoring, groups=groups)
    # With softmax, the scores of the first row are NaN, so all experts are equal.
    np.testing.assert_array_equal(ids, [[0, 1] if scoring == "softmax" else [2, 3], [0, 1]])
    np.testing.assert_array_equal(np.isnan(weights), [[scoring == "softmax"] * 2, [False] * 2])


def blocks(ids: list[int], expert: int, count: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array(values, np.int32) for values in (ids + [1] * (8 - len(ids)), [expert], [count]))


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (blocks([0], 3, 8), "expert_ids: expected values from -1 to 2, got 3"),
        (blocks([0], -2, 8), "expert_ids: expected values from -1 to 2, got -2"),
        (blocks([-1], 0, 8), "sorted_token_ids: expected values from 0 to 2147483647, got -1"),
        (blocks([0], 0, 16), "num_tokens_post_padded: expected values from 0 to 8, got 16"),
        (blocks([0], 0, -8), "num_tokens_post_padded: expected values from 0 to 8, got -8"),
    ],
)
def test_arrays_of_vllm_out_of_range_are_refused(routing: Any, message: str) -> None:
    weight, x = random_experts(np.random.default_rng(0), 3, 64, 16, 32), np.zeros((1, 64), np.float16)
    with pytest.raises(ValueError, match=message):
        cupy_awq.gemm_grouped(x, weight, routing, block_size=8)


WORDS, SCALES = np.zeros((3, 64, 2), np.int32), np.ones((3, 2, 16), np.float16)
BLOCKS = vllm_arrays(np.array([[0], [1], [1], [2]], np.int32), 3, 8)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PackedExperts(WORDS[0], SCALES, None), ValueError, "qweight: expected 3 axes"),
        (lambda: PackedExperts(WORDS, SCALES[:2], None), ValueError, "scales: expected 3 axes [E, ...] with E = 3"),
        (lambda: PackedExperts(WORDS, SCALES[:, :, ::2], None), ValueError, "scales: expected a contiguous array"),
        (lambda: PackedExperts(WORDS, SCALES, WORDS), ValueError, "qzeros: expected int32 [K/G, N/8]"),
        (lambda: PackedExperts(WORDS, SCALES.astype(np.float32), None), TypeError, "scales: expected"),
        (lambda: PackedExperts(WORDS, SCALES, None, bias=SCALES[:, 0, :8].copy()), ValueError, "bias: expected"),
        (lambda: PackedExperts(WORDS, SCALES, None, keep_weight=1), TypeError, "keep_weight: expected True or False"),
        (lambda: cupy_awq.topk(SCALES[0], 17), ValueError, "k: expected at most 16"),
        (lambda: cupy_awq.topk(SCALES[0], 9, groups=(4, 2)), ValueError, "k: expected at most 8"),
        (lambda: cupy_awq.topk(SCALES[0], 1, groups=(3, 2)), ValueError, "groups: expected a divisor"),
        (lambda: cupy_awq.topk(SCALES[0], 1, groups=4), TypeError, "groups: expected"),
        (lambda: cupy_awq.topk(SCALES[0], 1, scoring="tanh"), ValueError, "scoring: expected softmax or sigmoid"),
        (lambda: cupy_awq.topk(SCALES[0], 1, scale=-1.0), ValueError, "scale: expected"),
        (lambda: cupy_awq.topk(SCALES[0], 1, bias=SCALES[0, 0]), TypeError, "bias: expected float32 [E]"),
        (lambda: cupy_awq.topk(WORDS[0], 1), TypeError, "router_logits: expected"),
        (lambda: grouped(np.array([0, 1, 1], np.int32)), ValueError, "offsets: expected int32 [E + 1] = [4]"),
        (lambda: grouped(np.array([0, 2, 1, 4], np.int32)), ValueError, "offsets: expected values that ascend"),
        (lambda: grouped(np.array([0, 1, 2, 5], np.int32)), ValueError, "offsets: expected values that ascend"),
        (lambda: grouped(np.array([0, 1, 2, 4], np.int64)), TypeError, "offsets: expected a contiguous int32"),
        (lambda: grouped(np.array([0, 1, 2, 4], np.int32), top_k=2), ValueError, "offsets: expected vLLM's arrays"),
        (lambda: grouped(BLOCKS, block_size=12), ValueError, "block_size: expected a multiple of 8"),
        (lambda: grouped(BLOCKS), TypeError, "block_size: expected an integer"),
        (lambda: grouped(BLOCKS[:2], block_size=8), ValueError, "offsets: expected one array or"),
        (lambda: grouped((*BLOCKS[:1], BLOCKS[1][:1], BLOCKS[2]), block_size=8), ValueError, "expert_ids: expected"),
    ],
)
def test_invalid_arguments(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as found:
        make()
    assert message in str(found.value)


def grouped(offsets: Any, **options: Any) -> Any:
    return cupy_awq.gemm_grouped(np.zeros((4, 64), np.float16), PackedExperts(WORDS, SCALES, None), offsets, **options)
