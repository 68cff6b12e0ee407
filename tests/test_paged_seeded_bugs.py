# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the kernels of a paged KV cache: each one is caught by their tests on the simulator."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests import test_llm_kernels as tests
from tests.simt.kernels import patched
from tests.simt.seeds import OUTSIDE, RACE, VALUES, caught_by

ROPE = functools.partial(
    tests.test_rope_and_cache_append_start_at_the_position_of_each_sequence, "latest", 90, "float16", 64, False, 3
)
PROMPT = functools.partial(
    tests.test_attention_of_a_prompt_is_causal_and_stays_in_its_sequence, "latest", 90, "float16", 2, 1, 64, 25, False
)
LONG = functools.partial(
    tests.test_attention_of_a_prompt_is_causal_and_stays_in_its_sequence, "latest", 90, "float16", 4, 1, 128, 70, True
)
TURING = functools.partial(
    tests.test_attention_of_a_prompt_is_causal_and_stays_in_its_sequence, "latest", 75, "float16", 4, 1, 128, 70, True
)
DECODE = functools.partial(
    tests.test_decode_attention_covers_the_cache_and_the_new_token, "latest", 90, "float16", 4, 2, 64, False
)
SPLITS = functools.partial(tests.test_decode_attention_merges_many_splits, "latest", 90, 1, 2, 1)
CHOOSE = functools.partial(tests.test_the_kernels_choose_the_same_tokens_as_the_cpu, "latest", 90, tests.MIXED)

CACHE, ITEMS, BEGIN, ATTENTION = (
    f"decoder/{name}" for name in ("kv_cache.cuh", "decode_step.cuh", "begin_step.cu", "attention_mma.cu")
)
Seed = tuple[Callable[[], None], str, str, str, tuple[str, str]]

SEEDS: dict[str, Seed] = {
    "the wrong row of the block table": (
        DECODE, CACHE, "int64_t>(slot) * (capacity", "int64_t>(slot - 1) * (capacity", VALUES,
    ),
    "the block of the next token at an edge of a block": (
        DECODE, CACHE, "block = key / kBlockKeys", "block = (key + 1) / kBlockKeys", VALUES,
    ),
    "the keys of a whole block from the block of the key before": (
        PROMPT, ATTENTION, "cache.blocks[block]", "cache.blocks[max(block - 1, 0)]", VALUES,
    ),
    "a padding row is appended to a block in decode attention": (
        DECODE, ITEMS, "if (!is_padding) pairs.store", "pairs.store", VALUES,
    ),
    "a padding row is appended to a block in a prompt": (
        ROPE, "decoder/rope_cache.cu", " || position < 0", "", OUTSIDE,
    ),
    "the last range of keys is missing": (
        SPLITS, BEGIN, "if (lane >= (own.y >> 8 & 0xff)) continue;",
        "if (lane > 0 && lane + 1 >= (own.y >> 8 & 0xff)) continue;", OUTSIDE,
    ),
    "the ranges of rows of other warps are not counted": (
        DECODE, BEGIN, "if (lane >= step) end += before;", "if (lane > step) end += before;", RACE,
    ),
    "the block of the new token is not entered": (DECODE, BEGIN, "    blocks[block] = row[3];\n", "", VALUES),
    "the first keys of another block": (
        DECODE, BEGIN, "blocks[min(first + i, last)]", "blocks[min(first + i + 1, last)]", VALUES,
    ),
    "the new token in the block of the first key": (
        DECODE, BEGIN, "int4{blocks[last], 0", "int4{blocks[first], 0", VALUES,
    ),
    "items are written before the block table": (
        DECODE, BEGIN, "  __syncthreads();  // the items of all rows", "  // the items of all rows", RACE,
    ),
    "only the first ranges are merged": (
        SPLITS, ITEMS, "begin < splits; begin +=", "begin < 1; begin +=", VALUES,
    ),
    "queries of the tile before": (
        PROMPT, ATTENTION, "out + (static_cast<int64_t>(tile.x", "out + (static_cast<int64_t>(max(tile.x - 1, 0)", RACE,
    ),
    "a query past the end of the tile": (
        LONG, ATTENTION, "query_of(threadIdx.x, i), tile.y - 1)", "query_of(threadIdx.x, i), tile.y)", OUTSIDE,
    ),
    "keys are read before they have landed": (
        PROMPT, ATTENTION, "cp_async_wait_group<kStages - 2>", "cp_async_wait_group<kStages - 1>",
        ("in flight", "in flight"),
    ),
    "a stage is filled while other warps read it": (
        PROMPT, ATTENTION, "wait_for_group();  // The block has landed", "// The block has landed", RACE,
    ),
    "keys after the query are not masked": (
        PROMPT, ATTENTION, "if (first_key + kBlockKeys - 1 > position)", "if (first_key > position)", VALUES,
    ),
    "the last keys of a warp's queries are skipped": (
        LONG, ATTENTION, "first_key > position + 15", "first_key > position", VALUES,
    ),
    "both heads have the queries of the first": (
        PROMPT, ATTENTION, "queries[h][i], b[2]", "queries[0][i], b[2]", VALUES,
    ),
    "values past the last key are not zero": (PROMPT, ATTENTION, "first < valid ? 16 : 0", "16", VALUES),
    "both groups have the same keys": (TURING, ATTENTION, "kGroups * step + group_now()", "kGroups * step", VALUES),
    "the results of a group are passed while others read its stages": (
        TURING, ATTENTION, "  __syncthreads();  // no stage is read", "  // no stage is read", RACE,
    ),
    "the other group's sum is missing": (TURING, ATTENTION, "+ other * passed_at", "+ 0.0f * passed_at", VALUES),
    "a stage is stored while other warps read it": (
        TURING, ATTENTION, "if (step > 0) wait_for_group();", "", RACE,
    ),
    "keys are copied from the registers of the block before": (
        TURING, ATTENTION, "      fetch(step + 1);\n", "", VALUES,
    ),
    "the sum is not rescaled": (LONG, ATTENTION, "        row_sum[h][i] *= rescale;\n", "", VALUES),
    "the key that rope_cache has appended is left out": (
        DECODE, "decoder/decode_attention_mma.cu", "kAppended ? keys : min(position, capacity)",
        "min(position, capacity)", VALUES,
    ),
    "the seen tokens of the row instead of its slot": (
        CHOOSE, "decoder/sample.cu", "own_seen = seen + static_cast<int64_t>(slot)",
        "own_seen = seen + static_cast<int64_t>(row)", VALUES,
    ),
    "the options of the row instead of its slot": (
        CHOOSE, "decoder/sample.cu", "const int slot = slots[row]", "const int slot = row", VALUES,
    ),
}  # fmt: skip


FIRST = {file: name for name, (_, file, *_) in reversed(SEEDS.items())}.values()
"""The first bug of each source file. A run without slow tests plants only these."""


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in SEEDS])
def test_a_planted_bug_is_caught(name: str) -> None:
    check, file, old, new, caught = SEEDS[name]
    with patched(file, old, new):
        assert caught_by(check) in caught
