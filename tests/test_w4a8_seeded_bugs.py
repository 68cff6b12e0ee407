# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in copies of `gemm_w4a8_sm90`: the simulator must catch each of them.

The last entry of a bug names the checks that catch it: the kind of the simulator's fault, or "values" for a wrong
result. The first one is with asynchronous copies that land as late as possible, the second one as early as possible.
"""

from __future__ import annotations

import pytest

from cupy_awq.kernels import gemm_w4a8_sm90
from cupy_awq.kernels.gemm_w4a8_sm90 import GemmW4A8Config
from cupy_awq.kernels.int8_problem import Int8Problem
from cupy_awq.runtime import device
from tests import simt
from tests.simt.kernels import patched
from tests.test_gemm_int8 import check_product

KERNEL, HEADER = "int8/gemm_w4a8_sm90.cu", "int8/gemm_w4a8_sm90.cuh"
RACE = ("race", "race")
PROBLEM = Int8Problem(70, 130, 1424, 128, 4, False, True, "float16", wide=False, zero_points=True)
CONFIG = GemmW4A8Config(80, 1, 1, 2, 2, 1, 3, 1, 2)
"""Clusters of six CTAs: three slices of K, which pass the two stages twice, and two CTAs that share x."""

SEEDS = {
    "a stage is released while wgmma still reads it": (KERNEL, "          ptx::wgmma_wait_group<0>();\n", "", RACE),
    "a stage is refilled while the other CTA still reads it": (
        KERNEL, "kWarpgroups * 4 * kShareX);", "kWarpgroups * 4);", ("barrier", "barrier"),
    ),
    "a stage is read before the values of x have been stored": (
        KERNEL, "pipeline.init(1 + kHasXParameters,", "pipeline.init(1,", ("barrier", "deadlock"),
    ),
    "the values of x overwrite those that consumers still read": (
        KERNEL, "      if (k_tile % kKTiles == 0) pipeline.producer_acquire(state);\n", "", ("barrier", "values"),
    ),
    "copies of x go to the CTAs of the first slice": (KERNEL, " << (tile.split * kShareX));", ");", RACE),
    "a CTA releases the stages of another slice": (
        KERNEL, "tile.split * kShareX + lane % kShareX", "lane % kShareX", ("barrier", "barrier"),
    ),
    "a CTA that owns few rows expects the bytes of all": (
        HEADER, "max(0, min(kOwnedRows, kBlockM - split * kOwnedRows))", "kOwnedRows", ("deadlock", "deadlock"),
    ),
    "a CTA exits while others signal its barriers": (
        KERNEL, "    cluster_sync_before_exit<kClusterSize>();\n", "", RACE,
    ),
    "barriers share memory with accumulators": (
        HEADER, "Pipeline<kStages, Barriers::kBegin>", "Pipeline<kStages, XParameters::kEnd>", ("race", "nothing"),
    ),
    "two CTAs write to the same slot": (
        HEADER, "tile.split < owner ? tile.split : tile.split - 1", "tile.split / 2", RACE,
    ),
    "partial sums go to the CTA with other columns": (HEADER, "owner * kShareX + tile.share", "owner * kShareX", RACE),
    "accumulators overwrite stages that are still read": (
        HEADER, "  sync_consumers();  // All stages", "  // All stages", RACE,
    ),
    "accumulators are read before other consumers have stored them": (
        HEADER, "  sync_consumers();\n  // Adds", "  // Adds", RACE,
    ),
    "partial sums are read before they have landed": (
        HEADER, "      tile.shared.received_barrier().wait_for_all();\n#pragma", "#pragma", RACE,
    ),
    "zero points are subtracted from the codes of the other column": (
        KERNEL, "biases[i % 2]", "biases[i / 2]", ("values", "values"),
    ),
}  # fmt: skip


def outcome(landing: str) -> str:
    """Return the check that catches the planted bug, or "nothing"."""
    try:
        check_product(landing, PROBLEM, gemm_w4a8_sm90, CONFIG, device.nominal(90), 128, seed=0)
    except simt.Fault as fault:
        return fault.kind
    except AssertionError:
        return "values"
    return "nothing"


def test_kernel_passes_before_a_bug_is_planted() -> None:
    assert outcome("latest") == "nothing"


@pytest.mark.parametrize(
    "name", [next(iter(SEEDS)), *(pytest.param(n, marks=pytest.mark.slow) for n in list(SEEDS)[1:])]
)
def test_planted_bug_is_caught(name: str) -> None:
    file, old, new, caught = SEEDS[name]
    with patched(file, old, new):
        assert (outcome("latest"), outcome("earliest")) == caught
