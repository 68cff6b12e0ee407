# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the kernels of a mixture of experts: each one is caught."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from cupy_awq.kernels.experts.expert_gemm import ExpertGemmConfig
from cupy_awq.kernels.experts.problem import ExpertProduct
from cupy_awq.runtime import device
from tests import simt
from tests.backends import runner
from tests.simt.kernels import patched
from tests.simt.seeds import OUTSIDE, RACE, VALUES
from tests.test_expert_kernels import check_product, test_sort

MAIN, LOOP, SORT = (f"experts/{name}" for name in ("expert_gemm.cu", "expert_gemm_mainloop.cuh", "sort_tokens.cu"))
HERE = replace(device.nominal(80), sm_count=2)
GATED = {"activation": "silu", "gated": True, "layout": "fragments"}
SORTED = (
    ExpertProduct("sorted", 30, 3, 160, 704, 64, block=16, top_k=2, x_divisor=2, row_weights=True, **GATED),
    ExpertGemmConfig("kExact", 16, 2, 2, 2, stages=3, depth=2),
)
"""Warps that share stages, slices with several stages, units with a few rows, CTAs with several tiles."""
LAST = ExpertProduct("sorted", 9, 3, 96, 704, 704, block=16, **GATED), replace(SORTED[1], warps_k=2)
"""K ends within a weight tile whose scales are not zero past the end."""
LARGE = (
    ExpertProduct("sorted", 90, 2, 160, 704, 64, block=64, **GATED),
    ExpertGemmConfig("kScaled", 64, 2, 4, 1, stages=2, depth=2),
)
PAIRS = (
    ExpertProduct("pairs", 12, 3, 96, 704, 32, top_k=2, x_divisor=2, **GATED),
    ExpertGemmConfig("kExact", 8, 2, 1, 2, stages=3, depth=1),
)
TOKENS = (
    ExpertProduct("tokens", 9, 3, 72, 320, 64, top_k=3, row_weights=True, shared=True, layout="fragments"),
    ExpertGemmConfig("kExact", 8, 1, 1, 4, stages=3, depth=2),
)
Case = tuple[ExpertProduct, ExpertGemmConfig]
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
        SORTED, MAIN, "      __syncthreads();  // the stages, or", "      // the stages, or", RACE,
    ),
    "accumulators are read before all warps have stored them": (
        SORTED, MAIN, "result_factor);\n      __syncthreads();", "result_factor);", RACE,
    ),
    "the pairs of the next unit overwrite those of this one": (
        SORTED, MAIN, "    __syncthreads();  // unit_pairs are no longer read\n", "", RACE,
    ),
    "copies start before the pairs of the unit are written": (
        SORTED, MAIN, "    __syncthreads();  // unit_pairs are written", "    // unit_pairs are written", RACE,
    ),
    "rows of x past the last one": (
        SORTED, LOOP, "pairs_[min(row, rows_ - 1)]", "pairs_[row]", ("uninitialised", "uninitialised"),
    ),
    "the row of x of the wrong token": (SORTED, LOOP, "pair / arguments_.x_divisor", "pair", OUTSIDE),
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
        SORTED, LOOP, "begin_group(i, parts[i].groups[group])", "begin_group(i, parts[i].groups[0])", VALUES,
    ),
    "the up projection of other columns": (
        SORTED, LOOP, "0 : arguments.n / 32", "0 : arguments.n / 64", VALUES,
    ),
    "a tile of 16 rows too few": (LARGE, LOOP, "active_(ceil_div(rows, 16))", "active_(rows / 16)", VALUES),
    "half of the rows of a pass": (LARGE, MAIN, "pass * kPassRows, result_factor", "0, result_factor", VALUES),
    "a wait for one group of copies too few, with large units": (
        LARGE, MAIN, NEXT_WAIT, NEXT_WAIT.replace("2", "1"), IN_FLIGHT,
    ),
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
    """Return the check that catches a planted bug, or "nothing"; without a case, the sort runs."""
    try:
        if case is None:
            test_sort(landing, from_offsets=False, pairs=700, experts=40, block=16)
        else:
            check_product(runner(landing), *case, HERE, np.random.default_rng(0))
    except simt.Fault as fault:
        return fault.kind
    except AssertionError:
        return "values"
    return "nothing"


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
