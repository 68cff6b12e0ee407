# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the reduction of stream-K units, which several clusters share: each one is caught."""

from __future__ import annotations

from typing import Any

import pytest

from cupy_awq.kernels.problem import Problem
from tests.simt.seeds import RACE, VALUES, Seed, assert_caught

PROBLEM = Problem(140, 384, 768, 128, repacked=True)
"""Six tiles of 80 rows and 128 columns, with six k tiles each."""
EPILOGUE = "gemm/gemm_sm90_large_epilogue.cuh"


def stream_k(old: str, new: str, caught: tuple[str, str], file: str = EPILOGUE, cluster: int = 1) -> Seed:
    """Return a bug in a launch whose clusters share units by two and, without pairs of CTAs, also by three."""
    units, clusters = (3, 7) if cluster == 1 else (3, 4)
    config: dict[str, Any] = {
        "cluster": cluster,
        "ctas": clusters * cluster,
        "stream_k_units": units,
        "stream_k_clusters": clusters,
        "block_m": 80,
        "warpgroups": 2,
        "m64_tiles": 1,
    }
    return Seed("gemm_sm90_large", 90, file, old, new, caught, PROBLEM, config)


SEEDS = {
    "a warpgroup signals before all of its warps have written their partial sums": stream_k(
        "    ptx::barrier_sync(1 + warpgroup, 128);\n    if (thread == 0) {\n      __threadfence();\n      atomicAdd",
        "    if (thread == 0) {\n      __threadfence();\n      atomicAdd", RACE,
    ),
    "partial sums are not fenced before the signal": stream_k(
        "      __threadfence();\n      atomicAdd", "      atomicAdd", RACE,
    ),
    "partial sums are added without a wait": stream_k(
        "while (*const_cast<volatile uint32_t*>(counter) != scheduler.cluster_idx - first) {\n    }\n", "", RACE,
    ),
    "partial sums are added after the signal of the first cluster": stream_k(
        "(counter) != scheduler.cluster_idx - first)", "(counter) == 0)", VALUES,
    ),
    "partial sums are read without a fence after the signal": stream_k(
        "    *counter = 0;\n    __threadfence();\n", "    *counter = 0;\n", RACE,
    ),
    "warps add partial sums before the first thread has seen the signal": stream_k(
        "  ptx::barrier_sync(1 + warpgroup, 128);\n#pragma unroll 1", "#pragma unroll 1", RACE,
    ),
    "the counter is not left at zero": stream_k("    *counter = 0;\n", "", VALUES),
    "the partial sums of one cluster are not added": stream_k(
        "for (int cluster_idx = first; cluster_idx <", "for (int cluster_idx = first + 1; cluster_idx <", VALUES,
    ),
    "the CTAs of a pair use one slot": stream_k(
        "cluster_idx * kCluster + cluster_rank<kCluster>();", "cluster_idx * kCluster;", RACE, cluster=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [next(iter(SEEDS)), *(pytest.param(n, marks=pytest.mark.slow) for n in list(SEEDS)[1:])]
)
def test_seeded_bug_of_stream_k_is_caught(name: str) -> None:
    assert_caught(SEEDS[name])
