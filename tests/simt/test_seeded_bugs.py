# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in copies of the library's kernels, each of which must be caught by the check that it names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Fusion, Problem
from tests.simt.seeds import DEADLOCK, OUTSIDE, RACE, VALUES, Seed, assert_caught

LONG = Problem(40, 224, 640, 64)
GEMV = Problem(1, 264, 320, 32)
FEW = Problem(5, 160, 640, 32)
FEW_LONG = Problem(5, 160, 4096, 64)
FEW_CONSTANT = Problem(5, 160, 640, 32, may_prefetch_weights=True)
REPACKED = Problem(20, 192, 1024, 128, layouts=(AWQ, FRAGMENTS))
REPACKED_MANY = Problem(70, 64, 3072, 128, layouts=(AWQ, FRAGMENTS), scale_exponent=6)
REPACKED_FEW = Problem(3, 192, 1024, 128, layouts=(AWQ, FRAGMENTS))
REPACKED_ONE = Problem(1, 192, 1024, 128, layouts=(AWQ, FRAGMENTS))
ADDED = Problem(5, 192, 1024, 128, layouts=(AWQ, FRAGMENTS), fusion=Fusion("add_to_stream"))
NORMED = Problem(5, 192, 1024, 128, layouts=(AWQ, FRAGMENTS), fusion=Fusion("rms_norm_x", eps=1e-6))

