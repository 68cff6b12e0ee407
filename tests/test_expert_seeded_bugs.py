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
from cupy_awq.kernels.family import AnyFamily
from cupy_awq.kernels.gemm.gemm_mma_fragments import GemmFragmentsConfig
from cupy_awq.runtime import device
from tests.backends import runner
from tests.simt.kernels import patched
from tests.simt.seeds import OUTSIDE, RACE, VALUES, caught_by
from tests.test_expert_kernels import check_product, test_sort

MAIN, LOOP, TILES, UNIT, SORT = (
    f"experts/{name}"
    for name in (
        "expert_gemm.cu", "expert_gemm_mainloop.cuh", "expert_gemm_tiles.cu", "expert_unit.cuh", "sort_tokens.cu",
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
LAST = ExpertProduct("sorted", 9, 3, 96, 704, 704, block=16, **GATED), replace(SORTED[1], warps_k=2)
"""A launch whose K ends within a weight tile (128 k); behind the end of K, the tile's scales are not zero."""
LARGE = (
    ExpertProduct("sorted", 120, 2, 192, 704, 64, block=64, top_k=2, x_divisor=2, row_weights=True, **GATED),
    GemmFragmentsConfig("kScaled", 64, 64, 1, 4, 2, 64),
)
PAIRS = (
    ExpertProduct("pairs", 12, 3, 96, 704, 32, top_k=2, x_divisor=2, **GATED),
    ExpertGemmConfig(8, 2, 1, 2, stages=3, depth=1),
)
TOKENS = (
    ExpertProduct("tokens", 9, 3, 72, 320, 64, top_k=3, row_weights=True, shared=True, layout="fragments"),
    ExpertGemmConfig(8, 1, 1, 4, stages=3, depth=2),
)
Case = tuple[ExpertProduct, ExpertGemmConfig | GemmFragmentsConfig]
Seed = tuple[Case | None, str, str, str, tuple[str, str]]

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
    "accumulators overwrite stages that other warps still read": (
        SORTED, MAIN, "    __syncthreads();  // the stages are", "    // the stages are", RACE,
    ),
    "accumulators are read before all warps have stored them": (
        SORTED, MAIN, "accumulators);\n    __syncthreads();", "accumulators);", RACE,
    ),
    "the pairs of the next unit overwrite those of this one": (
        SORTED, MAIN, "    __syncthreads();  // unit_pairs are no longer read\n", "", RACE,
    ),
    "copies start before the pairs of the unit are written": (
        SORTED, MAIN, "    __syncthreads();  // unit_pairs are written", "    // unit_pairs are written", RACE,
    ),
    "rows of x past the last one": (
        SORTED, LOOP, "pairs[min(row(pass), rows - 1)]", "pairs[row(pass)]", ("uninitialised", "uninitialised"),
    ),
    "the row of x of the wrong token": (SORTED, LOOP, " / arguments.x_divisor;", ";", OUTSIDE),
    "no zeros past the end of K": (
        LAST, LOOP, "column < arguments_.k ? 16 : 0", "16", OUTSIDE,
    ),
    "the expert of the preceding block": (
        SORTED, MAIN, "kBlockM / route_block]", "kBlockM / route_block / 2]", VALUES,
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
    "values that are not pairs": (SORTED, UNIT, "< static_cast<unsigned>(pairs)", "< ~0u", OUTSIDE),
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
    "the first rows in each pass": (LARGE, TILES, "accumulators, first, Group", "accumulators, 0, Group", VALUES),
    "weights of the wrong k tile": (
        PAIRS, LOOP, "at.k_tile * kWeightTileBytes;", "(at.k_tile ^ 1) * kWeightTileBytes;", VALUES,
    ),
    "an id that is of no expert": (
        PAIRS, MAIN, "    if (!has_expert) at.expert = 0;", "    ", OUTSIDE,
    ),
    "no zeros for an id of no expert": (
        PAIRS, MAIN, "has_expert ? out : Vector<X, 8>{}", "out", VALUES,
    ),
    "the weight of the first slot for all slots": (
        TOKENS, MAIN, "__shfl_sync(kFullWarp, at.weight, at.slot)", "__shfl_sync(kFullWarp, at.weight, 0)", VALUES,
    ),
    "x of the first slot for all slots": (
        TOKENS, LOOP, "(kRows == Rows::kTokens ? at.slot : 0)", "0", VALUES,
    ),
    "a slice of K is lost": (TOKENS, MAIN, "slice < kSlices; ++slice", "slice < kSlices - 1; ++slice", VALUES),
    "rows are placed before the starts are known": (
        None, SORT, "    }\n  }\n  __syncthreads();\n  for (int expert = threadIdx.x / 32",
        "    }\n  }\n  for (int expert = threadIdx.x / 32", RACE,
    ),
}  # fmt: skip


def outcome(case: Case | None, landing: str) -> str:
    """Return the check that fails in a launch, or "nothing"; without a case, the kernel sort_tokens is launched."""
    if case is None:
        return caught_by(lambda: test_sort(landing, from_offsets=False, arch=90, pairs=700, experts=40, block=16))
    problem, config = case
    family: AnyFamily = EXPERT_GEMM if isinstance(config, ExpertGemmConfig) else EXPERT_GEMM_TILES
    return caught_by(lambda: check_product(runner(landing), problem, (family, config), HERE, np.random.default_rng(0)))


@functools.cache
def is_right(case: Case | None) -> bool:
    return outcome(case, "latest") == "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_planted_bug_is_caught(name: str) -> None:
    case, file, old, new, caught = SEEDS[name]
    assert is_right(case), "the kernel must be right before the bug is planted"
    with patched(file, old, new):
        found = outcome(case, "latest"), outcome(case, "earliest")
    assert found == caught, found
