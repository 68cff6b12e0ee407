# SPDX-License-Identifier: Apache-2.0
"""Tests of operations on block-quantized weights on the CPU, against MNN's vectors and independent formulas."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq import (
    BlockQuantizedWeight,
    block_weight,
    conv2d,
    conv2d_int8,
    from_mnn,
    from_packed,
    gemm_int8,
    linear_fp8,
    linear_int8,
    quantize_activations,
)
from cupy_awq.tools.testing import random_weight as random_awq
from tests.block_weights import float64_values, naive_conv, random_weight
from tests.test_reference import float64_weight

VECTORS = json.loads((Path(__file__).parent / "mnn_vectors.json").read_text(encoding="utf-8"))
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


def array(entry: dict[str, Any], dtype: Any) -> np.ndarray:
    return np.array(entry["v"], dtype).reshape(entry["shape"])


def test_mnn_packing_decodes_to_the_same_codes() -> None:
    case = VECTORS["mnn_conv_fpA_int4B"]
    packed = np.array([int(b, 16) for b in case["packed_ocp_khw_icp2_hex"]["hex"]], np.uint8).reshape(8, 4, 4)
    weight = from_mnn(packed, array(case["scale"], np.float32), None, kernel=(2, 2), in_channels=4)
    signed = array(case["qweight_signed_oc_ic_kh_kw"], int).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(weight.codes.astype(int) - 8, signed)
    assert (weight.block_size, weight.blocks) == (2, 2)


def test_conv2d_matches_the_mnn_vector() -> None:
    """`conv2d` with the unpacked MNN weight gives the output that MNN itself computed, recorded with five decimals."""
    case = VECTORS["mnn_conv_fpA_int4B"]
    packed = np.array([int(b, 16) for b in case["packed_ocp_khw_icp2_hex"]["hex"]], np.uint8).reshape(8, 4, 4)
    scale, offset = array(case["scale"], np.float32), array(case["offset"], np.float32)
    weight = from_mnn(packed, scale, offset, kernel=(2, 2), in_channels=4)
    x = array(case["input_nhwc_unpadded_f32"], np.float32)
    bias = np.array(case["bias"], np.float32)
    for activation, name in (("relu6", "out_nhwc_unpadded"), (None, "out_before_clamp")):
        y = conv2d(x, weight, bias=bias, padding=1, activation=activation, layout="NHWC")
        wanted = np.array(case[name]["v"] if activation else case[name]).reshape(y.shape)
        np.testing.assert_allclose(y, wanted, atol=6e-6)


def test_quantization_and_product_match_the_mnn_vector() -> None:
    case = VECTORS["mnn_quantA_chain"]
    x = array(case["A_f32"], np.float32)
    codes, scale, offset, sums = quantize_activations(x, block_size=4)
    weight_codes = array(case["B_q"], int)
    for b, group in enumerate(case["per_group"]):
        some = slice(4 * b, 4 * b + 4)
        np.testing.assert_array_equal(codes[:, some].ravel(), group["A_q"])
        np.testing.assert_array_equal(scale[:, b], np.array(group["scale_A"], np.float32))
        np.testing.assert_array_equal(offset[:, b], np.array(group["offset_A"], np.float32))
        np.testing.assert_array_equal(sums[:, b], group["sum_A_q"])
        exact = codes[:, some].astype(int) @ weight_codes[:, some].T
        np.testing.assert_array_equal(exact.ravel(), group["C_q"])
    weight = BlockQuantizedWeight(
        (weight_codes + 128).astype(np.uint8).reshape(2, 1, 1, 8),
        array(case["scale_B"], np.float32),
        array(case["offset_B"], np.float32),
        bits=8,
    )
    y = gemm_int8(codes, scale, offset, sums, weight, bias=np.array(case["bias"], np.float32))
    np.testing.assert_allclose(y, array(case["out"], float), atol=2e-6)


def test_conv2d_int8_matches_the_mnn_vector() -> None:
    case = VECTORS["mnn_convint8_requant"]
    x, w = array(case["I_q"], np.int8), array(case["W_q"], np.int8)
    y = conv2d_int8(
        x[:, :, None, None],
        w[:, None, None, :],
        np.array(case["S_W"], np.float32),
        x_scale=case["S_I"],
        out_scale=case["S_O"],
        x_zero=case["Z_I"],
        out_zero=case["Z_O"],
        bias=np.array(case["bias_real"], np.float32),
    )
    np.testing.assert_array_equal(y[:, :, 0, 0], array(case["out_q"], int))


@given(data=st.data())
@settings(max_examples=60)
def test_quantization_error_is_at_most_half_a_step(data: st.DataObject) -> None:
    m, k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    block = data.draw(st.one_of(st.none(), st.integers(1, 80)))
    symmetric = data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from(DTYPES))
    x = (rng.standard_normal((m, k)) * 2.0 ** data.draw(st.integers(-2, 9))).astype(dtype)
    rounding = data.draw(st.sampled_from(["half_away", "half_even"]))
    codes, scale, offset, sums = quantize_activations(x, block_size=block, symmetric=symmetric, rounding=rounding)
    size = block or k
    assert scale.shape == sums.shape == (m, -(-k // size))
    for b in range(scale.shape[1]):
        some = slice(b * size, (b + 1) * size)
        o = 0 if symmetric else offset[:, b, None]
        close = codes[:, some] * scale[:, b, None].astype(float) + o
        # The bound is half a step, plus the float32 rounding of x - offset.
        slack = 0.5001 * scale[:, b, None] + 1e-6 * np.abs(x[:, some].astype(float)).max()
        assert (np.abs(close - x[:, some].astype(float)) <= slack).all()
        np.testing.assert_array_equal(sums[:, b], codes[:, some].sum(1, dtype=int))
    assert (offset is None) == symmetric


def test_halves_round_away_from_zero_or_to_even() -> None:
    # The largest value, 127, makes the scale 1, so that the others lie half-way between codes.
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -2.5]], np.float32)
    away, even = (quantize_activations(x, symmetric=True, rounding=r)[0][0] for r in ("half_away", "half_even"))
    np.testing.assert_array_equal(away, [127, 1, 2, 3, -1, -3])
    np.testing.assert_array_equal(even, [127, 0, 2, 2, 0, -2])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("symmetric", [True, False])
def test_inf_or_nan_in_a_block_gives_scale_nan_and_codes_0(value: float, symmetric: bool) -> None:
    x = np.ones((2, 8), np.float32)
    x[0, 5] = value
    codes, scale, _, sums = quantize_activations(x, block_size=4, symmetric=symmetric)
    assert np.isnan(scale[0, 1])
    assert np.isfinite(scale[[0, 1, 1], [0, 0, 1]]).all()
    assert not codes[0, 4:].any()
    assert sums[0, 1] == 0


def test_zero_and_constant_rows_are_quantized_exactly() -> None:
    x = np.array([[0.0] * 4, [2.5] * 4, [-3.0] * 4], np.float32)
    codes, scale, offset, _ = quantize_activations(x)
    np.testing.assert_array_equal(codes * scale + offset, x)
    codes, scale, _, _ = quantize_activations(x[:1], symmetric=True)
    np.testing.assert_array_equal(codes, 0)
    np.testing.assert_array_equal(scale, 0)


@given(data=st.data())
@settings(max_examples=40)
def test_gemm_int8_equals_the_product_of_the_dequantized_operands(data: st.DataObject) -> None:
    """For random shapes, the integer GEMM equals the float64 product of the dequantized x and W.

    Last blocks may be shorter, blocks of x finer than the weight's or whole rows, and either operand may have offsets.
    """
    m, n, k = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 60))
    block = data.draw(st.integers(1, 70))
    parts = data.draw(st.sampled_from([p for p in (1, 2, 3) if block % p == 0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    bits = data.draw(st.sampled_from([4, 8]))
    weight = random_weight(rng, (n, 1, 1, k), block, bits, data.draw(st.booleans()))
    x = rng.standard_normal((m, k)).astype(np.float32)
    part = data.draw(st.sampled_from([block // parts, None]))
    codes, scale, offset, sums = quantize_activations(x, block_size=part, symmetric=data.draw(st.booleans()))
    bias = rng.standard_normal(n).astype(np.float32)
    y = gemm_int8(codes, scale, offset, sums, weight, block_size=part, bias=bias)
    at = np.arange(k) // (part or k)
    close = codes * scale.astype(float)[:, at] + (0 if offset is None else offset.astype(float)[:, at])
    wanted = close @ float64_values(weight).reshape(n, k).T + bias
    np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6)


@given(data=st.data())
@settings(max_examples=60)
def test_conv2d_equals_the_convolution_of_the_dequantized_weight(data: st.DataObject) -> None:
    draw = data.draw
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    ci, co = draw(st.integers(1, 6)), groups * draw(st.integers(1, 3))
    kernel = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stride, dilation = ((draw(st.integers(1, 3)), draw(st.integers(1, 3))) for _ in range(2))
    sides = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(2))
    spread = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    height, width = (draw(st.integers(max(1, spread[i] - sum(sides[i])), 9)) for i in range(2))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    weight = random_weight(rng, (co, *kernel, ci), draw(st.integers(1, 7)), draw(st.sampled_from([4, 8])))
    x = rng.standard_normal((draw(st.integers(0, 2)), groups * ci, height, width)).astype(np.float32)
    bias = rng.standard_normal(co).astype(np.float32)
    options = {"stride": stride, "padding": sides, "dilation": dilation, "groups": groups, "bias": bias}
    y = conv2d(x, weight, **options)
    wanted = naive_conv(x.astype(float), float64_values(weight), stride, sides, dilation, groups)
    np.testing.assert_allclose(y, wanted + bias[:, None, None], rtol=1e-6, atol=1e-6)
    last = conv2d(np.ascontiguousarray(x.transpose(0, 2, 3, 1)), weight, layout="NHWC", **options)
    np.testing.assert_array_equal(last.transpose(0, 3, 1, 2), y)
    clamped = conv2d(x, weight, activation=(-0.25, 0.5), **options)
    np.testing.assert_allclose(clamped, np.clip(wanted + bias[:, None, None], -0.25, 0.5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [5, 6, 7, 8])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_padding_rounds_outputs_up_and_puts_the_odd_pixel_last(size: int, kernel: int, stride: int) -> None:
    rng = np.random.default_rng(size)
    weight = random_weight(rng, (2, kernel, kernel, 3), 3)
    x = rng.standard_normal((1, 3, size, size)).astype(np.float32)
    y = conv2d(x, weight, padding="same", stride=stride)
    out = -(-size // stride)
    assert y.shape == (1, 2, out, out)
    first = max(0, ((out - 1) * stride + kernel - size)) // 2
    sides = (first, max(0, (out - 1) * stride + kernel - size) - first)
    wanted = naive_conv(x.astype(float), float64_values(weight), (stride, stride), (sides, sides), (1, 1), 1)
    np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conv2d_rounds_once_to_the_dtype_of_x(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    weight = random_weight(rng, (4, 3, 3, 5), 2, dtype=dtype)
    x = rng.standard_normal((1, 5, 6, 6)).astype(dtype)
    out = np.full((1, 4, 4, 4), np.nan, dtype)
    assert conv2d(x, weight, out=out) is out
    wanted = naive_conv(x.astype(float), float64_values(weight), (1, 1), ((0, 0), (0, 0)), (1, 1), 1)
    np.testing.assert_allclose(out.astype(float), wanted, rtol=float(ml_dtypes.finfo(dtype).eps), atol=1e-7)


@given(data=st.data())
@settings(max_examples=30)
def test_conv2d_int8_is_within_one_code_of_the_real_convolution(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.integers(-128, 128, (2, 4, 5, 5), np.int8)
    w = rng.integers(-128, 128, (6, 3, 3, 2), np.int8)
    scale = rng.uniform(0.001, 0.01, 6).astype(np.float32)
    bias = rng.standard_normal(6).astype(np.float32)
    zeros = draw(st.integers(-128, 127)), draw(st.integers(-128, 127))
    activation = draw(st.sampled_from([None, "relu", "relu6", (-1.0, 2.0)]))
    y = conv2d_int8(
        x,
        w,
        scale,
        x_scale=0.02,
        out_scale=0.05,
        x_zero=zeros[0],
        out_zero=zeros[1],
        bias=bias,
        padding=1,
        groups=2,
        activation=activation,
    )
    real = naive_conv(x - float(zeros[0]), w.astype(float), (1, 1), ((1, 1), (1, 1)), (1, 1), 2)
    real = real * 0.02 * scale[:, None, None] + bias[:, None, None]
    ranges = {None: (-np.inf, np.inf), "relu": (0, np.inf), "relu6": (0, 6)}
    low, high = ranges.get(activation, activation)
    wanted = np.clip(np.rint(np.clip(real, low, high) / 0.05) + zeros[1], -128, 127)
    # The formula truncates bias and zero point to multiples of x_scale * weight_scale.
    assert np.abs(y - wanted).max() <= 1
    assert np.mean(y == wanted) > 0.9


@pytest.mark.parametrize("zeros", ["packed", "symmetric", "float"])
def test_from_packed_keeps_the_values_of_an_awq_weight(zeros: str) -> None:
    weight = random_awq(np.random.default_rng(0), 96, 40, 32, zeros=zeros)
    values = float64_values(from_packed(weight)).reshape(40, 96).T
    wanted = float64_weight(weight.qweight, weight.scales, weight.qzeros)
    np.testing.assert_allclose(values, wanted, rtol=1e-6 if zeros == "float" else 0, atol=1e-8)


def test_4_bit_codes_are_stored_packed_and_awq_words_are_shared() -> None:
    awq = random_awq(np.random.default_rng(0), 96, 40, 32)
    assert from_packed(awq).stored is awq.qweight
    codes = np.random.default_rng(1).integers(0, 16, (13, 3, 2, 5), np.uint8)
    weight = BlockQuantizedWeight(codes, np.ones((13, 1), np.float32), None)
    assert (weight.stored.dtype, weight.stored.shape) == (np.int32, (30, 2))
    np.testing.assert_array_equal(weight.codes, codes)


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu"])
def test_activations_that_an_operation_lacks_are_refused_by_name(activation: str) -> None:
    """An activation that an operation lacks must not become the clamp of the requantizing kernel instead."""
    rng = np.random.default_rng(0)
    weight, x = random_weight(rng, (4, 1, 1, 8), 8), np.ones((2, 8), np.float32)
    image, codes = np.ones((1, 8, 1, 1), np.int8), np.ones((4, 1, 1, 8), np.int8)
    for call in (
        lambda: linear_int8(x, weight, activation=activation),
        lambda: linear_fp8(x, weight, activation=activation),
        lambda: gemm_int8(*quantize_activations(x), weight, activation=activation),
        lambda: conv2d(image.astype(np.float32), weight, activation=activation),
        lambda: conv2d_int8(image, codes, np.ones(4, np.float32), x_scale=1, out_scale=1, activation=activation),
    ):
        with pytest.raises(ValueError, match=f"^activation: expected None, 'relu', 'relu6' or .*, got '{activation}'$"):
            call()


@given(seed=st.integers(0, 99), spread=st.integers(0, 6))
@settings(max_examples=20)
def test_linear_int8_stays_within_its_documented_error_bound(seed: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    weight = from_packed(random_awq(rng, 96, 24, 32))
    x = (rng.standard_normal((5, 96)) * 2.0 ** rng.integers(-spread, spread + 1, 96)).astype(np.float32)
    w = float64_values(weight).reshape(24, 96)
    y = linear_int8(x, weight)
    size = np.abs(x).reshape(5, 3, 32).max(2).astype(float) / 254 @ np.abs(w).reshape(24, 3, 32).sum(2).T
    error = np.abs(y - x.astype(float) @ w.T)
    assert (error <= 1.001 * size + 1e-5).all()
    assert error.max() > 0.02 * size.max()  # the bound is not far too loose: the largest error is over 2% of it
    assert linear_int8(x.astype(np.float16), weight, activation="relu").dtype == np.float16


def test_a_layout_is_complete_before_another_thread_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight's layout on the GPU is given to other threads only after the stream that makes it has been synchronized.

    Without that, a second thread would launch a product on half-written codes. After an error there is no layout.
    """
    cupy = pytest.importorskip("cupy")
    weight = random_weight(np.random.default_rng(0), (8, 1, 1, 32), 32)
    monkeypatch.setattr(block_weight, "namespace", lambda array: cupy)  # Treat the weight as if it were on a GPU.
    synchronizing, may_finish, seen = threading.Event(), threading.Event(), []

    def synchronize() -> None:
        synchronizing.set()
        assert may_finish.wait(10)
        seen.append("complete")

    def read() -> None:
        weight.layout("key", lambda: 1)
        seen.append("read")

    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(synchronize=synchronize))
    first, second = threading.Thread(target=read), threading.Thread(target=read)
    first.start()
    assert synchronizing.wait(10)
    second.start()
    second.join(0.1)
    assert seen == []
    may_finish.set()
    first.join()
    second.join()
    assert seen[0] == "complete"
    assert seen.count("read") == 2
    weight.layouts.clear()
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(synchronize=lambda: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        read()
    assert not weight.layouts
