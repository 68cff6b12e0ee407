# SPDX-License-Identifier: Apache-2.0
"""The public operations: the NumPy path everywhere, the GPU's against float64 formulas with the marker ``gpu``."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_awq
from cupy_awq import PackedWeight, device, reference, select
from cupy_awq.kernels.convert import Conversion
from cupy_awq.kernels.problem import Problem
from cupy_awq.ops import gpu, matmul
from cupy_awq.packing import pack_int8
from cupy_awq.testing import random_activations, random_weight
from tests.backends import BACKENDS, runner
from tests.test_reference import ACTIVATIONS, SIGNIFICANT_BITS, float64_epilogue, float64_weight

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))
FLOAT16, BFLOAT16, FLOAT32 = (np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))
ELEMENTS = [FLOAT16, BFLOAT16, FLOAT32]
ZEROS = ["packed", "symmetric", "float"]


def tensors(weight: PackedWeight) -> tuple[Any, Any, Any]:
    return weight.qweight, weight.scales, weight.qzeros


def put(a: Any) -> Any:
    """A NumPy array, or a weight, on the GPU."""
    import cupy

    if isinstance(a, PackedWeight):
        return PackedWeight(*map(put, tensors(a)))
    return a if a is None else cupy.asarray(a)


def nan_like(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of the GPU that shows what is not written."""
    return put(np.full(shape, np.nan, dtype))


def gemm(x: Any, weight: PackedWeight, **options: Any) -> Any:
    return cupy_awq.gemm(x, *tensors(weight), **options)


def check_product(
    y: Any,
    x: np.ndarray,
    weight: PackedWeight,
    bias: np.ndarray | None = None,
    activation: Any = None,
    residual: np.ndarray | None = None,
) -> None:
    """Each element of y lies between the roundings of what float32 sums may differ from the float64 formula."""
    y = y if isinstance(y, np.ndarray) else y.get()
    k, n = weight.shape
    w = float64_weight(*tensors(weight))
    x64 = x.astype(np.float64).reshape(-1, k)
    added = np.zeros(n) if bias is None else bias.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        v = x64 @ w + added
        # Offsets are summed apart from codes: what cancels in W does not cancel in the sizes of the sums.
        sizes = np.abs(w)
        if weight.facts.zeros == "float":
            sizes = np.abs(float64_weight(weight.qweight, weight.scales, None)) + 8 * np.repeat(
                np.abs(weight.scales.astype(np.float64)), weight.group_size, axis=0
            )
        error = 2.0**-24 * ((8 + 4 * np.sqrt(k)) * (np.abs(x64) @ sizes + np.abs(added)) + 32 * np.abs(v))
        if activation == "swiglu":
            (gate, up), (gate_error, up_error) = np.split(v, 2, axis=1), np.split(error, 2, axis=1)
            error = 1.2 * gate_error * (np.abs(up) + up_error) + (np.abs(gate) + 1) * up_error
        elif activation is not None:
            error = 1.2 * error
        more = 0.0 if residual is None else residual.astype(np.float64).reshape(len(x64), -1)
        expected = float64_epilogue(v, activation, more)
        error += 2.0**-23 * np.abs(expected)
        low, high = (expected - error).astype(x.dtype), (expected + error).astype(x.dtype)
    y = y.reshape(expected.shape)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert np.all((low <= y) & (y <= high) | np.isnan(expected)), np.count_nonzero((y < low) | (y > high))


# ----------------------------------------------------------------------------------------------------------- the CPU


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
    with pytest.raises(TypeError, match=r"^words must be a NumPy or CuPy array, got list$"):
        function([1])
    with pytest.raises(TypeError, match=r"^words must be int32, got uint32$"):
        function(words.view(np.uint32))
    with pytest.raises(ValueError, match=r"^words must have at least one axis, got shape \(\)$"):
        function(words[0, 0, ...])
    with pytest.raises(TypeError, match=r"^out must be float16, got float32$"):
        function(words, out=function(words).astype(np.float32))
    with pytest.raises(ValueError, match=r"^out must have shape "):
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


