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
    tests.test_attention_of_a_prompt_is_causal_and_stays_in_its_sequence, "latest", 90, "float16", 2, 1, 64, 25
)
DECODE = functools.partial(
    tests.test_decode_attention_covers_the_cache_and_the_new_token, "latest", 90, "float16", 4, 2, 64, False
)
SPLITS = functools.partial(tests.test_decode_attention_merges_many_splits, "latest", 90, 1, 2, 1)
CHOOSE = functools.partial(tests.test_the_kernels_choose_the_same_tokens_as_the_cpu, "latest", 90, tests.MIXED)

CACHE, ITEMS, BEGIN = (f"decoder/{name}" for name in ("kv_cache.cuh", "decode_step.cuh", "begin_step.cu"))
Seed = tuple[Callable[[], None], str, str, str, tuple[str, str]]

SEEDS: dict[str, Seed] = {
    "the wrong row of the block table": (
        DECODE, CACHE, "int64_t>(slot) * (capacity", "int64_t>(slot - 1) * (capacity", OUTSIDE,
    ),
    "the block of the next token at an edge of a block": (
        DECODE, CACHE, "block = key / kBlockKeys", "block = (key + 1) / kBlockKeys", VALUES,
    ),
    "the keys of a whole block from the block of the key before": (
        PROMPT, CACHE, "block = key / kBlockKeys", "block = (key > 0 ? key - 1 : 0) / kBlockKeys", VALUES,
    ),
    "a padding row is appended to a block in decode attention": (
        DECODE, ITEMS, "if (!is_padding) pairs.store", "pairs.store", VALUES,
    ),
    "a padding row is appended to a block in a prompt": (
        ROPE, "decoder/rope_cache.cu", " || position < 0", "", OUTSIDE,
    ),
    "the last range of keys is missing": (
        SPLITS, BEGIN, "for (int i = 0; i < ranges; ++i)", "for (int i = 0; i < max(1, ranges - 1); ++i)", RACE,
    ),
    "the ranges of rows of other warps are not counted": (
        DECODE, BEGIN, "if (lane >= step) end += before;", "if (lane > step) end += before;", RACE,
    ),
    "the block of the new token is not entered": (DECODE, BEGIN, "    blocks[block] = row[3];\n", "", VALUES),
    "only the first ranges are merged": (
        SPLITS, ITEMS, "begin < splits; begin +=", "begin < 1; begin +=", VALUES,
    ),
    "queries of the tile before": (
        PROMPT, "decoder/attention_sm80.cu", "first_row = item.x", "first_row = max(item.x - 1, 0)", RACE,
    ),
    "the key that rope_cache has appended is left out": (
        DECODE, "decoder/decode_attention_sm80.cu", "kAppended ? keys : min(position, capacity)",
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
