# SPDX-License-Identifier: Apache-2.0
"""Tests of the kernels with INT8 activations, run from their launch plans on the simulator and on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq import BlockQuantizedWeight, block_check, block_reference, gemm_int8, quantize_activations
from cupy_awq.activation import Activation
from cupy_awq.kernels import select
from cupy_awq.kernels.epilogue import EPILOGUE_ACTIVATIONS
from cupy_awq.kernels.family import AnyFamily, Config
from cupy_awq.kernels.int8 import gemm_int8_sm90
from cupy_awq.kernels.int8.gemm_int8_mma import GEMM_INT8_SM75, GEMM_INT8_SM80
from cupy_awq.kernels.int8.gemm_int8_simt import GEMM_INT8_SIMT, GemmInt8SimtConfig
from cupy_awq.kernels.int8.gemm_int8_sm90 import GEMM_INT8_SM90, GemmInt8Sm90Config
from cupy_awq.kernels.int8.gemm_w4a8_mma import FRAGMENT_ORDER
from cupy_awq.kernels.int8.gemv_int8 import GEMV_INT8, GemvInt8Config
from cupy_awq.kernels.int8.problem import Int8Problem, layout_refusal
from cupy_awq.kernels.int8.quantize_rows import QUANTIZE_ROWS, RowQuantization
from cupy_awq.kernels.warp_tiles import WarpTileConfig
from cupy_awq.ops.quantized_linear import _in_blocks
from cupy_awq.runtime import device
from tests.backends import BACKENDS, LANDINGS, few_examples, fewer, runner, sample
from tests.block_weights import random_weight
from tests.test_kernels import ARCHS, DTYPES, facts, strided


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@given(data=st.data())
@few_examples
def test_quantize_rows_gives_the_bits_of_the_reference(backend: str, arch: int, data: st.DataObject) -> None:
    """Quantized rows, scales and sums have the reference's bits for any blocks of x, also with NaN, infinity and zeros.

    A block is read by a part of a warp, a warp or a CTA; last blocks are shorter.
    """
    wide = data.draw(st.booleans())
    each = 8 if wide else 1
    m = data.draw(st.integers(1, 5))
    k = each * data.draw(st.sampled_from([1, 3, 16, 33, 100, 300]))
    block = data.draw(st.sampled_from([size * each for size in (1, 4, 5, 16, 40, 290)] + [k]))
    block = min(block, k)
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    symmetric, half_even = data.draw(st.booleans()), data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-8, 8, (m, 1))).astype(DTYPES[dtype])
    # With a largest value of 127 the scale is 1, so many elements lie half-way between two codes.
    x[-1] = rng.integers(-254, 255, k) / 2
    x[-1, ::block] = 127
    x[0, : k // 2] = data.draw(st.sampled_from([0.0, 1.5, np.nan, np.inf, -np.inf]))
    x = strided(x, data.draw(st.sampled_from([0, 8])))
    fragments = wide and symmetric and block % 16 == k % 16 == 0
    check_quantize_rows(backend, arch, x, block, dtype, symmetric, half_even, wide, fragments)


def check_quantize_rows(
    backend: str,
    arch: int,
    x: Any,
    block: int,
    dtype: str,
    symmetric: bool,
    half_even: bool,
    wide: bool,
    fragments: bool = False,
) -> tuple[Any, ...]:
    """Compare the kernel with the reference bit by bit, and return the reference's results.

    With ``fragments``, the codes of each 16 columns must have the order of `FRAGMENT_ORDER`.
    """
    m, k = x.shape
    x.flags.writeable = False
    wanted = block_reference.quantize(x, block, symmetric, "half_even" if half_even else "half_away")
    if fragments:
        codes = wanted[0].reshape(m, -1, 16)[..., FRAGMENT_ORDER].reshape(m, k)
        wanted = codes, *wanted[1:]
    out = [None if a is None else np.full(a.shape, 77, a.dtype) for a in wanted]
    stride = x.strides[0] // x.itemsize
    problem = RowQuantization(m, k, block, dtype, symmetric, half_even, wide, stride, fragments)
    names = ("codes", "scale", "offset", "sums")
    gpu = facts(arch, backend)
    plan = QUANTIZE_ROWS.plan(QUANTIZE_ROWS.configs(problem, gpu)[0], problem, gpu)
    runner(backend)(plan, {"x": x, **dict(zip(names, out, strict=True))})
    for name, got, expected in zip(names, out, wanted, strict=True):
        np.testing.assert_array_equal(got, expected, err_msg=name)
    return wanted


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", [60, 90])
def test_finite_extremes_have_finite_scales(backend: str, arch: int, dtype: str, symmetric: bool, wide: bool) -> None:
    """Blocks whose max - min overflows float32 get finite scales, offsets and codes."""
    top = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    rows = [[top, -top], [3e38, -3e38], [top, top], [-top, 0.0], [top, -top / 4], [1.5, -0.5]]
    x = np.tile(np.array(rows, np.float64), 8).astype(DTYPES[dtype])
    x[:, 2::4] /= 2
    codes, scale, offset, sums = check_quantize_rows(backend, arch, x, 16, dtype, symmetric, False, wide)
    assert np.isfinite(scale).all()
    assert np.isfinite(0.0 if offset is None else offset).all()
    value = codes.astype(np.float64) * scale + (0 if offset is None else offset.astype(np.float64))
    assert (np.abs(value - x.astype(np.float64)) <= 0.51 * scale.astype(np.float64)).all()
    assert (sums[:, 0] == codes.sum(1)).all()


MMA = {75: GEMM_INT8_SM75, 80: GEMM_INT8_SM80, 90: GEMM_INT8_SM80}


def check_product(
    backend: str,
    problem: Int8Problem,
    family: AnyFamily,
    config: Config,
    gpu: device.Device,
    weight_block: int,
    seed: int,
) -> None:
    """Launch one configuration on random codes, with NaN wherever it must write, and compare with float64."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[problem.dtype]
    shape = (problem.n, 1, 1, problem.k)
    weight = random_weight(rng, shape, weight_block, problem.bits, problem.weight_offset, np.float32)
    scale = weight.scale.astype(DTYPES[problem.scale_dtype]).astype(np.float32)
    offset = rng.integers(-8, 9, scale.shape).astype(np.float32) * scale if problem.zero_points else weight.offset
    weight = BlockQuantizedWeight(weight.codes, scale, offset, bits=problem.bits, block_size=weight_block)
    assert (weight.zero_points is not None) == problem.zero_points
    x = rng.standard_normal((problem.m, problem.k)).astype(np.float32)
    x[0] = 1.0  # only the codes -128 and 127, which give the largest products
    x[0, ::2] = -1.0
    x_block = problem.k if problem.row_scales else problem.block_size
    quantized = quantize_activations(x, block_size=x_block, symmetric=not problem.x_offset)
    bias = rng.standard_normal(problem.n).astype(DTYPES[problem.bias_dtype]) if problem.bias_dtype else None
    y = strided(np.full((problem.m, problem.n), np.nan, dtype), problem.y_row_stride - problem.n)
    plan, needs = family.plan(config, problem, gpu), family.workspace(config, problem)
    sizes = block_check.validate_quantized_product(*quantized, weight, x_block, bias, None)
    assert (sizes.block_size, sizes.row_scales) == (problem.block_size, problem.row_scales)
    row_scale = quantized[1]
    if problem.row_scales:
        quantized = quantized[0], *_in_blocks(*quantized[:3], problem.block_size)
    buffers = {
        **dict(zip(("xq", "x_scale", "x_offset", "x_sums"), quantized, strict=True)),
        "x_row_scale": row_scale,
        "bias": bias,
        **family.prepare_weight(weight, config, problem),
    }
    for a in buffers.values():
        if a is not None:
            a.flags.writeable = False
    buffers |= {"partials": np.full(needs.partial_bytes // 4, np.nan, np.float32), "y": y}
    buffers["counters"] = np.zeros(needs.counters, np.uint32)
    runner(backend)(plan, {name: buffers[name] for name in plan.buffers})
    exact = np.empty((problem.m, problem.n), np.float64)
    activation = Activation(problem.activation, problem.limits)
    product = sizes._replace(dtype=np.dtype(np.float64))
    block_reference.gemm(*quantized, weight, product, bias, activation, exact)
    size = np.sqrt((x.astype(np.float64) ** 2).sum(1, keepdims=True) / problem.k) + np.abs(exact)
    eps = float(ml_dtypes.finfo(dtype).eps)
    error = np.abs(y.astype(np.float64) - exact)
    assert (error <= eps * np.abs(exact) + 4e-6 * size * np.sqrt(problem.k)).all(), (error / size).max()
    assert not buffers["counters"].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", [75, 80])
@pytest.mark.parametrize("m", [1, 20, 70, 130])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_mma_tile(backend: str, arch: int, m: int, bits: int) -> None:
    """Every tile is right where the last tiles are partly empty in M, N and K, with K whole or split in two."""
    problem = Int8Problem(m, 150, 288, 64, bits, True, True, "float16", "float32")
    gpu = facts(arch, backend)
    found = [c for c in MMA[arch].configs(problem, gpu) if c.block_m in (16, 32) or m > 20]
    assert {c.split_k for c in found} == {1, 2}
    for config in sample(found, backend, 3, m + bits // 4):
        check_product(backend, problem, MMA[arch], config, gpu, 64, seed=m)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("arch", ARCHS)
@given(data=st.data())
@few_examples
def test_any_int8_product(backend: str, arch: int, data: st.DataObject) -> None:
    """Random integer GEMMs are right on each kernel: short last blocks, blocks that end within a stage, clamps.

    Blocks of x may be finer than those of the weight.
    """
    draw = data.draw
    kind = draw(st.sampled_from(["simt", "gemv", "mma"] if arch >= 75 else ["simt", "gemv"]))
    tensor = kind != "simt"
    block = draw(st.sampled_from([32, 64, 96, 128, 160, 256, 320] if tensor else [1, 10, 32, 33, 64, 100]))
    k = draw(st.integers(1, 24)) * 16 if tensor else draw(st.integers(1, 140))
    block = min(block, k)
    problem = Int8Problem(
        m=draw(st.integers(1, 8) if kind == "gemv" else st.sampled_from([1, 7, 17, 66])),
        n=draw(st.integers(1, 140)),
        k=k,
        block_size=block,
        bits=draw(st.sampled_from([4, 8])),
        x_offset=draw(st.booleans()),
        weight_offset=draw(st.booleans()),
        dtype=draw(st.sampled_from(list(DTYPES))),
        bias_dtype=draw(st.sampled_from([None, *DTYPES])),
        activation=draw(st.sampled_from(EPILOGUE_ACTIVATIONS)),
        limits=(-0.5, 0.75),
    )
    stride = problem.n + draw(st.sampled_from([0, 1, 2]))
    problem = replace(problem, even=stride % 2 == 0, y_stride=stride)
    gpu = facts(arch, backend)
    family: AnyFamily = GEMM_INT8_SIMT
    config: Config = GemmInt8SimtConfig()
    if kind == "gemv":
        assert layout_refusal(problem) is None
        rows = draw(st.sampled_from([rows for rows in (2, 4, 8) if rows >= problem.m]))
        family = GEMV_INT8
        config = GemvInt8Config(rows, draw(st.integers(1, 3)))
    elif kind == "mma":
        family = MMA[arch]
        assert family.refusal(problem, gpu) is None
        config = draw(st.sampled_from(family.configs(problem, gpu)))
    weight_block = block * draw(st.integers(1, 2)) if block < k else k
    check_product(backend, problem, family, config, gpu, weight_block, seed=draw(st.integers(0, 99)))


# A case has m, n, k, block_size, bits, x_offset, weight_offset, split_k.
FEW = (
    (1, 16, 4112, 4112, 4, False, False, 1),
    (2, 17, 4224, 128, 4, True, True, 1),
    (1, 33, 2208, 32, 8, False, True, 1),
    (2, 31, 2304, 96, 8, True, False, 2),
    (3, 15, 2176, 32, 4, False, True, 1),
    (4, 16, 1152, 384, 8, True, True, 1),
    (5, 1, 2064, 64, 4, True, True, 1),
    (8, 50, 2208, 32, 4, False, True, 2),
    (7, 18, 1040, 160, 8, False, True, 3),
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", fewer(FEW), ids=str)
def test_gemv_with_more_k_than_is_prefetched_at_once(backend: str, arch: int, case: tuple) -> None:
    """The kernel for few rows is right where K ends within a step or a chunk of k that it prefetches.

    Tiles extend beyond N, and x has fewer rows than the kernel.
    """
    *sizes, split_k = case
    problem = Int8Problem(*sizes, "float16", "float32", "clamp", (-0.5, 0.75), y_stride=sizes[1] + 1)
    gpu = facts(arch, backend)
    config = replace(GEMV_INT8.configs(problem, gpu)[0], split_k=split_k)
    weight_block = problem.k if problem.blocks == 1 else 2 * problem.block_size
    check_product(backend, problem, GEMV_INT8, config, gpu, weight_block, seed=1)


# A case has m, n, k, block_size, bits, x_offset, weight_offset, dtype, bias, clamp, and the padding of y's rows; then
# cluster, ctas, split_k and m64_tiles of the configuration.
HOPPER = (
    (70, 270, 272, 128, 4, False, False, "float16", "float16", True, 2, 2, 2),
    (70, 270, 272, 128, 4, False, True, "float16", None, False, 0, 1, 4),
    (1, 300, 400, 256, 8, True, True, "bfloat16", "float32", False, 4, 2, 2),
    (131, 40, 144, 128, 4, True, True, "float32", None, False, 1, 1, 1),
    (129, 257, 144, 32, 4, True, False, "float16", "bfloat16", False, 7, 1, 2),
    (65, 64, 192, 64, 4, False, True, "float16", None, True, 0, 1, 1),
    (66, 72, 1040, 1040, 4, True, True, "bfloat16", None, False, 0, 1, 1),
    (3, 515, 144, 32, 8, False, True, "float32", None, False, 5, 2, 4),
    (70, 270, 400, 32, 4, True, True, "float32", "float32", True, 1, 1, 4, 2),
    (66, 72, 1040, 1040, 8, False, False, "float16", None, False, 0, 1, 1),
    (70, 270, 784, 64, 4, False, False, "float16", "float32", False, 1, 1, 4, 2, 3),
    (131, 300, 1040, 128, 4, False, True, "float16", None, False, 0, 1, 8, 2),
    (131, 140, 1040, 128, 8, False, True, "bfloat16", None, True, 0, 1, 8, 2, 2),
    (131, 300, 1040, 128, 4, True, True, "float16", None, False, 0, 2, 2, 1, 2),
)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("case", fewer(HOPPER), ids=str)
def test_gemm_int8_sm90(backend: str, case: tuple) -> None:
    """Results are right where blocks are shorter or longer than a stage, and where the ring of stages is used again.

    CTAs take several tiles, some of which are partly empty.
    """
    m, n, k, block, bits, x_offset, weight_offset, dtype, bias, clamps, padding, *config = case
    problem = Int8Problem(
        *(m, n, k, block, bits, x_offset, weight_offset, dtype, bias),
        activation="clamp" if clamps else None,
        limits=(-0.5, 0.75),
        wide=(n + padding) * np.dtype(DTYPES[dtype]).itemsize % 16 == 0,
        y_stride=n + padding,
    )
    assert gemm_int8_sm90.block_refusal(problem) is None
    weight_block = k if problem.blocks == 1 else 2 * block
    gpu = facts(90, backend)
    check_product(backend, problem, GEMM_INT8_SM90, GemmInt8Sm90Config(*config), gpu, weight_block, seed=m)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("sizes", fewer([(133, 80, 288, 64, 2), (70, 272, 400, 128, 1), (3, 40, 144, 32, 1)]), ids=str)
@pytest.mark.parametrize("zero_points", [False, True])
def test_gemm_int8_sm90_with_one_scale_per_row_of_x(backend: str, sizes: tuple[int, ...], zero_points: bool) -> None:
    *shape, cluster = sizes
    kind = {"row_scales": True, "zero_points": zero_points}
    problem = Int8Problem(*shape, 4, False, zero_points, "float16", "float32", **kind)
    config = GemmInt8Sm90Config(cluster, 2)
    gpu = facts(90, backend)
    assert "x_row_scale" in GEMM_INT8_SM90.plan(config, problem, gpu).buffers
    check_product(backend, problem, GEMM_INT8_SM90, config, gpu, problem.block_size, seed=7)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("x_offset", [False, True])
def test_gemm_int8_sm90_adds_zero_points_to_the_codes(backend: str, x_offset: bool) -> None:
    problem = Int8Problem(70, 300, 272, 64, 4, x_offset, True, "float32", zero_points=True)
    config = GemmInt8Sm90Config(1, 2)
    check_product(backend, problem, GEMM_INT8_SM90, config, facts(90, backend), 64, seed=0)


def test_zero_points_need_whole_quotients_within_the_range_of_codes() -> None:
    codes, scale = np.zeros((2, 1, 1, 64), np.uint8), np.array([[0.5, 0.25], [0, 3]], np.float32)
    whole = np.array([[-8, 3], [0, 8]], np.float32)
    for change, expected in (([], True), ([(0, 1, 3.5)], False), ([(1, 1, 9)], False), ([(1, 0, np.nan)], False)):
        zeros = whole.copy()
        for row, block, value in change:
            zeros[row, block] = value
        offset = np.where(np.isnan(zeros), 1, zeros * scale).astype(np.float32)
        weight = BlockQuantizedWeight(codes, scale, offset, bits=4, block_size=32)
        found = weight.zero_points
        assert (found is not None) == expected
        if found is not None:
            np.testing.assert_array_equal(found, whole)
    assert BlockQuantizedWeight(codes, scale, whole * scale, bits=8, block_size=32).zero_points is None
    assert BlockQuantizedWeight(codes, scale, None, bits=4, block_size=32).zero_points is None


@pytest.mark.parametrize("bits", [4, 8])
def test_gemm_int8_sm90_reads_codes_row_by_row_whatever_their_strides(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (64, 40), dtype=np.uint8)
    columns = BlockQuantizedWeight(codes.T.reshape(40, 1, 1, 64), np.ones((40, 1), np.float32), None, bits=bits)
    problem = Int8Problem(64, 40, 64, 64, bits, False, False, "float16")
    found = GEMM_INT8_SM90.prepare_weight(columns, GemmInt8Sm90Config(1, 1), problem)["codes"]
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, codes.T.astype(np.int64) - (1 << bits - 1))


def test_selection_fills_the_sms_and_says_why_a_kernel_is_refused() -> None:
    h100, a100 = device.nominal(90), device.nominal(80)
    one = Int8Problem(9, 4096, 4096, 128, 4, False, True, "float16")
    few, many = select.choose(one, h100).config, select.choose(replace(one, m=4096), a100).config
    assert isinstance(few, WarpTileConfig)
    assert isinstance(many, WarpTileConfig)
    assert (few.block_m, few.split_k) == (16, 4)
    assert (many.block_m, many.block_n, many.split_k) == (64, 128, 1)
    assert select.choose(replace(one, m=4096), h100).config == GemmInt8Sm90Config(1, 132)
    assert select.choose(replace(one, m=128 * 33), h100).config == GemmInt8Sm90Config(1, 132)
    # y has 8 x 8 tiles, 128 rows by 192 columns; two CTAs divide K of each tile.
    assert select.choose(replace(one, m=948, n=1472, k=8192), h100).config == GemmInt8Sm90Config(1, 128, 2, 3)
    assert select.choose(replace(one, m=4096, block_size=96), h100).name == "gemm_int8_sm80"
    problem = Int8Problem(1, 64, 72, 36, 4, False, True, "float16")
    refusal = GEMM_INT8_SM75.refusal
    assert refusal(problem, device.nominal(72)) == "needs sm_75 or newer, not sm_72"
    assert refusal(problem, device.nominal(75)) == "needs a multiple of 16 columns, not 72"
    assert refusal(problem, a100) == "is replaced by gemm_int8_sm80 on sm_80"
    assert layout_refusal(replace(one, aligned=False)) == "needs xq to start at a multiple of 16 bytes"
    assert layout_refusal(replace(problem, k=96)) == "needs blocks that are multiples of 32 columns, not 36"
    assert layout_refusal(replace(one, activation="silu")) == "has no activation silu, only clamp"
    assert GEMM_INT8_SIMT.refusal(replace(one, activation="silu"), h100) == "has no activation silu, only clamp"
    expected = "needs blocks of 32, 64, or a multiple of 128 columns, not 96"
    assert GEMM_INT8_SM90.refusal(replace(problem, m=64, k=960, block_size=96), h100) == expected
    assert GEMM_INT8_SM90.refusal(one, device.nominal(100)) == "needs sm_90, not sm_100"
    assert GEMM_INT8_SM90.refusal(replace(one, m=4), h100) == "takes 5 rows or more, not 4"
    assert select.choose(problem, h100).name == "gemm_int8_simt"
    assert select.choose(replace(problem, k=72, block_size=72), h100).name == "gemm_int8_simt"
    with pytest.raises(ValueError, match=r"^no kernel fits: gemv_int8 has no activation silu, only clamp; "):
        select.choose(replace(one, m=1, activation="silu"), h100)


@pytest.mark.parametrize("arch", ARCHS)
def test_gemv_is_chosen_for_up_to_eight_rows(arch: int) -> None:
    """`gemv_int8` is chosen for 1 to 8 rows, but not for 9, unaligned x or a block size of 36.

    On sm_80, five to eight rows are modelled to take 3% longer than on tensor cores.
    """
    gpu = device.nominal(arch)
    problem = Int8Problem(8, 4096, 4096, 32, 4, False, True, "float16")
    choices = [select.choose(replace(problem, m=m), gpu) for m in range(1, 9)]
    most = 4 if arch == 80 else 8
    expected = [GemvInt8Config(rows, 1) for rows in (2, 2, 4, 4, 8, 8, 8, 8)]
    assert [choice.config for choice in choices[:most]] == expected[:most]
    assert all(choice.family is MMA[80] for choice in choices[most:])
    more = select.choose(replace(problem, m=9), gpu)
    assert more.family is (MMA[arch] if arch >= 75 else GEMM_INT8_SIMT)
    assert select.choose(replace(problem, aligned=False), gpu).family is GEMM_INT8_SIMT
    assert select.choose(replace(problem, block_size=36), gpu).family is GEMM_INT8_SIMT
    assert [GEMV_INT8.refusal(replace(problem, m=m), gpu) is None for m in (8, 9)] == [True, False]
    assert [GEMV_INT8.configs(replace(problem, m=m), gpu)[0] for m in range(1, 9)] == expected
    few_columns = select.choose(replace(problem, n=64, k=28672), gpu)
    assert few_columns.family is GEMV_INT8
    assert few_columns.config.split_k > 1
    assert select.choose(replace(problem, n=64, k=1024), gpu).config.split_k == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("m", "n", "k", "block"),
    [
        (1, 256, 512, 128),
        (8, 200, 512, 32),
        (9, 100, 96, 32),
        (300, 520, 1024, 128),
        (1000, 4096, 512, 64),
        (5, 7, 33, 10),
    ],
)
def test_gemm_int8_on_a_gpu_agrees_with_the_cpu(dtype: str, bits: int, m: int, n: int, k: int, block: int) -> None:
    import cupy

    rng = np.random.default_rng(m)
    weight = random_weight(rng, (n, 1, 1, k), block, bits, dtype=DTYPES[dtype])
    there = BlockQuantizedWeight(
        *map(cupy.asarray, (weight.codes, weight.scale, weight.offset)), bits=bits, block_size=block
    )
    x = rng.standard_normal((m, k)).astype(DTYPES[dtype])
    here, far = quantize_activations(x, block_size=block), quantize_activations(cupy.asarray(x), block_size=block)
    for a, b in zip(here, far, strict=True):
        np.testing.assert_array_equal(a, b.get())
    bias = rng.standard_normal(n).astype(np.float32)
    wanted = gemm_int8(*here, weight, bias=bias, activation="relu").astype(np.float64)
    out = cupy.asarray(np.full((m, n), np.nan, DTYPES[dtype]))
    y = gemm_int8(*far, there, bias=cupy.asarray(bias), activation="relu", out=out)
    assert y is out
    eps = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    np.testing.assert_allclose(y.get().astype(np.float64), wanted, rtol=2 * eps, atol=2e-5)
    for symmetric in (True, False):  # x has one scale per row, with or without offsets
        here, far = (
            quantize_activations(x, symmetric=symmetric),
            quantize_activations(cupy.asarray(x), symmetric=symmetric),
        )
        y = gemm_int8(*far, there, out=out).get().astype(np.float64)
        np.testing.assert_allclose(y, gemm_int8(*here, weight).astype(np.float64), rtol=2 * eps, atol=2e-5)