def test_gemv_takes_one_vector_and_every_epilogue() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x = random_activations(np.random.default_rng(1), 64)
    options = {"bias": np.ones(32, np.float16), "activation": "silu", "residual": np.full(32, 2, np.float16)}
    y = cupy_awq.gemv(x, *tensors(weight), **options)
    np.testing.assert_array_equal(y, gemm(x[None], weight, **options | {"residual": options["residual"][None]})[0])
    with pytest.raises(ValueError, match=r"^x must be one vector \[K\], got shape \(1, 64\)$"):
        cupy_awq.gemv(x[None], *tensors(weight))
    with pytest.raises(TypeError, match=r"^x must be a NumPy or CuPy array, got list$"):
        cupy_awq.gemv([1.0] * 64, *tensors(weight))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": "gemm"}, ValueError, "kernel must be one of gemv, "),
        ({"split_k": 3}, ValueError, "split_k must be a power of two, got 3"),
        ({"split_k": 2.0}, ValueError, "split_k must be a power of two, got 2.0"),
        ({"activation": "elu"}, ValueError, "activation must be relu, "),
        ({"residual": np.zeros((3, 32), np.float32)}, TypeError, "residual must be float16, got float32"),
        ({"residual": np.zeros((1, 32), np.float16)}, ValueError, "residual must have shape (3, 32), got (1, 32)"),
        ({"bias": [0.0] * 32}, TypeError, "bias must be a NumPy or CuPy array, got list"),
        ({"dtype": "bfloat16"}, TypeError, "dtype=bfloat16 says how to read x, which is float16: they must agree"),
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
def test_row_steps_lead_to_every_row_or_are_none(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple))
    base = np.arange(int(np.prod([3 * s for s in shape])), dtype=np.int32).reshape([3 * s for s in shape])
    a = base[tuple(slice(0, s * (step := data.draw(st.sampled_from([1, 2]))), step) for s in shape)]
    if data.draw(st.booleans()):
        a = a[::-1]
    if data.draw(st.booleans()) and a.ndim > 1:
        a = a.swapaxes(0, 1)
    if data.draw(st.booleans()):
        a = np.broadcast_to(a, (2, *a.shape))
    step = gpu.row_step(a)
    starts = a.reshape(-1, a.shape[-1])[:, 0].tolist()
    contiguous = a.shape[-1] == 1 or a.strides[-1] == 4
    steps = {second - first for first, second in itertools.pairwise(starts)}
    if not contiguous or len(steps) > 1 or min(steps, default=0) < 0:
        assert step is None
    else:
        assert step == (steps.pop() if steps else a.shape[-1])
        assert gpu.writable_rows(a) == (len(starts) == 1 or step >= a.shape[-1])


# ------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_plan_computes_what_gemm_does(activation: Any) -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 64, 32, 16)
    x, n = random_activations(rng, 2, 3, 64), 16 if activation == "swiglu" else 32
    options = {"bias": rng.standard_normal(32).astype(np.float32), "activation": activation}
    residual, out = rng.standard_normal((2, 3, n)).astype(np.float16), np.full((2, 3, n), np.nan, np.float16)
    for template in (x, x.shape):
        plan = cupy_awq.plan(template, weight, residual=residual.shape, **options)
        assert (plan.kernel, plan.shape, plan.workspace_bytes) == ("numpy", out.shape, 0)
        assert plan(x, out, residual=residual) is out
        np.testing.assert_array_equal(out, gemm(x, weight, residual=residual, **options))


def test_a_plan_reads_uint16_as_it_was_told() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x = random_activations(np.random.default_rng(1), 2, 64, dtype=BFLOAT16)
    plan = cupy_awq.plan(x.view(np.uint16), weight, dtype="bfloat16")
    y = plan(x.view(np.uint16), np.zeros((2, 32), np.uint16))
    np.testing.assert_array_equal(y.view(BFLOAT16), gemm(x, weight))
    assert cupy_awq.plan((2, 64), weight, dtype="bfloat16")(x, np.zeros((2, 32), BFLOAT16)).dtype == BFLOAT16


def test_calls_that_differ_from_the_plan_are_refused() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    plan = cupy_awq.plan((2, 64), weight)
    x, y = np.zeros((2, 64), np.float16), np.zeros((2, 32), np.float16)
    with pytest.raises(ValueError, match=r"^x must be as planned, .* got \(\(3, 64\), "):
        plan(np.zeros((3, 64), np.float16), y)
    with pytest.raises(ValueError, match=r"^x must be as planned, .*float16.*, got .*float32"):
        plan(x.astype(np.float32), y)
    with pytest.raises(ValueError, match=r"^out must be as planned"):
        plan(x, y[:1])
    with pytest.raises(TypeError, match=r"^out must be a NumPy or CuPy array, got list$"):
        plan(x, [0.0])
    with pytest.raises(ValueError, match=r"^residual must be None, as planned$"):
        plan(x, y, residual=y)
    with pytest.raises(ValueError, match=r"^residual must be an array, as planned$"):
        cupy_awq.plan((2, 64), weight, residual=y)(x, y)


