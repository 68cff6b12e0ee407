# SPDX-License-Identifier: Apache-2.0
"""``gemm_mma_fragments``: mma.sync on the fragment layout, simulated for every architecture and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq.kernels import select
from cupy_awq.kernels.gemm import gemm_mma_fragments
from cupy_awq.kernels.gemm.gemm_mma_fragments import GemmFragmentsConfig
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Fusion, Problem
from cupy_awq.kernels.registry import FAMILIES
from cupy_awq.kernels.tiling import RESERVED_BYTES
from cupy_awq.ops.repack import scale_range
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device
from cupy_awq.tools.testing import random_activations, random_weight
from tests.backends import GPU, LANDINGS, few_examples, runner, sample
from tests.test_kernels import DTYPES, check_matmul, facts, repack
from tests.test_repacked_kernels import any_fused_problem, any_problem

ARCHS = (75, 80, 86, 87, 89, 100, 120)
FAMILY = FAMILIES["gemm_mma_fragments"]


def scaled(problem: Problem) -> Problem:
    """Return the problem with the range of scales that `check_matmul` draws, on which kernels depend."""
    bounds = (np.array([1.5, 0.5]) / (8 * np.sqrt(problem.k))).astype(DTYPES[problem.scales_dtype]).astype(float)
    exponent, wide = scale_range(*bounds, max_exponent=15)
    return replace(problem, scale_exponent=exponent, wide_scales=wide)


def few_sms(arch: int, backend: str, sms: int) -> device.Device:
    """Return the device with ``sms`` SMs: so few that small problems have more tiles than CTAs, and use stream-K."""
    return replace(facts(arch, backend), sm_count=sms)


@pytest.mark.parametrize("backend", LANDINGS)
@given(data=st.data())
@few_examples
def test_any_problem(backend: str, data: st.DataObject) -> None:
    """Random problems are right on `gemm_mma_fragments`: every group size, form of zeros, dtype and epilogue.

    M lies on both sides of each tile size, tiles may be partly empty, and few SMs make CTAs share tiles (stream-K).
    """
    arch = data.draw(st.sampled_from(ARCHS))
    dtypes = ("float16",) if arch == 75 else ("float16", "bfloat16")
    zeros = "packed", "symmetric", "float"
    problem = any_problem(data, [1, 2, 3, 7, 8, 9, 16, 17, 33, 48, 65, 100, 130], 320, 640, dtypes, zeros)
    problem = scaled(problem)
    if data.draw(st.booleans()):
        problem = replace(problem, wide_scales=data.draw(st.booleans()))
    here = few_sms(arch, backend, data.draw(st.sampled_from([2, 4, 9])))
    config = data.draw(st.sampled_from(FAMILY.configs(problem, here)))
    pad = data.draw(st.sampled_from([0, 8]))
    check_matmul(runner(backend), problem, FAMILY, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


@pytest.mark.parametrize("backend", LANDINGS)
@given(data=st.data())
@few_examples
def test_any_problem_with_a_fusion(backend: str, data: st.DataObject) -> None:
    """GEMMs that are fused with the residual add or the RMSNorm of a decoder layer are right, also with stream-K."""
    problem, arch = any_fused_problem(data), data.draw(st.sampled_from(ARCHS))
    if arch == 75:
        problem = replace(problem, dtype="float16")
    here = few_sms(arch, backend, data.draw(st.sampled_from([2, 9])))
    config = data.draw(st.sampled_from(FAMILY.configs(problem, here)))
    check_matmul(runner(backend), problem, FAMILY, config, here, seed=data.draw(st.integers(0, 99)))


def tile(config: GemmFragmentsConfig) -> tuple[object, ...]:
    """Return the fields of a configuration that describe its tile, without those that divide the work among CTAs."""
    return tuple(vars(replace(config, ctas=0, stream_k_units=0, stream_k_ctas=0)).values())


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
@pytest.mark.parametrize(
    ("arch", "m", "k", "dtype"),
    [
        pytest.param(80, 5, 2112, "float16", marks=pytest.mark.slow),
        (75, 5, 2112, "float16"),
        pytest.param(80, 16, 1088, "bfloat16", marks=pytest.mark.slow),
        pytest.param(80, 32, 1088, "float16", marks=pytest.mark.slow),
        (80, 60, 320, "float16"),
        pytest.param(80, 60, 1088, "float16", marks=pytest.mark.slow),
        pytest.param(75, 50, 1088, "float16", marks=pytest.mark.slow),
        pytest.param(80, 50, 1088, "bfloat16", marks=pytest.mark.slow),
        pytest.param(80, 200, 576, "float16", marks=pytest.mark.slow),
        pytest.param(75, 200, 576, "float16", marks=pytest.mark.slow),
    ],
)
def test_every_tile(backend: str, arch: int, m: int, k: int, dtype: str) -> None:
    """Each layout of warps is right once, with stream-K where it is legal.

    K ends within a weight tile (128 k), and the ring of stages is used more than once.
    """
    problem = scaled(Problem(m, 200, k, 64, dtype, layouts=(AWQ, FRAGMENTS)))
    here = few_sms(arch, backend, 3)
    configs = {tile(config): config for config in FAMILY.configs(problem, here)}
    assert len(configs) >= 3
    for config in sample(list(configs.values()), backend, 2, m):
        few = replace(config, stages=min(config.stages, 3))
        check_matmul(runner(backend), problem, FAMILY, few, here, seed=m)


@pytest.mark.parametrize("backend", [*LANDINGS[:2], GPU])
@pytest.mark.parametrize(
    ("m", "units", "ctas"),
    [(3, 2, 3), (3, 2, 7), (20, 2, 5), (40, 2, 9), pytest.param(100, 3, 4, marks=pytest.mark.slow)],
)
def test_ctas_that_share_tiles(backend: str, m: int, units: int, ctas: int) -> None:
    """Stream-K is right where CTAs' shares begin and end anywhere, and up to five CTAs share a tile."""
    problem = scaled(Problem(m, 256, 1152, 128, layouts=(AWQ, FRAGMENTS)))
    here = few_sms(80, backend, 8)
    for config in {config.math: config for config in FAMILY.configs(problem, here)}.values():
        wide = [c for c in FAMILY.configs(problem, here) if c.math == config.math and c.units(problem) >= units]
        shared = replace(
            wide[0], ctas=max(ctas, wide[0].units(problem) - units), stream_k_units=units, stream_k_ctas=ctas
        )
        check_matmul(runner(backend), problem, FAMILY, shared, here, seed=m)


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
@pytest.mark.parametrize("m", [2, 40])
def test_same_bits_from_run_to_run(backend: str, m: int) -> None:
    problem = scaled(Problem(m, 64, 1152, 128, layouts=(AWQ, FRAGMENTS)))
    run, here = runner(backend), few_sms(80, backend, 5)
    config = next(config for config in FAMILY.configs(problem, here) if config.stream_k_units)
    rng = np.random.default_rng(0)
    weight, x = random_weight(rng, problem.k, problem.n, 128), random_activations(rng, m, problem.k)
    repacked = repack(run, problem, weight, here)
    partial_bytes, counters = FAMILY.workspace(config, problem)
    found = []
    for _ in range(2):
        y = np.full((m, problem.n), np.nan, np.float16)
        scratch = {"partials": np.empty(partial_bytes // 4, np.float32), "counters": np.zeros(counters, np.uint32)}
        operands = {"weight": repacked, "bias": None, "residual": None, "x": x, "y": y, **scratch}
        run(FAMILY.plan(config, problem, here), operands)
        found.append(y.view(np.uint16))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        ("float16", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("bfloat16", False), ("float16", True))),
    ],
)
def test_batch_invariant_rows_have_the_same_bits_for_every_m(backend: str, dtype: str, wide: bool) -> None:
    problem = scaled(Problem(100, 96, 704, 64, dtype, layouts=(FRAGMENTS,), batch_invariant=True))
    problem = replace(problem, wide_scales=wide)
    run, here = runner(backend), facts(80, backend)
    rng = np.random.default_rng(1)
    weight, x = random_weight(rng, problem.k, problem.n, 64), random_activations(rng, problem.m, problem.k)
    x = x.astype(DTYPES[dtype])
    repacked = repack(run, problem, weight, here)
    reductions, rows = set(), []
    for m in (1, 7, 16, 40, 100):
        choice = select.choose(replace(problem, m=m), here)
        reductions.add(choice.family.reduction(choice.config, choice.problem))
        y = np.zeros((m, problem.n), DTYPES[dtype])
        run(
            choice.plan,
            {
                "weight": repacked,
                "bias": None,
                "residual": None,
                "x": x[:m].copy(),
                "y": y,
                "partials": None,
                "counters": None,
            },
        )
        rows.append(y.view(np.uint16))
    assert len(reductions) == 1
    for y in rows:
        np.testing.assert_array_equal(y, rows[-1][: len(y)])


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
@pytest.mark.parametrize("m", [2, 20, 40])
def test_infinity_and_nan_do_not_leak_into_other_rows(backend: str, m: int) -> None:
    problem, run, here = scaled(Problem(m, 64, 256, 128, layouts=(AWQ, FRAGMENTS))), runner(backend), facts(80, backend)
    rng = np.random.default_rng(0)
    weight, x = random_weight(rng, 256, 64, 128), random_activations(rng, m, 256)
    repacked = repack(run, problem, weight, here)
    plan = select.choose(problem, here, "gemm_mma_fragments").plan
    found = []
    for value in (None, np.inf, np.nan):
        damaged, y = x.copy(), np.zeros((m, 64), np.float16)
        if value is not None:
            damaged[1, 77] = value
        scratch = {"partials": np.empty(1 << 16, np.float32), "counters": np.zeros(64, np.uint32)}
        run(plan, {"weight": repacked, "bias": None, "residual": None, "y": y, "x": damaged, **scratch})
        found.append(y)
    for y in found[1:]:
        assert not np.isfinite(y[1]).any()
        np.testing.assert_array_equal(np.delete(y, 1, 0), np.delete(found[0], 1, 0))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_every_problem_has_configurations_that_fit(arch: int, group_size: int, gated: bool) -> None:
    here = device.nominal(arch)
    for m in (1, 2, 5, 8, 11, 16, 17, 32, 33, 48, 64, 65, 96, 128, 129, 300, 2048):
        for fields in (
            {},
            {"wide_scales": True},
            {"dtype": "bfloat16"},
            {"batch_invariant": True},
        ):
            problem = replace(Problem(m, 4096, 4096, group_size, gated=gated, layouts=(AWQ, FRAGMENTS)), **fields)
            if arch == 75 and problem.dtype == "bfloat16":
                assert FAMILY.refusal(problem, here) == "needs sm_80 or newer, not sm_75"
                continue
            configs = gemm_mma_fragments.configs(problem, here)
            assert configs, problem
            assert len(configs) == len(set(configs))
            for config in configs:
                assert config.shared_bytes(problem) <= here.shared_bytes_per_block
                reserved = config.shared_bytes(problem) + RESERVED_BYTES
                assert config.ctas_per_sm * reserved <= here.shared_bytes_per_sm


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (8192, 28672), (12288, 4096)])
def test_a_layer_takes_the_kernel_for_the_repacked_layout(arch: int, k: int, n: int) -> None:
    for m in (1, 4, 16, 32, 64, 256, 2048):
        assert (
            select.choose(Problem(m, n, k, 128, layouts=(AWQ, FRAGMENTS)), device.nominal(arch)).name
            == "gemm_mma_fragments"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "problem"),
    [
        (80, Problem(1, 4096, 4096, 16, layouts=(AWQ, FRAGMENTS))),
        (80, Problem(16, 4096, 4096, 32, "bfloat16", layouts=(AWQ, FRAGMENTS))),
        (80, Problem(32, 4096, 4096, 16, gated=True, activation="silu", layouts=(AWQ, FRAGMENTS))),
        (80, Problem(40, 4096, 4096, 64, "bfloat16", layouts=(AWQ, FRAGMENTS))),
        (80, Problem(64, 4096, 4096, 128, "bfloat16", residual=True, layouts=(AWQ, FRAGMENTS))),
        (80, Problem(128, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS))),
        (75, Problem(1, 4096, 4096, 16, layouts=(AWQ, FRAGMENTS))),
        (75, Problem(16, 4096, 4096, 128, residual=True, layouts=(AWQ, FRAGMENTS))),
        (75, Problem(32, 4096, 4096, 128, gated=True, activation="silu", layouts=(AWQ, FRAGMENTS))),
        (75, Problem(64, 4096, 4096, 64, layouts=(AWQ, FRAGMENTS))),
        (75, Problem(128, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS))),
        (80, Problem(8, 4096, 4096, 128, layouts=(FRAGMENTS,), fusion=Fusion("add_to_stream"))),
        (80, Problem(16, 8192, 4096, 128, gated=True, layouts=(FRAGMENTS,), fusion=Fusion("rms_norm_x"))),
    ],
    ids=str,
)
def test_registers_do_not_spill(arch: int, problem: Problem) -> None:
    here = device.nominal(arch)
    kernels = {FAMILY.plan(config, problem, here).kernel for config in FAMILY.configs(problem, here)}
    for kernel in kernels:
        resources = compiler.build(kernel).resources
        assert resources is not None
        assert resources.local_bytes == 0, kernel
