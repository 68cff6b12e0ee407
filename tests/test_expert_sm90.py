# SPDX-License-Identifier: Apache-2.0
"""The grouped product on wgmma: every tile, edges of units and of experts, equal bits from run to run, planted bugs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_awq.kernels.experts.expert_gemm_sm90 import EXPERT_GEMM_SM90, SHAPES, ExpertGemmSm90Config
from cupy_awq.kernels.experts.problem import ExpertProduct
from cupy_awq.kernels.gemm.problem import FRAGMENTS
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device
from tests.backends import HOPPER, LANDINGS, runner
from tests.experts import error_of, float64_rows, random_experts, repack_experts
from tests.simt.seeds import DEADLOCK, OUTSIDE, RACE, VALUES, assert_caught_by, caught_by
from tests.test_expert_kernels import check_product
from tests.test_kernels import BOUNDS, facts

ON_HOPPER = (*LANDINGS[:2], HOPPER)
TILES = [(gated, n, wgs) for wgs, most in SHAPES.items() for n in (16, most) for gated in (False, True)[wgs == 3 :]]


def make_product(gated: bool, block: int, **options: Any) -> ExpertProduct:
    """Return a product with rows of x for two slots each, whose K ends within a weight tile."""
    sizes = {"pairs": 2 * block + 10, "experts": 3, "n": 320, "k": 704, "group_size": 64}
    kind = {"activation": "silu", "x_divisor": 2} if gated else {"row_weights": True}
    return ExpertProduct(
        "sorted", **{**sizes, "top_k": 2, "block": block, "gated": gated, "layout": FRAGMENTS, **kind, **options}
    )


@pytest.mark.parametrize("backend", [LANDINGS[0], HOPPER])
@pytest.mark.parametrize("stream_k", [False, True])
@pytest.mark.parametrize(("gated", "block_m", "warpgroups"), TILES)
def test_every_tile(backend: str, gated: bool, block_m: int, warpgroups: int, stream_k: bool) -> None:
    """Each tile is right with units that have one to all of their rows, and CTAs with several units or parts."""
    here = replace(facts(90, backend), sm_count=3)
    config = ExpertGemmSm90Config(1, 3, block_m=block_m, warpgroups=warpgroups, stream_k=stream_k)
    problem = make_product(gated, block_m)
    check_product(runner(backend), problem, (EXPERT_GEMM_SM90, config), here, np.random.default_rng(block_m))


@pytest.mark.parametrize("backend", ON_HOPPER)
@pytest.mark.parametrize("ends", [[1, 7, 8, 9, 15, 0, 16, 17, 127, 128]])
def test_units_with_gaps(backend: str, ends: list[int]) -> None:
    """Units are right in which the last pair is at any place, and results have the same bits in two runs.

    The routing arrays are those of another engine: the padding is scattered, some blocks have experts out of range, and
    the arrays are longer than the part in use.
    """
    rng, here, block = np.random.default_rng(0), replace(facts(90, backend), sm_count=2), 128
    run, count = runner(backend), len(ends)
    weight = random_experts(rng, 3, 320, 136, 64, bias=np.float16)
    fragments, form = repack_experts(run, weight, here)
    experts = rng.integers(0, 3, count + 1).astype(np.int32)
    experts[:2] = -1, 3
    rows = np.full((count + 1, block), 10**6, np.int32)
    pairs = sum(ends) + 8
    order, at = rng.permutation(pairs).astype(np.int32), 0
    ids = np.full(pairs, -1)
    for i, end in enumerate(ends):
        rows[i, :end] = order[at : at + end]
        rows[i, end // 2 : end // 2 + 1] = -5
        own = rows[i][(rows[i] >= 0) & (rows[i] < pairs)]
        ids[own] = experts[i] if 0 <= experts[i] < 3 else -1
        at += end
    problem = ExpertProduct(
        "sorted", pairs, 3, 136, 320, 64, block=block, capacity=rows.size, layout=FRAGMENTS, bias_dtype="float16",
        scale_exponent=form.scale_exponent,
    )  # fmt: skip
    x = rng.standard_normal((pairs, 320)).astype(np.float16)
    routing = {
        "sorted_pairs": rows.reshape(-1),
        "experts": experts,
        "sorted_count": np.array([count * block], np.int32),
    }
    found = []
    for _ in range(2):
        y = np.full((pairs, 136), np.nan, np.float16)
        config = ExpertGemmSm90Config(1, 4, block_m=block, warpgroups=2, stream_k=True)
        needed = EXPERT_GEMM_SM90.workspace(config, problem)
        operands = {"weight": fragments, "bias": weight.bias, "row_weights": None, "x": x, "y": y}
        operands |= {"partials": np.full(needed.partial_bytes // 4, np.nan, np.float32)}
        operands |= {"counters": np.zeros(needed.counters, np.uint32)}
        run(EXPERT_GEMM_SM90.plan(config, problem, here), {**operands, **routing})
        found.append(y)
    assert np.isnan(found[0][ids < 0]).all()
    expected = float64_rows(x, ids, weight, None)
    assert error_of(found[0][ids >= 0], expected[ids >= 0]) < BOUNDS["float16"]
    np.testing.assert_array_equal(found[0].view(np.uint16), found[1].view(np.uint16))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scales_dtype"), [("float16", "float16"), ("bfloat16", "float16")])
@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_registers_suffice(dtype: str, scales_dtype: str, group_size: int) -> None:
    """No configuration spills registers, and the compiler serializes no wgmma."""
    here = device.nominal(90)
    for gated in (False, True):
        for block in (16, 48, 64, 80, 112, 128, 144):
            problem = make_product(gated, block, group_size=group_size, dtype=dtype, scales_dtype=scales_dtype)
            for config in EXPERT_GEMM_SM90.configs(problem, here):
                resources = compiler.build(EXPERT_GEMM_SM90.plan(config, problem, here).kernel).resources
                assert resources is not None
                assert (resources.local_bytes, resources.serialized) == (0, False), config


WGMMA = (
    ExpertProduct("sorted", 90, 3, 200, 1088, 64, block=48, top_k=2, x_divisor=2, row_weights=True, layout="fragments"),
    ExpertGemmSm90Config(1, 2, block_m=48, warpgroups=2),
)
"""A launch whose CTAs refill all stages and have tiles of several experts; K ends within a weight tile."""
SHORT = replace(WGMMA[0], pairs=150, k=64, x_divisor=1), WGMMA[1]
"""A launch whose tiles have one stage each, so that producers are several tiles ahead of the consumers."""
SPARSE = replace(WGMMA[0], pairs=20, experts=2, block=64), replace(WGMMA[1], block_m=16)
"""A launch with units without pairs."""
STREAM = WGMMA[0], replace(WGMMA[1], stream_k=True)
"""A launch whose CTAs share the k tiles of all tiles."""
GATED = replace(WGMMA[0], n=448, row_weights=False, activation="silu", gated=True), WGMMA[1]
Case = tuple[ExpertProduct, ExpertGemmSm90Config]
MAIN, STORE = "experts/expert_gemm_sm90.cu", "experts/expert_gemm_sm90.cuh"
LOOP = "gemm/gemm_sm90_large_mainloop.cuh"
SEEDS: dict[str, tuple[Case, str, str, str, tuple[str, str]]] = {
    "rows of x are not fenced": (WGMMA, MAIN, "    ptx::fence_proxy_async();\n", "    ", RACE),
    "a stage is refilled before the consumers have released it": (
        WGMMA, MAIN, "if (k_tile > k_tile_begin) pipeline.producer_acquire(state);", "", RACE,
    ),
    "a tile is announced in a slot that is still read": (
        SHORT, MAIN, "slot = slot + 1 == C::kTiles ? 0 : slot + 1;\n    }\n    pipeline", "}\n    pipeline",
        ("values", "race"),
    ),
    "rows are copied before the tile is announced": (
        WGMMA, MAIN, "    sync();\n    return tile.end();", "    return tile.end();", RACE,
    ),
    "the next tile is announced while a warp reads one without pairs": (
        SPARSE, MAIN, "tile.claimed = claimed;\n    sync();", "tile.claimed = claimed;", RACE,
    ),
    "the signaler stops too late": (
        WGMMA, MAIN, "has_ended = announced[slot].n_block < 0;", "has_ended = announced[slot].n_block < -1;",
        ("uninitialised", "uninitialised"),
    ),
    "the expert of the preceding unit": (
        WGMMA, MAIN, "[unit / units_per_id]", "[unit / units_per_id / 2]", VALUES,
    ),
    "the row of x of the wrong token": (WGMMA, MAIN, "x_row(my_pairs[i]) *", "my_pairs[i] *", OUTSIDE),
    "a quotient that is 1 too small": (
        WGMMA, MAIN, " + (pair - quotient * x_divisor >= x_divisor)", "", VALUES,
    ),
    "rows in the order of the pairs": (
        WGMMA, MAIN, "row / 8 * 8 + row % 2 * 4 + row / 2 % 4", "row", VALUES,
    ),
    "no zeros past the end of K": (WGMMA, MAIN, "chunk * 8 >= k) end_block = 0;", "chunk * 8 >= k);", OUTSIDE),
    "no zeros in blocks without pairs": (
        WGMMA, MAIN, "if (block >= blocks) break;", "if (block >= end_block) break;",
        ("uninitialised", "uninitialised"),
    ),
    "the up projection of other columns": (
        GATED, MAIN, "n / 2 / kWeightTileN", "n / 4 / kWeightTileN", VALUES,
    ),
    "a claim is read before it is shared": (
        WGMMA, MAIN, "tile.claimed = claimed;\n    sync();", "tile.claimed = claimed;", RACE,
    ),
    "a claim that starts one tile too late": (WGMMA, MAIN, "+ gridDim.x + tile", "+ gridDim.x + 1 + tile", VALUES),
    "a lower tile than the rows need": (WGMMA, STORE, "if (end <= kLower) {", "if (end <= kLower + 15) {", VALUES),
    "partial sums of other CTAs are left out": (
        STREAM, MAIN, "scheduler.adds_partial_sums() ? scheduler.first_sharer() :", "", DEADLOCK,
    ),
    "x of the first k tiles": (
        STREAM, MAIN, "stage_idx, k_tile);\n        ptx", "stage_idx, k_tile - k_tile_begin);\n        ptx", VALUES,
    ),
    "a part of a tile counts as the end of one": (
        STREAM, STORE, "return tile.first_cta >= 0;", "return true;", DEADLOCK,
    ),
    "the k tiles of another part": (
        STREAM, MAIN, "uniform(tile.k_tile_end - tile.k_tile_begin)", "uniform(tile.k_tile_end)", DEADLOCK,
    ),
    "the weight of another row": (WGMMA, STORE, "v / 4 % 2 * 2 + v % 2]", "v / 4 % 2 * 2]", VALUES),
    "padding is stored": (WGMMA, STORE, "if (pairs[pass] >= pairs_end)", "if (pairs_end == 0)", OUTSIDE),
    "columns past the end are stored": (
        WGMMA, STORE, "column < n_out ? 0x80000000u : 0u", "0x80000000u", RACE,
    ),
    "the next chunk overwrites rows that are still read": (
        WGMMA, STORE, "    ptx::barrier_sync(1 + warpgroup, 128);\n#pragma unroll\n    for (int i = 0;",
        "#pragma unroll\n    for (int i = 0;", RACE,
    ),
    "operands are overwritten while they are multiplied": (
        WGMMA, LOOP, "wgmma_wait_group<1>", "wgmma_wait_group<2>", RACE,
    ),
    "another stage is released": (
        WGMMA, LOOP, "preceding = my_empty_barriers + stage_idx", "preceding = my_empty_barriers + state.stage_idx",
        DEADLOCK,
    ),
    "codes of the first slice": (WGMMA, LOOP, "+ b % 2 * 1024", "", VALUES),
    "groups of the first half": (WGMMA, LOOP, "? b % 2 * kSliceGroups + i : 0", "? i : 0", VALUES),
}  # fmt: skip
"""Planted bugs: the launch, the file, the old and the new text, and the checks that catch the bug."""


def outcome(case: Case, landing: str) -> str:
    """Return the check that fails in a launch, or "nothing"."""
    choice, here, rng = (EXPERT_GEMM_SM90, case[1]), replace(device.nominal(90), sm_count=2), np.random.default_rng(0)
    return caught_by(lambda: check_product(runner(landing), case[0], choice, here, rng))


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_planted_bug_is_caught(name: str) -> None:
    assert_caught_by(outcome, *SEEDS[name])
