# SPDX-License-Identifier: Apache-2.0
"""Tests of the GEMMs with dense and with 8-bit weights, against float64 products, simulated and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupy_awq.kernels.decoder import decoder as llm
from cupy_awq.kernels.decoder.dense import DENSE_SM90, DenseProduct, DenseSm90Config
from tests.backends import BACKENDS, HOPPER, LANDINGS, fewer, runner
from tests.paged_cache import check_close, frozen, nan, normal
from tests.test_kernels import ARCHS, BOUNDS, DTYPES, facts
from tests.test_llm_kernels import SIXTEEN


def test_dense_gemms_of_many_rows_share_the_reads_of_the_weight_and_fill_the_gpu() -> None:
    """A CTA of a dense GEMM has up to three blocks of 16 rows; at most four read the same columns of the weight."""
    wanted = {1: (1, (1, 132, 1)), 17: (2, (1, 132, 1)), 48: (3, (1, 132, 1)), 64: (2, (2, 66, 1))}
    wanted |= {128: (2, (4, 33, 1)), 129: (2, (3, 44, 2))}
    for m, found in wanted.items():
        invariant = {"bias": False, "same_order": True}
        plan = llm.plan_dense(facts(90, "latest"), m, 128256, 2048, "float16", "float32", **invariant)
        assert (dict(plan.kernel.defines)["BLOCKS"], plan.grid) == found
    assert llm.plan_dense(facts(90, "latest"), 40, 4096, 4096, "float16", "float16", bias=False, block=32).grid[0] == 1


@pytest.mark.parametrize("m", [17, 64, 256, 512])
def test_lm_heads_of_tens_of_rows_take_wgmma_unless_batch_invariant(m: int) -> None:
    options = {"bias": False, "same_order": False}
    for k, entry in ((4096, "dense_sm90"), (4100, "dense")):
        assert llm.plan_dense(facts(90, "latest"), m, 151936, k, "float16", "float32", **options).kernel.entry == entry
    few = llm.plan_dense(facts(90, "latest"), 16, 151936, 4096, "float16", "float32", **options)
    options["same_order"] = True
    many = llm.plan_dense(facts(90, "latest"), m, 151936, 4096, "float16", "float32", **options)
    assert few.kernel.entry == many.kernel.entry == "dense_mma"


@pytest.mark.parametrize("backend", [*LANDINGS[:2], HOPPER])
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize(
    "case",
    [
        (17, 130, 200, 56),  # rows of zeros below x, columns and k past the end
        (70, 20, 648, 64),  # two tiles of rows that overlap, more k tiles than stages
        *fewer([(56, 300, 64, 56), (300, 40, 72, 256), (96, 30, 64, 96), (128, 140, 64, 128), (200, 10, 128, 200)]),
    ],
)
def test_dense_gemm_with_wgmma_matches_the_float64_product(backend: str, dtype: str, case: tuple[int, ...]) -> None:
    """Two CTAs compute all tiles in turn, so some have several tiles, and the first stages are filled early."""
    m, n, k, block_m = case
    rng = np.random.default_rng(m)
    x, w, bias = normal(rng, m, k, dtype=DTYPES[dtype]), normal(rng, n, k, dtype=DTYPES[dtype]), normal(rng, n)
    device = replace(facts(90, backend), sm_count=2)
    for out, bound, has_bias in ((dtype, BOUNDS[dtype], True), ("float32", 1e-5, False)):
        y = nan(m, n, dtype=DTYPES[out])
        problem = DenseProduct(m, n, k, dtype, out, bias=has_bias)
        assert DENSE_SM90.refusal(problem, device) is None
        plan = DENSE_SM90.plan(DenseSm90Config(block_m), problem, device)
        runner(backend)(plan, {**frozen(x=x, w=w, bias=bias), "y": y})
        check_close(y, x.astype(np.float64) @ w.astype(np.float64).T + (bias if has_bias else 0), bound)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 50, 96),
        (17, 33, 64),
        (5, 130, 200),
        (16, 40, 4640),
        (3, 2200, 544),
        (2, 70, 1568),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_dense_gemm_matches_the_float64_product(
    backend: str, arch: int, dtype: str, m: int, n: int, k: int, bias: bool
) -> None:
    check_dense_gemm(backend, arch, dtype, m, n, k, bias)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("entry", "m", "n", "k"), [("dense", 3, 20, 72), ("dense_mma", 41, 50, 96)])
def test_every_dense_kernel(backend: str, arch: int, entry: str, m: int, n: int, k: int) -> None:
    check_dense_gemm(backend, arch, "bfloat16" if arch == 90 else "float16", m, n, k, True, entry)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("entry", "m", "n", "k"), [("dense_int8", 2, 20, 80), ("dense_int8_mma", 17, 20, 96)])
def test_every_dense_kernel_of_8_bit_codes(backend: str, arch: int, entry: str, m: int, n: int, k: int) -> None:
    check_dense_gemm_of_codes(backend, arch, "bfloat16" if arch == 90 else "float16", m, n, k, 16, entry)


def check_dense_gemm(backend: str, arch: int, dtype: str, m: int, n: int, k: int, bias: bool, entry: str = "") -> None:
    """Check a product against float64; ``entry`` is the kernel that must compute it where there are tensor cores."""
    rng = np.random.default_rng(m)
    x, w = normal(rng, m, k, dtype=DTYPES[dtype]), normal(rng, n, k, dtype=DTYPES[dtype])
    added = normal(rng, n)
    for out, bound in ((dtype, BOUNDS[dtype]), ("float32", 2e-6)):
        y = nan(m, n, dtype=DTYPES[out])
        plan = llm.plan_dense(facts(arch, backend), m, n, k, dtype, out, bias=bias)
        assert entry in ("", plan.kernel.entry) or arch < 75
        runner(backend)(plan, {**frozen(x=x, w=w, bias=added), "y": y})
        check_close(y, x.astype(np.float64) @ w.astype(np.float64).T + (added if bias else 0), bound)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize(
    ("m", "n", "k", "block"),
    [
        *((1, 50, 96, 32), (1, 50, 96, 16), (17, 33, 64, 16), (16, 20, 4640, 32), (16, 20, 4640, 16)),
        *((3, 1100, 544, 32), (3, 1100, 544, 16)),
        (2, 40, 208, 16),  # K is no multiple of 32, so another kernel is used
    ],
)
def test_dense_gemm_of_8_bit_codes_multiplies_the_rounded_weight(
    backend: str, arch: int, dtype: str, m: int, n: int, k: int, block: int
) -> None:
    check_dense_gemm_of_codes(backend, arch, dtype, m, n, k, block)


def check_dense_gemm_of_codes(
    backend: str, arch: int, dtype: str, m: int, n: int, k: int, block: int, entry: str = ""
) -> None:
    """Check a product as `check_dense_gemm` does, by 8-bit codes with a scale per ``block`` columns."""
    rng = np.random.default_rng(m)
    x, scales = normal(rng, m, k, dtype=DTYPES[dtype]), normal(rng, n, k // block, dtype=DTYPES[dtype])
    codes, bias = rng.integers(0, 256, (n, k), dtype=np.uint8), normal(rng, n)
    w = (np.repeat(scales.astype(np.float32), block, axis=1) * (codes.astype(np.float32) - 128)).astype(x.dtype)
    for out, bound in ((dtype, BOUNDS[dtype]), ("float32", 2e-6)):
        y = nan(m, n, dtype=DTYPES[out])
        plan = llm.plan_dense(facts(arch, backend), m, n, k, dtype, out, bias=True, block=block)
        assert entry in ("", plan.kernel.entry) or arch < 75
        runner(backend)(plan, {**frozen(x=x, codes=codes, code_scales=scales, bias=bias), "y": y})
        check_close(y, x.astype(np.float64) @ w.astype(np.float64).T + bias, bound)
