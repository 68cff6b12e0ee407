# SPDX-License-Identifier: Apache-2.0
"""Tests of every kernel on the fragment layout against float64 formulas, on the simulator and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq.activation import FUNCTIONS
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm import gather_columns, gemm_sm90_config
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Fusion, NextWeight, Problem
from cupy_awq.kernels.registry import FAMILIES
from cupy_awq.packing import unpack_int4
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime.device import Device
from cupy_awq.tools.testing import random_activations, random_weight
from cupy_awq.weight import PackedWeight
from tests.backends import BACKENDS, HOPPER, LANDINGS, few_examples, runner, sample
from tests.simt.seeds import RACE, Seed, assert_caught
from tests.test_kernels import DTYPES, candidates, check_matmul, facts, repack, rounded_once
from tests.test_reference import float64_weight


def any_problem(
    data: st.DataObject,
    rows: list[int],
    most_n: int,
    most_k: int,
    dtypes: tuple[str, ...] = ("float16", "bfloat16"),
    zeros: tuple[str, ...] = ("packed", "symmetric"),
) -> Problem:
    """Draw a problem of any group size, zeros, scales and epilogue that all repacked families support."""
    group_size = data.draw(st.sampled_from([16, 32, 64, 128, 192, 256]))
    gated = data.draw(st.booleans())
    step = 64 if gated else 8
    return Problem(
        m=data.draw(st.sampled_from(rows)),
        n=data.draw(st.integers(1, most_n // step)) * step,
        k=group_size * data.draw(st.integers(1, 1 if group_size == 192 else most_k // group_size)) // 64 * 64 or 64,
        group_size=group_size,
        dtype=data.draw(st.sampled_from(dtypes)),
        scales_dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        zeros=data.draw(st.sampled_from(zeros)),
        bias_dtype=data.draw(st.sampled_from([None, "float16", "float32"])),
        residual=data.draw(st.booleans()),
        activation=data.draw(st.sampled_from([None, "clamp", *FUNCTIONS])),
        limits=(-0.5, 0.75),
        gated=gated,
        layouts=(AWQ, FRAGMENTS),
        scale_exponent=data.draw(st.sampled_from([0, 3, 8, 15])),
    )


@pytest.mark.parametrize("backend", [*LANDINGS[:2], HOPPER])
@given(data=st.data())
@few_examples
def test_any_repacked_problem(backend: str, data: st.DataObject) -> None:
    """Random problems are right on `gemm_sm90`: every group size, form of zeros and epilogue.

    M lies on both sides of each tile size, and tiles may be partly empty.
    """
    problem = any_problem(data, [1, 2, 7, 8, 9, 16, 17, 33, 65, 130], 320, 512)
    problem = replace(problem, wide_scales=data.draw(st.booleans()))
    here = facts(90, backend)
    family = FAMILIES["gemm_sm90"]
    configs = family.configs(problem, here)
    ranked = sorted(configs, key=lambda config: (config.scaled, family.estimate_us(config, problem, here)))
    config = data.draw(st.sampled_from(ranked[:20] + [config for config in ranked if config.scaled][:20]))
    pad = data.draw(st.sampled_from([0, 8]))
    check_matmul(runner(backend), problem, family, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


@pytest.mark.parametrize("backend", [LANDINGS[0], HOPPER])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(("k", "dtype"), [(320, "float16"), pytest.param(1088, "bfloat16", marks=pytest.mark.slow)])
def test_sums_of_x_in_slices_with_one_group_per_weight_tile(backend: str, m: int, k: int, dtype: str) -> None:
    """The sums of x that zero points need are right for all numbers of k tiles and split-K.

    With one or two rows, columns of mma without rows of x compute them, each for a slice of K.
    """
    problem = Problem(m, 72, k, k, dtype, layouts=(AWQ, FRAGMENTS))
    here = facts(90, backend)
    family = FAMILIES["gemm_sm90"]
    configs = {(c.k_tiles, c.split_k): c for c in family.configs(problem, here) if c.weight_tiles == 2}
    assert {k_tiles for k_tiles, _ in configs} >= {1, 2}
    assert {split_k for _, split_k in configs} >= {1, 2}
    for config in sample(list(configs.values()), backend, 2, m):
        check_matmul(runner(backend), problem, family, config, here, seed=k)


@pytest.mark.parametrize("backend", [LANDINGS[0], HOPPER])
@pytest.mark.parametrize(("m", "group_size", "k_tiles"), [(4, 128, 1), (6, 64, 4), (16, 32, 2)])
def test_consumers_of_every_number_of_warps_copy_all_rows_of_x(
    backend: str, m: int, group_size: int, k_tiles: int
) -> None:
    """Every row of x is copied also where a consumer's number of warps is no power of two.

    It then copies rows in passes in which some threads are idle.
    """
    problem = Problem(m, 264, 1152, group_size, layouts=(AWQ, FRAGMENTS))
    here = facts(90, backend)
    family = FAMILIES["gemm_sm90"]
    fit = [c for c in family.configs(problem, here) if c.name == "gemm_sm90_mma" and c.k_tiles == k_tiles]
    configs = {c.weight_tiles: c for c in fit}
    assert set(configs) == {1, 2, 3, 4, 6, 7, 8}
    for config in sample(list(configs.values()), backend, 3, m + k_tiles):
        check_matmul(runner(backend), problem, family, config, here, seed=m)


@pytest.mark.parametrize("backend", [*LANDINGS[:2], HOPPER])
@given(data=st.data())
@few_examples
def test_any_problem_whose_kernel_gathers_x(backend: str, data: st.DataObject) -> None:
    """Kernels that gather columns of x are right where K ends within a weight tile, and for any number of warps.

    Rows are strided, and all epilogues occur.
    """
    problem = replace(any_problem(data, [1, 2, 3, 4], 320, 1152), gathers_x=True)
    here = facts(90, backend)
    family = FAMILIES["gemm_sm90"]
    configs = {(c.weight_tiles, c.split_k, c.k_tiles, c.ctas_per_sm): c for c in family.configs(problem, here)}
    config = configs[data.draw(st.sampled_from(sorted(configs)))]
    pad = data.draw(st.sampled_from([0, 8]))
    check_matmul(runner(backend), problem, family, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


@pytest.mark.slow
def test_columns_gathered_before_all_threads_have_copied_their_part_of_x_are_caught() -> None:
    wait, barrier = "wait_group<0>();", "\n    ptx::barrier_sync(kBarrier, C::kConsumerThreads);"
    problem = Problem(3, 192, 1024, 128, layouts=(AWQ, FRAGMENTS), gathers_x=True)
    assert_caught(Seed("gemm_sm90", 90, "gemm/gemm_sm90_mma.cu", wait + barrier, wait, RACE, problem))


@pytest.mark.parametrize(
    ("change", "is_fused"),
    [
        ({}, True),
        ({"m": 2}, True),
        ({"m": 4}, False),  # copying x to every SM would take longer than another launch
        ({"m": 4, "n": 28672, "k": 4096}, True),
        ({"m": 5, "n": 28672, "k": 4096}, False),
        ({"k": 4096}, False),  # so short a GEMM cannot hide the copies
        ({"k": 16384 + 128}, False),
        ({"batch_invariant": True}, False),
        ({"x_aligned": False}, False),
        ({"layouts": (AWQ,)}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_the_gemm_gathers_few_rows_of_x_where_this_is_faster(change: dict[str, int | str], is_fused: bool) -> None:
    problem = replace(Problem(1, 4096, 12288, 128, layouts=(AWQ, FRAGMENTS), gathers_x=True), **change)
    assert gather_columns.is_fused(problem, facts(90, "latest")) == is_fused
    assert not gather_columns.is_fused(problem, facts(80, "latest"))


@pytest.mark.parametrize("backend", [LANDINGS[0], HOPPER])
@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("split_k", [1, 2])
def test_the_next_kernel_starts_late_if_ctas_of_three_kernels_could_be_resident(
    backend: str, m: int, split_k: int
) -> None:
    problem, family = Problem(m, 632, 256, 128, layouts=(AWQ, FRAGMENTS)), FAMILIES["gemm_sm90"]
    device, ctas = facts(90, backend), 10 * split_k
    configs = [c for c in family.configs(problem, device) if (c.weight_tiles, c.split_k) == (2, split_k)]
    config = next(c for c in configs if c.resident(problem, device) > 1)
    full = replace(device, sm_count=2 * ctas // config.resident(problem, device))
    roomy = replace(full, sm_count=full.sm_count + 1)
    single = replace(device, shared_bytes_per_sm=config.shared_bytes(problem) + 1024)

    def starts_late(here: Device) -> object:
        return dict(family.plan(config, problem, here).kernel.defines)["START_NEXT_LATE"]

    assert (starts_late(roomy), starts_late(full)) == (1, 0)
    assert starts_late(replace(single, sm_count=2 * ctas)) == 0
    assert starts_late(replace(single, sm_count=2 * ctas + 1)) == (config.name == "gemm_sm90")
    in_a_decode_step = replace(problem, fusion=Fusion("add_to_stream"))
    assert not config.starts_next_late(in_a_decode_step, roomy), "another kernel follows"
    for here in (roomy, full):
        check_matmul(runner(backend), problem, family, config, here, seed=m)


@pytest.mark.parametrize("backend", [*LANDINGS[:2], HOPPER])
@pytest.mark.parametrize(
    ("m", "dtype", "k", "group_size", "scaled", "k_tile_counts"),
    [
        (12, "float16", 2112, 64, False, {1, 2, 4}),
        pytest.param(12, "bfloat16", 2112, 64, False, {1, 2, 4}, marks=pytest.mark.slow),
        pytest.param(40, "float16", 2112, 64, False, {1, 2}, marks=pytest.mark.slow),
        pytest.param(40, "float16", 2176, 128, True, {1, 2}, marks=pytest.mark.slow),
        pytest.param(40, "bfloat16", 2176, 128, True, {1, 2}, marks=pytest.mark.slow),
        (40, "float16", 2112, 64, True, {1}),
    ],
)
def test_a_ring_of_very_few_stages_wraps_and_k_ends_within_a_stage(
    backend: str, m: int, dtype: str, k: int, group_size: int, scaled: bool, k_tile_counts: set[int]
) -> None:
    """Rings with the fewest stages are right when they are used again, and where K ends within a stage.

    All numbers of k tiles per stage and of consumers occur.
    """
    # With short groups and many rows, the family scales the weights unless float16 cannot hold the scales.
    scales = dtype if scaled else "float16"
    problem = Problem(m, 128, k, group_size, dtype, scales, layouts=(AWQ, FRAGMENTS), wide_scales=not scaled)
    here = facts(90, backend)
    family = FAMILIES["gemm_sm90"]
    configs = {
        (c.k_tiles, c.consumers): replace(c, stages=c.consumers * (2 if scaled or c.consumers == 1 else 1))
        for c in family.configs(problem, here)
        if c.name == "gemm_sm90" and c.weight_tiles == (4 if c.k_tiles == 4 else 2)
        if (c.split_k, c.scaled) == (1, scaled)
    }
    assert {k_tiles for k_tiles, _ in configs} == k_tile_counts
    for config in sample(list(configs.values()), backend, 2, m // 4):
        check_matmul(runner(backend), problem, family, config, here, seed=m)


@pytest.mark.parametrize("backend", [*LANDINGS[:2], HOPPER])
@pytest.mark.parametrize(
    ("m", "name", "split_k"),
    [
        (1, "gemm_sm90_mma", 3),
        pytest.param(5, "gemm_sm90_mma", 8, marks=pytest.mark.slow),
        (16, "gemm_sm90_mma", 5),
        pytest.param(12, "gemm_sm90", 3, marks=pytest.mark.slow),
        pytest.param(24, "gemm_sm90", 4, marks=pytest.mark.slow),
        (40, "gemm_sm90", 6),
        pytest.param(104, "gemm_sm90", 3, marks=pytest.mark.slow),
        (136, "gemm_sm90", 5),
    ],
)
def test_clusters_of_any_size_share_the_rows_of_a_tile(backend: str, m: int, name: str, split_k: int) -> None:
    """Clusters of any size share the rows of a tile when they add up: some CTAs sum fewer rows than others, or none.

    At M = 136 there are several tiles, and the last one overlaps its predecessor.
    """
    problem = Problem(m, 200, 1152, 128, layouts=(AWQ, FRAGMENTS))
    here = facts(90, backend)
    family = FAMILIES["gemm_sm90"]
    configs = [c for c in family.configs(problem, here) if (c.name, c.split_k) == (name, split_k)]
    config = min(configs, key=lambda c: (c.weight_tiles, -c.consumers))
    check_matmul(runner(backend), problem, family, config, here, seed=m)


@pytest.mark.parametrize("backend", [LANDINGS[0], HOPPER])
@pytest.mark.parametrize(("n", "residual"), [(224, False), (224, True), (200, True)])
@pytest.mark.parametrize("m", [40, 72, 136, pytest.param(200, marks=pytest.mark.slow)])
def test_tiles_of_every_height_of_many_rows(backend: str, m: int, n: int, residual: bool) -> None:
    """Tiles of every height are right, also if the last of their 16-row blocks has only 8 rows.

    At N = 200, rows of AWQ tensors are not aligned to 16 bytes.
    """
    problem = Problem(m, n, 256, 128, layouts=(AWQ, FRAGMENTS), residual=residual)
    here = replace(facts(90, backend), sm_count=4)
    family = FAMILIES["gemm_sm90_large"]
    configs = {(c.block_m, c.warpgroups, c.m64_tiles, c.cluster): c for c in family.configs(problem, here)}
    assert any(config.block_m % 16 == 8 for config in configs.values())
    for config in configs.values():
        check_matmul(runner(backend), problem, family, config, here, seed=m)


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("m", [200, 136])
def test_accumulators_of_a_tile_with_a_residual_stay_in_registers(m: int, aligned: bool) -> None:
    """No kernel with a residual keeps accumulators in local memory before wgmma.wait_group, which would be wrong.

    The simulator of PTX cannot show that; ptxas reports it.
    """
    problem = Problem(m, 256, 256, 128, layouts=(AWQ, FRAGMENTS), residual=True, aligned=aligned)
    here = facts(90, LANDINGS[0])
    family = FAMILIES["gemm_sm90_large"]
    kernels = {family.plan(config, problem, here).kernel for config in family.configs(problem, here)}
    assert any(dict(kernel.defines)["STORE_ROWS"] == 16 for kernel in kernels)
    for kernel in kernels:
        resources = compiler.build(kernel).resources
        assert resources is not None
        assert resources.local_bytes == 0, kernel


@pytest.mark.parametrize("backend", [LANDINGS[0], HOPPER])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_infinity_and_nan_do_not_leak_into_other_rows(backend: str, value: float) -> None:
    """An infinity or NaN in one row of x must not reach another, though one mma sums two rows of x at a time."""
    problem, run, here = Problem(2, 64, 256, 128, layouts=(AWQ, FRAGMENTS)), runner(backend), facts(90, backend)
    rng = np.random.default_rng(0)
    weight, x = random_weight(rng, 256, 64, 128), random_activations(rng, 2, 256)
    repacked = repack(run, problem, weight, here)
    plan = select.choose(problem, here, "gemm_sm90").plan
    assert plan.kernel.entry == "gemm_sm90_mma"
    found = []
    for row in (None, 0, 1):
        damaged, y = x.copy(), np.zeros((2, 64), np.float16)
        if row is not None:
            damaged[row, 77] = value
        run(plan, {"weight": repacked, "bias": None, "residual": None, "y": y, "x": damaged})
        found.append(y)
    for row in (0, 1):
        assert not np.isfinite(found[row + 1][row]).any()
        np.testing.assert_array_equal(found[row + 1][1 - row], found[0][1 - row])


def any_fused_problem(data: st.DataObject) -> Problem:
    """Draw a GEMM of a decoder layer that is fused with a residual add or an RMSNorm."""
    role = data.draw(st.sampled_from(["add_to_stream", "rms_norm_x"]))
    gated = role == "rms_norm_x" and data.draw(st.booleans())
    k = data.draw(st.sampled_from([64, 128, 192, 512, 1088]))
    return Problem(
        m=data.draw(st.sampled_from([1, 2, 3, 7, 16, 20, 32])),
        n=data.draw(st.integers(1, 5)) * 64 if gated else data.draw(st.integers(1, 40)) * 8,
        k=k,
        group_size=data.draw(st.sampled_from([16, 64, k])),
        dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        zeros=data.draw(st.sampled_from(["packed", "symmetric"])),
        bias_dtype=data.draw(st.sampled_from([None, "float32"])),
        activation="silu" if gated else None,
        gated=gated,
        layouts=(FRAGMENTS,),
        fusion=Fusion(
            role,
            eps=data.draw(st.sampled_from([1e-6, 0.5])),
            orders_y=role == "add_to_stream" and data.draw(st.booleans()),
            next_weight=NextWeight(data.draw(st.sampled_from([0, 1 << 20])), half_offset=1 << 20),
        ),
    )


@pytest.mark.parametrize("backend", [*LANDINGS[:2], HOPPER])
@given(data=st.data())
@few_examples
def test_any_problem_with_a_fusion(backend: str, data: st.DataObject) -> None:
    problem = any_fused_problem(data)
    here = facts(90, backend)
    (found,) = candidates(problem, here)
    family, config, _ = data.draw(st.sampled_from(found))
    assert family.NAME == "gemm_sm90"
    window_bytes = data.draw(st.sampled_from([1, 10000, gemm_sm90_config.WINDOW_BYTES]))
    with mock.patch.object(gemm_sm90_config, "WINDOW_BYTES", window_bytes):
        check_matmul(runner(backend), problem, family, config, here, seed=data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("backend", [*LANDINGS[:2], HOPPER])
@given(data=st.data())
@few_examples
def test_persistent_ctas_with_stream_k(backend: str, data: st.DataObject) -> None:
    """Persistent CTAs are right on a device with few SMs: CTAs take several tiles, and clusters share tiles along K.

    Tiles may be partly empty.
    """
    problem = any_problem(data, [40, 128, 140, 300], 704, 768)
    here = replace(facts(90, backend), sm_count=data.draw(st.sampled_from([2, 4, 7])))
    family = FAMILIES["gemm_sm90_large"]
    assert family.refusal(problem, here) is None
    config = data.draw(st.sampled_from(sorted(family.configs(problem, here), key=lambda config: -config.split_k)))
    pad = data.draw(st.sampled_from([0, 8]))
    check_matmul(runner(backend), problem, family, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


@pytest.mark.parametrize("backend", [LANDINGS[0], HOPPER])
@pytest.mark.parametrize("scales_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["gemm_sm90", "gemm_sm90_large"])
def test_scaled_weights_are_rounded_once(backend: str, name: str, dtype: str, scales_dtype: str) -> None:
    """A weight that is scaled before the product is rounded once, as y of an identity matrix x shows."""
    problem = Problem(192, 136, 192, 64, dtype, scales_dtype, layouts=(AWQ, FRAGMENTS), scale_exponent=3)
    here, run, rng = facts(90, backend), runner(backend), np.random.default_rng(0)
    weight = random_weight(rng, problem.k, problem.n, problem.group_size, dtype=DTYPES[scales_dtype])
    spread = np.float64(2) ** rng.integers(-8, 3, weight.scales.shape)
    scales = (weight.scales.astype(np.float64) * spread).astype(weight.scales.dtype)
    weight = PackedWeight(weight.qweight, scales, weight.qzeros)
    x = np.eye(problem.k).astype(DTYPES[dtype])
    w = rounded_once(float64_weight(weight.qweight, weight.scales, weight.qzeros), dtype)
    repacked = repack(run, problem, weight, here)
    family = FAMILIES[name]
    configs = {
        (config.block_m, config.m64_tiles): config
        for config in family.configs(problem, here)
        if config.split_k == 1 and getattr(config, "scaled", True)
    }
    assert configs
    for config in sample(list(configs.values()), backend, 2, dtype == "float16"):
        y = np.full((problem.m, problem.n), np.nan, DTYPES[dtype])
        none = dict.fromkeys(("bias", "residual", "partials", "counters"))
        run(family.plan(config, problem, here), {**none, "x": x, "y": y, "weight": repacked})
        np.testing.assert_array_equal(y.astype(np.float64), w)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("zeros", ["packed", "symmetric", "float"])
@pytest.mark.parametrize(
    ("k", "n", "group_size"), [(128, 128, 128), (320, 72, 64), (192, 264, 32), (192, 8, 192), (192, 40, 16)]
)
def test_repacking_keeps_every_code_scale_and_zero(backend: str, zeros: str, k: int, n: int, group_size: int) -> None:
    weight = random_weight(np.random.default_rng(k), k, n, group_size, zeros=zeros)
    layout = FragmentLayout.of(Problem(1, n, k, group_size, zeros=zeros))
    out = np.full(layout.nbytes, 255, np.uint8)
    arrays = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros, "out": out}
    runner(backend)(layout.pack(facts(90, backend)), arrays)
    codes, scales, points = layout.unpack(out)
    np.testing.assert_array_equal(codes, unpack_int4(weight.qweight))
    np.testing.assert_array_equal(scales, weight.scales.view(np.uint16))
    if points is not None:
        wanted = weight.qzeros.view(np.uint16) if zeros == "float" else unpack_int4(weight.qzeros)
        np.testing.assert_array_equal(points, wanted)
