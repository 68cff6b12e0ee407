# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in copies of `gemm_w4a8_sm90`, each of which the simulator must catch.

The last entry of a bug has the checks that catch it, with asynchronous copies that land as late, and as early, as PTX
allows: the kind of the simulator's fault, or "values" for a wrong result.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupy_awq import BlockQuantizedWeight
from cupy_awq.kernels.int8.gemm_w4a8_sm90 import GEMM_W4A8_SM90, GemmW4A8Config
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.runtime import device
from tests.simt.kernels import patched
from tests.simt.seeds import caught_by
from tests.test_fp8 import check_fp8_product, fp8_problem
from tests.test_gemm_int8 import check_product

KERNEL, HEADER = "int8/gemm_w4a8_sm90.cu", "int8/gemm_w4a8_sm90.cuh"
REDUCTION = "hopper/cluster_reduction.cuh"
RACE = ("race", "race")
PROBLEM = Int8Problem(70, 130, 1424, 128, 4, False, True, "float16", wide=False, zero_points=True)
CONFIG = GemmW4A8Config(80, 1, 1, 2, 2, 1, 3, 1, 2)
"""A configuration with clusters of six CTAs: three slices of K, which use both stages twice, and two CTAs share x.
"""

SEEDS = {
    "a stage is released while wgmma still reads it": (
        KERNEL, "          ptx::wgmma_wait_group<0>();\n#pragma", "#pragma", RACE,
    ),
    "a stage is refilled while the other CTA still reads it": (
        KERNEL, "C::kWarpgroups * 4 * C::kShareX);", "C::kWarpgroups * 4);", ("barrier", "barrier"),
    ),
    "a stage is read before the values of x have been stored": (
        KERNEL, "pipeline.init(1 + C::kHasXParameters,", "pipeline.init(1,", ("barrier", "deadlock"),
    ),
    "the values of x overwrite those that consumers still read": (
        KERNEL, "      if (k_tile % C::kKTiles == 0) pipeline.producer_acquire(state);\n", "", ("barrier", "values"),
    ),
    "copies of x go to the CTAs of the first slice": (
        KERNEL, "row, 0, full_barrier, tile.split * C::kShareX);", "row, 0, full_barrier);", RACE,
    ),
    "a CTA releases the stages of another slice": (
        KERNEL, "<C::kShareX>(lane, tile.split * C::kShareX);", "<C::kShareX>(lane);", ("barrier", "barrier"),
    ),
    "a CTA that owns few rows expects the bytes of all": (
        HEADER, "max(0, min(C::kOwnedRows, C::kBlockM - split * C::kOwnedRows))", "C::kOwnedRows",
        ("deadlock", "deadlock"),
    ),
    "a CTA exits while others signal its barriers": (
        KERNEL, "    cluster_sync_before_exit<C::kClusterSize>();\n", "", RACE,
    ),
    "barriers share memory with accumulators": (
        HEADER, "Pipeline<Host::kStages, Barriers::kBegin>", "Pipeline<Host::kStages, XParameters::kEnd>",
        ("race", "nothing"),
    ),
    "two CTAs write to the same slot": (
        REDUCTION, "(split < owner ? split : split - 1)", "(split / 2)", RACE,
    ),
    "partial sums go to the CTA with other columns": (
        REDUCTION, "write(first_rank + owner", "write(owner", RACE,
    ),
    "accumulators overwrite stages that are still read": (
        HEADER, "  sync_consumers<C>();  // All stages", "  // All stages", RACE,
    ),
    "accumulators are read before other consumers have stored them": (
        HEADER, "  sync_consumers<C>();\n  if constexpr", "  if constexpr", RACE,
    ),
    "partial sums are read before they have landed": (
        REDUCTION, "shared.received_barrier().wait_for_all();", "", RACE,
    ),
    "zero points are subtracted from the codes of the other column": (
        KERNEL, "biases[i % 2]", "biases[i / 2]", ("values", "values"),
    ),
}  # fmt: skip