def test_bad_arguments_of_a_plan_are_named() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    with pytest.raises(TypeError, match=r"^weight must be a PackedWeight, got ndarray$"):
        cupy_awq.plan((2, 64), weight.qweight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^K=63 in x is not K=64 in qweight$"):
        cupy_awq.plan((2, 63), weight)
    with pytest.raises(TypeError, match=r"^dtype must be float16, bfloat16 or float32, got 'int8'$"):
        cupy_awq.plan((2, 64), weight, dtype="int8")
    with pytest.raises(TypeError, match=r"^x must be a NumPy or CuPy array, got list$"):
        cupy_awq.plan([2, 64], weight)
    with pytest.raises(ValueError, match=r"^out must have shape \(2, 32\), got \(2, 16\)$"):
        cupy_awq.plan((2, 64), weight, out=(2, 16))
    with pytest.raises(ValueError, match=r"^residual must have shape \(2, 32\), got \(32,\)$"):
        cupy_awq.plan((2, 64), weight, residual=(32,))


def test_no_rows_give_no_rows() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x, y = np.zeros((3, 0, 64), np.float16), np.zeros((3, 0, 32), np.float16)
    assert gemm(x, weight, activation="gelu", residual=y).shape == (3, 0, 32)
    assert cupy_awq.plan(x, weight)(x, y) is y


# ------------------------------------------------------------------------- conversions, on the simulator and the GPU


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("arch", [60, 75])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("entry", "values"), [("s4_to_fp16x2", 8), ("int8_to_fp16", 4)])
def test_conversion_kernels(backend: str, arch: int, aligned: bool, entry: str, values: int) -> None:
    """Both paths, a last block that is partly empty, and a result that does not start at a multiple of 16 bytes."""
    facts = device.nominal(arch)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, 700).astype(np.int32)
    base = np.full(700 * values + 1, np.nan, np.float16)
    out = base[:-1] if aligned else base[1:]
    runner(backend)(Conversion(entry, values, words.size, aligned).plan(facts), {"words": words, "out": out})
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


# ---------------------------------------------------------------------------------------------------- products, GPU


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5, 70])
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_epilogue(m: int, element: np.dtype[Any], activation: Any) -> None:
    """Bias, activation and residual (of its own, and in place), twice: the same bits, and those of plans."""
    rng = np.random.default_rng(m)
    scales = BFLOAT16 if element == BFLOAT16 else FLOAT16
    weight = random_weight(rng, 192, 96, 64, dtype=scales)
    on_gpu = put(weight)
    x = 4 * random_activations(rng, m, 192, dtype=element)
    n = 48 if activation == "swiglu" else 96
    residual = rng.standard_normal((m, n)).astype(element)
    for bias in (None, rng.standard_normal(96).astype(np.float32)):
        options = {"bias": put(bias), "activation": activation}
        y = gemm(put(x), on_gpu, out=nan_like((m, n), element), **options)
        check_product(y, x, weight, bias, activation)
        y = gemm(put(x), on_gpu, residual=put(residual), out=nan_like((m, n), element), **options)
        check_product(y, x, weight, bias, activation, residual)
        again = put(residual)
        assert gemm(put(x), on_gpu, residual=again, out=again, **options) is again
        plan = cupy_awq.plan((m, 192), on_gpu, residual=(m, n), dtype=element, **options)
        planned = plan(put(x), nan_like((m, n), element), residual=put(residual))
        assert y.get().tobytes() == again.get().tobytes() == planned.get().tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5, 70])
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize(
    ("k", "n", "group_size"), [(192, 8, 192), (192, 104, 32), (90, 40, 18), (66, 24, 1), (240, 72, 48)]
)
def test_every_form_of_zeros_and_shapes_with_tails(m: int, zeros: str, k: int, n: int, group_size: int) -> None:
    rng = np.random.default_rng(k)
    for element in ELEMENTS:
        for scales in (FLOAT16, BFLOAT16):
            weight = random_weight(rng, k, n, group_size, zeros=zeros, dtype=scales)
            x = random_activations(rng, m, k, dtype=element)
            check_product(gemm(put(x), put(weight), out=nan_like((m, n), element)), x, weight)
            w = cupy_awq.dequantize(*tensors(put(weight)), dtype=element, out=nan_like((k, n), element))
            assert w.get().tobytes() == cupy_awq.dequantize(*tensors(weight), dtype=element).tobytes()


