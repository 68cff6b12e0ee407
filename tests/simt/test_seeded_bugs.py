# SPDX-License-Identifier: Apache-2.0
"""Faults planted in copies of the library's kernels: each one is caught, and this says by which check.

A check is the kind of a simulator's fault, or "values" where the kernel ran to its end with a wrong result.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cupy_awq.kernels import select
from cupy_awq.kernels.family import AnyFamily, Config
from cupy_awq.kernels.problem import Fusion, Problem
from cupy_awq.runtime import device
from tests import simt
from tests.simt.kernels import patched
from tests.test_kernels import check_matmul


@dataclass(frozen=True)
class Seed:
    """``old`` becomes ``new`` in ``file``; ``kernel`` then runs ``problem`` on the path of ``arch``.

    ``caught`` are the checks with copies that land as late, and as early, as the rules allow.
    """

    kernel: str
    arch: int
    file: str
    old: str
    new: str
    caught: tuple[str, str]
    problem: Problem = field(default_factory=lambda: Problem(40, 224, 320, 64))
    config: dict[str, Any] = field(default_factory=dict)


LONG = Problem(40, 224, 640, 64)
GEMV = Problem(1, 264, 320, 32)
FEW = Problem(5, 160, 640, 32)
FEW_LONG = Problem(5, 160, 4096, 64)
FEW_CONSTANT = Problem(5, 160, 640, 32, constant=True)
REPACKED = Problem(20, 192, 1024, 128, repacked=True)
REPACKED_MANY = Problem(70, 64, 3072, 128, repacked=True, scale_exponent=6)
REPACKED_FEW = Problem(3, 192, 1024, 128, repacked=True)
REPACKED_ONE = Problem(1, 192, 1024, 128, repacked=True)
ADDED = Problem(5, 192, 1024, 128, repacked=True, fusion=Fusion("add_to_stream"))
NORMED = Problem(5, 192, 1024, 128, repacked=True, fusion=Fusion("rms_norm_x", eps=1e-6))
RACE, VALUES = ("race", "race"), ("values", "values")
OUTSIDE, DEADLOCK = ("out of bounds", "out of bounds"), ("deadlock", "deadlock")

SEEDS = {
    # Barriers
    "gemv: sums are read before all warps have left theirs": Seed(
        "gemv", 80, "gemm/gemv.cu",
        "    __syncthreads();\n    totals[r] = 0.0f;", "    totals[r] = 0.0f;", RACE, GEMV,
    ),
    "gemv: the next row's sums overwrite those still read": Seed(
        "gemm_small", 80, "gemm/gemv.cu",
        "totals[r] += tile[warp][threadIdx.x];\n    __syncthreads();", "totals[r] += tile[warp][threadIdx.x];", RACE,
        Problem(5, 264, 320, 32),
    ),
    "gemm_simt: a step is multiplied before it is complete": Seed(
        "gemm_simt", 60, "gemm/gemm_simt.cu",
        "    keep(shared.steps[step_begin & 1]);\n  }\n  __syncthreads();",
        "    keep(shared.steps[step_begin & 1]);\n  }", RACE,
    ),
    "gemm_simt: a half is overwritten while others still multiply": Seed(
        "gemm_simt", 60, "gemm/gemm_simt.cu",
        "keep(shared.steps[(step + 1) & 1]);\n    __syncthreads();", "keep(shared.steps[(step + 1) & 1]);",
        ("uninitialised", "uninitialised"),
    ),
    "gemm_mma: no barrier after the wait for a stage": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh",
        "copy.template wait<kStages - 2>();\n    __syncthreads();", "copy.template wait<kStages - 2>();",
        RACE,
    ),
    "gemm_mma: the gate reads what the other warps have yet to leave": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh",
        "    __syncthreads();\n    if (warp >= kWarps / 2 || column >= n / 2) return;",
        "    if (warp >= kWarps / 2 || column >= n / 2) return;",
        RACE, Problem(40, 256, 320, 64, gated=True),
    ),
    "split-K: one thread counts before the block has left its part": Seed(
        "gemv", 80, "common/reduce.cuh",
        "  __syncthreads();\n  if (threadIdx.x == 0) {", "  if (threadIdx.x == 0) {",
        RACE, GEMV, {"split_k": 2},
    ),
    "split-K: all act on a count that one thread has yet to take": Seed(
        "gemm_sm80", 80, "common/reduce.cuh",
        "  __syncthreads();\n  if (!is_last) return false;", "  if (!is_last) return false;",
        ("uninitialised", "uninitialised"), config={"split_k": 2},
    ),
    # Fences and waits
    "split-K: parts are not fenced before the count": Seed(
        "gemm_sm80", 80, "common/reduce.cuh",
        "  __threadfence();\n  __syncthreads();\n", "  __syncthreads();\n", RACE, config={"split_k": 2},
    ),
    "split-K: parts are read with no fence after the count": Seed(
        "gemv", 80, "common/reduce.cuh",
        "  if (!is_last) return false;\n  __threadfence();", "  if (!is_last) return false;", RACE, GEMV, {"split_k": 2},
    ),
    "gemm_mma: waits for one stage too few": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh",
        "copy.template wait<kStages - 2>();", "copy.template wait<kStages - 1>();", ("in flight", "race"),
    ),
    "cp.async: copies are never closed into groups": Seed(
        "gemm_sm80", 80, "common/copy_to_shared.cuh", "{ ptx::cp_async_commit_group(); }", "{}", ("in flight", "race"),
    ),
    # Stages
    "gemm_mma: a stage is refilled one step too early": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh",
        "start_stage(tile_ahead, stage == 0 ? kStages - 1 : stage - 1);", "start_stage(tile_ahead, stage);",
        ("in flight", "race"), LONG, {"split_k": 1},
    ),
    "gemm_mma: the ring of stages is one too short": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh",
        "stage = stage + 1 == kStages ? 0 : stage + 1;", "stage = stage + 2 >= kStages ? 0 : stage + 1;",
        ("in flight", "race"), LONG, {"split_k": 1},
    ),
    "gemm_sm90: a stage is given back before its last lane has read it": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu",
        "__syncwarp();\n      if (lane == 0) ptx::mbarrier_arrive", "if (lane == 0) ptx::mbarrier_arrive",
        RACE, REPACKED, {"splits": 1},
    ),
    "gemm_sm90: consumers do not wait for a stage": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu",
        "const Lane mine = begin_lane(tile);\n    for (int round = team; round < tile.rounds(); round += kTeams) {\n"
        "      wait(tile.full(at.stage), at.parity);",
        "const Lane mine = begin_lane(tile);\n    for (int round = team; round < tile.rounds(); round += kTeams) {",
        ("in flight", "uninitialised"), REPACKED,
    ),
    "gemm_sm90: the producer does not wait for an empty stage": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "wait(tile.empty(at.stage), at.parity);", "",
        ("barrier", "race"), REPACKED, {"splits": 1},
    ),
    "gemm_sm90: the parity of the stages does not turn": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "parity ^= 1u;", "", ("in flight", "deadlock"), REPACKED, {"splits": 1},
    ),
    "gemm_sm90: a block does not wait for the other's sums": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "wait(tile.shared_begin + kSentBarrier, 0);", "", RACE, REPACKED,
        {"splits": 2},
    ),
    "gemm_sm90: sums are sent to a barrier that may not be there yet": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "begin_cluster<kSplits>();", "synchronize_block();", RACE, REPACKED,
        {"splits": 2},
    ),
    "gemm_sm90: a block expects its own sums, too": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "(kSplits - 1) * kOwnedRows * kBlockN * 4",
        "kSplits * kOwnedRows * kBlockN * 4", DEADLOCK, REPACKED, {"splits": 2},
    ),
    "gemm_sm90: sums are added before all teams have left theirs": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "{ ptx::barrier_sync(0, kThreads); }", "{}", RACE, REPACKED, {"splits": 2},
    ),
    "gemm_sm90: the sums of the last team are not sent": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "for (int team = 0; team < kTeams; ++team) {\n      Vector<float, 4> part;",
        "for (int team = 0; team < kTeams - 1; ++team) {\n      Vector<float, 4> part;", VALUES, REPACKED,
        {"splits": 2},
    ),
    "gemm_sm90_mma: sums of few rows are sent to the wrong pair": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "unit % kPairs * 2 + unit", "unit % kPairs + unit",
        ("uninitialised", "uninitialised"), REPACKED_FEW, {"splits": 2},
    ),
    "gemm_sm90: x is asked for before the kernel before has ended": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "    ptx::griddepcontrol_wait();\n    if (leader)", "    if (leader)",
        ("early", "early"), REPACKED,
    ),
    "gemm_sm90: weights that were to come with x do not": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "if (!kEager && round > 0) start_weight(round, round);", "", DEADLOCK,
        REPACKED, {"splits": 1, "eager": False},
    ),
    "gemm_sm90: weights that were to come early come with x once more": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "if (!kEager && round > 0) start", "if (round > 0) start",
        ("race", "deadlock"), REPACKED, {"splits": 1, "eager": True},
    ),
    "gemm_sm90_mma: nobody waits for the kernel before": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_mma.cu", "    ptx::griddepcontrol_wait();\n", "", ("early", "early"), REPACKED_FEW,
    ),
    "gemm_sm90_mma: zero points take away the part of one lane": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_mma.cu", "offsets[i][v] += __shfl_xor_sync(kFullWarp, offsets[i][v], 2);", "",
        VALUES, REPACKED_ONE,
    ),
    "gemm_sm90_mma: units of x lie where those of the first turn's rows would": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_mma.cu", "(mine_ ^ row % 8 * 16)", "mine_", VALUES,
        replace(REPACKED_FEW, m=8), {"records": 2, "depth": 1},
    ),
    "gemm_sm90_mma: threads beyond a turn's rows copy, too": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_mma.cu", "|| rows_left_ != kNone", "|| true", RACE, REPACKED_FEW,
        {"records": 3, "depth": 1},
    ),
    "gemm_sm90_mma: the second half of a record's codes comes late": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_mma.cu", "part + 1 == kGroups / 2) load_words(1)",
        "part == kGroups / 2) load_words(0)", VALUES, replace(REPACKED_FEW, group_size=32),
    ),
    "gemm_sm90: a block with the last columns only keeps a place": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "tile.block_n >= ceil_div(n, kBlockN)", "tile.block_n >= n / kBlockN", VALUES,
        replace(REPACKED_FEW, n=200), {"records": 2},
    ),
    "residual_stream: nobody waits for what the launch before has added": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh",
        "ptx::griddepcontrol_wait();\n      // The late", "// The late", ("early", "early"), ADDED,
    ),
    "residual_stream: no warp waits for the squares": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh",
        "  ptx::griddepcontrol_wait();\n  stream.make_factors", "  stream.make_factors", ("early", "early"), NORMED,
    ),
    "residual_stream: squares of more than 4,096 columns are left out": Seed(
        "gemm_sm90", 90, "hopper/residual_stream.cuh", "begin += 32 * kLoads", "begin += 32 * kLoads * 9", VALUES,
        Problem(2, 64, 4224, 128, repacked=True, fusion=Fusion("rms_norm_x")),
    ),
    "residual_stream: each lane adds up a part of the squares alone": Seed(
        "gemm_sm90", 90, "hopper/residual_stream.cuh", "total += __shfl_xor_sync(four, total, 2);", "", VALUES, ADDED,
    ),
    "residual_stream: rows have the factor of the first": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "factors[row]", "factors[0]", VALUES, NORMED,
    ),
    "residual_stream: a block of a cluster has the rows of the other": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "tile.m_begin + tile.split * kOwnedRows, m, k", "tile.m_begin, m, k", VALUES,
        NORMED, {"splits": 2},
    ),
    "residual_stream: a thread's second place has what the first one adds to": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "if (index != threadIdx.x) part =", "if (false) part =", VALUES,
        Problem(32, 192, 1024, 128, repacked=True, fusion=Fusion("add_to_stream")),
    ),
    "gemm_sm90: an arrival too many is expected": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh",
        "ptx::mbarrier_init(tile.full(stage), 1);", "ptx::mbarrier_init(tile.full(stage), 2);", DEADLOCK,
        REPACKED,
    ),
    "gemm_sm90: bytes are expected that nobody copies": Seed(
        "gemm_sm90", 90, "ptx/mbarrier.cuh", '::"r"(barrier), "r"(bytes)', '::"r"(barrier), "r"(bytes + 16)', DEADLOCK,
        REPACKED,
    ),
    "wgmma: products are not waited for": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu",
        "ptx::wgmma_commit_group();\n            ptx::wgmma_wait_group<0>();", "ptx::wgmma_commit_group();",
        RACE, REPACKED, {"splits": 1},
    ),
    "wgmma: no fence before the first product": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu",
        "float parts[kSums];\n            ptx::wgmma_fence();", "float parts[kSums];", ("invalid", "invalid"), REPACKED,
    ),
    "wgmma: an operand is converted anew while products read it": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu", "ptx::wgmma_wait_group<1>();", "", RACE, REPACKED_MANY,
        {"splits": 1, "scaled": True},
    ),
    "gemm_sm90: a stage is released while products read it": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu", "if (last != 0) {", "last = tile.empty(at.stage);\n      {", RACE,
        REPACKED_MANY, {"splits": 1, "scaled": True},
    ),
    "gemm_sm90_large: the stage in use is released in place of the one before": Seed(
        "gemm_sm90_large", 90, "gemm/gemm_sm90_large.cu", "schedule.begin) release(last);",
        "schedule.begin) release(my_empty + stage * 8);", DEADLOCK, REPACKED_MANY,
    ),
    "gemm_sm90_large: a stage is read before it has come": Seed(
        "gemm_sm90_large", 90, "gemm/gemm_sm90_large.cu",
        "            wait(shared.full(at.stage), at.parity);\n", "", ("in flight", "uninitialised"), REPACKED_MANY,
    ),
    # Bounds and masks
    "gemv: the last lanes are not held back from beyond n": Seed(
        "gemv", 80, "gemm/gemv.cu",
        "min(weight_column<kBlockN>(blockIdx.x, lane * 8, n), n - 8)",
        "weight_column<kBlockN>(blockIdx.x, lane * 8, n)",
        OUTSIDE, GEMV,
    ),
    "gemv: columns beyond n are stored": Seed(
        "gemv", 80, "gemm/gemv.cu", "} else if (column < n) {", "} else {", OUTSIDE, GEMV,
    ),
    "gemv: the last chunk of a slice fetches one too many": Seed(
        "gemv", 80, "gemm/gemv.cu",
        "if (row + kChunk < k_end) fetch_words(row + kChunk);", "fetch_words(row + kChunk);",
        OUTSIDE, GEMV,
    ),
    "gemm_mma: rows beyond m are copied": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh", "m_begin + x_row + i * kXRowStep < m && ", "", OUTSIDE,
    ),
    "gemm_mma: rows beyond m are stored": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh", "if (row >= m) continue;", "", OUTSIDE,
    ),
    "gemm_mma: columns beyond n are stored": Seed(
        "gemm_sm75", 75, "gemm/gemm_mma.cuh", "if (column >= n) return;", "", RACE,
    ),
    "gemm_simt: the tail of K is not masked": Seed(
        "gemm_simt", 60, "gemm/gemm_simt.cu", "row < m && k_x < k ?", "row < m ?", OUTSIDE,
        Problem(3, 64, 24, 24),
    ),
    "gemm_simt: a block stores all of its rows": Seed(
        "gemm_simt", 60, "gemm/gemm_simt.cu", "if (row >= m || column >= n) continue;", "if (column >= n) continue;",
        OUTSIDE,
    ),
    # Arithmetic and layouts
    "gemm_mma: the halves of the second operand are swapped": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh", "mma(parts[i][pair * 2 + j], a[i], b[j * 2], b[j * 2 + 1]);",
        "mma(parts[i][pair * 2 + j], a[i], b[j * 2 + 1], b[j * 2]);", VALUES,
    ),
    "gemm_mma: ldmatrix and the copies disagree on the swizzle": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh", "(row * 8 + (unit ^ (row % 8))) * 16", "(row * 8 + (unit ^ (row % 4))) * 16",
        VALUES,
    ),
    "gemv: the shuffle adds the wrong lane": Seed(
        "gemv", 80, "gemm/gemv.cu", "__shfl_xor_sync(0xffffffffu, sums[r][c], kLanes)",
        "__shfl_xor_sync(0xffffffffu, sums[r][c], kLanes / 2)", VALUES, GEMV,
    ),
    "gemv: a group's scales are used one chunk too long": Seed(
        "gemv", 80, "gemm/gemv.cu", "if (row >= group_end) {", "if (row > group_end) {", VALUES, GEMV,
    ),
    "split-K: the counter is not left at zero": Seed(
        "gemv", 80, "common/reduce.cuh", "if (is_last) counters[tile] = 0;", "", VALUES, GEMV, {"split_k": 2},
    ),
    "gemm_sm90: the last tile stores rows of its neighbour": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "row >= tile.m_own && row < m", "row < m", RACE, REPACKED_MANY,
        {"block_m": 64},
    ),
    "gemm_sm90: rows that no copy brings are not cleared": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "if (clears(m)) clear<", "if (false) clear<",
        ("uninitialised", "uninitialised"), REPACKED_MANY, {"block_m": 128},
    ),
    "gemm_sm90: what is cleared is not waited for": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "if (kSplits == 1 || clears(m))", "if (kSplits == 1)", RACE, REPACKED_MANY,
        {"block_m": 128, "splits": 2},
    ),
    "gemm_sm90_large: the last tile stores rows of its neighbour": Seed(
        "gemm_sm90_large", 90, "gemm/gemm_sm90_large.cu", "row(chunk, pass) >= tile.x * kBlockM && row", "row", RACE,
        replace(REPACKED_MANY, m=140), {"block_m": 128},
    ),
    "gemm_sm90_large: rows that no copy brings are not cleared": Seed(
        "gemm_sm90_large", 90, "gemm/gemm_sm90_large.cu", "clear<kStages * kXBytes, kThreads>(memory);", "",
        ("uninitialised", "uninitialised"), REPACKED_MANY, {"block_m": 128},
    ),
    "gemm_sm90_large: a cluster does not wait for what is cleared": Seed(
        "gemm_sm90_large", 90, "gemm/gemm_sm90_large.cu", "synchronize_cluster<kCluster>();", "begin_cluster<kCluster>();",
        RACE, replace(REPACKED_MANY, m=140, k=1024), {"block_m": 256, "cluster": 2},
    ),
    "gemm_sm90: what is cleared is not fenced": Seed(
        "gemm_sm90", 90, "hopper/hopper.cuh", "  ptx::fence_proxy_async();\n", "", RACE, REPACKED_MANY, {"block_m": 128},
    ),
    "gemm_sm90_raw: sums are added before all warps have left theirs": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "  }\n  __syncthreads();\n", "  }\n", RACE, FEW, {"splits": 2},
    ),
    "gemm_sm90_raw: the first block does not wait for the others' sums": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "wait(joined, 0);", "", RACE, FEW, {"splits": 2},
    ),
    "gemm_sm90_raw: sums are sent to a barrier that may not be there yet": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "ptx::barrier_cluster_wait_acquire();", "{}", RACE, FEW, {"splits": 2},
    ),
    "gemm_sm90_raw: rows beyond m are counted": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "kSplits * m * kBlockN * 4", "kSplits * kRows * kBlockN * 4", DEADLOCK,
        FEW, {"splits": 2},
    ),
    "gemm_sm90_raw: the last lanes are not held back from beyond n": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu",
        "min(weight_column<kBlockN>(tile, g * kWords * 8, n), n - 8 * kWords)",
        "weight_column<kBlockN>(tile, g * kWords * 8, n)", OUTSIDE, FEW,
    ),
    "gemm_sm90_raw: steps beyond a warp's last are copied": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu",
        "if (leader && step + kDepth < step_end) copy", "if (leader) copy", ("race", "nothing"), FEW_LONG,
        {"splits": 1},
    ),
    "gemm_sm90_raw: nobody waits for the kernel before": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "  ptx::griddepcontrol_wait();\n", "", ("early", "early"), FEW,
    ),
    "gemm_sm90_raw: a weight that may change is read before the kernel before has ended": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "kConstant = CONSTANT;", "kConstant = true;", ("early", "early"), FEW,
    ),
    "gemm_sm90_raw: x is asked for with a weight that does not change": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "copy_first(true, false)", "copy_first(true, true)",
        ("early", "early"), FEW_CONSTANT,
    ),
    "gemm_sm90_raw: rows past m are left as they were": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "if (chunk >= m * (kStepK * 2 / 16)) store", "if (chunk < 0) store",
        ("uninitialised", "uninitialised"), FEW,
    ),
    "gemm_sm90_raw: a step is not waited for": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "    wait(filled, parity);\n", "", ("in flight", "nothing"), FEW,
    ),
    "gemm_sm90_raw: the parity of the steps does not turn": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "parity ^= 1;", "", ("in flight", "deadlock"), FEW_LONG, {"splits": 1},
    ),
    "gemm_sm90_raw: a step's place is filled before its last lane has read it": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "multiply(place);\n    __syncwarp();", "multiply(place);",
        RACE, FEW_LONG, {"splits": 1},
    ),
    "gemm_sm90_raw: x is not counted": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "kWordBytes + m * (kStepK * 2));", "kWordBytes);",
        ("in flight", "nothing"), FEW,
    ),
    "gemm_sm90_raw: a group's scales are used one step too long": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "== (group + 1) * group_steps", "== (group + 1) * group_steps + 1",
        VALUES, FEW_LONG, {"splits": 1},
    ),
    "gemm_sm90_raw: odd columns are paired with even ones": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "i % 2 ? 0x7632 : 0x5410", "i % 2 ? 0x5410 : 0x7632", VALUES, FEW,
    ),
}  # fmt: skip


def configuration(seed: Seed) -> tuple[AnyFamily, Config, device.Device]:
    """The kernel's family and its last legal configuration with the values that the seed asks for."""
    here = device.nominal(seed.arch)
    family = select.FAMILIES[seed.kernel.removesuffix("_mma")]
    configs = [
        config
        for config in family.configs(seed.problem, here)
        if all(getattr(config, name) == value for name, value in seed.config.items())
    ]
    return family, configs[-1], here


def outcome(seed: Seed, landing: str) -> str:
    """The check that catches the seed, or "nothing"."""
    family, config, here = configuration(seed)
    try:
        check_matmul(
            lambda plan, buffers: simt.run(plan, buffers, landing=landing), seed.problem, family, config, here, seed=0
        )
    except simt.Fault as fault:
        return fault.kind
    except AssertionError:
        return "values"
    return "nothing"


FIRST = {seed.kernel: name for name, seed in reversed(SEEDS.items())}.values()
"""The first bug of each kernel, which the default run plants."""


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in SEEDS])
def test_seeded_bug_is_caught(name: str) -> None:
    seed = SEEDS[name]
    assert outcome(seed, "latest") == "nothing", "the kernel must be right before the bug is planted"
    with patched(seed.file, seed.old, seed.new):
        found = outcome(seed, "latest"), outcome(seed, "earliest")
    assert found == seed.caught
