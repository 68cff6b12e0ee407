# SPDX-License-Identifier: Apache-2.0
"""Tests of GEMMs on the GPU against float64 formulas: every epilogue and layout, and adversarial values."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cupy_awq
from cupy_awq import PackedWeight
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.ops import gemm as gemm_op
from cupy_awq.runtime import device
from cupy_awq.tools.testing import random_activations, random_weight, relative_error
from tests.products import BFLOAT16, ELEMENTS, FLOAT16, ZEROS, check_product, gemm, nan_like, put, tensors
from tests.test_reference import ACTIVATIONS, SIGNIFICANT_BITS, float64_weight

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("m", [1, 5, 70])
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_epilogue(m: int, element: np.dtype[Any], activation: Any) -> None:
    """Every combination of bias, activation and residual is right, and has equal bits in repeated calls and in plans.

    The residual is an array of its own or the output.
    """
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
    """Return a weight with zero points 0 and 15, all codes of a group on one side of it, and scales near ``scale``."""
    groups = k // 128
    codes = rng.integers(0, 16, (k, n), np.uint8)
    codes[:128] = 15
    zeros = rng.choice(np.array([0, 15], np.uint8), (groups, n))
    sizes = (scale * rng.uniform(0.7, 1, (groups, n))).astype(scales)
    return PackedWeight(cupy_awq.pack_int4(codes), sizes, cupy_awq.pack_int4(zeros))


@pytest.mark.parametrize("m", [1, 7, 33])
@pytest.mark.parametrize("scale", [6e-8, 1e-5, 6e4])
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_scales_at_the_ends_of_float16_and_outliers(m: int, scale: float, element: np.dtype[Any]) -> None:
    """Scales near the ends of float16's range, and outliers in x, give the rounded float64 sum, also infinite."""
    rng = np.random.default_rng(m)
    weight = adversarial(rng, 28672, 32, scale, FLOAT16)
    x = random_activations(rng, m, 28672, dtype=element)
    x[:, 5::4096] *= 1000
    x = (x * np.asarray(1e-4 if scale > 1 else 1, element)).astype(element)
    y = gemm(put(x), put(weight), out=nan_like((m, 32), element))
    check_product(y, x, weight)
    assert y.get().tobytes() == gemm(put(x), put(weight)).get().tobytes()


@pytest.mark.parametrize("m", [1, 5, 70])
@pytest.mark.parametrize("element", [FLOAT16, BFLOAT16], ids=str)
def test_errors_stay_in_bounds_at_a_large_k(m: int, element: np.dtype[Any]) -> None:
    rng = np.random.default_rng(m)
    weight = random_weight(rng, 28672, 256, 128, dtype=element)
    x = random_activations(rng, m, 28672, dtype=element)
    y = gemm(put(x), put(weight), out=nan_like((m, 256), element))
    assert relative_error(y, x, weight) < 2.0 ** -SIGNIFICANT_BITS[element]


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
                    expected = w[column] * value  # In this column y is infinite, or NaN where the weight is 0.
                # Kernels that sum q * s and o, or x * q and x * z, apart compute Inf - Inf, which is NaN.
                if zeros == "float" or kernel == "gemm_sm90_raw":
                    assert not np.isfinite(y[row]).any()
                else:
                    np.testing.assert_array_equal(y[row].astype(np.float64), expected)


def layouts(x: Any) -> dict[str, Any]:
    """Return views of a CuPy array x [6, K] and copies with other strides, by name."""
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


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("rows", [1, 6])
def test_every_layout_of_x_residual_and_out(element: np.dtype[Any], rows: int) -> None:
    """Views and copies of x, residual and out with any strides give the bits of contiguous arrays.

    Nothing outside of ``out`` is written.
    """
    rng = np.random.default_rng(0)
    weight = put(random_weight(rng, 64, 64, 16))
    layer = cupy_awq.AwqLinear(weight)
    x, residual = (put(random_activations(rng, 6, 64, dtype=element)) for _ in range(2))
    expected = gemm(x[:rows], weight, residual=residual[:rows]).get()
    # the repacked weight may have another kernel, with another order of additions
    of_layer = layer(x[:rows], residual=residual[:rows]).get()
    for name, a in layouts(x).items():
        a, r = (a, layouts(residual)[name]) if rows == 6 else (a[:1], layouts(residual)[name][:1])
        if a.ndim > 2 and rows == 1:
            continue
        for out in [None] if rows == 1 else [None, *layouts(nan_like((6, 64), element)).values()]:
            if out is not None and out.shape != a.shape:
                continue
            for _ in range(2):  # the second call uses the launch that the layer has cached, without checks
                y = layer(a, residual=r, out=out)
                assert out is None or y is out
                assert y.get().tobytes() == of_layer.tobytes(), name
            assert gemm(a, weight, residual=r, out=out).get().tobytes() == expected.tobytes(), name


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


@pytest.mark.parametrize("shift", [0, 64, 200])
def test_out_that_overlaps_x_or_a_part_of_the_residual(shift: int) -> None:
    rng = np.random.default_rng(0)
    weight = put(random_weight(rng, 64, 64, 16))
    layer = cupy_awq.AwqLinear(weight)
    values, more = random_activations(rng, 80 * 64), random_activations(rng, 80 * 64)
    for m in (1, 3, 70):
        for product in (layer, layer, lambda x, **options: gemm(x, weight, **options)):
            expected, plus = (
                product(put(values[: m * 64].reshape(m, 64)), residual=residual).get()
                for residual in (None, put(more[: m * 64].reshape(m, 64)))
            )
            memory = put(values)
            x, out = (memory[begin : begin + m * 64].reshape(m, 64) for begin in (0, shift))
            assert product(x, out=out).get().tobytes() == expected.tobytes()
            memory = put(more)
            residual, out = (memory[begin : begin + m * 64].reshape(m, 64) for begin in (0, shift))
            x = put(values[: m * 64].reshape(m, 64))
            assert product(x, residual=residual, out=out).get().tobytes() == plus.tobytes()


