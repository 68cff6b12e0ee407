# SPDX-License-Identifier: Apache-2.0
"""Faults planted in ``gemm_mma_fragments``: each one is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Fusion, Problem
from tests.simt.seeds import DEADLOCK, OUTSIDE, RACE, VALUES, Seed, assert_caught

MAIN, REDUCE, LAYOUT = "gemm/gemm_mma_fragments.cu", "common/reduce.cuh", "gemm/repacked_layout.cuh"
LOOP, COPIES, EPILOGUE = (f"gemm/gemm_mma_fragments_{part}.cuh" for part in ("mainloop", "copies", "epilogue"))
FEW = Problem(3, 104, 1088, 32, layouts=(AWQ, FRAGMENTS))
"""Few rows: each warp has stages of its own and three k tiles (128 k each), and K ends within a weight tile.

A weight tile has four groups.
"""
MANY = Problem(40, 232, 704, 64, scale_exponent=9, layouts=(AWQ, FRAGMENTS))
"""More rows: two slices of K with four warps each, which share their stages; the last tile is partly empty."""
FEW_CONFIG: dict[str, Any] = {
    "x_rows": 4,
    "weight_tiles": 1,
    "warps_k": 4,
    "stages": 2,
    "ctas_per_sm": 1,
    "ctas": 4,
    "stream_k_units": 0,
}
MANY_CONFIG: dict[str, Any] = {
    "block_m": 48, "x_rows": 48, "weight_tiles": 1, "warps_n": 4, "warps_k": 2, "stage_k": 128, "stages": 2,
    "ctas_per_sm": 1, "ctas": 2, "stream_k_units": 0,
}  # fmt: skip
STAGED_CONFIG = {**MANY_CONFIG, "block_m": 32, "x_rows": 32, "stage_k": 64, "ctas": 4}
SHARED_CONFIG = {**MANY_CONFIG, "ctas": 5, "stream_k_units": 2, "stream_k_ctas": 5}


def few(old: str, new: str, caught: tuple[str, str], file: str = LOOP) -> Seed:
    """Return a bug to plant in a launch with few rows, in which warps share no stage."""
    return Seed("gemm_mma_fragments", 80, file, old, new, caught, FEW, FEW_CONFIG)


def many(old: str, new: str, caught: tuple[str, str], file: str = LOOP) -> Seed:
    """Return a bug to plant in a launch whose warps share stages."""
    return Seed("gemm_mma_fragments", 80, file, old, new, caught, MANY, MANY_CONFIG)


def shared(old: str, new: str, caught: tuple[str, str], file: str = EPILOGUE) -> Seed:
    """Return a bug to plant in a launch in which CTAs share tiles and add up partial sums (stream-K)."""
    return Seed("gemm_mma_fragments", 80, file, old, new, caught, MANY, SHARED_CONFIG)


def fused(old: str, new: str, caught: tuple[str, str], role: Literal["add_to_stream", "rms_norm_x"]) -> Seed:
    """Return a bug to plant in a launch that is fused with the residual add or RMSNorm of a decoder layer."""
    problem = replace(FEW, layouts=(FRAGMENTS,), fusion=Fusion(role))
    return Seed("gemm_mma_fragments", 80, EPILOGUE, old, new, caught, problem, FEW_CONFIG)


def staged(old: str, new: str, caught: tuple[str, str], file: str = LOOP) -> Seed:
    """Return a bug to plant in a launch for sm_75, where threads copy through registers to shared memory."""
    return Seed("gemm_mma_fragments", 75, file, old, new, caught, MANY, STAGED_CONFIG)


def offsets(old: str, new: str, dtype: str) -> Seed:
    """Return a bug to plant in a launch with offsets in place of zero points, and scales in float16."""
    problem = replace(FEW, zeros="float", dtype=dtype, scale_exponent=9)
    return Seed("gemm_mma_fragments", 80, LAYOUT, old, new, VALUES, problem, {**FEW_CONFIG, "math": "kScaled"})


IN_FLIGHT = ("in flight", "race")
NEXT_WAIT, SYNC = "cp_async_wait_group<C::kStages - 2>();\n", "      sync_slice<C>(slice_);\n      const uint32_t next"
SEEDS = {
    "a wait for one group of copies too few": many(NEXT_WAIT, NEXT_WAIT.replace("2", "1"), IN_FLIGHT),
    "a wait for one group of copies too few, with few rows": few(NEXT_WAIT, NEXT_WAIT.replace("2", "1"), IN_FLIGHT),
    "warps read a stage that other warps still copy": many(SYNC, "      const uint32_t next", RACE),
    "the wrong stage is refilled": few("% C::kParts>(finished)", "% C::kParts>(stage_idx)", RACE),
    "words of the wrong step of 16 k": many(".values[step % 4]", ".values[(step + 1) % 4]", VALUES),
    "a weight tile past the last tile column": Seed(
        "gemm_mma_fragments", 80, COPIES, "min(index, columns.last)", "index", OUTSIDE,
        Problem(40, 104, 704, 64, scale_exponent=9, layouts=(AWQ, FRAGMENTS)),
        {**MANY_CONFIG, "weight_tiles": 2, "ctas": 1},
    ),
    "rows of x past the last row": many(
        "return min(row, output.m - 1 - row_begin);", "return row;", OUTSIDE, MAIN,
    ),
    "no zeros past the end of K": few("* 64 < k_left_);", "* 64 < k_left_ + 64);", OUTSIDE, COPIES),
    "the first group of a weight tile for all of its groups": few(
        "load_group(stage, (kStep + 1) / C::kGroupSteps)", "load_group(stage, 0)", VALUES,
    ),
    "the swizzle of a pass of four rows": Seed(
        "gemm_mma_fragments", 80, COPIES, "x_target_ ^ i % 2 * 64 : x_target_", "x_target_ : x_target_", VALUES,
        Problem(8, 104, 1088, 32, layouts=(AWQ, FRAGMENTS)), {**FEW_CONFIG, "x_rows": 8},
    ),
    "accumulators overwrite stages that other slices still read": many(
        "      __syncthreads();  // the stages, or the accumulators of the preceding pass, are no longer read\n",
        "",
        RACE,
        MAIN,
    ),
    "accumulators of one slice only": few("slice < C::kSlices; ++slice", "slice < 1; ++slice", VALUES, EPILOGUE),
    "partial sums are not fenced before the signal": shared(
        "  __threadfence();\n  atomicAdd(counter, 1u);", "  atomicAdd(counter, 1u);", RACE, REDUCE,
    ),
    "the signal is given before all warps have written their partial sums": shared(
        "    __syncthreads();  // the accumulators are no longer read, and all partial sums are written\n",
        "",
        RACE,
        MAIN,
    ),
    "partial sums are read without a wait": shared(
        "  while (*const_cast<volatile uint32_t*>(counter) != count) {\n  }\n", "", RACE, REDUCE,
    ),
    "partial sums of the first CTA only": shared(
        "other < scheduler.cluster_idx; ++other", "other < first_sharer + 1 && other < scheduler.cluster_idx; ++other",
        VALUES,
    ),
    "the ratio of the RMS of the first row for all": fused("*= factors[row]", "*= factors[0]", VALUES, "rms_norm_x"),
    "no CTA writes the inverse RMS": Seed(
        "gemm_mma_fragments", 80, MAIN, "tile.n_block == 0 && scheduler", "tile.n_block < 0 && scheduler", VALUES,
        replace(FEW, layouts=(FRAGMENTS,), fusion=Fusion("rms_norm_x")), FEW_CONFIG,
    ),
    "partial sums are scaled before they are complete": Seed(
        "gemm_mma_fragments", 80, EPILOGUE,
        "          if (!is_complete) {",
        "          if constexpr (C::kRmsNormsX) {\n            for (int i = 0; i < 8; ++i) sums[half].values[i] *= "
        "factors[row];\n          }\n          if (!is_complete) {",
        VALUES, replace(FEW, layouts=(FRAGMENTS,), fusion=Fusion("rms_norm_x")),
        {**FEW_CONFIG, "ctas": 5, "stream_k_units": 2, "stream_k_ctas": 5},
    ),
    "a lane past the last column leaves the sum of squares": fused(
        "if (is_complete) stream.store_square_sum", "if (is_complete && is_valid) stream.store_square_sum",
        DEADLOCK, "add_to_stream",
    ),
    "offsets of the first column for both": offsets(
        "return ptx::fma_f16x2(pair, ptx::twice<UPPER>(scales), ptx::twice<UPPER>",
        "return ptx::fma_f16x2(pair, ptx::twice<UPPER>(scales), ptx::twice<0>",
        "float16",
    ),
    "offsets are not multiplied by the factor of the scales": offsets(
        "offsets = scaled(group.offsets, factor)", "offsets = group.offsets", "bfloat16",
    ),
    "a zero point of 8 is subtracted beside the offset": offsets(
        "#define OFFSET_ZERO 0", "#define OFFSET_ZERO 8", "float16",
    ),
    "the next stage is stored to the stage that warps still read": staged(
        "copies.store_loaded(stage_idx);", "copies.store_loaded(finished);", RACE,
    ),
    "no barrier after the next stage is stored": staged(SYNC, "      const uint32_t next", RACE),
    "the next stage is loaded after the last one, too": staged(
        "if (index + 1 < stages) copies.template load_next", "if (index < stages) copies.template load_next", OUTSIDE,
    ),
    "the last stage of a weight tile is loaded twice": staged(
        "load_next<(PART + 1) % C::kParts>", "load_next<PART>", VALUES,
    ),
    "x of the first part of a weight tile for both": staged("+ PART * 128", "", VALUES, COPIES),
    "k 8 to 15 are multiplied by x at k 0 to 7": staged(
        "ptx::mma_m16n8k8_f16(c, a[2], a[3], b1)", "ptx::mma_m16n8k8_f16(c, a[2], a[3], b0)", VALUES, "common/mma.cuh",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_planted_bug_is_caught(name: str) -> None:
    assert_caught(SEEDS[name])
