# SPDX-License-Identifier: Apache-2.0
"""Products of activations in float8 (e4m3): the formulas, the bound that they document, and the kernels' launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq.int8 import BlockQuantizedWeight, forms, from_packed, gpu, linear_fp8, linear_int8, reference
from cupy_awq.kernels import int8
from cupy_awq.runtime import device
from cupy_awq.tools.testing import random_weight as random_awq
from cupy_awq.tools.testing import relative_error
from tests.backends import HOPPER, runner
from tests.test_int8 import float64_values, random_weight
from tests.test_kernels import DTYPES, facts, strided
from tests.test_reference import float64_weight

E4M3 = ml_dtypes.float8_e4m3fn


def step_of(x: np.ndarray) -> np.ndarray:
    """The most by which an element may be off."""
    size = np.abs(x.astype(np.float64))
    return 1.00001 * np.maximum(size / 17, size.max(axis=1, keepdims=True) / 448 / 1024)


def quantize_element(value: float, largest: float) -> int:
    """The nearest of all codes, of two the even one."""
    factor = np.float32(448) / np.float32(largest)
    scaled = np.float32(value) * factor
    codes = [c for c in range(256) if c & 127 != 127]  # the others are NaN
    values = np.array(codes, np.uint8).view(E4M3).astype(np.float64)
    far = np.abs(values - np.float64(scaled))
    nearest = [c for c, d in zip(codes, far, strict=True) if d == far.min() and (c < 128) == (not np.signbit(scaled))]
    return next((c for c in nearest if c % 2 == 0), nearest[0])


# ------------------------------------------------------------------------------------------------------ on the CPU


@given(seed=st.integers(0, 99), spread=st.integers(0, 20))
@settings(max_examples=20)
def test_codes_are_the_nearest_and_stay_within_the_bound(seed: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, 40)) * 2.0 ** -rng.integers(0, spread + 1, 40)).astype(np.float32)
    x[:, 7] = -0.0
    codes, scale, sums = reference.quantize_fp8(x, 16)
    wanted = [[quantize_element(v, np.abs(row).max()) for v in row] for row in x]
    np.testing.assert_array_equal(codes, wanted)
    values = codes.view(E4M3).astype(np.float64)
    assert (np.abs(values * scale[:, None] - x) <= step_of(x)).all()
    np.testing.assert_array_equal(sums, [[row[b : b + 16].sum() for b in (0, 16, 32)] for row in values])


def test_rows_that_are_zero_tiny_or_not_finite() -> None:
    x = np.ones((5, 8), np.float32)
    x[0], x[1] = 0, 1e-40
    x[2, 3], x[3, 4], x[4, 0] = np.nan, -np.inf, 3e38
    codes, scale, sums = reference.quantize_fp8(x, 8)
    assert not codes[:4].any()
    assert not sums[:4].any()
    np.testing.assert_array_equal(np.isnan(scale), [False, False, True, True, False])
    assert codes[4, 0] == 0x7E
    y = linear_fp8(x, BlockQuantizedWeight(np.full((2, 1, 1, 8), 9, np.uint8), np.ones((2, 1), np.float32), None))
    np.testing.assert_array_equal(np.isnan(y[:, 0]), [False, False, True, True, False])
    np.testing.assert_array_equal(y[:2], 0)


@given(seed=st.integers(0, 99), spread=st.integers(0, 6), zeros=st.sampled_from(["packed", "symmetric", "float"]))
@settings(max_examples=20)
def test_a_product_stays_within_the_bound_that_it_documents(seed: int, spread: int, zeros: str) -> None:
    rng = np.random.default_rng(seed)
    awq = random_awq(rng, 96, 24, 32, zeros=zeros)
    x = (rng.standard_normal((5, 96)) * 2.0 ** rng.integers(-spread, spread + 1, 96)).astype(np.float32)
    w = float64_weight(awq.qweight, awq.scales, awq.qzeros)
    y = linear_fp8(x, from_packed(awq))
    bound = step_of(x) @ np.abs(w)
    error = np.abs(y - x.astype(np.float64) @ w)
    assert (error <= bound + 1e-6 * (np.abs(x) @ np.abs(w))).all()
    assert error.max() > 0.02 * bound.max()  # the bound is no formality


def test_the_error_of_normal_activations_and_of_those_with_outliers() -> None:
    rng = np.random.default_rng(0)
    awq = random_awq(rng, 1024, 64, 128)
    weight = from_packed(awq)
    x = rng.standard_normal((16, 1024)).astype(np.float32)
    assert relative_error(linear_fp8(x, weight), x, awq) < 1 / 35
    ordinary = x.copy()
    x[:, ::128] *= 1000
    # What large elements contribute is known: the error of the others shows.
    w = float64_weight(awq.qweight, awq.scales, awq.qzeros)
    large = x.copy()
    large[:, np.arange(1024) % 128 != 0] = 0
    shared = reference.quantize_fp8(large, 1024)
    exact_large = (shared[0].view(E4M3).astype(np.float64) * shared[1][:, None]) @ w
    ordinary[:, ::128] = 0
    size = np.linalg.norm(ordinary.astype(np.float64) @ w)
    fp8, int8_ = (
        np.linalg.norm(y - exact_large - ordinary @ w) / size for y in (linear_fp8(x, weight), linear_int8(x, weight))
    )
    assert fp8 < 1 / 30 < int8_


def test_the_bits_that_tensor_cores_cut_off_are_few() -> None:
    """Of 32 products and a sum, each is cut off 13 bits below the largest, toward zero; a block of 128 columns."""
    rng = np.random.default_rng(0)
    codes, _, _ = reference.quantize_fp8(rng.standard_normal((8, 128)).astype(np.float32), 128)
    values, weights = codes.view(E4M3).astype(np.float64), rng.integers(0, 16, (64, 128)) * 2.0**-9
    total = np.zeros((8, 64))
    for k in range(0, 128, 32):
        terms = np.concatenate((values[:, None, k : k + 32] * weights[:, k : k + 32], total[..., None]), axis=2)
        unit = 2.0 ** (np.floor(np.log2(np.abs(terms).max(axis=2, keepdims=True))) - 13)
        total = (np.trunc(terms / unit) * unit).sum(axis=2)
    # What the zero points take off again is not in y: its size is that of signed codes.
    size = np.linalg.norm(values @ (weights - 8 * 2.0**-9).T)
    assert 1e-6 < np.linalg.norm(total - values @ weights.T) / size < 1 / 4000


# ------------------------------------------------------------------------------------------------------ the kernels


def check_fp8_quantization(backend: str, m: int, k: int, unit: int, dtype: str, spare: int) -> None:
    """One launch over m random rows, and some that are not finite, zero, and of numbers that lie half-way."""
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((m + 4, k)) * 2.0 ** rng.integers(-12, 8, (m + 4, k))).astype(DTYPES[dtype])
    x[0, k // 2], x[1, k - 1], x[2] = np.nan, -np.inf, 0
    x[3] = rng.integers(-127, 128, k)
    x[3, 0] = 448
    x = strided(x, spare)
    x.flags.writeable = False
    wanted = reference.quantize_fp8(x, unit)
    out = [np.full_like(a, 77) for a in wanted]
    problem = int8.Fp8Quantization(m + 4, k, unit, dtype, k + spare)
    names = ("codes", "scale", "sums")
    runner(backend)(problem.plan(facts(90, backend)), {"x": x, **dict(zip(names, out, strict=True))})
    for name, got, expected in zip(names, out, wanted, strict=True):
        np.testing.assert_array_equal(got, expected, err_msg=name)


@pytest.mark.parametrize("backend", ["latest", HOPPER])
@pytest.mark.parametrize(
    ("m", "k", "unit", "dtype", "spare"),
    [
        (3, 8, 32, "float16", 0),
        (2, 272, 32, "bfloat16", 8),
        (2, 4112, 128, "float32", 4),
        (1, 8208, 64, "float32", 0),
        (1, 16400, 128, "float16", 0),
    ],
)
def test_quantization_gives_the_references_bits(
    backend: str, m: int, k: int, unit: int, dtype: str, spare: int
) -> None:
    """Rows shorter than a warp takes, of several rounds, read once and twice; short last sums."""
    check_fp8_quantization(backend, m, k, unit, dtype, spare)


def check_fp8_product(
    backend: str,
    problem: int8.IntegerProduct,
    config: int8.HopperConfig | int8.MmaConfig,
    weight: BlockQuantizedWeight,
    seed: int,
    arch: int = 90,
) -> None:
    """One launch over random codes, with NaN where it must write."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[problem.dtype]
    x = (rng.standard_normal((problem.m, problem.k)) * 2.0 ** rng.integers(-3, 4, problem.k)).astype(np.float32)
    codes, scale, sums = reference.quantize_fp8(x, problem.block)
    bias = rng.standard_normal(problem.n).astype(DTYPES[problem.bias_dtype]) if problem.bias_dtype else None
    buffers = {"xq": codes, "x_scale": scale, "x_offset": None, "x_sums": sums, "bias": bias}
    if isinstance(config, int8.HopperConfig):
        problem = replace(problem, weight_offset=weight.offset is not None and forms.whole_zeros(weight) is None)
        buffers["codes"] = forms.byte_codes(weight, fp8=True)
        buffers["parameters"] = forms.tile_parameters(weight, problem.block, False)
    else:
        buffers["codes"] = forms.product_codes(weight, fp8=True)
        buffers["parameters"] = forms.product_parameters(weight, problem.block, fp8=True)
    for a in buffers.values():
        if a is not None:
            a.flags.writeable = False
    y = strided(np.full((problem.m, problem.n), np.nan, dtype), problem.y_stride - problem.n)
    partials, counters = config.workspace(problem)
    scratch = {"partials": np.full(partials // 4, np.nan, np.float32), "counters": np.zeros(counters, np.uint32)}
    runner(backend)(config.plan(problem, facts(arch, backend)), {**buffers, **scratch, "y": y})
    values = codes.view(E4M3).astype(np.float64) * scale[:, None]
    w = float64_values(weight).reshape(problem.n, problem.k)
    exact = values @ w.T + (0 if bias is None else bias.astype(np.float64))
    if problem.activation == "clamp":
        exact = np.clip(exact, *problem.limits)
    offset = 0 if weight.offset is None else np.abs(weight.offset.astype(np.float64))
    sizes = 16 * np.abs(weight.scale.astype(np.float64)) + offset
    size = np.abs(values) @ sizes[:, np.arange(problem.k) // weight.block_size].T + np.abs(exact)
    # Tensor cores of a GPU keep about 14 bits of what they add up.
    error = 2.0**-13 if backend == "gpu" else 2.0**-21
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert (np.abs(y.astype(np.float64) - exact) <= eps * np.abs(exact) + error * size).all()


# m, n, k, weight's block, its offsets, dtype, bias, clamps, spare columns of y, cluster, blocks
CASES = (
    (70, 270, 272, 128, True, "float16", None, False, 0, 1, 4),
    (131, 300, 1040, 256, True, "float16", "float32", True, 4, 2, 2),
    (65, 41, 144, 32, False, "float32", "float16", False, 1, 1, 1),
    (3, 257, 208, 192, True, "bfloat16", None, False, 7, 1, 2),
    (1, 64, 48, 48, True, "float16", None, False, 0, 1, 1),
)


@pytest.mark.parametrize("backend", ["latest", "earliest", HOPPER])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_of_hopper(backend: str, case: tuple) -> None:
    """Sums within and across steps of 128 k, stages that come round, several tiles a block, ends in M, N and K."""
    m, n, k, block, offsets, dtype, bias, clamps, spare, cluster, blocks = case
    problem = int8.IntegerProduct(
        *(m, n, k, int8.fp8_unit(block, k), 4, False, True, dtype, bias),
        activation="clamp" if clamps else None,
        limits=(-0.5, 0.75),
        wide=(n + spare) * np.dtype(DTYPES[dtype]).itemsize % 16 == 0,
        stride=n + spare,
        fp8=True,
    )
    assert int8.refuse_fp8(block, k, facts(90, backend)) is None
    weight = random_weight(np.random.default_rng(m), (n, 1, 1, k), block, 4, offsets)
    check_fp8_product(backend, problem, int8.HopperConfig(cluster, blocks), weight, seed=m)


@pytest.mark.parametrize("backend", ["latest", "earliest", HOPPER])
def test_codes_and_whole_zeros_are_e4m3(backend: str) -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, (300, 1, 1, 272), 128, 4, False)
    offset = rng.integers(-8, 9, weight.scale.shape).astype(weight.scale.dtype) * weight.scale
    weight = BlockQuantizedWeight(weight.codes, weight.scale, offset, block_size=128)
    assert forms.whole_zeros(weight) is not None
    problem = int8.IntegerProduct(
        70, 300, 272, int8.fp8_unit(128, 272), 4, False, False, "float32", wide=True, fp8=True
    )
    check_fp8_product(backend, problem, int8.HopperConfig(1, 2), weight, seed=0)


# m, n, k, weight's block, its offsets, dtype, bias, clamps, spare columns of y, splits
MMA_CASES = (
    (1, 70, 272, 128, True, "float16", None, False, 0, 2),
    (20, 41, 1040, 256, False, "float32", "float16", True, 1, 1),
    (70, 131, 144, 32, True, "bfloat16", "float32", False, 3, 1),
    (17, 40, 208, 192, True, "float16", None, False, 0, 1),
)


@pytest.mark.parametrize("backend", ["latest", "earliest", HOPPER])
@pytest.mark.parametrize("arch", [89, 90])
@pytest.mark.parametrize("case", MMA_CASES, ids=str)
def test_products_by_warps(backend: str, arch: int, case: tuple) -> None:
    """The tile that is chosen for the rows, one block and four in 128 k, splits of K, ends in M, N and K."""
    m, n, k, block, offsets, dtype, bias, clamps, spare, splits = case
    here = facts(arch, backend)
    problem = int8.IntegerProduct(
        *(m, n, k, int8.fp8_unit(block, k), 4, False, True, dtype, bias),
        activation="clamp" if clamps else None,
        limits=(-0.5, 0.75),
        even=(n + spare) % 2 == 0,
        stride=n + spare,
        fp8=True,
    )
    config = replace(int8.choose(problem, device.nominal(89)), splits=splits)
    assert int8.refuse_fp8(block, k, here) is None
    weight = random_weight(np.random.default_rng(m), (n, 1, 1, k), block, 4, offsets)
    check_fp8_product(backend, problem, config, weight, seed=m, arch=arch)


def test_every_code_of_4_bits_is_e4m3_as_it_lies() -> None:
    np.testing.assert_array_equal(np.arange(16, dtype=np.uint8).view(E4M3).astype(float) * 512, np.arange(16))


def test_what_no_kernel_takes_is_said() -> None:
    here = device.nominal(90)
    assert int8.refuse_fp8(128, 4096, here) is None
    assert int8.refuse_fp8(4096, 4096, here) is None
    assert int8.refuse_fp8(16, 16, here) is None
    assert int8.refuse_fp8(128, 4096, device.nominal(89)) is None
    assert int8.refuse_fp8(128, 4096, device.nominal(86)) == "needs sm_89 or newer, not sm_86"
    assert int8.refuse_fp8(8, 24, here) == "needs a multiple of 16 columns, not 24"
    assert int8.refuse_fp8(48, 96, here) == "needs blocks that are multiples of 32 columns, not 48"
    problem = int8.IntegerProduct(1, 4096, 4096, 128, 4, False, True, "float16", fp8=True)
    assert isinstance(int8.choose(problem, here), int8.MmaConfig)
    many = replace(problem, m=4096)
    assert int8.choose(many, here) == int8.HopperConfig(2, 132)
    assert isinstance(int8.choose(many, device.nominal(89)), int8.MmaConfig)


def test_a_gpu_that_has_no_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "of", lambda index: device.nominal(80))
    there = weight()
    gpu.check_fp8(there)
    object.__setattr__(there, "device", 0)
    with pytest.raises(ValueError, match=r"^activations in float8: needs sm_89 or newer, not sm_80$"):
        gpu.check_fp8(there)


# -------------------------------------------------------------------------------------------------------- arguments


X = np.zeros((3, 8), np.float32)


def weight(bits: int = 4, kernel: int = 1) -> BlockQuantizedWeight:
    scale = np.ones((4, 2), np.float32)
    return BlockQuantizedWeight(np.zeros((4, kernel, kernel, 8), np.uint8), scale, scale, bits=bits)


@pytest.mark.parametrize(
    ("x", "w", "options", "error", "text"),
    [
        (X, X, {}, TypeError, "weight must be a BlockQuantizedWeight, got ndarray"),
        (X, weight(bits=8), {}, ValueError, "weight must have 4 bits for a product with float8, got 8"),
        (X, weight(kernel=3), {}, ValueError, "weight must have a 1x1 kernel for a matrix product, got 3x3"),
        (X.astype(float), weight(), {}, TypeError, "x: expected float16, bfloat16 or float32"),
        (X[0], weight(), {}, ValueError, r"x must be \[M, K\]"),
        (X[:, :4], weight(), {}, ValueError, "K=4 in x is not K=8 in weight"),
        (X.tolist(), weight(), {}, TypeError, "x: expected a NumPy or CuPy array"),
        (
            X,
            weight(),
            {"bias": np.ones(3, np.float32)},
            ValueError,
            r"bias: expected .* \[N\] = \[4\], got float32 \[3\]",
        ),
        (X, weight(), {"activation": "silu"}, ValueError, "activation must be None"),
        (X, weight(), {"out": np.zeros((3, 4), np.float16)}, TypeError, r"out: expected float32 \[3, 4\], got float16"),
        (X, weight(), {"out": np.zeros((3, 5), np.float32)}, ValueError, r"out: expected float32 \[3, 4\], got"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    x: Any, w: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        linear_fp8(x, w, **options)


# ----------------------------------------------------------------------------------------------------------- the GPU


@pytest.mark.sm90
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("zeros", ["packed", "symmetric", "float"])
@pytest.mark.parametrize(
    ("m", "n", "k", "group_size"), [(1, 256, 512, 128), (300, 520, 1024, 32), (1000, 4096, 4096, 128)]
)
def test_a_gpu_agrees_with_the_cpu(dtype: str, zeros: str, m: int, n: int, k: int, group_size: int) -> None:
    import cupy

    from cupy_awq import PackedWeight

    rng = np.random.default_rng(m)
    awq = random_awq(rng, k, n, group_size, zeros=zeros)
    arrays = (awq.qweight, awq.scales, awq.qzeros)
    there = from_packed(PackedWeight(*(None if a is None else cupy.asarray(a) for a in arrays)))
    x = rng.standard_normal((m, k)).astype(DTYPES[dtype])
    bias = rng.standard_normal(n).astype(np.float32)
    wanted = linear_fp8(x, from_packed(awq), bias=bias, activation="relu").astype(np.float64)
    out = cupy.asarray(np.full((m, n), np.nan, DTYPES[dtype]))
    y = linear_fp8(cupy.asarray(x), there, bias=cupy.asarray(bias), activation="relu", out=out)
    assert y is out
    w = float64_weight(*arrays)
    size = np.sqrt((x.astype(np.float64) ** 2).sum(axis=1, keepdims=True) * (w**2).sum(axis=0))
    error = np.abs(y.get().astype(np.float64) - wanted)
    assert (error <= 2 * float(ml_dtypes.finfo(DTYPES[dtype]).eps) * wanted + 2e-3 * size).all()