def test_out_that_overlaps_rows_of_x_to_be_read_later() -> None:
    rng = np.random.default_rng(0)
    m = 64 * 132 * 20  # many more CTAs than run at the same time on an H100
    weight, values = put(random_weight(rng, 64, 64, 16)), random_activations(rng, 2 * m, 64)
    layer = cupy_awq.AwqLinear(weight)
    for product in (layer, layer, lambda x, **options: gemm(x, weight, **options)):
        expected = product(put(values[:m])).get()
        memory = put(values)
        assert product(memory[:m], out=memory[m // 2 : m // 2 + m]).get().tobytes() == expected.tobytes()


@pytest.mark.parametrize("m", [1, 5, 70])
@pytest.mark.parametrize("zeros", ZEROS)
def test_slices_and_misaligned_weights_on_the_gpu(m: int, zeros: str) -> None:
    import cupy

    rng = np.random.default_rng(0)
    whole = random_weight(rng, 160, 128, 32, zeros=zeros)
    per = 8 if zeros == "float" else 1
    for columns in (slice(1, 6), slice(4, 12)):
        for rows in (slice(0, 5), slice(1, 4), slice(None, None, -1)):
            if rows.step:  # reverse the order of the groups, and of the rows in them
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


def test_functions_check_a_layout_once_and_every_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weights = [random_weight(rng, 64, 32, 16) for _ in range(3)]
    values = [random_activations(rng, 3, 64) for _ in weights]
    gemm(put(values[0]), put(weights[0]), activation=(-0.25, 0.5))

    def checked(*_: Any, **__: Any) -> None:
        raise AssertionError("a known layout was checked again")

    monkeypatch.setattr(gemm_op, "run_gemm", checked)
    for x, weight in zip(values, weights, strict=True):
        check_product(gemm(put(x), put(weight), activation=(-0.25, 0.5)), x, weight, activation=(-0.25, 0.5))
    x, weight = put(values[0]), put(weights[0])
    new = {"bias": put(np.ones(32, np.float16)), "residual": put(np.zeros((3, 32), np.float16)), "kernel": "gemm_small"}
    for options in ({}, {"activation": "relu"}, *({"activation": (-0.25, 0.5), name: a} for name, a in new.items())):
        with pytest.raises(AssertionError, match="checked again"):
            gemm(x, weight, **options)


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


def test_no_rows_on_the_gpu() -> None:
    weight = put(random_weight(np.random.default_rng(0), 64, 32, 16))
    x = put(np.zeros((3, 0, 64), np.float16))
    for _ in range(2):
        assert cupy_awq.AwqLinear(weight)(x).shape == gemm(x, weight).shape == (3, 0, 32)
    plan = cupy_awq.plan(x, weight)
    assert plan(x, out := put(np.zeros((3, 0, 32), np.float16))) is out


def test_arrays_on_two_devices_are_refused() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x = np.zeros((2, 64), np.float16)
    with pytest.raises(TypeError, match=r"^x: expected an array on GPU 0 like the weight, got one on the CPU$"):
        gemm(x, put(weight))
    with pytest.raises(TypeError, match=r"^x: expected an array on GPU 0 like the weight, got one on the CPU$"):
        cupy_awq.AwqLinear(put(weight))(x.astype(BFLOAT16))
    with pytest.raises(TypeError, match=r"^x: expected an array on the CPU like the weight, got one on GPU 0$"):
        gemm(put(x), weight)
    with pytest.raises(TypeError, match=r"^out: expected an array on GPU 0 like the result, got one on the CPU$"):
        gemm(put(x), put(weight), out=x[:, :32])
    with pytest.raises(TypeError, match=r"^scales: expected an array on GPU 0 like qweight, got one on the CPU$"):
        cupy_awq.dequantize(put(weight.qweight), weight.scales, None)
    with pytest.raises(TypeError, match=r"^x: expected an array on GPU 0 like the plan, got one on the CPU$"):
        cupy_awq.plan((2, 64), put(weight))(x, x[:, :32])
    with pytest.raises(ValueError, match=r"^no kernel fits: gemv takes one row of x, not M=2$"):
        gemm(put(x), put(weight), kernel="gemv")


def test_every_gpu_of_the_machine_from_any_other_and_from_several_threads() -> None:
    """Arrays on any GPU work, whichever is current, also when each GPU has a thread and all run at once."""
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 256, 128, 64)
    xs = {m: random_activations(rng, m, 256) for m in (1, 9, 70)}

    def work(index: int) -> None:
        with cupy.cuda.Device(index):
            there = put(weight)
            layer = cupy_awq.AwqLinear(there)
            inputs = {m: put(x) for m, x in xs.items()}
            cupy.cuda.Device().synchronize()
        for current in {index, 0, count - 1}:
            with cupy.cuda.Device(current):
                for _ in range(3):
                    for m, x in inputs.items():
                        for y in (layer(x), gemm(x, there)):
                            assert y.device.id == index
                            assert relative_error(y, xs[m], weight) < 5e-4
                assert cupy.cuda.runtime.getDevice() == current

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