SEEDS = {
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
        "copy.template wait<C::kStages - 2>();\n    __syncthreads();", "copy.template wait<C::kStages - 2>();",
        RACE,
    ),
    "gemm_mma: the gate reads what the other warps have yet to leave": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh",
        "    __syncthreads();\n    if (warp >= C::kWarps / 2 || column >= n / 2) return;",
        "    if (warp >= C::kWarps / 2 || column >= n / 2) return;",
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
    "split-K: parts are not fenced before the count": Seed(
        "gemm_sm80", 80, "common/reduce.cuh",
        "  __threadfence();\n  __syncthreads();\n", "  __syncthreads();\n", RACE, config={"split_k": 2},
    ),
    "split-K: parts are read with no fence after the count": Seed(
        "gemv", 80, "common/reduce.cuh",
        "  if (!is_last) return false;\n  __threadfence();", "  if (!is_last) return false;", RACE, GEMV,
        {"split_k": 2},
    ),
    "gemm_mma: waits for one stage too few": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh",
        "copy.template wait<C::kStages - 2>();", "copy.template wait<C::kStages - 1>();", ("in flight", "race"),
    ),
    "cp.async: copies are never closed into groups": Seed(
        "gemm_sm80", 80, "common/copy_to_shared.cuh", "{ ptx::cp_async_commit_group(); }", "{}", ("in flight", "race"),
    ),
    "gemm_mma: a stage is refilled one step too early": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh",
        "start_stage(tile_ahead, stage == 0 ? C::kStages - 1 : stage - 1);", "start_stage(tile_ahead, stage);",
        ("in flight", "race"), LONG, {"split_k": 1},
    ),
    "gemm_mma: the ring of stages is one too short": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh",
        "stage = stage + 1 == C::kStages ? 0 : stage + 1;", "stage = stage + 2 >= C::kStages ? 0 : stage + 1;",
        ("in flight", "race"), LONG, {"split_k": 1},
    ),
    "gemm_sm90: a stage is released before the last lane of the warp has read it": Seed(
        "gemm_sm90", 90, "hopper/pipeline.cuh",
        "lane) {\n    __syncwarp();", "lane) {",
        RACE, REPACKED, {"split_k": 1},
    ),
    "gemm_sm90: consumers do not wait for a full stage": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu",
        "const Operands mine = lane_operands(tile);\n"
        "    for (int iteration = consumer; iteration < tile.iterations(); iteration += C::kConsumers) {\n"
        "      pipeline.consumer_wait(state);",
        "const Operands mine = lane_operands(tile);\n"
        "    for (int iteration = consumer; iteration < tile.iterations(); iteration += C::kConsumers) {",
        ("in flight", "uninitialised"), REPACKED,
    ),
    "gemm_sm90: the producer does not wait for an empty stage": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "pipeline.producer_acquire(state);", "",
        ("barrier", "race"), REPACKED, {"split_k": 1},
    ),
    "gemm_sm90: the phase does not flip at the end of the ring": Seed(
        "gemm_sm90", 90, "hopper/pipeline.cuh", "stage_idx -= kNumStages;\n      phase ^= 1u;",
        "stage_idx -= kNumStages;", ("barrier", "values"), REPACKED, {"split_k": 1},
    ),
    "gemm_sm90: a CTA does not wait for the partial sums of the other": Seed(
        "gemm_sm90", 90, "hopper/cluster_reduction.cuh", "while (!ptx::mbarrier_try_wait_parity_cluster(barrier, 0))",
        "if (false)", RACE, REPACKED, {"split_k": 2},
    ),
    "gemm_sm90: partial sums signal a barrier that may not be initialized": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "cluster_sync_after_init<C::kSplitK>();", "sync_cta<C>();", RACE,
        REPACKED, {"split_k": 2},
    ),
    "gemm_sm90: the first weights behind those ahead of x are not copied": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "i >= tile.stages_ahead()", "i > tile.stages_ahead()", DEADLOCK,
        REPACKED, {"prefetch_weights": False, "consumers": 1, "split_k": 1, "k_tiles": 1},
    ),
    "gemm_sm90: a CTA expects its own partial sums, too": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "(C::kSplitK - 1) * Tile<C>::owned_rows",
        "C::kSplitK * Tile<C>::owned_rows", DEADLOCK, REPACKED, {"split_k": 2},
    ),
    "gemm_sm90: accumulators are added before all consumers have stored theirs": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "ptx::barrier_sync(0, C::kThreads);", "", RACE, REPACKED, {"split_k": 2},
    ),
    "gemm_sm90: the accumulators of the last consumer are not written to the other CTA": Seed(
        "gemm_sm90", 90, "hopper/cluster_reduction.cuh",
        "for (int consumer = 0; consumer < L::kConsumers; ++consumer) {\n      Vector<float, 4> values;",
        "for (int consumer = 0; consumer < L::kConsumers - 1; ++consumer) {\n      Vector<float, 4> values;", VALUES,
        REPACKED, {"split_k": 2},
    ),
    "gemm_sm90_mma: partial sums of few rows are written to the wrong pair of rows": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_tile.cuh", "unit % kPairs * 2 + unit", "unit % kPairs + unit",
        ("uninitialised", "uninitialised"), REPACKED_FEW, {"split_k": 2},
    ),
    "gemm_sm90: x is copied before the preceding kernel has finished": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "    wait_for_x<C>();\n    if (is_leader)", "    if (is_leader)",
        ("early", "early"), REPACKED,
    ),
    "gemm_sm90: weights that are to be copied with x are not": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh",
        "if (!C::kPrefetchWeights && i >= tile.stages_ahead()) copy_weight(i, i);", "", DEADLOCK,
        REPACKED, {"split_k": 1, "prefetch_weights": False},
    ),
    "gemm_sm90: weights that were prefetched are copied with x once more": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "if (!C::kPrefetchWeights && i >= tile", "if (i >= tile",
        ("race", "deadlock"), REPACKED, {"split_k": 1, "prefetch_weights": True},
    ),
    "gemm_sm90_mma: x is read before the preceding kernel has finished": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_mma.cu", "    wait_for_x<C>();\n", "", ("early", "early"), REPACKED_FEW,
    ),
    "gemm_sm90_mma: a stage waits for its own copies before they are issued": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "::consumer();  //", "::consumer(C::kWindow);  //", DEADLOCK, NORMED,
        {"name": "gemm_sm90_mma", "weight_tiles": 4, "split_k": 1, "k_tiles": 2},
    ),
    "gemm_sm90_mma: the copies of a paced stage go to the stage before it": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "copy_tile_column(threadIdx.x % 32, i, i);",
        "copy_tile_column(threadIdx.x % 32, i, i - 1);", RACE, NORMED,
        {"name": "gemm_sm90_mma", "weight_tiles": 4, "split_k": 1, "k_tiles": 2},
    ),
    "gemm_sm90_mma: zero points are subtracted for the slices of two lanes only": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_mma.cu", "zero_sums[i][v] += __shfl_xor_sync(kFullWarp, zero_sums[i][v], 2);",
        "", VALUES, REPACKED_ONE,
    ),
    "gemm_sm90_mma: the rows of the second pass are swizzled as those of the first": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_x_ring.cuh", "(first_chunk_ ^ swizzle_bits(row) * 16)", "first_chunk_", VALUES,
        replace(REPACKED_FEW, m=8), {"weight_tiles": 2, "k_tiles": 1},
    ),
    "gemm_sm90_mma: threads past the rows of a pass copy, too": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_x_ring.cuh", "|| rows_left_ != kCopiesNothing", "|| true", RACE, REPACKED_FEW,
        {"weight_tiles": 3, "k_tiles": 1},
    ),
    "gemm_sm90_mma: the second half of a weight tile is multiplied by the codes of the first": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_mma.cu", "part + 1 == C::kParts / 2) load_codes(1)",
        "part == C::kParts / 2) load_codes(0)", VALUES, replace(REPACKED_FEW, group_size=32),
    ),
    "gemm_sm90: a kernel that lets the next one start late does not wait": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "  ptx::griddepcontrol_wait();\n  if constexpr", "  if constexpr",
        ("early", "early"), REPACKED_FEW,
    ),
    "residual_stream: nobody waits for what the launch before has added": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh",
        "ptx::griddepcontrol_wait();\n      // After the main", "// After the main", ("early", "early"), ADDED,
    ),
    "residual_stream: no warp waits for the squares": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh",
        "  ptx::griddepcontrol_wait();\n  args.stream.template make_factors", "  args.stream.template make_factors",
        ("early", "early"), NORMED,
    ),
    "residual_stream: squares of more than 4,096 columns are left out": Seed(
        "gemm_sm90", 90, "hopper/residual_stream.cuh", "begin += 32 * kLoads", "begin += 32 * kLoads * 9", VALUES,
        Problem(2, 64, 4224, 128, layouts=(AWQ, FRAGMENTS), fusion=Fusion("rms_norm_x")),
    ),
    "residual_stream: each lane adds up a part of the squares alone": Seed(
        "gemm_sm90", 90, "hopper/residual_stream.cuh", "total += __shfl_xor_sync(four, total, 2);", "", VALUES, ADDED,
    ),
    "residual_stream: rows have the factor of the first": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_epilogue.cuh", "factors[row]", "factors[0]", VALUES, NORMED,
    ),
    "residual_stream: a block of a cluster has the rows of the other": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh", "tile.m_begin + tile.split * C::kOwnedRows, args.m",
        "tile.m_begin, args.m", VALUES, NORMED, {"split_k": 2},
    ),
    "residual_stream: a thread's second place has what the first one adds to": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_epilogue.cuh", "if (index != threadIdx.x) part =", "if (false) part =", VALUES,
        Problem(32, 192, 1024, 128, layouts=(AWQ, FRAGMENTS), fusion=Fusion("add_to_stream")), {"split_k": 2},
    ),
    "gemm_sm90: the full barriers expect one arrival too many": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cuh",
        "pipeline.init(1, C::kConsumerWarps);", "pipeline.init(2, C::kConsumerWarps);", DEADLOCK,
        REPACKED,
    ),
    "gemm_sm90: the full barriers expect bytes that are not copied": Seed(
        "gemm_sm90", 90, "ptx/mbarrier.cuh", '::"r"(barrier), "r"(bytes)', '::"r"(barrier), "r"(bytes + 16)', DEADLOCK,
        REPACKED,
    ),
    "wgmma: accumulators are read before wgmma has finished": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu",
        "ptx::wgmma_commit_group();\n            ptx::wgmma_wait_group<0>();", "ptx::wgmma_commit_group();",
        RACE, REPACKED, {"split_k": 1},
    ),
    "wgmma: no fence before the first wgmma": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu",
        "float group_sums[C::kAccumulators];\n            ptx::wgmma_fence();", "float group_sums[C::kAccumulators];",
        ("invalid", "invalid"), REPACKED,
    ),
    "wgmma: operand A is overwritten while wgmma reads it": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu", "ptx::wgmma_wait_group<1>();", "", RACE, REPACKED_MANY,
        {"split_k": 1, "scaled": True},
    ),
    "gemm_sm90: a stage is released while wgmma reads it": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90.cu", "if (preceding != 0) {",
        "preceding = pipeline.empty_barrier(state.stage_idx);\n      {", RACE,
        REPACKED_MANY, {"split_k": 1, "scaled": True, "k_tiles": 1},
    ),
    "gemm_sm90_large: the stage in use is released instead of the preceding one": Seed(
        "gemm_sm90_large", 90, "gemm/gemm_sm90_large.cu",
        "scheduler.k_tile_begin) pipeline.template release<C::kCluster>(preceding, lane);",
        "scheduler.k_tile_begin) pipeline.template release<C::kCluster>(my_empty_barriers + stage_idx * 8, lane);",
        DEADLOCK, REPACKED_MANY, {"ctas": 2},
    ),
    "gemm_sm90_large: a stage is read before its copies have landed": Seed(
        "gemm_sm90_large", 90, "gemm/gemm_sm90_large.cu",
        "            pipeline.consumer_wait(state);\n", "", ("in flight", "uninitialised"), REPACKED_MANY,
    ),
    "gemv: the last lanes are not held back from beyond n": Seed(
        "gemv", 80, "gemm/gemv.cu",
        "min(weight_column<Options, kBlockN>(blockIdx.x, lane * 8, n), n - 8)",
        "weight_column<Options, kBlockN>(blockIdx.x, lane * 8, n)",
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
        "gemm_sm80", 80, "gemm/gemm_mma.cuh", "m_begin + x_row + i * C::kXRowStep < m && ", "", OUTSIDE,
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
    "gemm_mma: the halves of the second operand are swapped": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh", "group_accumulators[i][pair * 2 + j], a[i], b[j * 2], b[j * 2 + 1]);",
        "group_accumulators[i][pair * 2 + j], a[i], b[j * 2 + 1], b[j * 2]);", VALUES,
    ),
    "gemm_mma: ldmatrix and the copies disagree on the swizzle": Seed(
        "gemm_sm80", 80, "gemm/gemm_mma.cuh", "(chunk ^ swizzle_bits(row))) * 16",
        "(chunk ^ swizzle_bits(row) % 4)) * 16", VALUES,
    ),
    "gemv: the shuffle adds the wrong lane": Seed(
        "gemv", 80, "gemm/gemv.cu", "__shfl_xor_sync(0xffffffffu, accumulators[r][c], kLanes)",
        "__shfl_xor_sync(0xffffffffu, accumulators[r][c], kLanes / 2)", VALUES, GEMV,
    ),
    "gemv: a group's scales are used one chunk too long": Seed(
        "gemv", 80, "gemm/gemv.cu", "if (row >= group_end) {", "if (row > group_end) {", VALUES, GEMV,
    ),
    "split-K: the counter is not left at zero": Seed(
        "gemv", 80, "common/reduce.cuh", "if (is_last) counters[tile] = 0;", "", VALUES, GEMV, {"split_k": 2},
    ),
    "gemm_sm90: the last tile stores rows of its neighbour": Seed(
        "gemm_sm90", 90, "gemm/gemm_sm90_epilogue.cuh", "row >= tile.store_begin && row < m", "row < m", RACE,
        REPACKED_MANY, {"block_m": 64, "split_k": 2},
    ),
    "gemm_sm90_large: the last tile stores rows of its neighbour": Seed(
        "gemm_sm90_large", 90, "gemm/gemm_sm90_large_epilogue.cuh",
        "row(chunk, pass) >= tile.m_block * C::kBlockM && row", "row", RACE,
        replace(REPACKED_MANY, m=140, k=1024), {"block_m": 80},
    ),
    "gemm_sm90_raw: accumulators are added before all warps have stored theirs": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "  }\n  __syncthreads();\n", "  }\n", RACE, FEW, {"split_k": 2},
    ),
    "gemm_sm90_raw: the first CTA does not wait for the partial sums of the others": Seed(
        "gemm_sm90_raw", 90, "hopper/cluster_reduction.cuh", "shared.received_barrier().wait_for_all();", "", RACE, FEW,
        {"split_k": 2},
    ),
    "gemm_sm90_raw: partial sums signal a barrier that may not be initialized": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "ptx::barrier_cluster_wait_acquire();", "{}", RACE, FEW,
        {"split_k": 2},
    ),
    "gemm_sm90_raw: bytes of rows past m are expected": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", ": 1) * m * C::kBlockN * 4", ": 1) * C::kRows * C::kBlockN * 4",
        DEADLOCK, FEW, {"split_k": 2},
    ),
    "gemm_sm90_raw: the last lanes read scales past n": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu",
        "min(weight_column<C, C::kBlockN>(tile, g * C::kWords * 8, n), n - 8 * C::kWords)",
        "weight_column<C, C::kBlockN>(tile, g * C::kWords * 8, n)", OUTSIDE, FEW,
    ),
    "gemm_sm90_raw: steps past the last one of a warp are copied": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu",
        "if (leader && step + C::kStages < step_end)", "if (leader)", ("race", "nothing"), FEW_LONG,
        {"split_k": 1},
    ),
    "gemm_sm90_raw: x is read before the preceding kernel has finished": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "  ptx::griddepcontrol_wait();\n", "", ("early", "early"), FEW,
    ),
    "gemm_sm90_raw: a weight that may change is read before the preceding kernel has finished": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "kMayPrefetchWeights = MAY_PREFETCH_WEIGHTS",
        "kMayPrefetchWeights = true", ("early", "early"), FEW,
    ),
    "gemm_sm90_raw: x is copied early with a constant weight": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "copy_first(true, false)", "copy_first(true, true)",
        ("early", "early"), FEW_CONSTANT,
    ),
    "gemm_sm90_raw: rows past m are not zeroed": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "if (chunk >= m * (C::kStepK * 2 / 16)) store",
        "if (chunk < 0) store", ("uninitialised", "uninitialised"), FEW,
    ),
    "gemm_sm90_raw: a stage is read before its copies have landed": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "    wait(state.full_barrier, state.phase);\n", "",
        ("in flight", "nothing"), FEW,
    ),
    "gemm_sm90_raw: the phase does not flip at the end of the ring": Seed(
        "gemm_sm90_raw", 90, "hopper/pipeline.cuh", "full_barrier = full_barriers;\n      phase ^= 1u;",
        "full_barrier = full_barriers;", ("in flight", "deadlock"), FEW_LONG, {"split_k": 1},
    ),
    "gemm_sm90_raw: a stage is refilled before the last lane has read it": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "multiply(state.stage_offset);\n    __syncwarp();",
        "multiply(state.stage_offset);", RACE, FEW_LONG, {"split_k": 1},
    ),
    "gemm_sm90_raw: the bytes of x are not expected": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "C::kWordBytes + m * (C::kStepK * 2));", "C::kWordBytes);",
        ("in flight", "nothing"), FEW,
    ),
    "gemm_sm90_raw: a group's scales are used one step too long": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "== (group + 1) * group_steps",
        "== (group + 1) * group_steps + 1", VALUES, FEW_LONG, {"split_k": 1},
    ),
    "gemm_sm90_raw: odd columns are paired with even ones": Seed(
        "gemm_sm90_raw", 90, "gemm/gemm_sm90_raw.cu", "i % 2 ? 0x7632 : 0x5410", "i % 2 ? 0x5410 : 0x7632", VALUES, FEW,
    ),
}  # fmt: skip


FIRST = {seed.kernel: name for name, seed in reversed(SEEDS.items())}.values()
"""The first bug of each kernel. A run without slow tests plants only these."""


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in SEEDS])
def test_seeded_bug_is_caught(name: str) -> None:
    assert_caught(SEEDS[name])
