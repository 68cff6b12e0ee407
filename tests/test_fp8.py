# SPDX-License-Identifier: Apache-2.0
"""Tests of GEMMs with float8 (e4m3) activations: the formulas, the documented error bound, and the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq import BlockQuantizedWeight, block_reference, from_packed, linear_fp8, linear_int8
from cupy_awq.kernels import select
from cupy_awq.kernels.family import AnyFamily, Config
from cupy_awq.kernels.int8 import quantize_fp8
from cupy_awq.kernels.int8.gemm_int8_mma import GEMM_INT8_SM80
from cupy_awq.kernels.int8.gemm_int8_sm90 import GEMM_INT8_SM90, GemmInt8Sm90Config
from cupy_awq.kernels.int8.gemm_w4a8_mma import FRAGMENT_ORDER
from cupy_awq.kernels.int8.problem import Int8Problem, fp8_block_size, fp8_refusal
from cupy_awq.kernels.int8.quantize_fp8 import QUANTIZE_FP8, Fp8Quantization, half_sum_stride
from cupy_awq.ops.quantized_linear import check_layer
from cupy_awq.runtime import device
from cupy_awq.tools.testing import random_weight as random_awq
from cupy_awq.tools.testing import relative_error
from tests.backends import HOPPER, fewer, runner
from tests.block_weights import float64_values, random_weight
from tests.test_kernels import DTYPES, facts, strided
from tests.test_reference import float64_weight

E4M3 = ml_dtypes.float8_e4m3fn


def max_rounding_error(x: np.ndarray) -> np.ndarray:
    """Return the documented bound of the rounding error of each element."""
    size = np.abs(x.astype(np.float64))
    return 1.00001 * np.maximum(size / 17, size.max(axis=1, keepdims=True) / 448 / 1024)


def quantize_element(value: float, largest: float) -> int:
    """Return the e4m3 code nearest to value * 448 / largest, searched among all codes; ties go to the even code."""
    factor = np.float32(448) / np.float32(largest)
    scaled = np.float32(value) * factor
    codes = [c for c in range(256) if c & 127 != 127]  # codes 127 and 255 are NaN
    values = np.array(codes, np.uint8).view(E4M3).astype(np.float64)
    far = np.abs(values - np.float64(scaled))
    nearest = [c for c, d in zip(codes, far, strict=True) if d == far.min() and (c < 128) == (not np.signbit(scaled))]
    return next((c for c in nearest if c % 2 == 0), nearest[0])


@given(seed=st.integers(0, 99), spread=st.integers(0, 20))
@settings(max_examples=20)
def test_codes_are_nearest_and_within_the_error_bound(seed: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, 40)) * 2.0 ** -rng.integers(0, spread + 1, 40)).astype(np.float32)
    x[:, 7] = -0.0
    codes, scale, sums = block_reference.quantize_fp8(x, 16)
    wanted = [[quantize_element(v, np.abs(row).max()) for v in row] for row in x]
    np.testing.assert_array_equal(codes, wanted)
    values = codes.view(E4M3).astype(np.float64)
    assert (np.abs(values * scale[:, None] - x) <= max_rounding_error(x)).all()
    np.testing.assert_array_equal(sums, [[row[b : b + 16].sum() for b in (0, 16, 32)] for row in values])


def test_zero_tiny_and_non_finite_rows() -> None:
    x = np.ones((5, 8), np.float32)
    x[0], x[1] = 0, 1e-40
    x[2, 3], x[3, 4], x[4, 0] = np.nan, -np.inf, 3e38
    codes, scale, sums = block_reference.quantize_fp8(x, 8)
    assert not codes[:4].any()
    assert not sums[:4].any()
    np.testing.assert_array_equal(np.isnan(scale), [False, False, True, True, False])
    assert codes[4, 0] == 0x7E
    y = linear_fp8(x, BlockQuantizedWeight(np.full((2, 1, 1, 8), 9, np.uint8), np.ones((2, 1), np.float32), None))
    np.testing.assert_array_equal(np.isnan(y[:, 0]), [False, False, True, True, False])
    np.testing.assert_array_equal(y[:2], 0)


@given(seed=st.integers(0, 99), spread=st.integers(0, 6), zeros=st.sampled_from(["packed", "symmetric", "float"]))
@settings(max_examples=20)
def test_linear_fp8_stays_within_its_documented_error_bound(seed: int, spread: int, zeros: str) -> None:
    rng = np.random.default_rng(seed)
    awq = random_awq(rng, 96, 24, 32, zeros=zeros)
    x = (rng.standard_normal((5, 96)) * 2.0 ** rng.integers(-spread, spread + 1, 96)).astype(np.float32)
    w = float64_weight(awq.qweight, awq.scales, awq.qzeros)
    y = linear_fp8(x, from_packed(awq))
    bound = max_rounding_error(x) @ np.abs(w)
    error = np.abs(y - x.astype(np.float64) @ w)
    assert (error <= bound + 1e-6 * (np.abs(x) @ np.abs(w))).all()
    assert error.max() > 0.02 * bound.max()  # the bound is not far too loose: the largest error is over 2% of it


def test_fp8_keeps_small_elements_beside_outliers_and_int8_does_not() -> None:
    rng = np.random.default_rng(0)
    awq = random_awq(rng, 1024, 64, 128)
    weight = from_packed(awq)
    x = rng.standard_normal((16, 1024)).astype(np.float32)
    assert relative_error(linear_fp8(x, weight), x, awq) < 1 / 35
    ordinary = x.copy()
    x[:, ::128] *= 1000
    # Subtract the exact contribution of the outliers; the remainder is the error of the other elements.
    w = float64_weight(awq.qweight, awq.scales, awq.qzeros)
    large = x.copy()
    large[:, np.arange(1024) % 128 != 0] = 0
    shared = block_reference.quantize_fp8(large, 1024)
    exact_large = (shared[0].view(E4M3).astype(np.float64) * shared[1][:, None]) @ w
    ordinary[:, ::128] = 0
    size = np.linalg.norm(ordinary.astype(np.float64) @ w)
    fp8, int8_ = (
        np.linalg.norm(y - exact_large - ordinary @ w) / size for y in (linear_fp8(x, weight), linear_int8(x, weight))
    )
    assert fp8 < 1 / 30 < int8_


def test_truncation_in_the_tensor_cores_changes_y_by_less_than_1_in_4000() -> None:
    """On a model of Hopper's tensor cores, truncation changes y by less than 1/4000.

    The hardware truncates 32 products and the sum 13 bits below the largest of them.
    """
    rng = np.random.default_rng(0)
    codes, _, _ = block_reference.quantize_fp8(rng.standard_normal((8, 128)).astype(np.float32), 128)
    values, weights = codes.view(E4M3).astype(np.float64), rng.integers(0, 16, (64, 128)) * 2.0**-9
    total = np.zeros((8, 64))
    for k in range(0, 128, 32):
        terms = np.concatenate((values[:, None, k : k + 32] * weights[:, k : k + 32], total[..., None]), axis=2)
        unit = 2.0 ** (np.floor(np.log2(np.abs(terms).max(axis=2, keepdims=True))) - 13)
        total = (np.trunc(terms / unit) * unit).sum(axis=2)
    # Zero points are subtracted only from the total, so the error is relative to the product with signed codes.
    size = np.linalg.norm(values @ (weights - 8 * 2.0**-9).T)
    assert 1e-6 < np.linalg.norm(total - values @ weights.T) / size < 1 / 4000


def check_fp8_quantization(backend: str, m: int, k: int, block_size: int, dtype: str, padding: int) -> None:
    """Quantize rows that are random, or hold NaN, infinity, zeros or ties; require the bits of the reference."""
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((m + 4, k)) * 2.0 ** rng.integers(-12, 8, (m + 4, k))).astype(DTYPES[dtype])
    x[0, k // 2], x[1, k - 1], x[2] = np.nan, -np.inf, 0
    x[3] = rng.integers(-127, 128, k)
    x[3, 0] = 448
    x = strided(x, padding)
    x.flags.writeable = False
    wanted = block_reference.quantize_fp8(x, block_size)
    fragments = block_size % 16 == k % 16 == 0
    if fragments:
        codes = wanted[0].reshape(m + 4, -1, 16)[..., FRAGMENT_ORDER].reshape(m + 4, k)
        wanted = codes, *wanted[1:]
    problem = Fp8Quantization(m + 4, k, block_size, dtype, k + padding, fragments)
    names = ("codes", "scale", "sums")
    (config,) = QUANTIZE_FP8.configs(problem, facts(90, backend))
    for threads in (config.threads, quantize_fp8.MANY_ROWS_THREADS):
        out = [np.full_like(a, 77) for a in wanted]
        plan = QUANTIZE_FP8.plan(quantize_fp8.QuantizeFp8Config(threads), problem, facts(90, backend))
        half_sums = np.full((m + 4, half_sum_stride(k, block_size)), 77, np.float16)
        runner(backend)(plan, {"x": x, **dict(zip(names, out, strict=True)), "half_sums": half_sums})
        blocks = wanted[2].shape[1]
        np.testing.assert_array_equal(half_sums[:, :blocks], wanted[2].astype(np.float16))
        assert (half_sums[:, blocks:] == 77).all()
        for name, got, expected in zip(names, out, wanted, strict=True):
            np.testing.assert_array_equal(got, expected, err_msg=name)


@pytest.mark.parametrize("backend", ["latest", HOPPER])
@pytest.mark.parametrize(
    ("m", "k", "block_size", "dtype", "padding"),
    [
        (3, 8, 32, "float16", 0),
        (2, 272, 32, "bfloat16", 8),
        (2, 8184, 128, "float32", 4),
        (1, 8208, 64, "float16", 0),
        (1, 32784, 128, "float32", 0),
    ],
)
def test_quantize_fp8_gives_the_bits_of_the_reference(
    backend: str, m: int, k: int, block_size: int, dtype: str, padding: int
) -> None:
    """Rows take less than a warp or several rounds of all threads, and are read once or twice: all give equal bits."""
    check_fp8_quantization(backend, m, k, block_size, dtype, padding)


@pytest.mark.parametrize(
    ("m", "k", "dtype", "threads"),
    [
        (256, 4096, "float16", 512),
        (256, 8192, "float16", 1024),
        (256, 8200, "float16", 544),
        (257, 24576, "bfloat16", 384),
        (257, 24584, "float16", 800),
        (257, 12296, "float32", 800),
    ],
)
def test_threads_of_quantize_fp8_keep_their_part_of_a_row(m: int, k: int, dtype: str, threads: int) -> None:
    """A row takes as few rounds as possible, then as few threads: 8200 columns take two rounds of 544 threads."""
    (config,) = QUANTIZE_FP8.configs(Fp8Quantization(m, k, 128, dtype, k), facts(90, "latest"))
    assert config.threads == threads


def check_fp8_product(
    backend: str,
    problem: Int8Problem,
    family: AnyFamily,
    config: Config,
    weight: BlockQuantizedWeight,
    seed: int,
    arch: int = 90,
) -> None:
    """Launch one configuration on random e4m3 codes, with NaN wherever it must write, and compare with float64."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[problem.dtype]
    zero_points = weight.zero_points is not None
    problem = replace(problem, weight_offset=weight.offset is not None, zero_points=zero_points)
    x = (rng.standard_normal((problem.m, problem.k)) * 2.0 ** rng.integers(-3, 4, problem.k)).astype(np.float32)
    codes, scale, sums = block_reference.quantize_fp8(x, problem.block_size)
    bias = rng.standard_normal(problem.n).astype(DTYPES[problem.bias_dtype]) if problem.bias_dtype else None
    half_sums = np.full((problem.m, half_sum_stride(problem.k, problem.block_size)), np.nan, np.float16)
    half_sums[:, : sums.shape[1]] = sums
    buffers = {"xq": codes, "x_row_scale": scale, "x_offset": None, "x_sums": sums, "bias": bias}
    buffers["x_half_sums"] = half_sums
    buffers |= family.prepare_weight(weight, config, problem)
    for a in buffers.values():
        if a is not None:
            a.flags.writeable = False
    y = strided(np.full((problem.m, problem.n), np.nan, dtype), problem.y_row_stride - problem.n)
    needs = family.workspace(config, problem)
    buffers |= {"partials": np.full(needs.partial_bytes // 4, np.nan, np.float32), "y": y}
    buffers["counters"] = np.zeros(needs.counters, np.uint32)
    plan = family.plan(config, problem, facts(arch, backend))
    runner(backend)(plan, {name: buffers[name] for name in plan.buffers})
    values = codes.view(E4M3).astype(np.float64) * scale[:, None]
    w = float64_values(weight).reshape(problem.n, problem.k)
    exact = values @ w.T + (0 if bias is None else bias.astype(np.float64))
    if problem.activation == "clamp":
        exact = np.clip(exact, *problem.limits)
    offset = 0 if weight.offset is None else np.abs(weight.offset.astype(np.float64))
    sizes = 16 * np.abs(weight.scale.astype(np.float64)) + offset
    size = np.abs(values) @ sizes[:, np.arange(problem.k) // weight.block_size].T + np.abs(exact)
    # Tensor cores keep about 14 bits of each term of a sum.
    error = 2.0**-13 if backend == "gpu" else 2.0**-21
    eps = float(ml_dtypes.finfo(dtype).eps)
    bound = eps * np.abs(exact) + error * size
    if getattr(config, "offset_tiles", False):
        # This configuration rounds zero points times scales, and the sums of x, to float16.
        zeros = 8 if weight.zero_points is None else 8 - weight.zero_points.astype(np.float64)
        offsets = (np.abs(weight.scale) * zeros)[:, np.arange(sums.shape[1]) * problem.block_size // weight.block_size]
        bound += 2.0**-10 * np.abs(sums * scale[:, None]).astype(np.float64) @ np.abs(offsets).T
    assert (np.abs(y.astype(np.float64) - exact) <= bound).all()


def fp8_problem(
    m: int, n: int, k: int, block_size: int, dtype: str, bias: str | None = None, clamps: bool = False, padding: int = 0
) -> Int8Problem:
    """Return the problem of a float8 GEMM whose y has ``padding`` elements between its rows."""
    stride = n + padding
    return Int8Problem(
        *(m, n, k, fp8_block_size(block_size, k), 4, False, True, dtype, bias),
        activation="clamp" if clamps else None,
        limits=(-0.5, 0.75),
        even=stride % 2 == 0,
        wide=stride * np.dtype(DTYPES[dtype]).itemsize % 16 == 0,
        y_stride=stride,
        fp8=True,
    )


# A case has m, n, k, the weight's block size, offsets, dtype, bias, clamp, and the padding of y's rows; then cluster,
# ctas, split_k and m64_tiles of the configuration.
CASES = (
    (65, 41, 144, 32, False, "float32", "float16", False, 1, 1, 1),
    (70, 270, 272, 128, True, "float16", None, False, 0, 1, 4),
    (3, 257, 208, 192, True, "bfloat16", None, False, 7, 1, 2),
    (131, 300, 1040, 256, True, "float16", "float32", True, 4, 2, 2),
    (131, 300, 1040, 256, True, "float16", "float32", True, 4, 1, 8, 2),
    (1, 64, 48, 48, True, "float16", None, False, 0, 1, 1),
    (131, 300, 1040, 256, True, "float16", "float32", True, 4, 2, 2, 1, 3),
    (65, 41, 144, 32, False, "float32", "float16", False, 1, 1, 2, 2),
    (70, 270, 784, 128, False, "float32", None, False, 0, 1, 4, 2, 3),
    (131, 300, 1936, 128, True, "bfloat16", None, False, 4, 1, 12, 2, 2),
)


@pytest.mark.parametrize("backend", ["latest", "earliest", HOPPER])
@pytest.mark.parametrize("case", fewer(CASES), ids=str)
def test_fp8_on_gemm_int8_sm90(backend: str, case: tuple) -> None:
    """Results are right where blocks are shorter or longer than a stage, and where the ring of stages is used again.

    CTAs take several tiles, some of which are partly empty.
    """
    m, n, k, block_size, offsets, dtype, bias, clamps, padding, *config = case
    problem = fp8_problem(m, n, k, block_size, dtype, bias, clamps, padding)
    assert fp8_refusal(block_size, k, facts(90, backend)) is None
    weight = random_weight(np.random.default_rng(m), (n, 1, 1, k), block_size, 4, offsets)
    check_fp8_product(backend, problem, GEMM_INT8_SM90, GemmInt8Sm90Config(*config), weight, seed=m)


@pytest.mark.parametrize("backend", ["latest", "earliest", HOPPER])
def test_zero_points_are_added_to_e4m3_codes(backend: str) -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, (300, 1, 1, 272), 128, 4, False)
    offset = rng.integers(-8, 9, weight.scale.shape).astype(weight.scale.dtype) * weight.scale
    weight = BlockQuantizedWeight(weight.codes, weight.scale, offset, block_size=128)
    assert weight.zero_points is not None
    problem = fp8_problem(70, 300, 272, 128, "float32")
    check_fp8_product(backend, problem, GEMM_INT8_SM90, GemmInt8Sm90Config(1, 2), weight, seed=0)


# A case has m, n, k, the weight's block size, offsets, dtype, bias, clamp, the padding of y's rows, and split_k.
MMA_CASES = (
    (1, 70, 272, 128, True, "float16", None, False, 0, 2),
    (20, 41, 1040, 256, False, "float32", "float16", True, 1, 1),
    (70, 131, 144, 32, True, "bfloat16", "float32", False, 3, 1),
    (17, 40, 208, 192, True, "float16", None, False, 0, 1),
)


@pytest.mark.parametrize("backend", ["latest", "earliest", HOPPER])
@pytest.mark.parametrize("arch", [89, 90])
@pytest.mark.parametrize("case", MMA_CASES, ids=str)
def test_fp8_on_gemm_int8_sm80(backend: str, arch: int, case: tuple) -> None:
    """The sm_80 kernel is right on e4m3 codes: with one or four blocks per stage, split K, and partial tiles."""
    m, n, k, block_size, offsets, dtype, bias, clamps, padding, split_k = case
    problem = fp8_problem(m, n, k, block_size, dtype, bias, clamps, padding)
    config = replace(GEMM_INT8_SM80.configs(problem, device.nominal(89))[0], split_k=split_k)
    assert fp8_refusal(block_size, k, facts(arch, backend)) is None
    weight = random_weight(np.random.default_rng(m), (n, 1, 1, k), block_size, 4, offsets)
    check_fp8_product(backend, problem, GEMM_INT8_SM80, config, weight, seed=m, arch=arch)


def test_the_bits_of_a_4_bit_code_are_an_e4m3_number() -> None:
    np.testing.assert_array_equal(np.arange(16, dtype=np.uint8).view(E4M3).astype(float) * 512, np.arange(16))


def test_fp8_selection_and_the_reasons_of_its_refusals() -> None:
    h100 = device.nominal(90)
    assert fp8_refusal(128, 4096, h100) is None
    assert fp8_refusal(4096, 4096, h100) is None
    assert fp8_refusal(16, 16, h100) is None
    assert fp8_refusal(128, 4096, device.nominal(89)) is None
    assert fp8_refusal(128, 4096, device.nominal(86)) == "needs sm_89 or newer, not sm_86"
    assert fp8_refusal(8, 24, h100) == "needs a multiple of 16 columns, not 24"
    assert fp8_refusal(48, 96, h100) == "needs blocks that are multiples of 32 columns, not 48"
    few, many = (fp8_problem(m, 4096, 4096, 128, "float16") for m in (1, 4096))
    assert select.choose(few, h100).name == "gemm_int8_sm80"
    assert select.choose(many, h100).config == GemmInt8Sm90Config(1, 132)
    assert select.choose(many, device.nominal(89)).name == "gemm_int8_sm80"
    assert GEMM_INT8_SM80.refusal(many, h100) == "is replaced by gemm_int8_sm90 for e4m3"
    with pytest.raises(ValueError, match="gemm_int8_simt multiplies int8, not e4m3"):
        select.choose(few, device.nominal(86))


def test_a_gpu_without_fp8_tensor_cores_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "of", lambda index: device.nominal(80))
    on_gpu = weight()
    check_layer(on_gpu, None, "fp8")
    object.__setattr__(on_gpu, "device", 0)
    check_layer(on_gpu, None, "int8")
    with pytest.raises(ValueError, match=r"^weight: expected .*, got one that needs sm_89 or newer, not sm_80$"):
        check_layer(on_gpu, None, "fp8")


X = np.zeros((3, 8), np.float32)


def weight(bits: int = 4, kernel: int = 1) -> BlockQuantizedWeight:
    scale = np.ones((4, 2), np.float32)
    return BlockQuantizedWeight(np.zeros((4, kernel, kernel, 8), np.uint8), scale, scale, bits=bits)


@pytest.mark.parametrize(
    ("x", "w", "options", "error", "text"),
    [
        (X, X, {}, TypeError, "weight: expected a BlockQuantizedWeight, got ndarray"),
        (X, weight(bits=8), {}, ValueError, "weight: expected 4 bits for a float8 product, got 8"),
        (X, weight(kernel=3), {}, ValueError, "weight: expected a 1x1 kernel for a matrix product, got 3x3"),
        (X.astype(float), weight(), {}, TypeError, "x: expected float16, bfloat16 or float32"),
        (X[0], weight(), {}, ValueError, r"x: expected \[M, K\]"),
        (X[:, :4], weight(), {}, ValueError, r"x: expected \[M, K\] with K=8"),
        (X.tolist(), weight(), {}, TypeError, "x: expected a NumPy or CuPy array"),
        (X, weight(), {"bias": np.ones(3, np.float32)}, ValueError, r"^bias: expected .* \[N\] = \[4\], got "),
        (X, weight(), {"activation": "silu"}, ValueError, "activation: expected None"),
        (X, weight(), {"out": np.zeros((3, 4), np.float16)}, TypeError, "^out: expected float32 .*, got float16"),
        (
            X,
            weight(),
            {"out": np.zeros((3, 5), np.float32)},
            ValueError,
            r"^out: expected float32 \[3, 4\]",
        ),
    ],
)
def test_linear_fp8_arguments(x: Any, w: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        linear_fp8(x, w, **options)


@pytest.mark.sm90
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("zeros", ["packed", "symmetric", "float"])
@pytest.mark.parametrize(
    ("m", "n", "k", "group_size"), [(1, 256, 512, 128), (300, 520, 1024, 32), (1000, 4096, 4096, 128)]
)
def test_linear_fp8_on_a_gpu(dtype: str, zeros: str, m: int, n: int, k: int, group_size: int) -> None:
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
