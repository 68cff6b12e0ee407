# SPDX-License-Identifier: Apache-2.0
"""Tests of `gemm_w4a8_sm90`, run from its launch plans on the simulator and on the GPU.

A tile of offsets holds -zero * scale of 64 columns and 32 k tiles in float16. Behind the last k tile, it is multiplied
by the sums of x over these k tiles.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupy_awq import BlockQuantizedWeight
from cupy_awq.kernels.int8.gemm_w4a8_sm90 import GEMM_W4A8_SM90, GemmW4A8Config
from cupy_awq.kernels.int8.problem import Int8Problem
from tests.backends import LANDINGS, fewer
from tests.test_fp8 import check_fp8_product, fp8_problem
from tests.test_gemm_int8 import check_product
from tests.test_kernels import DTYPES, facts

# A case has m, n, k, x's block size, the weight's block size, dtype, bias, zero points; then the configuration:
# block_m, warpgroups, m64_tiles, consumers, stages, k_tiles, split_k, ctas_per_sm, share_x, offset_tiles.
CASES = (
    (1, 64, 128, 128, 128, "float16", None, True, 8, 1, 1, 1, 2, 1, 1),
    (5, 200, 1168, 128, 256, "float16", "float16", True, 8, 1, 1, 3, 6, 1, 2),
    (24, 70, 656, 256, 256, "bfloat16", None, False, 24, 2, 1, 1, 2, 2, 1),
    (40, 264, 784, 128, 128, "float32", "float32", True, 48, 1, 2, 2, 2, 1, 3),
    (100, 130, 528, 528, 528, "float16", None, True, 64, 2, 1, 2, 4, 1, 1),
    (129, 128, 1040, 128, 128, "float16", None, True, 80, 1, 1, 2, 4, 2, 4),
    (128, 72, 272, 128, 128, "bfloat16", "float16", True, 128, 1, 1, 1, 2, 1, 1),
    (60, 200, 656, 128, 128, "float16", None, True, 64, 1, 1, 2, 4, 1, 1, 1, 2),
    (70, 130, 784, 128, 128, "float16", "float16", True, 80, 1, 1, 1, 2, 1, 3, 1, 2),
    (64, 300, 400, 128, 128, "float16", None, True, 64, 1, 1, 1, 2, 2, 2, 1, 4),
)

# The same with offset_tiles: two tiles of offsets, slices of K that end within or before them, partly empty tiles, and
# kernels that move registers between warpgroups (setmaxnreg).
OFFSET_CASES = (
    (70, 136, 1424, 128, 128, "float16", None, True, 40, 1, 2, 2, 4, 1, 2, 1, 1, True),
    (40, 264, 784, 128, 256, "float32", "float32", True, 48, 1, 2, 2, 2, 1, 1, 1, 1, True),
    (64, 130, 4400, 128, 128, "bfloat16", None, True, 64, 1, 2, 1, 2, 1, 3, 1, 2, True),
    (130, 72, 528, 528, 528, "float16", None, True, 72, 1, 1, 1, 2, 1, 2, 2, 1, True),
    (9, 200, 1168, 128, 128, "float16", None, False, 16, 3, 1, 1, 3, 1, 1, 1, 1, True),
)


def problem_of(case: tuple, kind: str) -> tuple[Int8Problem, GemmW4A8Config, int]:
    """Return the problem, the configuration and the weight's block size that a case describes.

    The ``kind`` "rows" gives x one scale per row, "blocks" one per block of columns.
    """
    m, n, k, block, weight_block, dtype, bias, zero_points, *config = case
    rows = kind == "rows" and k > weight_block
    problem = Int8Problem(
        *(m, n, k, weight_block if rows else block, 4, False, zero_points, dtype, bias),
        activation="clamp" if bias else None,
        limits=(-0.5, 0.75),
        wide=n * np.dtype(DTYPES[dtype]).itemsize % 16 == 0,
        row_scales=rows,
        zero_points=zero_points,
    )
    return problem, GemmW4A8Config(*config), weight_block


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("kind", ["blocks", "rows"])
@pytest.mark.parametrize("case", fewer(CASES), ids=str)
def test_int8(backend: str, kind: str, case: tuple) -> None:
    """Results are right where tiles are partly empty and slices of K differ in length.

    With split-K, some CTAs of a cluster have no row of y whose partial sums they would add.
    """
    problem, config, weight_block = problem_of(case, kind)
    gpu = facts(90, backend)
    assert GEMM_W4A8_SM90.refusal(problem, gpu) is None
    check_product(backend, problem, GEMM_W4A8_SM90, config, gpu, weight_block, seed=problem.m)


@pytest.mark.parametrize("backend", LANDINGS)
def test_the_next_kernel_starts_late_if_ctas_of_three_kernels_could_be_resident(backend: str) -> None:
    problem, config, weight_block = problem_of(CASES[1], "rows")
    device = facts(90, backend)
    resident, ctas = config.resident(problem, device), 4 * 2
    assert resident > 1
    full = replace(device, sm_count=2 * ctas // resident)
    roomy = replace(full, sm_count=full.sm_count + 1)
    for here, late in ((full, 0), (roomy, 1)):
        plan = GEMM_W4A8_SM90.plan(config, problem, here)
        assert (plan.grid[0], dict(plan.kernel.defines)["START_NEXT_LATE"]) == (ctas, late)
        check_product(backend, problem, GEMM_W4A8_SM90, config, here, weight_block, seed=late)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", fewer(CASES + OFFSET_CASES), ids=str)
def test_fp8(backend: str, scale_dtype: str, case: tuple) -> None:
    m, n, k, _, weight_block, dtype, bias, zero_points, *config = case
    rng = np.random.default_rng(m)
    codes = rng.integers(0, 16, (n, 1, 1, k), dtype=np.uint8)
    shape = n, -(-k // weight_block)
    scale = rng.uniform(-1, 1, shape).astype(DTYPES[scale_dtype]).astype(np.float32)
    if scale_dtype == "bfloat16":
        scale[0, 0] = 2.0**-18 * (1 + 2.0**-7)  # a scale that float16 rounds, because it is subnormal there
    offset = rng.integers(-8, 9, shape).astype(scale.dtype) * scale if zero_points else None
    weight = BlockQuantizedWeight(codes, scale, offset, block_size=weight_block)
    assert weight.exact_scale_dtype == scale_dtype
    problem = replace(fp8_problem(m, n, k, weight_block, dtype, bias, bias is not None), scale_dtype=scale_dtype)
    assert GEMM_W4A8_SM90.refusal(replace(problem, zero_points=True), facts(90, backend)) is None
    check_fp8_product(backend, problem, GEMM_W4A8_SM90, GemmW4A8Config(*config), weight, seed=m)


def test_scales_of_16_bits_are_kept() -> None:
    scale = np.ones((2, 1), np.float16)
    for dtype in DTYPES.values():
        weight = BlockQuantizedWeight(np.zeros((2, 1, 1, 4), np.uint8), scale.astype(dtype), None)
        assert weight.exact_scale_dtype == ("float16" if dtype == np.float32 else np.dtype(dtype).name)