def adversarial(rng: np.random.Generator, k: int, n: int, scale: float, scales: Any) -> PackedWeight:
    """Zeros of 0 and 15, groups of codes on one side of them, and scales about ``scale``."""
    groups = k // 128
    codes = rng.integers(0, 16, (k, n), np.uint8)
    codes[:128] = 15
    zeros = rng.choice(np.array([0, 15], np.uint8), (groups, n))
    sizes = (scale * rng.uniform(0.7, 1, (groups, n))).astype(scales)
    return PackedWeight(cupy_awq.pack_int4(codes), sizes, cupy_awq.pack_int4(zeros))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 7, 33])
@pytest.mark.parametrize("scale", [6e-8, 1e-5, 6e4])
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_scales_at_the_ends_of_float16_and_outliers(m: int, scale: float, element: np.dtype[Any]) -> None:
    """Where the result leaves float16's normal range, it is the float64 sum rounded: subnormal, or infinite."""
    rng = np.random.default_rng(m)
    weight = adversarial(rng, 28672, 32, scale, FLOAT16)
    x = random_activations(rng, m, 28672, dtype=element)
    x[:, 5::4096] *= 1000
    x = (x * np.asarray(1e-4 if scale > 1 else 1, element)).astype(element)
    y = gemm(put(x), put(weight), out=nan_like((m, 32), element))
    check_product(y, x, weight)
    assert y.get().tobytes() == gemm(put(x), put(weight)).get().tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5, 70])
@pytest.mark.parametrize("element", [FLOAT16, BFLOAT16], ids=str)
def test_errors_stay_in_bounds_at_a_large_k(m: int, element: np.dtype[Any]) -> None:
    from cupy_awq.testing import relative_error

    rng = np.random.default_rng(m)
    weight = random_weight(rng, 28672, 256, 128, dtype=element)
    x = random_activations(rng, m, 28672, dtype=element)
    y = gemm(put(x), put(weight), out=nan_like((m, 256), element))
    assert relative_error(y, x, weight) < 2.0 ** -SIGNIFICANT_BITS[element]


