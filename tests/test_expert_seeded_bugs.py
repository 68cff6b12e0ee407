# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the kernels of a mixture of experts: each one is caught."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from cupy_awq.kernels.experts.expert_gemm import EXPERT_GEMM, ExpertGemmConfig
from cupy_awq.kernels.experts.expert_gemm_tiles import EXPERT_GEMM_TILES
from cupy_awq.kernels.experts.problem import ExpertProduct
from cupy_awq.kernels.experts.routing import SHARED_PAIRS
from cupy_awq.kernels.family import AnyFamily
from cupy_awq.kernels.gemm.gemm_mma_fragments import GemmFragmentsConfig
from cupy_awq.runtime import device
from tests.backends import runner
from tests.simt.seeds import OUTSIDE, RACE, VALUES, assert_caught_by, caught_by
from tests.test_expert_kernels import (
    check_product,
    test_norm_and_router_in_one_launch,
    test_router,
    test_sort,
)

MAIN, LOOP, TILES, UNIT, SORT, CHOICE, ROUTE = (
    f"experts/{name}"
    for name in (
        "expert_gemm.cu", "expert_gemm_mainloop.cuh", "expert_gemm_tiles.cu", "expert_unit.cuh", "sort_tokens.cu",
        "expert_choice.cuh", "route_tokens.cu",
    )
)  # fmt: skip
HERE = replace(device.nominal(80), sm_count=2)
GATED = {"activation": "silu", "gated": True, "layout": "fragments"}
SORTED = (
    ExpertProduct("sorted", 30, 3, 160, 704, 64, block=16, top_k=2, x_divisor=2, row_weights=True, **GATED),
    ExpertGemmConfig(16, 2, 2, 2, stages=3, depth=2),
)
"""A launch in which warps share stages, slices of K have several stages, and CTAs have several tiles.

Units (blocks of up to 16 rows of one expert) have only a few rows.
"""
SORTS = {"sort": (700, 90), "large sort": (SHARED_PAIRS, 90), "long sort": (4200, 80)}
"""The number of pairs of a sort, and the architecture: with one CTA, a cluster, and more pairs than registers hold."""
LAST = ExpertProduct("sorted", 9, 3, 96, 704, 704, block=16, **GATED), replace(SORTED[1], warps_k=2)
"""A launch whose K ends within a weight tile (128 k); behind the end of K, the tile's scales are not zero."""
LARGE = (
    ExpertProduct("sorted", 120, 2, 192, 704, 64, block=64, top_k=2, x_divisor=2, row_weights=True, **GATED),
    GemmFragmentsConfig("kScaled", 64, 64, 1, 4, 2, 64),
)
STAGED = replace(LARGE[0], pairs=40, block=16), GemmFragmentsConfig("kExact", 16, 16, 1, 2, 2, 64, is_async=False)
"""A launch on sm_75, which copies through registers and has mma of 8 k."""
OFFSETS = replace(LARGE[0], zeros="float"), LARGE[1]
PAIRS = (
    ExpertProduct("pairs", 12, 3, 96, 704, 32, top_k=2, x_divisor=2, **GATED),
    ExpertGemmConfig(8, 2, 1, 2, stages=3, depth=1),
)
TOKENS = (
    ExpertProduct("tokens", 9, 3, 72, 320, 64, top_k=3, row_weights=True, shared=True, layout="fragments"),
    ExpertGemmConfig(8, 1, 1, 4, stages=3, depth=2),
)
Case = tuple[ExpertProduct, ExpertGemmConfig | GemmFragmentsConfig]
Seed = tuple[Case | str, str, str, str, tuple[str, str]]
"""The launch, or the name of a kernel whose test is run; file, old and new text, and the checks that catch the bug."""

