# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the split-K reduction of clusters whose CTAs own different numbers of rows; each must be caught."""

from __future__ import annotations

import pytest

from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from tests.simt.seeds import DEADLOCK, OUTSIDE, RACE, VALUES, Seed, assert_caught

UNEVEN = Problem(20, 64, 1152, 128, layouts=(AWQ, FRAGMENTS))
"""A problem with a tile of 24 rows, of which the five CTAs of a cluster sum 6, 6, 6, 6 and none."""
SEVERAL = Problem(136, 64, 1152, 128, layouts=(AWQ, FRAGMENTS))
"""A problem with two tiles of 72 rows, of which the five CTAs of a cluster sum 16, 16, 16, 16 and 8 rows."""
EPILOGUE, REDUCTION = "gemm/gemm_sm90_epilogue.cuh", "hopper/cluster_reduction.cuh"
INVALID = ("invalid", "invalid")

SEEDS = {
    "a CTA that owns few rows expects the bytes of all": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "Tile<C>::owned_rows(tile.split)", "C::kOwnedRows", DEADLOCK, SEVERAL,
        {"split_k": 5, "block_m": 72},
    ),
    "partial sums past the tile are written": Seed(
        "gemm_sm90", 90, REDUCTION, "if (!kSendsAll && owner * L::kOwnedRows + row >= rows) continue;", "",
        INVALID, SEVERAL, {"split_k": 5, "block_m": 72},
    ),
    "two CTAs write to the same slot": Seed(
        "gemm_sm90", 90, REDUCTION, "(split < owner ? split : split - 1)", "(split / 2)", RACE, UNEVEN,
        {"split_k": 5},
    ),
    "the partial sums of the last CTA are not added": Seed(
        "gemm_sm90", 90, REDUCTION, "other < (L::kSplitK - 1)", "other < (L::kSplitK - 2)", VALUES, UNEVEN,
        {"split_k": 5},
    ),
    "a CTA sends its own rows to itself and none to its neighbour": Seed(
        "gemm_sm90", 90, REDUCTION, "split + 1 + index / kUnits", "split + index / kUnits", RACE, UNEVEN,
        {"split_k": 5},
    ),
    "a CTA stores rows that the next tile owns": Seed(
        "gemm_sm90", 90, EPILOGUE,
        "if (!C::kOwnsEvenly) is_valid = is_valid && tile.split * C::kOwnedRows + local_row < C::kBlockM;", "",
        INVALID, SEVERAL, {"split_k": 5, "block_m": 72},
    ),
    "row pairs are numbered as if four fitted into a block": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_tile.cuh", "(kPairs * (kBlockN / 2)) * (2 * kPairs)",
        "(kPairs * (kBlockN / 2)) * 8",
        OUTSIDE, UNEVEN, {"split_k": 5},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [next(iter(SEEDS)), *(pytest.param(n, marks=pytest.mark.slow) for n in list(SEEDS)[1:])]
)
def test_seeded_bug_of_a_cluster_is_caught(name: str) -> None:
    assert_caught(SEEDS[name])