@pytest.mark.gpu
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("m", [1, 16, 40])
def test_inf_and_nan_reach_their_own_row_and_all_of_it(zeros: str, m: int) -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 256, 64, 32, zeros=zeros)
    on_gpu = put(weight)
    x = random_activations(rng, m, 256)
    w = float64_weight(*tensors(weight))
    candidates = select.candidates(Problem(m, 64, 256, 32, zeros=zeros), device.current())
    for kernel in (name for name, configs in candidates.items() if not isinstance(configs, str)):
        clean = gemm(put(x), on_gpu, kernel=kernel).get()
        for row in {0, m // 2, m - 1}:
            for column, value in ((0, np.inf), (130, -np.inf), (255, np.nan)):
                spoiled = x.copy()
                spoiled[row, column] = value
                y = gemm(put(spoiled), on_gpu, out=nan_like((m, 64), FLOAT16), kernel=kernel).get()
                others = np.arange(m) != row
                np.testing.assert_array_equal(y[others], clean[others])
                with np.errstate(invalid="ignore"):
                    expected = w[column] * value  # infinite, or NaN where the weight is 0
                if zeros == "float":  # q * s and o are summed apart: Inf - Inf
                    assert not np.isfinite(y[row]).any()
                else:
                    np.testing.assert_array_equal(y[row].astype(np.float64), expected)


def layouts(x: Any) -> dict[str, Any]:
    """The values of x [6, K], CuPy's, in other layouts."""
    import cupy

    m, k = x.shape
    wide = cupy.full((m, k + 24), np.nan, x.dtype)
    wide[:, 8 : k + 8] = x
    odd = cupy.full((m, k + 3), np.nan, x.dtype)
    odd[:, 3:] = x
    shifted = cupy.full(m * k + 1, np.nan, x.dtype)
    shifted[1:] = x.ravel()
    return {
        "rows of a wider matrix": wide[:, 8 : k + 8],
        "rows at odd addresses": odd[:, 3:],
        "one value off": shifted[1:].reshape(m, k),
        "columns": cupy.asfortranarray(x),
        "every second": cupy.repeat(x, 2, axis=1)[:, ::2],
        "reversed": cupy.ascontiguousarray(x[::-1])[::-1],
        "leading axes": x.reshape(2, 1, 3, k),
        "leading axes of a wider one": wide.reshape(3, 2, 1, k + 24)[..., 8 : k + 8],
        "leading axes that no step leads through": cupy.stack([x.reshape(2, 3, k)] * 2, axis=1)[:, 1],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("rows", [1, 6])
def test_every_layout_of_x_residual_and_out(element: np.dtype[Any], rows: int) -> None:
    """The same bits as contiguous arrays give, nothing written beside them, in layers as in functions."""
    rng = np.random.default_rng(0)
    weight = put(random_weight(rng, 64, 64, 16))
    layer = cupy_awq.AwqLinear(weight)
    x, residual = (put(random_activations(rng, 6, 64, dtype=element)) for _ in range(2))
    expected = gemm(x[:rows], weight, residual=residual[:rows]).get()
    for name, a in layouts(x).items():
        a, r = (a, layouts(residual)[name]) if rows == 6 else (a[:1], layouts(residual)[name][:1])
        if a.ndim > 2 and rows == 1:
            continue
        for out in [None] if rows == 1 else [None, *layouts(nan_like((6, 64), element)).values()]:
            if out is not None and out.shape != a.shape:
                continue
            for _ in range(2):  # the second time a layer launches without checks
                y = layer(a, residual=r, out=out)
                assert out is None or y is out
                assert y.get().tobytes() == expected.tobytes(), name
            assert gemm(a, weight, residual=r, out=out).get().tobytes() == expected.tobytes(), name


@pytest.mark.gpu
def test_nothing_is_written_beside_out() -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight = put(random_weight(rng, 64, 24, 16))
    for m in (1, 5, 70):
        x = put(random_activations(rng, m, 64))
        base = nan_like((m + 2, 64), FLOAT16)
        gemm(x, weight, out=base[1:-1, 16:40])
        written = ~cupy.isnan(base).get()
        assert written[1:-1, 16:40].all()
        assert written.sum() == m * 24


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0, 64, 200])
def test_out_that_overlaps_x_or_a_part_of_the_residual(shift: int) -> None:
    rng = np.random.default_rng(0)
    weight = put(random_weight(rng, 64, 64, 16))
    layer = cupy_awq.AwqLinear(weight)
    values, more = random_activations(rng, 80 * 64), random_activations(rng, 80 * 64)
    for m in (1, 3, 70):
        expected = gemm(put(values[: m * 64].reshape(m, 64)), weight).get()
        plus = gemm(put(values[: m * 64].reshape(m, 64)), weight, residual=put(more[: m * 64].reshape(m, 64))).get()
        for product in (layer, layer, lambda x, **options: gemm(x, weight, **options)):
            memory = put(values)
            x, out = (memory[begin : begin + m * 64].reshape(m, 64) for begin in (0, shift))
            assert product(x, out=out).get().tobytes() == expected.tobytes()
            memory = put(more)
            residual, out = (memory[begin : begin + m * 64].reshape(m, 64) for begin in (0, shift))
            x = put(values[: m * 64].reshape(m, 64))
            assert product(x, residual=residual, out=out).get().tobytes() == plus.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5, 70])
