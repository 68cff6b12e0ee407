# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the kernels of batch-invariant GEMMs; each must be caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupy_awq.kernels.gemm.gemm_sm90_config import MMA_INVARIANT
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from tests.simt.seeds import DEADLOCK, VALUES, Seed, assert_caught

FEW = Problem(5, 160, 2048, 64, batch_invariant=True)
REPACKED = Problem(3, 192, 1024, 128, layouts=(AWQ, FRAGMENTS), batch_invariant=True)
SLICED = Problem(40, 224, 640, 64, batch_invariant=True)

SEEDS = {
    "gemm_sm90_mma_invariant: x is read before the preceding kernel has finished": Seed(
        "gemm_sm90",
        90,
        "gemm/gemm_sm90_mma_invariant.cu",
        "    wait_for_x<C>();\n",
        "",
        ("early", "early"),
        REPACKED,
        {"name": MMA_INVARIANT},
    ),
    "gemm_sm90_mma_invariant: the next k tile of a stage gets the weights of the current one": Seed(
        "gemm_sm90",
        90,
        "gemm/gemm_sm90_mma_invariant.cu",
        "(k_tile + i) * C::kWeightTileBytes",
        "i * C::kWeightTileBytes",
        VALUES,
        REPACKED,
        {"name": MMA_INVARIANT, "k_tiles": 4},
    ),
    "gemm_sm90_mma_invariant: weights past the last k tile of a stage are read": Seed(
        "gemm_sm90",
        90,
        "gemm/gemm_sm90_mma_invariant.cu",
        "&& k_tile + i < k_tiles",
        "",
        ("uninitialised", "uninitialised"),
        replace(REPACKED, k=640),
        {"name": MMA_INVARIANT, "k_tiles": 2, "split_k": 1},
    ),
    "gemm_sm90_mma_invariant: scales are applied to the accumulators twice": Seed(
        "gemm_sm90",
        90,
        "gemm/gemm_sm90_mma_invariant.cu",
        "accumulators[j][v] *= result_factor",
        "accumulators[j][v] *= factor.value",
        VALUES,
        replace(REPACKED, scale_exponent=6),
        {"name": MMA_INVARIANT, "scaled": True},
    ),
    "gemm_sm90: partial sums in rank order are taken from the slot of another CTA": Seed(
        "gemm_sm90",
        90,
        "hopper/cluster_reduction.cuh",
        "rank < split ? rank : rank - 1",
        "rank < split ? rank : L::kSplitK - 2",
        VALUES,
        REPACKED,
        {"name": MMA_INVARIANT, "split_k": 3},
    ),
    "gemm_sm90_raw: partial sums of the first CTA's warps are expected, too": Seed(
        "gemm_sm90_raw",
        90,
        "gemm/gemm_sm90_raw.cu",
        "expect((C::kSplitK - 1) * (C::kInvariant",
        "expect(C::kSplitK * (C::kInvariant",
        DEADLOCK,
        FEW,
        {"split_k": 2, "words": 1},
    ),
    "gemm_sm90_raw: batch-invariant sums take the zero points of the next group": Seed(
        "gemm_sm90_raw",
        90,
        "gemm/gemm_sm90_raw.cu",
        "fetch_zeros(group);",
        "fetch_zeros(group + 1);",
        VALUES,
        FEW,
    ),
    "gemm_sm90_raw: batch-invariant steps of x are in the order of the default": Seed(
        "gemm_sm90_raw",
        90,
        "gemm/gemm_sm90_raw.cu",
        "ptx::ld_shared(halves[1], begin + 32);",
        "ptx::ld_shared(halves[1], begin + 8);",
        VALUES,
        FEW,
    ),
    "gemm_sm80: the sums of slices in shared memory are not zeroed": Seed(
        "gemm_sm80",
        80,
        "common/reduce.cuh",
        "store<true>(shared_sums(i), Vector<float, 4>{});",
        ";",
        ("uninitialised", "uninitialised"),
        SLICED,
        {"block_m": 64, "slices": 2},
    ),
    "gemm_sm80: the accumulators are not zeroed for the next slice": Seed(
        "gemm_sm80",
        80,
        "common/reduce.cuh",
        "      accumulators[i] = 0.0f;\n",
        "",
        VALUES,
        SLICED,
        {"block_m": 64, "slices": 2},
    ),
}


@pytest.mark.parametrize(
    "name", [next(iter(SEEDS)), *(pytest.param(name, marks=pytest.mark.slow) for name in list(SEEDS)[1:])]
)
def test_seeded_bug_is_caught(name: str) -> None:
    assert_caught(SEEDS[name])
