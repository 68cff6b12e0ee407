# SPDX-License-Identifier: Apache-2.0
"""The paged cache: blocks in random use, prefixes, and the logits of ragged batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cupy_awq import llm
from cupy_awq.llm.decoder.block_pool import BLOCK, DUMMY, BlockPool, BlockTable, count_blocks
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from tests import llm_models
from tests.logits import logits_of
from tests.test_batch_invariant import bits

BLOCKS = 9


class Pool(RuleBasedStateMachine):
    """A random test of the block pool: sequences over a small alphabet start, grow and end, and share prefixes.

    It remembers what was written to each block, so a block that is reused wrongly or freed twice shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(1 + BLOCKS)
        self.live: list[tuple[BlockTable, list[int]]] = []
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}

    def compute(self, table: BlockTable, tokens: list[int], computed: int) -> None:
        """Note what a forward pass writes: each block gets the text up to its last computed token."""
        for i in range(table.computed // BLOCK, count_blocks(computed)):
            self.contents[table.blocks[i]] = table.salt, tuple(tokens[: min(computed, (i + 1) * BLOCK)])
        self.pool.mark_computed(table, tokens, computed)

    @rule(runs=st.lists(st.integers(0, 1), max_size=4), rest=st.integers(1, 40), salt=st.sampled_from("ab"))
    def start(self, runs: list[int], rest: int, salt: str) -> None:
        tokens = [token for token in runs for _ in range(BLOCK)] + [0] * rest
        table = BlockTable(salt)
        needed, free = self.pool.count_needed(salt, tokens, len(tokens)), self.pool.free
        known = self.pool.reuse_prefix(table, tokens)
        assert known % BLOCK == 0
        assert known < len(tokens)
        if not self.pool.reserve(table, len(tokens)):
            assert needed > free
            self.pool.release(table)
            return
        assert needed == free - self.pool.free
        self.live.append((table, tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 80))
    def run(self, data: Any, count: int) -> None:
        table, tokens = data.draw(st.sampled_from(self.live))
        self.compute(table, tokens, min(len(tokens), table.computed + count))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def grow(self, data: Any, new: list[int]) -> None:
        table, tokens = data.draw(st.sampled_from(self.live))
        if self.pool.reserve(table, len(tokens) + len(new)):
            tokens += new

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        table, tokens = data.draw(st.sampled_from(self.live))
        self.live.remove((table, tokens))
        self.pool.release(table)

    @invariant()
    def no_block_is_lost_or_shared_by_mistake(self) -> None:
        self.pool.check(table for table, _ in self.live)
        assert self.pool.free + len({block for table, _ in self.live for block in table.blocks}) == BLOCKS
        for table, tokens in self.live:
            assert len(set(table.blocks)) == len(table.blocks)
            assert len(table.blocks) == count_blocks(len(tokens))
            for i, block in enumerate(table.blocks[: count_blocks(table.computed)]):
                text = tuple(tokens[: min(table.computed, (i + 1) * BLOCK)])
                assert self.contents[block] == (table.salt, text)


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase


def test_the_least_recently_used_prefix_is_evicted_and_its_end_first() -> None:
    pool, tables = BlockPool(1 + 4), [BlockTable(), BlockTable()]
    texts = [[i] * (2 * BLOCK) for i in range(2)]
    for table, text in zip(tables, texts, strict=True):
        assert pool.reserve(table, len(text))
        pool.mark_computed(table, text, len(text))
    for table in tables:
        pool.release(table)
    newer = BlockTable()
    assert pool.reserve(newer, BLOCK)
    assert DUMMY not in newer.blocks
    assert [len(pool.find_prefix("", [*text, 9])) for text in texts] == [1, 2]
    pool.release(newer)
    assert pool.reserve(BlockTable(), BLOCK)  # a block that holds no known prefix is taken first
    assert [len(pool.find_prefix("", [*text, 9])) for text in texts] == [1, 2]


def test_a_whole_prompt_that_is_known_still_runs_its_last_token() -> None:
    pool, table = BlockPool(1 + 4), BlockTable()
    text = list(range(2 * BLOCK))
    assert pool.reserve(table, len(text))
    pool.mark_computed(table, text, len(text))
    assert len(pool.find_prefix("", text)) == 1
    assert not pool.find_prefix("another key", text)


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "qwen2"))])
def test_ragged_rows_have_the_bits_of_a_sequence_alone(tmp_path: Path, family: str) -> None:
    """Rows of a ragged batch have the bits that each sequence has alone.

    Three sequences run in chunks of different lengths, in scattered cache blocks that hold NaN before.
    """
    files = llm.read(llm_models.folder(tmp_path, llm_models.FAMILIES[family]))
    model = build_model(files, NumpyOps(files.config, batch_invariant=True))
    rng = np.random.default_rng(0)
    texts = [[int(i) for i in rng.integers(0, 250, size)] for size in (3, 90, 64)]
    pages = model.ops.make_pages(8 * BLOCK, 256)
    for state in pages.layers:
        state.k[:] = state.v[:] = np.nan
    blocks = [[7], [3, 8, 1], [2, 6]]
    found: list[list[np.ndarray]] = [[], [], []]
    at = [0, 0, 0]
    for counts in ([1, 31, 0], [2, 1, 64], [0, 58, 0]):
        used = [i for i in range(3) if counts[i]]
        batch = pages.make_rows([(at[i], counts[i], blocks[i]) for i in used])
        tokens = [token for i in used for token in texts[i][at[i] : at[i] + counts[i]]]
        logits = model.logits(model.forward(model.ops.prepare_tokens(tokens)[None], batch))[0]
        for i in used:
            found[i].append(logits[: counts[i]])
            logits = logits[counts[i] :]
            at[i] += counts[i]
    for text, parts in zip(texts, found, strict=True):
        np.testing.assert_array_equal(bits(np.concatenate(parts)), bits(logits_of(model, text)))
        wanted = llm_models.forward(files, text)
        assert np.abs(np.concatenate(parts) - wanted).max() <= 1e-4 * np.abs(wanted).max()
    unused = [place for block in (DUMMY, 4, 5) for place in range(block * BLOCK, (block + 1) * BLOCK)]
    assert all(np.isnan(state.k[:, unused]).all() for state in pages.layers)


def test_pages_beyond_memory_are_refused(tmp_path: Path) -> None:
    files = llm.read(llm_models.folder(tmp_path, llm_models.LLAMA))
    with pytest.raises(ValueError, match="KV cache of 10000000000000 tokens: expected at most"):
        NumpyOps(files.config).make_pages(10**13, 256)
