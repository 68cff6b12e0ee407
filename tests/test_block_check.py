# SPDX-License-Identifier: Apache-2.0
"""Tests of invalid arguments of operations on block-quantized weights: each error names the argument."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cupy_awq import (
    BlockQuantizedWeight,
    conv2d,
    conv2d_int8,
    from_mnn,
    from_packed,
    gemm_int8,
    linear_fp8,
    linear_int8,
    quantize_activations,
)

F32 = np.float32


def weight(ci: int = 8, block: int = 4, co: int = 4, kernel: int = 3) -> BlockQuantizedWeight:
    scale = np.ones((co, -(-ci // block)), F32)
    return BlockQuantizedWeight(np.zeros((co, kernel, kernel, ci), np.uint8), scale, scale, block_size=block)


CODES = np.zeros((4, 1, 1, 8), np.uint8)
SCALE = np.ones((4, 2), F32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ([CODES.tolist(), SCALE, None], {}, TypeError, "codes: expected a NumPy or CuPy array, got list"),
        ([CODES.view(np.int8), SCALE, None], {}, TypeError, "codes: expected uint8, got int8"),
        ([CODES[0], SCALE, None], {}, ValueError, r"codes: expected a non-empty \[Co, Kh, Kw, Ci/groups\]"),
        ([CODES[:0], SCALE, None], {}, ValueError, "codes: expected a non-empty"),
        ([CODES, SCALE, None], {"bits": 5}, ValueError, "bits: expected 4 or 8, got 5"),
        ([CODES + np.uint8(16), SCALE, None], {}, ValueError, "codes: expected 0 .. 15 for bits=4, got 16"),
        (
            [CODES, SCALE.astype(float), None],
            {},
            TypeError,
            "scale: expected float16, bfloat16 or float32, got float64",
        ),
        ([CODES, SCALE[:3], None], {}, ValueError, r"scale: expected \[Co, blocks\] with Co=4"),
        ([CODES, [1.0], None], {}, TypeError, "scale: expected a NumPy or CuPy array"),
        ([CODES, SCALE, SCALE.astype(np.float16)], {}, TypeError, "offset: expected float32 as in scale, got float16"),
        ([CODES, SCALE, SCALE[:, :1]], {}, ValueError, "offset: expected the shape of scale"),
        (
            [CODES, SCALE, None],
            {"block_size": 8},
            ValueError,
            "scale: expected 1 blocks for 8 input channels in blocks of 8, got 2",
        ),
        ([CODES, np.ones((4, 5), F32), None], {}, ValueError, "scale: expected 4 blocks .*, got 5"),
        ([CODES, SCALE, None], {"block_size": 0}, ValueError, "block_size: expected at least 1, got 0"),
        ([CODES, SCALE, None], {"block_size": 4.0}, TypeError, "block_size: expected an integer, got 4.0"),
    ],
)
def test_weight_arguments(arguments: list[Any], options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        BlockQuantizedWeight(*arguments, **options)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"packed": np.zeros((8, 9, 4), np.int8)}, TypeError, "packed: expected uint8 for bits=4, got int8"),
        ({"packed": np.zeros((8, 4, 4), np.uint8)}, ValueError, r"packed: expected .* = \[8, 9, 4\], got \[8, 4, 4\]"),
        (
            {"scale": np.ones((4, 3), F32)},
            ValueError,
            "in_channels: expected a multiple of the 3 blocks of scale, got 8",
        ),
        ({"scale": np.ones(4, F32)}, ValueError, r"scale: expected a non-empty \[Co, blocks\]"),
        ({"bits": 3}, ValueError, "bits: expected 4 or 8, got 3"),
    ],
)
def test_from_mnn_arguments(change: dict[str, Any], error: type[Exception], text: str) -> None:
    values = {"packed": np.zeros((8, 9, 4), np.uint8), "scale": SCALE, "kernel": (3, 3), "in_channels": 8} | change
    with pytest.raises(error, match=text):
        from_mnn(values.pop("packed"), values.pop("scale"), None, **values)


X = np.zeros((1, 8, 6, 6), F32)


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        (X.tolist(), {}, TypeError, "x: expected a NumPy or CuPy array, got list"),
        (X.astype(float), {}, TypeError, "x: expected float16, bfloat16 or float32"),
        (X[0], {}, ValueError, r"x: expected NCHW, got shape \(8, 6, 6\)"),
        (X, {"layout": "CHWN"}, ValueError, "layout: expected 'NCHW' or 'NHWC', got 'CHWN'"),
        (
            X,
            {"layout": "NHWC"},
            ValueError,
            "x: expected Ci = 8 channels, Ci/groups=8 times groups=1, got 6 in the NHWC",
        ),
        (X, {"groups": 2}, ValueError, "x: expected Ci = 16 channels, Ci/groups=8 times groups=2, got 8"),
        (X, {"groups": 0}, ValueError, "groups: expected at least 1, got 0"),
        (X, {"stride": 0}, ValueError, "stride: expected at least 1, got 0"),
        (X, {"stride": (1, 2, 3)}, ValueError, "stride: expected a number or two"),
        (X, {"stride": 1.5}, TypeError, "stride: expected an integer, got 1.5"),
        (X, {"dilation": 0}, ValueError, "dilation: expected at least 1, got 0"),
        (X, {"dilation": 3}, ValueError, "x: expected at least the size of the 3x3 kernel with dilation .*, got 6x6"),
        (X, {"padding": -1}, ValueError, "padding: expected at least 0, got -1"),
        (X, {"padding": "valid"}, ValueError, "padding: expected numbers or 'same', got 'valid'"),
        (X, {"bias": np.zeros(3, F32)}, ValueError, r"^bias: expected .* \[N\] = \[4\], got "),
        (X, {"bias": [0.0]}, TypeError, "^bias: expected a NumPy or CuPy array"),
        (X, {"activation": "silu"}, ValueError, "activation: expected None, 'relu', 'relu6' or"),
        (X, {"activation": (2, 1)}, ValueError, "low <= high"),
        (
            X,
            {"out": np.zeros((1, 4, 4, 5), F32)},
            ValueError,
            r"^out: expected float32 \[1, 4, 4, 4\]",
        ),
        (X, {"out": np.zeros((1, 4, 4, 4), np.float16)}, TypeError, "^out: expected float32 .*, got float16"),
    ],
)
def test_conv2d_arguments(x: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        conv2d(x, weight(), **options)


def test_conv2d_needs_whole_groups_of_outputs_and_a_block_weight() -> None:
    with pytest.raises(ValueError, match="groups: expected a divisor of Co=4, got 3"):
        conv2d(np.zeros((1, 24, 6, 6), F32), weight(), groups=3)
    with pytest.raises(TypeError, match="weight: expected a BlockQuantizedWeight, got ndarray"):
        conv2d(X, X)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        ([[1.0]], {}, TypeError, "x: expected a NumPy or CuPy array, got list"),
        (X, {}, ValueError, r"x: expected \[M, K\]"),
        (np.zeros((3, 0), F32), {}, ValueError, "x: expected at least one column"),
        (np.zeros((3, 4)), {}, TypeError, "x: expected float16, bfloat16 or float32"),
        (np.zeros((3, 4), F32), {"block_size": 0}, ValueError, "block_size: expected at least 1, got 0"),
        (np.zeros((3, 4), F32), {"block_size": 2.0}, TypeError, "block_size: expected an integer, got 2.0"),
        (np.zeros((3, 4), F32), {"symmetric": 1}, TypeError, "symmetric: expected True or False, got 1"),
        (np.zeros((3, 4), F32), {"rounding": "up"}, ValueError, "rounding: expected 'half_away' or 'half_even'"),
    ],
)
def test_quantize_activations_arguments(x: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        quantize_activations(x, **options)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"weight": weight()}, ValueError, "weight: expected a 1x1 kernel for a matrix product, got 3x3"),
        ({"weight": None}, TypeError, "weight: expected a BlockQuantizedWeight, got NoneType"),
        ({"xq": np.zeros((3, 8), np.uint8)}, TypeError, "xq: expected int8, got uint8"),
        ({"xq": np.zeros((3, 9), np.int8)}, ValueError, r"xq: expected \[M, K\] with K=8"),
        ({"xq": np.zeros(8, np.int8)}, ValueError, r"xq: expected \[M, K\]"),
        ({"xq": [[0] * 8]}, TypeError, "xq: expected a NumPy or CuPy array, got list"),
        ({"x_scale": np.ones((3, 2), np.float16)}, TypeError, "x_scale: expected float32, got float16"),
        ({"x_scale": np.ones((2, 2), F32)}, ValueError, r"x_scale: expected \[M, blocks\] with M=3"),
        ({"x_offset": np.ones((3, 1), F32)}, ValueError, "x_offset: expected"),
        ({"x_sums": np.ones((3, 2), F32)}, TypeError, "x_sums: expected int32, got float32"),
        ({"block_size": 8}, ValueError, "x_scale: expected 1 blocks for K=8 and block_size=8, got 2"),
        ({"block_size": 5}, ValueError, "block_size: expected a divisor of the weight's block_size=4, got 5"),
        ({"bias": np.zeros(3, F32)}, ValueError, r"^bias: expected .* \[N\] = \[4\], got "),
        ({"activation": "gelu"}, ValueError, "activation: expected None, 'relu', 'relu6' or"),
        ({"out": np.zeros((3, 5), F32)}, ValueError, r"^out: expected float32 \[3, 4\]"),
        ({"out": np.zeros((3, 4))}, TypeError, "out: expected float16, bfloat16 or float32"),
    ],
)
def test_gemm_int8_arguments(change: dict[str, Any], error: type[Exception], text: str) -> None:
    codes, scale, offset, sums = quantize_activations(np.zeros((3, 8), F32), block_size=4)
    given = {"xq": codes, "x_scale": scale, "x_offset": offset, "x_sums": sums, "weight": weight(kernel=1)} | change
    arrays = [given.pop(name) for name in ("xq", "x_scale", "x_offset", "x_sums", "weight")]
    with pytest.raises(error, match=text):
        gemm_int8(*arrays, **given)


def test_gemm_int8_refuses_blocks_whose_sums_could_overflow() -> None:
    k = 131072
    wide = BlockQuantizedWeight(np.zeros((1, 1, 1, k), np.uint8), np.ones((1, 1), F32), None)
    quantized = quantize_activations(np.ones((1, k), F32), symmetric=True)
    with pytest.raises(ValueError, match=r"block_size: expected at most 131071, .*, got 131072"):
        gemm_int8(*quantized, wide)
    quantized = quantize_activations(np.ones((1, k), F32), symmetric=True, block_size=k // 2)
    assert gemm_int8(*quantized, wide, block_size=k // 2) == -8 * k


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": X}, TypeError, "x: expected int8, got float32"),
        ({"codes": CODES}, TypeError, "codes: expected int8, got uint8"),
        ({"codes": CODES.view(np.int8)[0]}, ValueError, "codes: expected a non-empty"),
        ({"weight_scale": np.ones(4)}, TypeError, "weight_scale: expected float32, got float64"),
        ({"weight_scale": np.ones(3, F32)}, ValueError, r"weight_scale: expected \[Co\] = \[4\]"),
        ({"bias": np.ones(3, F32)}, ValueError, r"bias: expected \[Co\] = \[4\]"),
        ({"x_scale": 0.0}, ValueError, "x_scale: expected a number from .*, got 0.0"),
        (
            {"out_scale": float("nan")},
            ValueError,
            r"out_scale: expected a number from 1.175e-38 to 3.403e\+38, got nan",
        ),
        ({"x_zero": 128}, ValueError, "x_zero: expected at most 127, got 128"),
        ({"out_zero": 0.5}, TypeError, "out_zero: expected an integer, got 0.5"),
        ({"activation": "silu"}, ValueError, "activation: expected None"),
        ({"out": np.zeros((1, 4, 6, 6), F32)}, TypeError, "^out: expected int8 .*, got float32"),
    ],
)
def test_conv2d_int8_arguments(change: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"x": X.astype(np.int8), "codes": CODES.view(np.int8), "weight_scale": np.ones(4, F32)}
    options = {"x_scale": 0.5, "out_scale": 1.0} | {k: v for k, v in change.items() if k not in given}
    arrays = [change.get(name, a) for name, a in given.items()]
    with pytest.raises(error, match=text):
        conv2d_int8(*arrays, **options)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight_scale": np.array([1, np.nan, 1, 1], F32)}, "weight_scale: expected finite values"),
        ({"weight_scale": np.array([1, np.inf, 1, 1], F32)}, "weight_scale: expected finite values"),
        ({"bias": np.array([1, np.nan, 1, 1], F32)}, "bias: expected finite values, got NaN or infinity"),
        ({"bias": np.array([1, -np.inf, 1, 1], F32)}, "bias: expected finite values, got NaN or infinity"),
        (
            {"bias": np.array([1, 1e30, 1, 1], F32)},
            "bias: expected bias / .* and all sums within int32, got sums up to 2e",
        ),
        ({"x_scale": 1e-40}, "x_scale: expected a number from"),
        ({"x_scale": 1e40}, "x_scale: expected a number from"),
        ({"out_scale": 1e40}, "out_scale: expected a number from"),
        ({"out_scale": 10**400}, "out_scale: expected a number from"),
        ({"x_scale": 1e-37, "weight_scale": np.full(4, 1e-6, F32)}, r"x_scale: expected x_scale \* weight_scale from"),
        ({"x_scale": 1e-30, "out_scale": 1e30}, r"out_scale: expected x_scale \* weight_scale / out_scale from"),
        ({"x_scale": 1e30, "out_scale": 1e-30}, r"out_scale: expected x_scale \* weight_scale / out_scale from"),
        (
            {"x_scale": 1e-9, "out_zero": 3},
            "out_zero: expected out_zero / .* and all sums within int32",
        ),
    ],
)
def test_conv2d_int8_refuses_scales_and_biases_that_would_give_silent_zeros(change: dict[str, Any], text: str) -> None:
    given = {"x": X.astype(np.int8), "codes": CODES.view(np.int8), "weight_scale": np.ones(4, F32)} | change
    options = {"x_scale": 0.5, "out_scale": 1.0} | {k: v for k, v in change.items() if k != "weight_scale"}
    out = np.full_like(conv2d_int8(given["x"], given["codes"], np.ones(4, F32), x_scale=1.0, out_scale=1.0), 85)
    with pytest.raises(ValueError, match=f"^{text}"):
        conv2d_int8(given["x"], given["codes"], given["weight_scale"], **options, out=out)
    assert (out == 85).all()


def test_infinite_and_nan_elements_do_not_warn() -> None:
    """An infinity or NaN in an input gives no warning, as in `gemm`; pytest turns warnings into errors."""
    weight = BlockQuantizedWeight(np.full((8, 1, 1, 8), 9, np.uint8), np.ones((8, 2), F32), np.ones((8, 2), F32))
    for value in (np.inf, -np.inf, np.nan, 3e38):
        x = np.full((3, 8), value, F32)
        x[1] = 1
        for linear in (linear_int8, linear_fp8):
            y = linear(x, weight)
            assert np.isfinite(y[1]).all()
        quantized = quantize_activations(x, block_size=4)
        assert np.isfinite(gemm_int8(*quantized, weight, block_size=4)[1]).all()
        images = x.reshape(3, 8, 1, 1)
        assert np.isfinite(conv2d(images, weight)[1]).all()
        assert conv2d(images, weight, activation="relu6").shape == (3, 8, 1, 1)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"kernel": 3}, TypeError, "kernel: expected (Kh, Kw), got int"),
        ({"kernel": (3,)}, TypeError, "kernel: expected (Kh, Kw), got tuple"),
        ({"kernel": (3, 3.0)}, TypeError, "kernel: expected an integer, got 3.0"),
        ({"kernel": (-1, -1)}, ValueError, "kernel: expected at least 1, got -1"),
        ({"in_channels": 4.0}, TypeError, "in_channels: expected an integer, got 4.0"),
        ({"in_channels": 0}, ValueError, "in_channels: expected at least 1, got 0"),
        ({"in_channels": -8}, ValueError, "in_channels: expected at least 1, got -8"),
        ({"bits": [4]}, ValueError, "bits: expected 4 or 8, got [4]"),
    ],
)
def test_from_mnn_validates_kernel_and_channels(change: dict[str, Any], error: type[Exception], text: str) -> None:
    options = {"kernel": (1, 1), "in_channels": 4} | change
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        from_mnn(np.zeros((8, 1, 4), np.uint8), np.ones((2, 1), F32), None, **options)


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        (np.zeros((3, 8), F32), {"out": [0]}, TypeError, "out: expected a NumPy or CuPy array, got list"),
        (np.zeros((), F32), {}, ValueError, r"x: expected \[M, K\], got shape \(\)"),
        (np.zeros((3, 8), F32), {"bias": np.zeros((), F32)}, ValueError, r"bias: expected .* got float32 \[\]"),
        (np.zeros((3, 8)), {}, TypeError, "x: expected float16, bfloat16 or float32"),
        (np.zeros((3, 9), F32), {}, ValueError, r"x: expected \[M, K\] with K=8"),
        (np.zeros(8, F32), {}, ValueError, r"x: expected \[M, K\]"),
        (np.zeros((3, 8), F32), {"out": np.zeros((3, 4), np.float16)}, TypeError, r"out: expected float32 \[3, 4\]"),
    ],
)
def test_linear_int8_arguments(x: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        linear_int8(x, weight(kernel=1), **options)


def test_from_packed_needs_a_packed_weight() -> None:
    with pytest.raises(TypeError, match=r"weight: expected a PackedWeight, got ndarray"):
        from_packed(CODES)  # type: ignore[arg-type]
