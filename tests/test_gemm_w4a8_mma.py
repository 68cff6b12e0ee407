# SPDX-License-Identifier: Apache-2.0
"""Tests of `gemm_w4a8_mma`, run from its launch plans on the simulator and on the GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupy_awq import BlockQuantizedWeight, from_packed, linear_fp8, linear_int8
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.kernels.int8.gemm_w4a8_mma import GEMM_W4A8_MMA, GemmW4A8MmaConfig
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.kernels.int8.quantize_fp8 import QUANTIZE_FP8
from cupy_awq.kernels.int8.quantize_rows import QUANTIZE_ROWS
from cupy_awq.ops.repacked_linear import make_problems
from cupy_awq.tools import testing
from tests.backends import GPU, LANDINGS, runner, sample
from tests.simt.kernels import patched
from tests.simt.seeds import OUTSIDE, RACE, VALUES, caught_by
from tests.test_fp8 import check_fp8_product, fp8_problem
from tests.test_gemm_int8 import check_product
from tests.test_kernels import facts, repack

NO_BUFFERS = {"partials": None, "counters": None, "bias": None}

# A case has m, n, k, the weight's block size, dtype, scale dtype, bias, zero points; then the configuration: block_m,
# warps_n, stages, ctas, stream_k_units, stream_k_ctas.
CASES = (
    (20, 72, 272, 128, "float16", "float16", None, True, 24, 4, 2, 1, 0, 0),
    (40, 136, 656, 256, "bfloat16", "bfloat16", "float32", False, 40, 4, 3, 3, 2, 3),
    (100, 264, 400, 400, "float16", "float32", "float16", True, 56, 8, 2, 5, 4, 5),
    (130, 200, 1168, 128, "float16", "float16", None, True, 72, 8, 4, 2, 0, 0),
    (20, 64, 1040, 128, "bfloat16", "float32", None, True, 16, 4, 4, 3, 1, 3),
    (128, 128, 128, 128, "float16", "bfloat16", "bfloat16", True, 128, 4, 2, 1, 0, 0),
)


def problem_of(case: tuple, kind: str) -> tuple[Int8Problem, GemmW4A8MmaConfig, int]:
    """Return the problem, the configuration and the weight's block size that a case describes.

    The ``kind`` "rows" gives x one scale per row, "blocks" one per block of columns.
    """
    m, n, k, block, dtype, scale_dtype, bias, zero_points, block_m, warps_n, stages, *division = case
    problem = Int8Problem(
        *(m, n, k, block, 4, False, zero_points, dtype, bias),
        activation="clamp" if bias else None,
        limits=(-0.5, 0.75),
        row_scales=kind == "rows" and k > block,
        zero_points=zero_points,
        scale_dtype=scale_dtype,
    )
    return problem, GemmW4A8MmaConfig(block_m, warps_n, 1, True, stages, *division), block


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("arch", [75, 80, 89])
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, marks=[] if (kind, i) in (("blocks", 2), ("rows", 4)) else pytest.mark.slow)
        for kind in ("blocks", "rows")
        for i, case in enumerate(CASES)
    ],
    ids=str,
)
def test_products(backend: str, arch: int, kind: str, case: tuple) -> None:
    """Tiles that are partly empty in M, N and K, chunks of rows without a row of x, stream-K, rings that turn."""
    problem, config, block = problem_of(case, kind)
    gpu = facts(arch, backend)
    if arch == 75:
        config = replace(config, is_async=False, stages=2)
    assert GEMM_W4A8_MMA.refusal(problem, gpu) is None
    check_product(backend, problem, GEMM_W4A8_MMA, config, gpu, block, seed=problem.m)


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
@pytest.mark.parametrize("arch", [75, 80])
@pytest.mark.parametrize("m", [20, 50, pytest.param(200, marks=pytest.mark.slow)])
def test_every_tile(backend: str, arch: int, m: int) -> None:
    """Every tile is right, also where the rows of y start at odd addresses."""
    stride = 201
    problem = Int8Problem(m, 200, 528, 128, 4, False, True, "float16", zero_points=True, scale_dtype="float16")
    problem = replace(problem, wide=False, even=False, y_stride=stride)
    gpu = replace(facts(arch, backend), sm_count=3)
    found = {(c.block_m, c.warps_n, c.split_k > 1): c for c in GEMM_W4A8_MMA.configs(problem, gpu)}
    assert len(found) >= 4
    for config in sample(list(found.values()), backend, 2, m):
        check_product(backend, problem, GEMM_W4A8_MMA, config, gpu, 128, seed=m)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("arch", [89, 120])
@pytest.mark.parametrize(("i", "block"), [(0, 128), (1, 256), (3, 1168), (5, 128)])
def test_float8_products(backend: str, arch: int, i: int, block: int) -> None:
    m, n, k, *_ = CASES[i]
    _, config, _ = problem_of(CASES[i], "blocks")
    scale = np.random.default_rng(i).uniform(-0.1, 0.1, (n, -(-k // block))).astype(np.float16).astype(np.float32)
    codes = np.random.default_rng(i).integers(0, 16, (n, 1, 1, k), dtype=np.uint8)
    offset = np.random.default_rng(i).integers(-8, 9, scale.shape).astype(np.float32) * scale
    weight = BlockQuantizedWeight(codes, scale, offset if i else None, block_size=block)
    problem = replace(fp8_problem(m, n, k, block, "float16", "float32" if i else None, bool(i)), scale_dtype="float16")
    check_fp8_product(backend, problem, GEMM_W4A8_MMA, config, weight, seed=i, arch=arch)


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
def test_blocks_of_the_weight_may_be_larger_than_those_of_x(backend: str) -> None:
    problem, config, _ = problem_of(CASES[0], "blocks")
    check_product(backend, problem, GEMM_W4A8_MMA, config, facts(80, backend), 256, seed=3)


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
@pytest.mark.parametrize(("arch", "x_dtype"), [(75, "int8"), (80, "int8"), (89, "fp8")])
@pytest.mark.parametrize(("zeros", "k", "group_size"), [("packed", 384, 128), ("symmetric", 320, 320)])
def test_the_repacked_weight_is_multiplied(
    backend: str, arch: int, x_dtype: str, zeros: str, k: int, group_size: int
) -> None:
    """Kernels with 16-bit x read the same weight; the codes of x are written in the order of its words."""
    rng, run, gpu, fp8 = np.random.default_rng(k), runner(backend), facts(arch, backend), x_dtype == "fp8"
    weight = testing.random_weight(rng, k, 72, group_size, zeros=zeros)
    x, y = testing.random_activations(rng, 20, k), np.full((20, 72), np.nan, np.float16)
    repacked = repack(run, Problem(20, 72, k, group_size, zeros=zeros), weight, gpu)
    quantization, product = make_problems(weight.spec, 20, "float16", fp8=fp8)
    blocks = -(-k // product.block_size)
    codes, scale = np.zeros((20, k), np.int8), np.zeros((20, 1 if fp8 else blocks), np.float32)
    sums = np.zeros((20, blocks), np.float32 if fp8 else np.int32)
    family = QUANTIZE_FP8 if fp8 else QUANTIZE_ROWS
    plan = family.plan(family.configs(quantization, gpu)[0], quantization, gpu)
    half_sums = np.zeros((20, 8), np.float16)
    quantized = {"x": x, "codes": codes, "scale": scale, "offset": None, "sums": sums, "half_sums": half_sums}
    run(plan, {name: quantized[name] for name in plan.buffers})
    plan = GEMM_W4A8_MMA.plan(GemmW4A8MmaConfig(24, 4, 1, arch >= 80, 2), product, gpu)
    buffers = {"xq": codes, "x_scale": scale, "x_row_scale": scale, "x_sums": sums, "weight": repacked, "y": y}
    run(plan, {name: (NO_BUFFERS | buffers)[name] for name in plan.buffers})
    linear = linear_fp8 if fp8 else linear_int8
    expected = linear(x.astype(np.float32), from_packed(weight))
    np.testing.assert_allclose(y.astype(np.float32), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fp8": True}, "needs sm_89"),
        ({"dtype": "float32"}, "writes a y of 16 bits"),
        ({"n": 100}, "writes a y of 16 bits"),
        ({"bits": 8}, "needs 4-bit weights"),
        ({"zero_points": False}, "integer multiples"),
    ],
)
def test_refusals_name_a_reason(change: dict, reason: str) -> None:
    problem = Int8Problem(64, 4096, 4096, 128, 4, False, True, "float16", zero_points=True, scale_dtype="float16")
    gpu = facts(80, "latest")
    assert GEMM_W4A8_MMA.refusal(problem, gpu) is None
    assert reason in str(GEMM_W4A8_MMA.refusal(replace(problem, **change), gpu))
    assert "gemm_w4a8_sm90" in str(GEMM_W4A8_MMA.refusal(problem, facts(90, "latest")))


@pytest.mark.parametrize("arch", [75, 80, 86, 87, 89, 120])
def test_many_rows_take_it(arch: int) -> None:
    for m in (256, 2048):
        problem = Int8Problem(m, 4096, 4096, 128, 4, False, True, "float16", zero_points=True, scale_dtype="float16")
        assert select.choose(problem, facts(arch, "latest")).family is GEMM_W4A8_MMA


KERNEL, HEADER = "int8/gemm_w4a8_mma.cu", "int8/gemm_w4a8_mma.cuh"
SEEDS = {
    "a stage is refilled while a warp still reads it": (HEADER, "    __syncthreads();\n", "", RACE),
    "a stage is read before its copies have landed": (
        HEADER, "wait<C::kStages - 2>", "wait<C::kStages - 1>", ("in flight", "race"),
    ),
    "a stage ahead of the ring is filled": (
        HEADER, "stage_idx == 0 ? C::kStages - 1 : stage_idx - 1", "stage_idx", RACE,
    ),
    "the last k tile reads past the end of K": (HEADER, ", k_left_ > 0)", ", true)", OUTSIDE),
    "rows past the last one are read": (HEADER, "min(row, last_row_)", "row", OUTSIDE),
    "scales past the last row are read": (HEADER, "min(thread, last_row_)", "thread", OUTSIDE),
    "a warp copies the codes of its neighbour": (HEADER, ".tile(warp, 0)", ".tile(warp ^ 1, 0)", VALUES),
    "the zero points of the last columns are not copied": (
        HEADER, "C::kHalfGroupBytes / 8) continue", "C::kHalfGroupBytes / 8 - 1) continue",
        ("uninitialised", "uninitialised"),
    ),
    "a chunk with a row of x is not scaled": (
        HEADER, "rows <= first_tile(CHUNK - 1)", "rows <= first_tile(CHUNK)", VALUES,
    ),
    "products overwrite those of the chunk before": (
        HEADER, "sums)[4] = products[chunk % 2]", "sums)[4] = products[0]", VALUES,
    ),
    "the first half of x is that of the chunk before": (HEADER, "load_x(chunk + 1, 0)", "load_x(chunk, 0)", VALUES),
    "the products of the last chunk are not scaled": (
        HEADER, "if constexpr (CHUNK > 0) scale", "if constexpr (CHUNK > 0 && CHUNK < C::kChunks) scale", VALUES,
    ),
    "products begin with those of the k tile before": (HEADER, "step == 0 ? magic", "step < 0 ? magic", VALUES),
    "the scale of the next block is late by a k tile": (
        HEADER, "if (--block_left_ == 0)", "if (--block_left_ < 0)", VALUES,
    ),
    "zero points of the other column": (HEADER, "biases[i % 2]", "biases[i / 2]", VALUES),
    "codes of the other half of k": (HEADER, "words[i / 2] >> (i % 2 * 4)", "words[i % 2] >> (i / 2 * 4)", VALUES),
    "partial sums are added before they are written": (
        KERNEL, "      wait_for_partials(counter, scheduler.cluster_idx - scheduler.first_sharer());\n", "",
        RACE,
    ),
    "accumulators overwrite stages that are still read": (
        KERNEL, "      __syncthreads();  // the stages, or", "      // the stages, or", RACE,
    ),
    "accumulators are read before other warps have stored them": (
        KERNEL, "1.0f);\n      __syncthreads();", "1.0f);", RACE,
    ),
}  # fmt: skip


ROW_SEEDS = {
    "products are taken for their bits": (HEADER, "static_cast<float>(product)", "__int_as_float(product)", VALUES),
    "scales of the other row": (HEADER, "(threadIdx.x) % 4 * 2 + v", "(threadIdx.x) % 4 * 2 + 1 - v", VALUES),
    "scales past the last row are read at the end": (HEADER, "last_row)]", "last_row + 1)]", OUTSIDE),
}  # fmt: skip
"""Bugs of products with one scale per row of x."""


SEEDED = (60, 136, 656, 128, "float16", "float16", None, True, 40, 4, 3, 5, 4, 5)
"""The case in which bugs are planted: two chunks of rows, of which a tile has part of the second, and stream-K."""


def outcome(landing: str, kind: str) -> str:
    """Return the check that fails when the case is simulated, or "nothing" if y is right."""
    problem, config, block = problem_of(SEEDED, kind)
    gpu = facts(80, landing)
    return caught_by(lambda: check_product(landing, problem, GEMM_W4A8_MMA, config, gpu, block, seed=1))


@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_the_kernel_passes_before_a_bug_is_planted(kind: str) -> None:
    assert (outcome("latest", kind), outcome("earliest", kind)) == ("nothing", "nothing")


@pytest.mark.parametrize(
    "bug", [next(iter(SEEDS)), *(pytest.param(bug, marks=pytest.mark.slow) for bug in list(SEEDS)[1:])]
)
def test_a_planted_bug_is_caught(bug: str) -> None:
    path, old, new, caught = SEEDS[bug]
    with patched(path, old, new):
        assert (outcome("latest", "blocks"), outcome("earliest", "blocks")) == caught


@pytest.mark.slow
@pytest.mark.parametrize("bug", ROW_SEEDS)
def test_a_planted_bug_of_row_scales_is_caught(bug: str) -> None:
    path, old, new, caught = ROW_SEEDS[bug]
    with patched(path, old, new):
        assert (outcome("latest", "rows"), outcome("earliest", "rows")) == caught