@pytest.mark.parametrize("zeros", ZEROS)
def test_slices_and_misaligned_weights_on_the_gpu(m: int, zeros: str) -> None:
    import cupy

    rng = np.random.default_rng(0)
    whole = random_weight(rng, 160, 128, 32, zeros=zeros)
    per = 8 if zeros == "float" else 1
    for columns in (slice(1, 6), slice(4, 12)):
        for rows in (slice(0, 5), slice(1, 4), slice(None, None, -1)):
            if rows.step:  # groups from the last to the first, and the rows in them too
                k, some = slice(None, None, -1), slice(None, None, -1)
            else:
                k, some = slice(32 * rows.start, 32 * rows.stop), rows

            def part(w: PackedWeight, k: Any = k, some: Any = some, c: slice = columns) -> PackedWeight:
                zero_columns = slice(c.start * per, c.stop * per)
                qzeros = None if w.qzeros is None else w.qzeros[some, zero_columns]
                return PackedWeight(w.qweight[k, c], w.scales[some, 8 * c.start : 8 * c.stop], qzeros)

            weight, on_gpu = part(whole), part(put(whole))
            assert on_gpu.qweight.base is not None
            x = random_activations(rng, m, weight.shape[0])
            check_product(gemm(put(x), on_gpu, out=nan_like((m, weight.shape[1]), FLOAT16)), x, weight)
            w = cupy_awq.dequantize(*tensors(on_gpu))
            assert w.get().tobytes() == cupy_awq.dequantize(*tensors(weight)).tobytes()
            out = cupy.asfortranarray(nan_like(weight.shape, FLOAT16))
            assert cupy_awq.dequantize(*tensors(on_gpu), out=out) is out
            np.testing.assert_array_equal(out.get(), w.get())


@pytest.mark.gpu
def test_functions_check_a_layout_once_and_every_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weights = [random_weight(rng, 64, 32, 16) for _ in range(3)]
    values = [random_activations(rng, 3, 64) for _ in weights]
    gemm(put(values[0]), put(weights[0]), activation=(-0.25, 0.5))

    def checked(*_: Any, **__: Any) -> None:
        raise AssertionError("a known layout was checked again")

    monkeypatch.setattr(matmul, "multiply", checked)
    for x, weight in zip(values, weights, strict=True):
        check_product(gemm(put(x), put(weight), activation=(-0.25, 0.5)), x, weight, activation=(-0.25, 0.5))
    x, weight = put(values[0]), put(weights[0])
    new = {"bias": put(np.ones(32, np.float16)), "residual": put(np.zeros((3, 32), np.float16)), "kernel": "gemm_small"}
    for options in ({}, {"activation": "relu"}, *({"activation": (-0.25, 0.5), name: a} for name, a in new.items())):
        with pytest.raises(AssertionError, match="checked again"):
            gemm(x, weight, **options)


@pytest.mark.gpu
def test_uint16_bits_and_bfloat16_are_the_same_on_the_gpu() -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 64, 32, 16, dtype=BFLOAT16)
    bits = PackedWeight(put(weight.qweight), put(weight.scales), put(weight.qzeros))
    for m in (1, 5, 70):
        x = random_activations(rng, m, 64, dtype=BFLOAT16)
        y = gemm(put(x), bits)
        assert y.dtype == BFLOAT16
        raw = gemm(put(x.view(np.uint16)), bits, dtype="bfloat16", residual=put(np.zeros((m, 32), np.uint16)))
        assert raw.dtype == np.uint16
        assert raw.get().tobytes() == y.get().tobytes()


@pytest.mark.gpu
def test_no_rows_on_the_gpu() -> None:
    weight = put(random_weight(np.random.default_rng(0), 64, 32, 16))
    x = put(np.zeros((3, 0, 64), np.float16))
    for _ in range(2):
        assert cupy_awq.AwqLinear(weight)(x).shape == gemm(x, weight).shape == (3, 0, 32)
    plan = cupy_awq.plan(x, weight)
    assert plan(x, out := put(np.zeros((3, 0, 32), np.float16))) is out


@pytest.mark.gpu
def test_arrays_of_two_places_are_refused() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x = np.zeros((2, 64), np.float16)
    with pytest.raises(TypeError, match=r"^x is on the CPU, but the weight is on GPU 0$"):
        gemm(x, put(weight))
    with pytest.raises(TypeError, match=r"^x is on the CPU, but the weight is on GPU 0$"):
        cupy_awq.AwqLinear(put(weight))(x.astype(BFLOAT16))
    with pytest.raises(TypeError, match=r"^x is on GPU 0, but the weight is on the CPU$"):
        gemm(put(x), weight)
    with pytest.raises(TypeError, match=r"^out is on the CPU, but the result is on GPU 0$"):
        gemm(put(x), put(weight), out=x[:, :32])
    with pytest.raises(TypeError, match=r"^scales is on the CPU, but qweight is on GPU 0$"):
        cupy_awq.dequantize(put(weight.qweight), weight.scales, None)
    with pytest.raises(TypeError, match=r"^x is on the CPU, but the plan is for GPU 0$"):
        cupy_awq.plan((2, 64), put(weight))(x, x[:, :32])
    with pytest.raises(ValueError, match=r"^no kernel fits: gemv takes one row of x, not M=2$"):
        gemm(put(x), put(weight), kernel="gemv")


