# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in stream-K's reduction, by which clusters that share a tile add up; each must be caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from tests.simt.seeds import DEADLOCK, RACE, VALUES, Seed, assert_caught

PROBLEM = Problem(140, 384, 768, 128, layouts=(AWQ, FRAGMENTS))
"""A problem with six tiles of 80 rows and 128 columns, whose K of 768 is six k tiles of 128 for stream-K to share out.

CTAs receive the partial sums of others through the stages of the pipeline.
"""
GATED = Problem(140, 768, 768, 128, gated=True, activation="silu", layouts=(AWQ, FRAGMENTS))
"""A gated problem with six tiles of 80 rows and 256 columns (gate and up), with six k tiles of 128 each.

Warpgroups read the partial sums of other CTAs from global memory.
"""
EPILOGUE, REDUCE = "gemm/gemm_sm90_large_epilogue.cuh", "common/reduce.cuh"
COPY = (
    "      pipeline.producer_acquire(state);\n"
    "      if (is_leader) {\n"
    "        const uint32_t full_barrier = pipeline.full_barrier(state.stage_idx);\n"
    "        ptx::mbarrier_arrive_expect_tx(full_barrier, C::kXStageBytes)"
)


WAIT = "  while (*const_cast<volatile uint32_t*>(counter) != count) {\n  }\n"
RESET = "  *counter = 0;\n"
FENCE = "  __threadfence();\n"


def stream_k(
    old: str, new: str, caught: tuple[str, str], problem: Problem = PROBLEM, cluster: int = 1, file: str = EPILOGUE
) -> Seed:
    """Return a bug and a launch in which two clusters, and without pairs of CTAs also three, share a tile."""
    units, clusters = (3, 7) if cluster == 1 else (3, 4)
    config: dict[str, Any] = {
        "cluster": cluster,
        "ctas": clusters * cluster,
        "stream_k_units": units,
        "stream_k_clusters": clusters,
        "block_m": 80,
        "warpgroups": 2,
        "m64_tiles": 2 if problem.gated else 1,
    }
    return Seed("gemm_sm90_large", 90, file, old, new, caught, problem, config)


SEEDS = {
    "the signal is given before all warps have written their partial sums": stream_k(
        "    ptx::barrier_sync(C::kSignalBarrier, C::kSignalThreads);\n", "", ("values", "race"),
    ),
    "partial sums are not fenced before the signal": stream_k(
        FENCE + "  atomicAdd(counter, 1u);", "  atomicAdd(counter, 1u);", RACE, file=REDUCE,
    ),
    "partial sums are copied without a wait": stream_k(
        WAIT, "", ("values", "race"), file=REDUCE,
    ),
    "partial sums are copied without a fence after the signal": stream_k(
        RESET + FENCE, RESET, RACE, file=REDUCE,
    ),
    "the counter is not left at zero": stream_k(
        RESET + FENCE, FENCE, VALUES, file=REDUCE,
    ),
    "partial sums are copied to a stage in use": stream_k(COPY, COPY.split("\n", 1)[1], RACE, replace(PROBLEM, k=2048)),
    "partial sums are added before they have landed": stream_k(
        "    pipeline.consumer_wait(state);\n", "", ("uninitialised", "uninitialised"),
    ),
    "stages with partial sums are not released": stream_k(
        "    pipeline.template release<C::kCluster>(empty_barriers + state.stage_idx * 8, lane);\n", "", DEADLOCK,
    ),
    "a warpgroup adds the partial sums of the other one": stream_k(
        "i % C::kWarpgroups == warpgroup", "i % C::kWarpgroups != warpgroup", VALUES,
    ),
    "the CTAs of a pair use one slot": stream_k(
        "cluster_idx * C::kCluster + cluster_rank<C::kCluster>();\n  return static_cast",
        "cluster_idx * C::kCluster;\n  return static_cast", RACE, cluster=2,
    ),
    "gated: a warpgroup signals before all of its warps have written their partial sums": stream_k(
        "    ptx::barrier_sync(1 + warpgroup, 128);\n    if (thread == 0) signal_partials",
        "    if (thread == 0) signal_partials", RACE, GATED,
    ),
    "gated: partial sums are not fenced before the signal": stream_k(
        FENCE + "  atomicAdd(counter, 1u);", "  atomicAdd(counter, 1u);", RACE, GATED, file=REDUCE,
    ),
    "gated: partial sums are added without a wait": stream_k(
        WAIT, "", RACE, GATED, file=REDUCE,
    ),
    "gated: partial sums are read without a fence after the signal": stream_k(
        RESET + FENCE, RESET, RACE, GATED, file=REDUCE,
    ),
    "gated: warps add partial sums before the first thread has seen the signal": stream_k(
        "  ptx::barrier_sync(1 + warpgroup, 128);\n#pragma unroll 1", "#pragma unroll 1", RACE, GATED,
    ),
    "gated: the counter is not left at zero": stream_k(
        RESET + FENCE, FENCE, VALUES, GATED, file=REDUCE,
    ),
    "gated: the partial sums of one cluster are not added": stream_k(
        "(int cluster_idx = first; cluster_idx < scheduler.cluster_idx; ++cluster_idx) {\n    const",
        "(int cluster_idx = first + 1; cluster_idx < scheduler.cluster_idx; ++cluster_idx) {\n    const", VALUES, GATED,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [next(iter(SEEDS)), *(pytest.param(n, marks=pytest.mark.slow) for n in list(SEEDS)[1:])]
)
def test_seeded_bug_of_stream_k_is_caught(name: str) -> None:
    assert_caught(SEEDS[name])
