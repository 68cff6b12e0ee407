# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the split-K reduction of clusters whose CTAs own different numbers of rows; each must be caught."""

from __future__ import annotations

import pytest

from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from tests.simt.seeds import DEADLOCK, OUTSIDE, RACE, VALUES, Seed, assert_caught

UNEVEN = Problem(20, 64, 1152, 128, layouts=(AWQ, FRAGMENTS))
"""A problem with tiles of 24 rows, of which the CTAs of a cluster of five own 6, 6, 6, 6 and none."""
SEVERAL = Problem(136, 64, 1152, 128, layouts=(AWQ, FRAGMENTS))
"""A problem with two tiles of 72 rows, of which the CTAs of a cluster of five own 16, 16, 16, 16 and 8."""
EPILOGUE = "gemm/gemm_sm90_epilogue.cuh"
INVALID = ("invalid", "invalid")

SEEDS = {
    "a CTA that owns few rows expects the bytes of all": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "Tile::owned_rows(tile.split)", "kOwnedRows", DEADLOCK, SEVERAL,
        {"split_k": 5, "block_m": 72},
    ),
    "partial sums past the tile are written": Seed(
        "gemm_sm90", 90, EPILOGUE, "if (!kOwnsEvenly && owner * kOwnedRows + row >= kBlockM) continue;", "",
        INVALID, SEVERAL, {"split_k": 5, "block_m": 72},
    ),
    "two CTAs write to the same slot": Seed(
        "gemm_sm90", 90, EPILOGUE, "tile.split < owner ? tile.split : tile.split - 1", "tile.split / 2", RACE, UNEVEN,
        {"split_k": 5},
    ),
    "the partial sums of the last CTA are not added": Seed(
        "gemm_sm90", 90, EPILOGUE, "other < kSplitK - 1; ++other", "other < kSplitK - 2; ++other", VALUES, UNEVEN,
        {"split_k": 5},
    ),
    "a CTA sends its own rows to itself and none to its neighbour": Seed(
        "gemm_sm90", 90, EPILOGUE, "tile.split + 1 + index / kUnits", "tile.split + index / kUnits", RACE, UNEVEN,
        {"split_k": 5},
    ),
    "a CTA stores rows that the next tile owns": Seed(
        "gemm_sm90", 90, EPILOGUE,
        "if (!kOwnsEvenly) is_valid = is_valid && tile.split * kOwnedRows + local_row < kBlockM;", "",
        INVALID, SEVERAL, {"split_k": 5, "block_m": 72},
    ),
    "row pairs are numbered as if four fitted into a block": Seed(
        "gemm_sm90", 90, EPILOGUE, "(kPairs * (kBlockN / 2)) * (2 * kPairs)", "(kPairs * (kBlockN / 2)) * 8",
        OUTSIDE, UNEVEN, {"split_k": 5},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [next(iter(SEEDS)), *(pytest.param(n, marks=pytest.mark.slow) for n in list(SEEDS)[1:])]
)
def test_seeded_bug_of_a_cluster_is_caught(name: str) -> None:
    assert_caught(SEEDS[name])