# ------------------------------------------------------------------------------------------------------- plans, GPU


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 64])
@pytest.mark.parametrize("split_k", [1, 4])
def test_a_captured_plan_replays_on_new_values(m: int, split_k: int) -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 512, 128, 64)
    x, out = put(np.zeros((m, 512), np.float16)), nan_like((m, 128), FLOAT16)
    plan = cupy_awq.plan(x, put(weight), activation="silu", out=out, split_k=split_k)
    assert (plan.workspace_bytes > 0) == (split_k > 1)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan(x, out)
        graph = stream.end_capture()
        for seed in range(3):
            values = random_activations(np.random.default_rng(seed), m, 512)
            x.set(values)
            out.fill(np.nan)
            graph.launch()
            check_product(out, values, weight, activation="silu")


@pytest.mark.gpu
def test_functions_whose_first_call_is_captured() -> None:
    """What they set up on the way, memory of zeros above all, is not a part of the graph."""
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 512, 128, 64)
    on_gpu = put(weight)
    values = random_activations(rng, 1, 512)
    x, out, eager = put(values), nan_like((1, 128), FLOAT16), nan_like((1, 128), FLOAT16)
    stream = cupy.cuda.Stream(non_blocking=True)  # one that has no workspace yet
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        gemm(x, on_gpu, out=out, split_k=4)
        graph = stream.end_capture()
        gemm(x, on_gpu, out=eager, split_k=4)
        graph.launch()
        check_product(eager, values, weight)
        check_product(out, values, weight)


@pytest.mark.gpu
def test_a_plan_on_several_streams_with_workspaces_of_their_own() -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 4096, 256, 128)
    plan = cupy_awq.plan((4, 4096), put(weight), split_k=8)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    values = [random_activations(rng, 4, 4096) for _ in streams]
    expected = [gemm(put(x), put(weight), split_k=8).get().tobytes() for x in values]
    arrays = [(put(x), nan_like((4, 256), FLOAT16)) for x in values]
    workspaces = [cupy.zeros(plan.workspace_bytes, cupy.uint8) for _ in streams]
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        for stream, (x, out), workspace in zip(streams, arrays, workspaces, strict=True):
            with stream:
                plan(x, out, workspace=workspace)
    cupy.cuda.Device().synchronize()
    assert [out.get().tobytes() for _, out in arrays] == expected


@pytest.mark.gpu
def test_bad_workspaces_and_layouts_of_a_plan_are_named() -> None:
    import cupy

    weight = put(random_weight(np.random.default_rng(0), 512, 64, 64))
    plan = cupy_awq.plan((2, 512), weight, split_k=4)
    x, out = (put(np.zeros((2, columns), np.float16)) for columns in (512, 64))
    short = cupy.zeros(plan.workspace_bytes - 1, cupy.uint8)
    with pytest.raises(ValueError, match=rf"^workspace must have at least {plan.workspace_bytes} bytes, got "):
        plan(x, out, workspace=short)
    with pytest.raises(TypeError, match=r"^workspace is on the CPU, but the plan is for GPU 0$"):
        plan(x, out, workspace=np.zeros(1 << 20, np.uint8))
    with pytest.raises(ValueError, match=r"^workspace must be contiguous and start at a multiple of 16 bytes$"):
        plan(x, out, workspace=cupy.zeros(1 << 20, cupy.uint8)[1:])
    wide = put(np.zeros((2, 520), np.float16))
    for bad in (wide[:, :512], put(np.zeros(1025, np.float16))[1:].reshape(2, 512)):
        with pytest.raises(ValueError, match=r"^x must be as planned, .* = \(\(2, 512\), \(1024, 2\), "):
            plan(bad, out)
    with pytest.raises(ValueError, match=r"^x must have contiguous rows at even steps, got strides \(2, 4\)$"):
        cupy_awq.plan(cupy.asfortranarray(x), weight)
    assert cupy_awq.plan(wide[:, :512], weight)(wide[:, :512], out) is out