OFFSET_PROBLEM = fp8_problem(76, 130, 1424, 128, "float16")
OFFSET_CONFIG = GemmW4A8Config(72, 1, 1, 2, 2, 1, 2, offset_tiles=True)
"""A configuration with two slices of K, each passing both stages more than twice.

The second slice ends with a tile of offsets (see `tests.test_gemm_w4a8`).
"""
DEEP_CONFIG = replace(OFFSET_CONFIG, stages=8)
"""`OFFSET_CONFIG` with more stages than a CTA's slice of K has k tiles (128 rows of W each)."""
PROLOGUE = "the prologue copies weights for a tile of offsets"

OFFSET_SEEDS = {
    "the bytes of the sums of x are not expected": (
        KERNEL, "C::kColumnTiles * C::kCodeBytes + C::kXTileBytes);", "C::kColumnTiles * C::kCodeBytes);",
        ("deadlock", "deadlock"),
    ),
    "sums of x overwrite a stage that is still read": (
        KERNEL,
        "      pipeline.producer_acquire(state);\n      ptx::mbarrier_arrive_expect_tx(full_barrier, C::kColumn",
        "      ptx::mbarrier_arrive_expect_tx(full_barrier, C::kColumn", ("barrier", "deadlock"),
    ),
    "the sums of x are those of the first rows": (
        KERNEL, "                                   tile.m_begin, 0, full_barrier);\n      for",
        "                                   0, 0, full_barrier);\n      for", ("values", "values"),
    ),
    PROLOGUE: (
        KERNEL, "for (int i = 0; i < min(tile.weight_iterations(), C::kStages); ++i)",
        "for (int i = 0; i < min(tile.iterations(), C::kStages); ++i)", ("out of bounds", "out of bounds"),
    ),
    "the stage of a tile of offsets has the phase of the preceding pass": (
        "hopper/pipeline.cuh", "(iteration / kNumStages & 1u) ^ 1u}", "iteration / kNumStages & 1u}",
        ("barrier", "deadlock"),
    ),
    "a tile of offsets is released while wgmma still reads it": (
        KERNEL, "        ptx::wgmma_wait_group<0>();\n#pragma unroll\n        for (int v", "        for (int v", RACE,
    ),
    "offsets are multiplied with the sums of another k tile": (
        KERNEL, "offset_tile * C::kOffsetTileGroups,", "offset_tile * C::kOffsetTileGroups + 1,", ("values", "values"),
    ),
}  # fmt: skip


def check(landing: str, config: GemmW4A8Config) -> None:
    """Check y of a product with random codes, for one configuration, on the simulator."""
    if config.offset_tiles:
        codes = np.random.default_rng(0).integers(0, 16, (130, 1, 1, 1424), dtype=np.uint8)
        scale = np.random.default_rng(1).uniform(-1, 1, (130, 12)).astype(np.float32)
        weight = BlockQuantizedWeight(codes, scale, -8 * scale, block_size=128)
        check_fp8_product(landing, OFFSET_PROBLEM, GEMM_W4A8_SM90, config, weight, seed=0)
    else:
        check_product(landing, PROBLEM, GEMM_W4A8_SM90, config, device.nominal(90), 128, seed=0)


def outcome(landing: str, config: GemmW4A8Config = CONFIG) -> str:
    """Return the check that fails when a product is simulated, or "nothing" if y is right."""
    return caught_by(lambda: check(landing, config))


@pytest.mark.parametrize("config", [CONFIG, OFFSET_CONFIG, DEEP_CONFIG])
def test_kernel_passes_before_a_bug_is_planted(config: GemmW4A8Config) -> None:
    assert outcome("latest", config) == "nothing"


@pytest.mark.parametrize(
    "name", [next(iter(SEEDS)), *(pytest.param(n, marks=pytest.mark.slow) for n in [*SEEDS, *OFFSET_SEEDS][1:])]
)
def test_planted_bug_is_caught(name: str) -> None:
    file, old, new, caught = (SEEDS | OFFSET_SEEDS)[name]
    config = DEEP_CONFIG if name == PROLOGUE else OFFSET_CONFIG if name in OFFSET_SEEDS else CONFIG
    with patched(file, old, new):
        assert (outcome("latest", config), outcome("earliest", config)) == caught
