# SPDX-License-Identifier: Apache-2.0
"""The kernels for INT8 activations, through their launch plans: simulated and on the GPU."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq import check
from cupy_awq.int8 import BlockQuantizedWeight, arguments, forms, gemm_int8, quantize_activations, reference
from cupy_awq.kernels import gemv_int8
from cupy_awq.kernels.gemv_int8 import GemvInt8Config
from cupy_awq.kernels.int8 import (
    Config,
    HopperConfig,
    IntegerProduct,
    MmaConfig,
    RowQuantization,
    SimtConfig,
    choose,
    configs,
    refuse,
    refuse_hopper,
    refuse_layout,
)
from cupy_awq.runtime import device
from tests.backends import BACKENDS, LANDINGS, runner
from tests.test_int8 import random_weight
from tests.test_kernels import ARCHS, DTYPES, facts, strided


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@given(data=st.data())
@settings(max_examples=8)
def test_quantization_gives_the_references_bits(backend: str, arch: int, data: st.DataObject) -> None:
    """Blocks of a part of a warp, of a warp and of a whole thread block, short last ones, NaN, infinity, zeros."""
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
    x[-1] = rng.integers(-254, 255, k) / 2  # where the largest is 127 the scale is 1, and many lie half-way
    x[-1, ::block] = 127
    x[0, : k // 2] = data.draw(st.sampled_from([0.0, 1.5, np.nan, np.inf, -np.inf]))
    x = strided(x, data.draw(st.sampled_from([0, 8])))
    x.flags.writeable = False
    wanted = reference.quantize(x, block, symmetric, "half_even" if half_even else "half_away")
    out = [None if a is None else np.full(a.shape, 77, a.dtype) for a in wanted]
    stride = x.strides[0] // x.itemsize
    problem = RowQuantization(m, k, block, dtype, symmetric, half_even, wide, stride)
    names = ("codes", "scale", "offset", "sums")
    runner(backend)(problem.plan(facts(arch, backend)), {"x": x, **dict(zip(names, out, strict=True))})
    for name, got, expected in zip(names, out, wanted, strict=True):
        np.testing.assert_array_equal(got, expected, err_msg=name)


def check_product(
    backend: str,
    problem: IntegerProduct,
    config: Config,
    here: device.Device,
    weight_block: int,
    seed: int,
    whole_zeros: bool = False,
) -> None:
    """One launch over random codes, with NaN where it must write."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[problem.dtype]
    shape = (problem.n, 1, 1, problem.k)
    weight = random_weight(rng, shape, weight_block, problem.bits, problem.weight_offset, np.float32)
    if whole_zeros:
        offset = rng.integers(-8, 9, weight.scale.shape).astype(np.float32) * weight.scale
        weight = BlockQuantizedWeight(weight.codes, weight.scale, offset, bits=4, block_size=weight_block)
    x = rng.standard_normal((problem.m, problem.k)).astype(np.float32)
    x[0] = 1.0  # codes of -128 and 127 alone, as the largest products have
    x[0, ::2] = -1.0
    x_block = problem.k if problem.row_scales else problem.block
    quantized = quantize_activations(x, block_size=x_block, symmetric=not problem.x_offset)
    bias = rng.standard_normal(problem.n).astype(DTYPES[problem.bias_dtype]) if problem.bias_dtype else None
    stride = problem.n if problem.stride is None else problem.stride
    y = strided(np.full((problem.m, problem.n), np.nan, dtype), stride - problem.n)
    partials, counters = config.workspace(problem)
    buffers = {
        **dict(zip(("xq", "x_scale", "x_offset", "x_sums"), quantized, strict=True)),
        "bias": bias,
    }
    if isinstance(config, HopperConfig):
        buffers["codes"] = forms.byte_codes(weight)
        buffers["parameters"] = forms.tile_parameters(weight, problem.block, problem.x_offset)
    else:
        buffers["codes"] = forms.product_codes(weight)
        buffers["parameters"] = forms.product_parameters(weight, problem.block)
    for a in buffers.values():
        if a is not None:
            a.flags.writeable = False
    scratch = {"partials": np.full(partials // 4, np.nan, np.float32), "counters": np.zeros(counters, np.uint32)}
    runner(backend)(config.plan(problem, here), {**buffers, **scratch, "y": y})
    sizes = arguments.quantized(*quantized, weight, x_block, bias, None)
    assert (sizes.block, sizes.row_scales) == (problem.block, problem.row_scales)
    if problem.row_scales:
        quantized = quantized[0], *forms.in_blocks(quantized[0], *quantized[1:3], problem.block)
    exact = np.empty((problem.m, problem.n), np.float64)
    form = check.Activation(problem.activation, problem.limits)
    reference.gemm(*quantized, weight, sizes._replace(dtype=np.dtype(np.float64)), bias, form, exact)
    size = np.sqrt((x.astype(np.float64) ** 2).sum(1, keepdims=True) / problem.k) + np.abs(exact)
    eps = float(ml_dtypes.finfo(dtype).eps)
    error = np.abs(y.astype(np.float64) - exact)
    assert (error <= eps * np.abs(exact) + 4e-6 * size * np.sqrt(problem.k)).all(), (error / size).max()
    assert not scratch["counters"].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", [75, 80])
@pytest.mark.parametrize("m", [1, 20, 70, 130])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_tile_of_the_tensor_cores(backend: str, arch: int, m: int, bits: int) -> None:
    """All tiles with one split and with two, on a shape whose last tiles are partly empty in M, N and K."""
    problem = IntegerProduct(m, 150, 288, 64, bits, True, True, "float16", "float32")
    here = facts(arch, backend)
    found = [c for c in configs(problem, here) if c.block_m in (16, 32) or m > 20]
    assert {c.splits for c in found} == {1, 2}
    for config in found:
        check_product(backend, problem, config, here, 64, seed=m)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("arch", ARCHS)
@given(data=st.data())
@settings(max_examples=10)
def test_any_integer_product(backend: str, arch: int, data: st.DataObject) -> None:
    """Block sizes that meet within a tile, short last blocks, x in finer blocks than the weight, both epilogues."""
    draw = data.draw
    kind = draw(st.sampled_from(["simt", "gemv", "mma"] if arch >= 75 else ["simt", "gemv"]))
    tensor = kind != "simt"
    block = draw(st.sampled_from([32, 64, 96, 128, 160, 256, 320] if tensor else [1, 10, 32, 33, 64, 100]))
    k = draw(st.integers(1, 24)) * 16 if tensor else draw(st.integers(1, 140))
    block = min(block, k)
    problem = IntegerProduct(
        m=draw(st.integers(1, 8) if kind == "gemv" else st.sampled_from([1, 7, 17, 66])),
        n=draw(st.integers(1, 140)),
        k=k,
        block=block,
        bits=draw(st.sampled_from([4, 8])),
        x_offset=draw(st.booleans()),
        weight_offset=draw(st.booleans()),
        dtype=draw(st.sampled_from(list(DTYPES))),
        bias_dtype=draw(st.sampled_from([None, *DTYPES])),
        activation=draw(st.sampled_from([None, "clamp"])),
        limits=(-0.5, 0.75),
    )
    stride = problem.n + draw(st.sampled_from([0, 1, 2]))
    problem = replace(problem, even=stride % 2 == 0, stride=stride)
    here = facts(arch, backend)
    config: Config = SimtConfig()
    if kind == "gemv":
        assert refuse_layout(problem) is None
        rows = draw(st.sampled_from([rows for rows in (2, 4, 8) if rows >= problem.m]))
        config = GemvInt8Config(rows, draw(st.integers(1, 3)))
    elif kind == "mma":
        assert refuse(problem, here) is None
        config = draw(st.sampled_from(configs(problem, here)))
    weight_block = block * draw(st.integers(1, 2)) if block < k else k
    check_product(backend, problem, config, here, weight_block, seed=draw(st.integers(0, 99)))


# m, n, k, block, bits, x_offset, weight_offset, splits
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
@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_rows_on_weights_that_come_in_several_rounds(backend: str, arch: int, case: tuple) -> None:
    """More of K than all warps have under way, ends within a step and a chunk, columns past n, rows that x lacks."""
    *sizes, splits = case
    problem = IntegerProduct(*sizes, "float16", "float32", "clamp", (-0.5, 0.75), stride=sizes[1] + 1)
    here = facts(arch, backend)
    config = replace(gemv_int8.choose(problem, here), splits=splits)
    check_product(backend, problem, config, here, problem.k if problem.blocks == 1 else 2 * problem.block, seed=1)


# m, n, k, block, bits, x_offset, weight_offset, dtype, bias, clamps, spare columns of y, cluster, blocks
HOPPER = (
    (70, 270, 272, 128, 4, False, True, "float16", None, False, 0, 1, 4),
    (70, 270, 272, 128, 4, False, False, "float16", "float16", True, 2, 2, 2),
    (131, 40, 144, 128, 4, True, True, "float32", None, False, 1, 1, 1),
    (1, 300, 400, 256, 8, True, True, "bfloat16", "float32", False, 4, 2, 2),
    (65, 64, 192, 64, 4, False, True, "float16", None, True, 0, 1, 1),
    (129, 257, 144, 32, 4, True, False, "float16", "bfloat16", False, 7, 1, 2),
    (3, 515, 144, 32, 8, False, True, "float32", None, False, 5, 2, 4),
    (66, 72, 1040, 1040, 8, False, False, "float16", None, False, 0, 1, 1),
    (66, 72, 1040, 1040, 4, True, True, "bfloat16", None, False, 0, 1, 1),
)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_integer_products_of_hopper(backend: str, case: tuple) -> None:
    """Blocks within and across steps of 128 k, stages that come round, several tiles a block, ends in M, N and K."""
    m, n, k, block, bits, x_offset, weight_offset, dtype, bias, clamps, spare, cluster, blocks = case
    problem = IntegerProduct(
        *(m, n, k, block, bits, x_offset, weight_offset, dtype, bias),
        activation="clamp" if clamps else None,
        limits=(-0.5, 0.75),
        wide=(n + spare) * np.dtype(DTYPES[dtype]).itemsize % 16 == 0,
        stride=n + spare,
    )
    here = facts(90, backend)
    assert refuse_hopper(problem, here) is None
    weight_block = k if problem.blocks == 1 else 2 * block
    check_product(backend, problem, HopperConfig(cluster, blocks), here, weight_block, seed=m)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("sizes", [(70, 272, 400, 128, 1), (133, 80, 288, 64, 2), (3, 40, 144, 32, 1)], ids=str)
@pytest.mark.parametrize("whole_zeros", [False, True])
def test_rows_with_one_scale_over_blocks_of_the_weight(backend: str, sizes: tuple[int, ...], whole_zeros: bool) -> None:
    *shape, cluster = sizes
    problem = IntegerProduct(*shape, 4, False, False, "float16", "float32", row_scales=True)
    here = facts(90, backend)
    check_product(backend, problem, HopperConfig(cluster, 2), here, problem.block, seed=7, whole_zeros=whole_zeros)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("x_offset", [False, True])
def test_offsets_that_are_whole_scales_become_codes(backend: str, x_offset: bool) -> None:
    problem = IntegerProduct(70, 300, 272, 64, 4, x_offset, False, "float32", wide=True)
    check_product(backend, problem, HopperConfig(1, 2), facts(90, backend), 64, seed=0, whole_zeros=True)


def test_zeros_are_whole_only_where_all_are_and_codes_have_room() -> None:
    codes, scale = np.zeros((2, 1, 1, 64), np.uint8), np.array([[0.5, 0.25], [0, 3]], np.float32)
    whole = np.array([[-8, 3], [0, 8]], np.float32)
    for change, expected in (([], True), ([(0, 1, 3.5)], False), ([(1, 1, 9)], False), ([(1, 0, np.nan)], False)):
        zeros = whole.copy()
        for row, block, value in change:
            zeros[row, block] = value
        offset = np.where(np.isnan(zeros), 1, zeros * scale).astype(np.float32)
        weight = BlockQuantizedWeight(codes, scale, offset, bits=4, block_size=32)
        found = forms.whole_zeros(weight)
        assert (found is not None) == expected
        if found is not None:
            np.testing.assert_array_equal(found, whole)
    assert forms.whole_zeros(BlockQuantizedWeight(codes, scale, whole * scale, bits=8, block_size=32)) is None
    assert forms.whole_zeros(BlockQuantizedWeight(codes, scale, None, bits=4, block_size=32)) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_in_any_order_of_memory_are_bytes_row_by_row(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (64, 40), dtype=np.uint8)
    columns = BlockQuantizedWeight(codes.T.reshape(40, 1, 1, 64), np.ones((40, 1), np.float32), None, bits=bits)
    found = forms.byte_codes(columns)
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, codes.T.astype(np.int64) - (1 << bits - 1))


def test_selection_fills_the_multiprocessors_and_says_why_it_refuses() -> None:
    here = device.nominal(90)
    one = IntegerProduct(9, 4096, 4096, 128, 4, False, True, "float16")
    few, many = choose(one, here), choose(replace(one, m=4096), device.nominal(80))
    assert isinstance(few, MmaConfig)
    assert isinstance(many, MmaConfig)
    assert (few.block_m, few.splits) == (16, 8)
    assert (many.block_m, many.block_n, many.splits) == (128, 128, 1)
    assert choose(replace(one, m=4096), here) == HopperConfig(2, 132)
    assert choose(replace(one, m=128 * 33), here) == HopperConfig(1, 132)
    assert isinstance(choose(replace(one, m=4096, block=96), here), MmaConfig)
    problem = IntegerProduct(1, 64, 72, 36, 4, False, True, "float16")
    assert refuse(problem, device.nominal(72)) == "needs sm_75 or newer, not sm_72"
    assert refuse(problem, here) == "needs rows of xq that start at multiples of 16 bytes"
    assert refuse(replace(problem, k=96), here) == "needs blocks that are multiples of 32 columns, not 36"
    wanted = "needs blocks of 32, 64, or a multiple of 128 columns, not 96"
    assert refuse_hopper(replace(problem, k=960, block=96), here) == wanted
    assert refuse_hopper(one, device.nominal(100)) == "needs sm_90, not sm_100"
    assert isinstance(choose(problem, here), SimtConfig)
    assert isinstance(choose(replace(problem, k=72, block=72), here), SimtConfig)


@pytest.mark.parametrize("arch", ARCHS)
def test_up_to_eight_rows_are_for_the_kernel_that_reads_weights_once(arch: int) -> None:
    """Both sides of the edge, the rows a block holds, and splits where columns leave multiprocessors idle alone."""
    here = device.nominal(arch)
    problem = IntegerProduct(8, 4096, 4096, 32, 4, False, True, "float16")
    assert choose(problem, here) == GemvInt8Config(8, 1)
    assert isinstance(choose(replace(problem, m=9), here), MmaConfig if arch >= 75 else SimtConfig)
    assert isinstance(choose(replace(problem, aligned=False), here), SimtConfig)
    assert isinstance(choose(replace(problem, block=36), here), SimtConfig)
    rows = [choose(replace(problem, m=m), here).rows for m in range(1, 9)]
    assert rows == [2, 2, 4, 4, 8, 8, 8, 8]
    few_columns = choose(replace(problem, n=64, k=28672), here)
    assert isinstance(few_columns, GemvInt8Config)
    assert few_columns.splits > 1
    assert choose(replace(problem, n=64, k=1024), here).splits == 1
    assert {c.splits for c in gemv_int8.configs(replace(problem, n=4096 * 16))} == {1, 2, 4}
    assert {c.splits for c in gemv_int8.configs(replace(problem, n=4096 * 16 + 1))} == {1}


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
def test_operations_on_a_gpu_agree_with_those_on_the_cpu(
    dtype: str, bits: int, m: int, n: int, k: int, block: int
) -> None:
    import cupy

    from cupy_awq.int8 import BlockQuantizedWeight

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
    for symmetric in (True, False):  # one scale a row
        here, far = (
            quantize_activations(x, symmetric=symmetric),
            quantize_activations(cupy.asarray(x), symmetric=symmetric),
        )
        y = gemm_int8(*far, there, out=out).get().astype(np.float64)
        np.testing.assert_allclose(y, gemm_int8(*here, weight).astype(np.float64), rtol=2 * eps, atol=2e-5)
