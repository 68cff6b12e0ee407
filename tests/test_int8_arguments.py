# SPDX-License-Identifier: Apache-2.0
"""Each bad argument of the operations on INT4 and INT8 blocks is refused by a message that names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_awq.int8 import (
    BlockQuantizedWeight,
    conv2d,
    conv2d_int8,
    from_mnn,
    from_packed,
    gemm_int8,
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
        ([CODES.view(np.int8), SCALE, None], {}, TypeError, "codes must be uint8, got int8"),
        ([CODES[0], SCALE, None], {}, ValueError, r"codes must be \[Co, Kh, Kw, Ci/groups\]"),
        ([CODES[:0], SCALE, None], {}, ValueError, "at least one element"),
        ([CODES, SCALE, None], {"bits": 5}, ValueError, "bits must be 4 or 8, got 5"),
        ([CODES + np.uint8(16), SCALE, None], {}, ValueError, "codes must be in 0..15 for bits=4, got 16"),
        ([CODES, SCALE.astype(float), None], {}, TypeError, "scale must be float16, bfloat16 or float32, got float64"),
        ([CODES, SCALE[:3], None], {}, ValueError, r"scale must be \[Co, blocks\] with Co=4"),
        ([CODES, [1.0], None], {}, TypeError, "scale: expected a NumPy or CuPy array"),
        ([CODES, SCALE, SCALE.astype(np.float16)], {}, TypeError, "offset must be float32 like scale, got float16"),
        ([CODES, SCALE, SCALE[:, :1]], {}, ValueError, "offset must have the shape of scale"),
        (
            [CODES, SCALE, None],
            {"block_size": 8},
            ValueError,
            "scale has 2 blocks, but 8 input channels",
        ),
        ([CODES, np.ones((4, 5), F32), None], {}, ValueError, "scale has 5 blocks"),
        ([CODES, SCALE, None], {"block_size": 0}, ValueError, "block_size must be positive, got 0"),
        ([CODES, SCALE, None], {"block_size": 4.0}, TypeError, "block_size must be an integer, got 4.0"),
    ],
)
def test_weight(arguments: list[Any], options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        BlockQuantizedWeight(*arguments, **options)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"packed": np.zeros((8, 9, 4), np.int8)}, TypeError, "packed must be uint8 for bits=4, got int8"),
        ({"packed": np.zeros((8, 4, 4), np.uint8)}, ValueError, r"packed must be .* = \(8, 9, 4\)"),
        ({"scale": np.ones((4, 3), F32)}, ValueError, "in_channels=8 is not a multiple of the 3 blocks"),
        ({"scale": np.ones(4, F32)}, ValueError, r"scale must be \[Co, blocks\]"),
        ({"bits": 3}, ValueError, "bits must be 4 or 8, got 3"),
    ],
)
def test_mnn_packing(change: dict[str, Any], error: type[Exception], text: str) -> None:
    values = {"packed": np.zeros((8, 9, 4), np.uint8), "scale": SCALE, "kernel": (3, 3), "in_channels": 8} | change
    with pytest.raises(error, match=text):
        from_mnn(values.pop("packed"), values.pop("scale"), None, **values)


X = np.zeros((1, 8, 6, 6), F32)


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        (X.tolist(), {}, TypeError, "x: expected a NumPy or CuPy array, got list"),
        (X.astype(float), {}, TypeError, "x: expected float16, bfloat16 or float32"),
        (X[0], {}, ValueError, r"x must be NCHW, got shape \(8, 6, 6\)"),
        (X, {"layout": "CHWN"}, ValueError, "layout must be 'NCHW' or 'NHWC', got 'CHWN'"),
        (X, {"layout": "NHWC"}, ValueError, "Ci=6 in x is not Ci/groups=8 in codes times groups=1"),
        (X, {"groups": 2}, ValueError, "Ci=8 in x is not Ci/groups=8 in codes times groups=2"),
        (X, {"groups": 0}, ValueError, "groups must be at least 1, got 0"),
        (X, {"stride": 0}, ValueError, "stride must be at least 1, got 0"),
        (X, {"stride": (1, 2, 3)}, ValueError, "stride must be a number or two"),
        (X, {"stride": 1.5}, TypeError, "stride must be an integer, got 1.5"),
        (X, {"dilation": 0}, ValueError, "dilation must be at least 1, got 0"),
        (X, {"dilation": 3}, ValueError, "the 3x3 kernel, dilation .* is larger than x 6x6"),
        (X, {"padding": -1}, ValueError, "padding must be at least 0, got -1"),
        (X, {"padding": "valid"}, ValueError, "padding must be numbers or 'same', got 'valid'"),
        (X, {"bias": np.zeros(3, F32)}, ValueError, r"bias: expected .* \[N\] = \[4\], got float32 \[3\]"),
        (X, {"bias": [0.0]}, TypeError, "bias: expected a NumPy or CuPy array"),
        (X, {"activation": "silu"}, ValueError, "activation must be None, 'relu', 'relu6' or"),
        (X, {"activation": (2, 1)}, ValueError, "low <= high"),
        (X, {"out": np.zeros((1, 4, 4, 5), F32)}, ValueError, r"out: expected float32 \[1, 4, 4, 4\], got"),
        (
            X,
            {"out": np.zeros((1, 4, 4, 4), np.float16)},
            TypeError,
            r"out: expected float32 \[1, 4, 4, 4\], got float16",
        ),
    ],
)
def test_conv2d(x: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        conv2d(x, weight(), **options)


def test_conv2d_wants_outputs_in_whole_groups_and_a_packed_weight() -> None:
    with pytest.raises(ValueError, match="Co=4 in codes is not a multiple of groups=3"):
        conv2d(np.zeros((1, 24, 6, 6), F32), weight(), groups=3)
    with pytest.raises(TypeError, match="weight must be a BlockQuantizedWeight, got ndarray"):
        conv2d(X, X)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        ([[1.0]], {}, TypeError, "x: expected a NumPy or CuPy array, got list"),
        (X, {}, ValueError, r"x must be \[M, K\]"),
        (np.zeros((3, 0), F32), {}, ValueError, "at least one column"),
        (np.zeros((3, 4)), {}, TypeError, "x: expected float16, bfloat16 or float32"),
        (np.zeros((3, 4), F32), {"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        (np.zeros((3, 4), F32), {"block_size": 2.0}, TypeError, "block_size must be an integer, got 2.0"),
        (np.zeros((3, 4), F32), {"symmetric": 1}, TypeError, "symmetric must be True or False, got 1"),
        (np.zeros((3, 4), F32), {"rounding": "up"}, ValueError, "rounding must be 'half_away' or 'half_even'"),
    ],
)
def test_quantize(x: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        quantize_activations(x, **options)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"weight": weight()}, ValueError, "weight must have a 1x1 kernel for a matrix product, got 3x3"),
        ({"weight": None}, TypeError, "weight must be a BlockQuantizedWeight, got NoneType"),
        ({"xq": np.zeros((3, 8), np.uint8)}, TypeError, "xq must be int8, got uint8"),
        ({"xq": np.zeros((3, 9), np.int8)}, ValueError, "K=9 in xq is not K=8 in weight"),
        ({"xq": np.zeros(8, np.int8)}, ValueError, r"xq must be \[M, K\]"),
        ({"xq": [[0] * 8]}, TypeError, "xq: expected a NumPy or CuPy array, got list"),
        ({"x_scale": np.ones((3, 2), np.float16)}, TypeError, "x_scale must be float32, got float16"),
        ({"x_scale": np.ones((2, 2), F32)}, ValueError, r"x_scale must be \[M, blocks\] with M=3"),
        ({"x_offset": np.ones((3, 1), F32)}, ValueError, "x_offset must be"),
        ({"x_sums": np.ones((3, 2), F32)}, TypeError, "x_sums must be int32, got float32"),
        ({"block_size": 8}, ValueError, "x_scale has 2 blocks, but K=8 in blocks of block_size=8 are 1"),
        ({"block_size": 5}, ValueError, "the weight's block_size=4 is not a multiple of the 5 columns of x's"),
        ({"bias": np.zeros(3, F32)}, ValueError, r"bias: expected .* \[N\] = \[4\], got float32 \[3\]"),
        ({"activation": "gelu"}, ValueError, "activation must be None, 'relu', 'relu6' or"),
        ({"out": np.zeros((3, 5), F32)}, ValueError, r"out: expected float32 \[3, 4\], got"),
        ({"out": np.zeros((3, 4))}, TypeError, "out: expected float16, bfloat16 or float32"),
    ],
)
def test_gemm(change: dict[str, Any], error: type[Exception], text: str) -> None:
    codes, scale, offset, sums = quantize_activations(np.zeros((3, 8), F32), block_size=4)
    given = {"xq": codes, "x_scale": scale, "x_offset": offset, "x_sums": sums, "weight": weight(kernel=1)} | change
    arrays = [given.pop(name) for name in ("xq", "x_scale", "x_offset", "x_sums", "weight")]
    with pytest.raises(error, match=text):
        gemm_int8(*arrays, **given)


def test_gemm_refuses_blocks_whose_sums_could_overflow() -> None:
    k = 131072
    wide = BlockQuantizedWeight(np.zeros((1, 1, 1, k), np.uint8), np.ones((1, 1), F32), None)
    quantized = quantize_activations(np.ones((1, k), F32), symmetric=True)
    with pytest.raises(ValueError, match="blocks of 131072 columns could overflow int32"):
        gemm_int8(*quantized, wide)
    quantized = quantize_activations(np.ones((1, k), F32), symmetric=True, block_size=k // 2)
    assert gemm_int8(*quantized, wide, block_size=k // 2) == -8 * k


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": X}, TypeError, "x must be int8, got float32"),
        ({"codes": CODES}, TypeError, "codes must be int8, got uint8"),
        ({"codes": CODES.view(np.int8)[0]}, ValueError, "codes must be"),
        ({"weight_scale": np.ones(4)}, TypeError, "weight_scale must be float32, got float64"),
        ({"weight_scale": np.ones(3, F32)}, ValueError, r"weight_scale must be \[Co\] = \(4,\)"),
        ({"bias": np.ones(3, F32)}, ValueError, r"bias must be \[Co\] = \(4,\)"),
        ({"x_scale": 0.0}, ValueError, "x_scale must be positive, got 0.0"),
        ({"out_scale": float("nan")}, ValueError, "out_scale must be positive, got nan"),
        ({"x_zero": 128}, ValueError, "x_zero must be in -128..127, got 128"),
        ({"out_zero": 0.5}, TypeError, "out_zero must be an integer, got 0.5"),
        ({"activation": "silu"}, ValueError, "activation must be None"),
        ({"out": np.zeros((1, 4, 6, 6), F32)}, TypeError, r"out: expected int8 \[1, 4, 6, 6\], got float32"),
    ],
)
def test_conv2d_int8(change: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"x": X.astype(np.int8), "codes": CODES.view(np.int8), "weight_scale": np.ones(4, F32)}
    options = {"x_scale": 0.5, "out_scale": 1.0} | {k: v for k, v in change.items() if k not in given}
    arrays = [change.get(name, a) for name, a in given.items()]
    with pytest.raises(error, match=text):
        conv2d_int8(*arrays, **options)


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        (np.zeros((3, 8)), {}, TypeError, "x: expected float16, bfloat16 or float32"),
        (np.zeros((3, 9), F32), {}, ValueError, "K=9 in xq is not K=8 in weight"),
        (np.zeros(8, F32), {}, ValueError, r"x must be \[M, K\]"),
        (np.zeros((3, 8), F32), {"out": np.zeros((3, 4), np.float16)}, TypeError, "out must be float32 like x"),
    ],
)
def test_linear(x: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        linear_int8(x, weight(kernel=1), **options)


def test_only_a_packed_weight_is_turned_into_blocks() -> None:
    with pytest.raises(TypeError, match="weight: expected a PackedWeight, got ndarray"):
        from_packed(CODES)  # type: ignore[arg-type]
