# SPDX-License-Identifier: Apache-2.0
"""`Int8Linear` and its kernels against float64 products: on the CPU, simulated for every architecture, and on a GPU."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq import AwqLinear, BlockQuantizedWeight, Int8Linear
from cupy_awq.activation import FUNCTIONS
from cupy_awq.block_check import validate_block_weight
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, INT8_FRAGMENTS, INT8_ROWS, Problem
from cupy_awq.kernels.registry import FAMILIES, FAMILIES_OF
from cupy_awq.ops.repack import scale_exponent
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device
from cupy_awq.tools.testing import random_activations, random_weight
from tests.backends import BACKENDS, GPU, LANDINGS, few_examples, runner, sample
from tests.simt.seeds import OUTSIDE, VALUES, Seed, assert_caught
from tests.test_kernels import BOUNDS, DTYPES, check_matmul, expected, facts
from tests.test_mma_repacked import ARCHS, few_sms, tile

TILES, SIMT = FAMILIES["gemm_mma_fragments"], FAMILIES["gemm_w8a16_simt"]


def random_block_weight(
    rng: np.random.Generator, k: int, n: int, block_size: int, dtype: str = "float16", offsets: bool = False
) -> BlockQuantizedWeight:
    """Return a random 8-bit weight [N, 1, 1, K]."""
    blocks = -(-k // block_size)
    scale = (rng.uniform(0.5, 1.5, (n, blocks)) / (64 * np.sqrt(k))).astype(DTYPES[dtype])
    offset = (rng.normal(0, 40, scale.shape) * scale.astype(float)).astype(DTYPES[dtype]) if offsets else None
    codes = rng.integers(0, 256, (n, 1, 1, k), dtype=np.uint8)
    return BlockQuantizedWeight(codes, scale, offset, bits=8, block_size=block_size)


def float64_values(weight: BlockQuantizedWeight) -> np.ndarray:
    """Return the values of a weight [N, 1, 1, K] as float64 [K, N]."""
    n, _, _, k = weight.shape
    block = np.arange(k) // weight.block_size
    w = (weight.codes.reshape(n, k).astype(np.float64) - 128) * weight.scale.astype(np.float64)[:, block]
    return (w if weight.offset is None else w + weight.offset.astype(np.float64)[:, block]).T


def put(a: Any) -> Any:
    """Return an array or a block-quantized weight on the GPU; None stays None."""
    import cupy

    if isinstance(a, BlockQuantizedWeight):
        arrays = (put(a.codes), put(a.scale), put(a.offset))
        return BlockQuantizedWeight(*arrays, bits=a.bits, block_size=a.block_size)
    return None if a is None else cupy.asarray(a)


def check_layer(place: Any, get: Any, m: int, k: int, n: int, block_size: int, dtype: str, **options: Any) -> Any:
    """Check calls of a layer with every operand against float64, into NaN, on the device of ``place``; return it."""
    rng = np.random.default_rng(m)
    weight = random_block_weight(rng, k, n, block_size, dtype, offsets=options.pop("offsets"))
    bias = rng.standard_normal(n).astype(np.float32)
    layer = Int8Linear(place(weight), bias=place(bias), dtype=dtype, **options)
    gated = options.get("activation") == "swiglu"
    kind = "silu" if gated else {"relu": "clamp"}.get(options.get("activation", ""), options.get("activation"))
    problem = Problem(m, n, k, block_size, dtype, dtype, activation=kind, limits=(0.0, np.inf), gated=gated)
    x = random_activations(rng, m, k, dtype=DTYPES[dtype])
    out = np.full((m, n // (1 + gated) + 8), np.nan, DTYPES[dtype])
    residual = rng.standard_normal((m, n // (1 + gated))).astype(DTYPES[dtype])
    target = place(out)[:, :-8]
    found = layer(place(x), residual=place(residual), out=target)
    assert found is target
    y, size = expected(problem, x, float64_values(weight), bias, residual)
    scale = size + np.abs(y)
    assert (np.abs(get(target).astype(np.float64) - y) <= 20 * BOUNDS[dtype] * scale).all()
    assert np.linalg.norm(get(target).astype(np.float64) - y) <= BOUNDS[dtype] * np.linalg.norm(scale)
    return layer, place(x), place(residual), target


CASES = [
    (1, 128, 64, 128, "float16", {"offsets": False}),
    (5, 128, 64, 32, "bfloat16", {"offsets": True, "activation": "relu"}),
    (17, 192, 128, 128, "float16", {"offsets": True, "activation": "swiglu"}),
    (40, 128, 40, 64, "float16", {"offsets": False, "activation": "gelu", "batch_invariant": True}),
    (3, 100, 37, 24, "float16", {"offsets": True, "activation": "relu"}),
    (9, 70, 48, 70, "bfloat16", {"offsets": False, "activation": "swiglu"}),
    (6, 128, 64, 16, "float32", {"offsets": True}),
]


@pytest.mark.parametrize(("m", "k", "n", "block_size", "dtype", "options"), CASES)
def test_layer_on_the_cpu_matches_the_float64_product(
    m: int, k: int, n: int, block_size: int, dtype: str, options: dict[str, Any]
) -> None:
    layer, x, residual, y = check_layer(lambda a: a, lambda a: a, m, k, n, block_size, dtype, **options)
    plan = layer.plan(x, residual=residual, out=y)
    np.testing.assert_array_equal(plan(x, np.empty_like(y), residual=residual), y)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(twin(x, residual=residual), y)
        assert repr(twin) == repr(layer)
    assert (layer.shape, layer.group_size, layer.kernel_for(m)) == ((k, n), min(block_size, k), "numpy")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": None}, TypeError, "weight: expected a BlockQuantizedWeight, got NoneType"),
        ({"bits": 4}, ValueError, "weight: expected 8 bits and [N, 1, 1, K], got 4 bits and (24, 1, 1, 64)"),
        ({"window": 3}, ValueError, "weight: expected 8 bits and [N, 1, 1, K], got 8 bits and (24, 3, 3, 64)"),
        ({"bias": np.zeros(16, np.float16)}, ValueError, "bias: expected float16, bfloat16 or float32 [N] = [24]"),
        ({"activation": "elu"}, ValueError, "activation: expected relu, "),
        ({"activation": "swiglu"}, ValueError, "weight: expected N divisible by 16 for a gated activation, got N = 24"),
        ({"dtype": "int8"}, TypeError, "dtype: expected float16, bfloat16 or float32"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    window, bits = change.pop("window", 1), change.pop("bits", 8)
    codes, scale = np.zeros((24, window, window, 64), np.uint8), np.ones((24, 1), np.float16)
    weight = change.pop("weight", BlockQuantizedWeight(codes, scale, None, bits=bits))
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        Int8Linear(weight, **change)


def test_x_of_another_dtype_is_refused() -> None:
    layer = Int8Linear(random_block_weight(np.random.default_rng(0), 64, 16, 64), dtype="bfloat16")
    with pytest.raises(TypeError, match=r"^x: expected bfloat16, the dtype of the 8-bit layer, got float16$"):
        layer(np.zeros((1, 64), np.float16))


def test_float16_weights_below_its_normal_range_keep_their_bits() -> None:
    """Scales that float16 itself cannot represent are stored times a power of two."""
    rng = np.random.default_rng(3)
    scale = rng.uniform(1e-9, 4e-9, (8, 2)).astype(np.float32)
    codes = rng.integers(0, 256, (8, 1, 1, 128), dtype=np.uint8)
    weight = validate_block_weight(BlockQuantizedWeight(codes, scale, None, bits=8))
    assert scale_exponent(scale) == 33
    assert [scale_exponent(np.full((1, 1), value)) for value in (0.0, np.inf, 1e30, 1e-45)] == [0, 0, -94, 100]
    operand = Int8Linear(weight, dtype="float32")._operand
    half = type(operand)(operand.spec._replace(dtype=DTYPES["float16"]), operand.qweight, operand.scales, None)
    problem = Problem(3, 8, 128, 64, "float16", "float16", "symmetric", layouts=(INT8_FRAGMENTS,))
    found = half.in_fragments()
    problem = replace(problem, scale_exponent=found.scale_exponent)
    x = random_activations(rng, 3, 128) * np.float16(4096)
    y = np.full((3, 8), np.nan, np.float16)
    here = facts(80, "latest")
    config = TILES.configs(problem, here)[0]
    buffers = {"weight": found.repacked, "bias": None, "residual": None, "x": x, "y": y}
    runner("latest")(TILES.plan(config, problem, here), buffers | {"partials": None, "counters": None})
    reference = x.astype(np.float64) @ float64_values(weight)
    np.testing.assert_allclose(y.astype(float), reference, rtol=0.01, atol=1e-5)


def int8_problem(data: st.DataObject, rows: list[int], dtypes: tuple[str, ...], layout: str) -> Problem:
    """Draw a problem of any group size, offsets, epilogue and partly empty tiles."""
    fits = layout == INT8_FRAGMENTS
    group_size = data.draw(st.sampled_from([16, 32, 64, 128, 256] if fits else [1, 8, 24, 100, 128]))
    gated = data.draw(st.booleans())
    step = (64 if gated else 8) if fits else 1 + gated
    k = data.draw(st.integers(1, 9)) * 64 if fits else data.draw(st.sampled_from([100, 104, 256]))
    dtype = data.draw(st.sampled_from(dtypes))
    return Problem(
        m=data.draw(st.sampled_from(rows)),
        n=data.draw(st.integers(1, max(1, 256 // step) if fits else 30)) * step,
        k=k,
        group_size=min(group_size, k),
        dtype=dtype,
        scales_dtype=dtype,
        zeros=data.draw(st.sampled_from(["symmetric", "float"])),
        bias_dtype=data.draw(st.sampled_from([None, "float16", "float32"])),
        residual=data.draw(st.booleans()),
        activation=data.draw(st.sampled_from([None, "clamp", *FUNCTIONS])),
        limits=(-0.5, 0.75),
        gated=gated,
        layouts=(layout,),
    )


@pytest.mark.parametrize("backend", LANDINGS)
@given(data=st.data())
@few_examples
def test_any_problem_on_tensor_cores(backend: str, data: st.DataObject) -> None:
    """Products are right for every group size, offsets, dtype, epilogue, partly empty tiles and stream-K."""
    arch = data.draw(st.sampled_from((*ARCHS, 90)))
    dtypes = ("float16",) if arch == 75 else ("float16", "bfloat16")
    problem = int8_problem(data, [1, 2, 3, 7, 8, 9, 16, 17, 33, 48, 65, 100, 130], dtypes, INT8_FRAGMENTS)
    here = few_sms(arch, backend, data.draw(st.sampled_from([2, 4, 9])))
    config = data.draw(st.sampled_from(TILES.configs(problem, here)))
    pad = data.draw(st.sampled_from([0, 8]))
    check_matmul(runner(backend), problem, TILES, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", [60, 75, 80, 90])
@given(data=st.data())
@few_examples
def test_any_problem_on_cuda_cores(backend: str, arch: int, data: st.DataObject) -> None:
    """Products are right for every K, N, group size and alignment, with rows on both sides of those of a warp."""
    problem = int8_problem(data, [1, 3, 4, 5, 9], tuple(DTYPES), INT8_ROWS)
    here = facts(arch, backend)
    (config,) = SIMT.configs(problem, here)
    pad = data.draw(st.sampled_from([0, 1, 8]))
    check_matmul(runner(backend), problem, SIMT, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
@pytest.mark.parametrize(
    ("arch", "m", "k", "dtype", "zeros"),
    [
        (80, 5, 2112, "float16", "float"),
        (75, 16, 1088, "float16", "symmetric"),
        (90, 16, 1088, "bfloat16", "float"),
        (80, 50, 320, "bfloat16", "symmetric"),
        pytest.param(75, 50, 1088, "float16", "float", marks=pytest.mark.slow),
        pytest.param(80, 200, 576, "float16", "float", marks=pytest.mark.slow),
        pytest.param(80, 200, 576, "bfloat16", "float", marks=pytest.mark.slow),
        pytest.param(75, 200, 576, "float16", "symmetric", marks=pytest.mark.slow),
    ],
)
def test_every_tile(backend: str, arch: int, m: int, k: int, dtype: str, zeros: str) -> None:
    """Each layout of warps is right; K ends within a weight tile, and the ring of stages is used more than once."""
    problem = Problem(m, 200, k, 64, dtype, dtype, zeros, layouts=(INT8_FRAGMENTS,))
    here = few_sms(arch, backend, 3)
    configs = {tile(config): config for config in TILES.configs(problem, here)}
    assert len(configs) >= 3
    for config in sample(list(configs.values()), backend, 2, m):
        few = replace(config, stages=min(config.stages, 3))
        check_matmul(runner(backend), problem, TILES, few, here, seed=m)


@pytest.mark.parametrize("arch", [75, 80, 90])
def test_selection_knows_the_bits_of_a_weight(arch: int) -> None:
    """A kernel for weights of other bits refuses, and tensor cores are chosen for any M where they can read it."""
    gpu = device.nominal(arch)
    names = {INT8_FRAGMENTS: "gemm_mma_fragments", INT8_ROWS: "gemm_w8a16_simt"}
    for layout, name in names.items():
        for m in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 4096):
            problem = Problem(m, 4096, 4096, 128, zeros="symmetric", layouts=(layout,))
            found = select.candidates(problem, gpu)
            assert [kernel for kernel, some in found.items() if not isinstance(some, str)] == [name]
            assert select.choose(problem, gpu).name == name
    assert "int8" in select.explain(problem, gpu).splitlines()[0]
    assert problem.weight_bytes == 4096 * (4096 + 2 * 32)
    four = Problem(16, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS))
    assert isinstance(select.candidates(four, gpu)["gemm_w8a16_simt"], str)


@pytest.mark.parametrize("arch", [80, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (75, 89, 120))])
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_fastest_configurations_use_no_local_memory(arch: int, dtype: str) -> None:
    gpu = device.nominal(arch)
    if arch == 75:
        dtype = "float16"
    for m in (8, 48, 128):
        problem = Problem(m, 4096, 4096, 128, dtype, dtype, "float", layouts=(INT8_FRAGMENTS,))
        resources = compiler.build(select.choose(problem, gpu).plan.kernel).resources
        assert resources is not None
        assert resources.local_bytes == 0


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
def test_batch_invariant_rows_have_the_same_bits_for_every_m(backend: str) -> None:
    rng, run, here = np.random.default_rng(1), runner(backend), facts(80, backend)
    weight = Int8Linear(random_block_weight(rng, 704, 96, 64))._operand.in_fragments()
    x, rows = random_activations(rng, 100, 704), []
    for m in (1, 7, 16, 40, 100):
        problem = Problem(m, 96, 704, 64, zeros="symmetric", layouts=(INT8_FRAGMENTS,), batch_invariant=True)
        problem = replace(problem, scale_exponent=weight.scale_exponent)
        y = np.zeros((m, 96), np.float16)
        buffers = {"weight": weight.repacked, "bias": None, "residual": None, "x": x[:m].copy(), "y": y}
        run(select.choose(problem, here).plan, buffers | {"partials": None, "counters": None})
        rows.append(y.view(np.uint16))
    for y in rows:
        np.testing.assert_array_equal(y, rows[-1][: len(y)])


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n", "block_size", "dtype", "options"), [*CASES, (700, 256, 320, *CASES[0][3:])])
def test_layer_on_the_gpu_matches_the_float64_product(
    m: int, k: int, n: int, block_size: int, dtype: str, options: dict[str, Any]
) -> None:
    """Calls, plans, captured graphs and copies of a layer agree, on every path."""
    import cupy

    layer, x, residual, y = check_layer(put, cupy.asnumpy, m, k, n, block_size, dtype, **options)
    plan = layer.plan(x, residual=residual, out=y)
    assert plan.kernel == layer.kernel_for(m)
    found = put(np.full(y.shape, np.nan, y.dtype))
    wide = put(np.full((m, y.shape[1] + 8), np.nan, y.dtype))[:, :-8]
    results = [
        plan(x, wide, residual=residual),
        layer(x, residual=residual),
        copy.deepcopy(layer)(x, residual=residual),
    ]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        layer(x, residual=residual, out=found)
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    for result in (*results, found):
        np.testing.assert_array_equal(result.get().view(np.uint8), np.ascontiguousarray(y.get()).view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [128, 104])
def test_layer_reads_codes_of_any_strides_and_alignment(k: int) -> None:
    import cupy

    rng = np.random.default_rng(5)
    weight, x = random_block_weight(rng, k, 64, k), random_activations(rng, 3, k)
    memory = cupy.zeros((64, 1, 1, 2 * k + 1), np.uint8)
    for place in (slice(1, k + 1), slice(0, 2 * k, 2)):
        memory[..., place] = put(weight.codes)
        strided = BlockQuantizedWeight(memory[..., place], put(weight.scale), None, bits=8)
        np.testing.assert_array_equal(Int8Linear(strided)(put(x)).get(), Int8Linear(put(weight))(put(x)).get())


@pytest.mark.gpu
def test_layer_frees_its_weight_where_tensor_cores_read_another_layout() -> None:
    weight = put(random_block_weight(np.random.default_rng(0), 4096, 512, 4096))
    layer = Int8Linear(weight)
    assert layer._operand.has_original == (layer.kernel_for(1) == "gemm_w8a16_simt")
    assert layer.nbytes <= 1.05 * weight.nbytes
    assert isinstance(AwqLinear(random_weight(np.random.default_rng(0), 64, 16, 16)), AwqLinear)


LOOP, LAYOUT = "gemm/gemm_mma_fragments_mainloop.cuh", "gemm/repacked_layout.cuh"
COPIES, FALLBACK = "gemm/gemm_mma_fragments_copies.cuh", "gemm/gemm_w8a16_simt.cu"
BYTES = "dequantize/unpack_bytes.cuh"
FEW = Problem(3, 104, 320, 32, zeros="float", layouts=(INT8_FRAGMENTS,))
ROWS = Problem(5, 44, 104, 8, zeros="float", gated=True, activation="silu", layouts=(INT8_ROWS,))


def tiles(file: str, old: str, new: str, caught: tuple[str, str] = VALUES, dtype: str = "float16") -> Seed:
    """Return a bug to plant in the tensor-core kernel."""
    return Seed("gemm_mma_fragments", 80, file, old, new, caught, replace(FEW, dtype=dtype, scales_dtype=dtype))


def dependent(old: str, new: str, caught: tuple[str, str]) -> Seed:
    """Return a bug to plant in a dependent launch of the tensor-core kernel (PDL)."""
    return replace(tiles(LOOP, old, new, caught), arch=90)


def rows(old: str, new: str, caught: tuple[str, str] = VALUES) -> Seed:
    """Return a bug to plant in the kernel on CUDA cores."""
    return Seed("gemm_w8a16_simt", 80, FALLBACK, old, new, caught, ROWS)


SEEDS = {
    "words of the wrong step of 16 k": tiles(LOOP, "step % 2 * 2;", "(step + 1) % 2 * 2;"),
    "codes of the wrong 32 k": tiles(LOOP, "[step / 2 % 2].values", "[0].values"),
    "the preceding kernel is not waited for": dependent("      ptx::griddepcontrol_wait();\n", "", ("early", "early")),
    "x is copied before the preceding kernel has written it": dependent(
        "fill<0, false, true>(copies, weight", "fill<0, true, true>(copies, weight", ("race", "early")
    ),
    "the weight of the first stages is not copied": dependent(
        "fill<0, false, true>(copies, weight",
        "fill<0, false, true>(copies, 0 * weight",
        ("uninitialised", "uninitialised"),
    ),
    "one vector of codes is loaded twice": tiles(LOOP, "* C::kCodeVectors + v) * 512", "* C::kCodeVectors) * 512"),
    "groups where those of 4-bit codes are": tiles(COPIES, "C::kTileCodeBytes + (", "kCodeBytes + ("),
    "the scale of the other column": tiles(LAYOUT, "= scale<1>(pairs[1])", "= scale<0>(pairs[1])"),
    "scales in place of offsets": tiles(LAYOUT, "ld_shared_u32(scales + 32 +", "ld_shared_u32(scales +"),
    "bytes in the order of registers": tiles(BYTES, "0x64646464u, 0x5250", "0x64646464u, 0x5150"),
    "bfloat16 codes without their sign": tiles(BYTES, "- 8388736.0f", "- 8388608.0f", dtype="bfloat16"),
    "rows of x past the last row": rows("min(row_begin + r, m - 1)", "row_begin + r", OUTSIDE),
    "rows of y past the last row": rows("threadIdx.x % 32 != 0 || row >= m", "threadIdx.x % 32 != 0", OUTSIDE),
    "columns past the last one": rows("if (column >= n / kHalves) return;\n", "", OUTSIDE),
    "the gate's weight for the up projection": rows("column + half * (n / 2)", "column"),
    "the groups of the first column": rows("weight_row * groups + begin", "begin"),
    "the offset is left out": rows("scale, offset);", "scale, 0.0f);"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_planted_bug_is_caught(name: str) -> None:
    assert_caught(SEEDS[name])


def test_every_8_bit_kernel_is_registered() -> None:
    assert {"gemm_mma_fragments", "gemm_w8a16_simt"} <= set(FAMILIES_OF[Problem])