IN_FLIGHT = "in flight", "race"
NEXT_WAIT = "cp_async_wait_group<kStages - 2>();\n"
SEEDS: dict[str, Seed] = {
    "a wait for one group of copies too few": (
        SORTED, MAIN, NEXT_WAIT, NEXT_WAIT.replace("2", "1"), IN_FLIGHT,
    ),
    "warps read a stage that other warps still copy": (
        SORTED, MAIN, "        sync_slice(slice);", "        __syncwarp();", RACE,
    ),
    "the wrong stage is refilled": (
        SORTED, MAIN, "stage_idx == 0 ? kStages - 1 : stage_idx - 1", "stage_idx", IN_FLIGHT,
    ),
    "accumulators overwrite those of the preceding tile, which other warps still read": (
        SORTED, MAIN, "    __syncthreads();  // the accumulators", "    // the accumulators", RACE,
    ),
    "accumulators are read before all warps have stored them": (
        SORTED, MAIN, "accumulators);\n    __syncthreads();", "accumulators);", RACE,
    ),
    "the pairs of the next unit overwrite those of this one": (
        SORTED, MAIN, "parity ^= 1", "parity ^= 0", RACE,
    ),
    "the weights of the tile, not of the next one": (
        SORTED, MAIN, "weight_ahead = Weight(arguments, next", "weight_ahead = Weight(arguments, tile", VALUES,
    ),
    "x of the tile, not of the next one": (
        SORTED, MAIN, "x_ahead = Copies(arguments, next", "x_ahead = Copies(arguments, tile", VALUES,
    ),
    "the weights of the next tile are loaded too late": (
        PAIRS, MAIN, "first + kDepth >= k_tiles", "first + kDepth > k_tiles", OUTSIDE,
    ),
    "the routing of a tile is not loaded": (
        SORTED, LOOP, "load(tile.index + gridDim.x);", "loaded_.index += gridDim.x;", VALUES,
    ),
    "rows of x past the last one": (
        SORTED, LOOP, "pair, min(row, rows - 1))", "pair, row)", OUTSIDE,
    ),
    "the row of x of the wrong token": (SORTED, LOOP, " / arguments.x_divisor", "", OUTSIDE),
    "no zeros past the end of K": (
        LAST, LOOP, "column + chunk() * 8 < arguments.k ? 16 : 0", "16", OUTSIDE,
    ),
    "the expert of the preceding block": (
        SORTED, LOOP, "kBlockM / arguments_.route_block]", "kBlockM / arguments_.route_block / 2]", VALUES,
    ),
    "the weight of another pair": (
        SORTED, MAIN, "arguments.row_weights[pair]", "arguments.row_weights[pair / 2]", VALUES,
    ),
    "the first group of a weight tile for all of its groups": (
        SORTED, LOOP, "zeros(parts[i].groups[group].zeros)", "zeros(parts[i].groups[0].zeros)", VALUES,
    ),
    "the up projection of other columns": (
        SORTED, LOOP, "0 : arguments.n / 32", "0 : arguments.n / 64", VALUES,
    ),
    "values that are not pairs": (SORTED, LOOP, "< static_cast<unsigned>(arguments_.pairs)", "< ~0u", OUTSIDE),
    "values that are not pairs, with large units": (LARGE, UNIT, "< static_cast<unsigned>(pairs)", "< ~0u", OUTSIDE),
    "rows of x past the last one, with large units": (
        LARGE, TILES, "unit_pairs[min(row, rows - 1)]", "unit_pairs[row]", ("uninitialised", "uninitialised"),
    ),
    "the row of x of the wrong token, with large units": (LARGE, TILES, " / x_divisor;", ";", OUTSIDE),
    "the expert of the preceding block, with large units": (
        LARGE, TILES, "first_row / route_block]", "first_row / route_block / 2]", VALUES,
    ),
    "the weight of another pair, with large units": (LARGE, TILES, "row_weights[pair]", "row_weights[row]", VALUES),
    "copies start before the pairs of the large unit are written": (
        LARGE, TILES, "    __syncthreads();  // unit_pairs are written", "    // unit_pairs are written", RACE,
    ),
    "the pairs of the next large unit overwrite those of this one": (
        LARGE, TILES, "    __syncthreads();  // unit_pairs are no longer read\n", "", RACE,
    ),
    "accumulators of a large unit overwrite stages that other slices still read": (
        LARGE, TILES, "      __syncthreads();  // the stages, or", "      // the stages, or", RACE,
    ),
    "accumulators of a large unit are read before all warps have stored them": (
        LARGE, TILES, "result_factor));\n      __syncthreads();", "result_factor));", RACE,
    ),
    "the pairs of the next unit overwrite those of this one, with copies through registers": (
        STAGED, TILES, "    __syncthreads();  // unit_pairs are no longer read\n", "", RACE,
    ),
    "x of the first 8 k for all 16": (
        STAGED, "common/mma.cuh", "(c, a[2], a[3], b1)", "(c, a[2], a[3], b0)", VALUES,
    ),
    "offsets of the wrong columns": (
        OFFSETS, "gemm/repacked_layout.cuh", "ld_shared_u32(scales + 32 +", "ld_shared_u32(scales + 28 +", VALUES,
    ),
    "the first rows in each pass": (LARGE, TILES, "accumulators, first, Group", "accumulators, 0, Group", VALUES),
    "weights of the wrong k tile": (
        PAIRS, LOOP, "at_.k_tile * kWeightTileBytes;", "(at_.k_tile ^ 1) * kWeightTileBytes;", VALUES,
    ),
    "the sum of x over another group": (PAIRS, LOOP, "const int t = group * 4 / kGroups", "const int t = 0", VALUES),
    "the sum of x over the wrong values": (TOKENS, LOOP, "lane % 8 * 2 + lane / 8 % 2", "lane % 16", VALUES),
    "a group's sum of x without its second half": (
        TOKENS, LOOP, "if constexpr (kGroups <= 2) sums[0] +=", "if constexpr (kGroups == 1) sums[0] +=", VALUES,
    ),
    "a result stored for columns past the end": (TOKENS, MAIN, "if (column >= n_out) continue;", "", RACE),
    "an id that is of no expert": (
        PAIRS, LOOP, "      if (!is_expert) tile.expert = 0;", "", OUTSIDE,
    ),
    "no zeros for an id of no expert": (
        PAIRS, MAIN, "tile.weight == 0.0f", "false", VALUES,
    ),
    "the weight of the first slot for all slots": (
        TOKENS, MAIN, "__shfl_sync(kFullWarp, tile.weight, at.slot)", "__shfl_sync(kFullWarp, tile.weight, 0)", VALUES,
    ),
    "x of the first slot for all slots": (
        TOKENS, LOOP, "(kRows == Rows::kTokens ? at_.slot * arguments.ldx : 0)", "0", VALUES,
    ),
    "a slice of K is lost": (TOKENS, MAIN, "slice < kSlices; ++slice", "slice < kSlices - 1; ++slice", VALUES),
    "rows are placed before the starts are known": (
        "sort", SORT, "  __syncthreads();\n  for (int expert = rank", "  for (int expert = rank", RACE,
    ),
    "counts of other CTAs are read before they are known": (
        "large sort", SORT, "cluster_sync<kCluster>();\n  }", "__syncthreads();\n  }", RACE,
    ),
    "a CTA ends while others read its counts": (
        "large sort", SORT, "  cluster_sync_before_exit<kCluster>();\n", "", RACE,
    ),
    "the places of another part of the pairs": (
        "large sort", SORT, "if (other == rank)", "if (other == rank / 2)", RACE,
    ),
    "a lane reads a place before that of the preceding pairs is known": (
        "sort", SORT, "+ __popc(same);\n        __syncwarp();", "+ __popc(same);", RACE,
    ),
    "the places of warps are added before all pairs are counted": (
        "sort", SORT, "place_pairs(false);\n    __syncthreads();", "place_pairs(false);", RACE,
    ),
    "the places of the warps before are left out": (
        "sort", SORT, "places[warp][kept_experts[i]] + kept_places[i]", "kept_places[i]", RACE,
    ),
    "pairs beyond those in registers are left out": (
        "long sort", SORT, "parts) * 32 * kKept)", "parts) * 32 * kKept * 2)", VALUES,
    ),
    "the sums of warps are read before all of them are known": (
        "sort", SORT, "warp_sums[warp] = sum;\n  __syncthreads();", "warp_sums[warp] = sum;", RACE,
    ),
    "the last of equal experts": ("router", CHOICE, "__ffs(owners) - 1", "31 - __clz(owners)", VALUES),
    "an expert is taken twice": ("router", CHOICE, "index) values[i] = kTaken;", "index) values[i] -= 1;", VALUES),
    "experts are chosen before all logits are known": ("norm", ROUTE, "1u) == kCtas - 1", "1u) == 0", RACE),
    "a counter is not reset": ("norm", ROUTE, "counters[token] = 0", "counters[token] = 1", VALUES),
    "experts are chosen before all CTAs of a cluster have sent logits": (
        "cluster norm", ROUTE, "    cluster_sync<kClusterSize>();\n", "    __syncthreads();\n", RACE,
    ),
    "logits are sent to the wrong CTA": (
        "cluster norm", ROUTE, "ptx::mapa(target, 0)", "ptx::mapa(target, 1)", ("uninitialised", "uninitialised"),
    ),
    "x is multiplied before all of it is stored": (
        "norm", ROUTE, "normed);\n  }\n  __syncthreads();", "normed);\n  }", RACE,
    ),
    "the sums of warps are read before they are stored": (
        "norm", ROUTE, "= sum;\n  __syncthreads();", "= sum;", RACE,
    ),
    "the row of an expert that does not exist": (
        "norm", ROUTE, "if (first_expert < kExperts) fetch", "fetch", OUTSIDE,
    ),
    "columns past the end of x": ("norm", ROUTE, "  if (column >= kWidth) continue;\n      if", "  if", OUTSIDE),
}  # fmt: skip


def outcome(case: Case | str, landing: str) -> str:
    """Return the check that fails in a launch, or "nothing"."""
    if case in SORTS:
        pairs, arch = SORTS[case]
        return caught_by(lambda: test_sort(landing, from_offsets=False, arch=arch, pairs=pairs, experts=40, block=16))
    if case in ("norm", "cluster norm"):
        arch = 80 if case == "norm" else 90
        route = functools.partial(test_norm_and_router_in_one_launch, landing, arch, "float16", 44, 2304)
        return caught_by(lambda: route(delta=True, options={}))
    if isinstance(case, str):
        return caught_by(lambda: test_router(landing, 80, {}))
    problem, config = case
    family: AnyFamily = EXPERT_GEMM if isinstance(config, ExpertGemmConfig) else EXPERT_GEMM_TILES
    here = HERE if getattr(config, "is_async", True) else replace(device.nominal(75), sm_count=2)
    return caught_by(lambda: check_product(runner(landing), problem, (family, config), here, np.random.default_rng(0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_planted_bug_is_caught(name: str) -> None:
    assert_caught_by(outcome, *SEEDS[name])
