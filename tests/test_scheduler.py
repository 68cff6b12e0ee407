# SPDX-License-Identifier: Apache-2.0
"""The scheduler alone, with a simulated clock: latency, fairness and blocks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq.llm import Request
from cupy_awq.llm.decoder.block_pool import BLOCK, BlockPool
from cupy_awq.llm.engine.scheduler import MIN_CHUNK, Part, Scheduler, Sequence


def simulate(
    planner: Scheduler, arrivals: list[tuple[float, Sequence]], rate: float, decode: float, pair: float = 0.0
) -> Any:
    """Run all sequences; return the steps (start, end, step) and the times of each sequence's tokens.

    A step with prompts takes 1 / ``rate`` seconds per token, and ``pair`` per token and key that it attends to.
    """
    now, steps = 0.0, []
    times: dict[Sequence, list[float]] = {sequence: [] for _, sequence in arrivals}
    waiting = sorted(arrivals, key=lambda pair: pair[0])
    while any(len(s.tokens) < s.limit for _, s in arrivals):
        while waiting and waiting[0][0] <= now:
            planner.add(waiting.pop(0)[1])
        step = planner.next_step(now)
        if step is None:
            now = waiting[0][0]
            continue
        seconds = decode
        if step.is_prompt:
            seconds = sum(part.size / rate + pair * part.size * (part.start + part.size / 2) for part in step.parts)
        chosen = [[1] if part.is_last else [] for part in step.parts]
        planner.finish_step(step, chosen, seconds)
        steps.append((now, now := now + seconds, step))
        for part, tokens in zip(step.parts, chosen, strict=True):
            times[part.sequence] += [now] * len(tokens)
            if len(part.sequence.tokens) >= part.sequence.limit:
                planner.remove(part.sequence)
        planner.check()
    assert planner.pool.free == planner.pool.size
    return steps, times


def sequence(size: int, tokens: int, *, key: str = "", at: float = 0.0, seed: int = 0) -> Sequence:
    ids = tuple(random.Random(seed).randrange(1000) for _ in range(size))
    return Sequence(Request(ids, max_tokens=tokens, key=key), 0, size + tokens, at)


def make_scheduler(blocks: int = 2000, **options: Any) -> Scheduler:
    return Scheduler(
        BlockPool(1 + blocks), **{"max_rows": 16, "max_chunk": 2048, "inter_token_seconds": 0.02, **options}
    )


@pytest.mark.parametrize("pair", [0.0, 4e-9])
def test_long_prompts_do_not_delay_a_stream_beyond_the_bound(pair: float) -> None:
    stream = sequence(32, 400)
    flood = [sequence(8192, 4, at=0.05 * i, seed=i + 1) for i in range(6)]
    arrivals = [(s.arrival, s) for s in (stream, *flood)]
    _, times = simulate(make_scheduler(), arrivals, rate=45_000, decode=0.002, pair=pair)
    gaps = [b - a for a, b in itertools.pairwise(times[stream])]
    assert max(gaps[2:]) <= 0.02 * 1.02
    assert sum(gap > 0.015 for gap in gaps) >= 50  # decode steps wait as long as allowed: prompts fill the gaps


def test_a_chunk_alternates_with_a_decode_step_and_has_at_least_64_tokens() -> None:
    stream, long = sequence(32, 30), sequence(1000, 1, at=0.01, seed=1)
    steps, _ = simulate(make_scheduler(inter_token_seconds=1e-6), [(0, stream), (0.01, long)], 1000, 0.01)
    both = [step for _, _, step in steps if len(long.tokens) > 0]
    kinds = [step.is_prompt for step in both][1:-1]
    assert not any(a and b for a, b in itertools.pairwise(kinds))
    sizes = [part.size for step in both if step.is_prompt for part in step.parts if part.sequence is long]
    assert sizes[:-1] == [MIN_CHUNK] * (len(sizes) - 1)


def test_short_prompts_share_a_chunk_and_pass_long_ones_that_have_not_waited_long() -> None:
    long, short = sequence(60_000, 1), [sequence(100, 1, at=0.1, seed=i + 1) for i in range(12)]
    steps, times = simulate(make_scheduler(), [(s.arrival, s) for s in (long, *short)], 10_000, 0.01)
    assert max(times[s][0] for s in short) < 3
    late = [sequence(100, 1, at=0.1 * i, seed=i + 1) for i in range(300)]
    long = sequence(20_000, 1)
    _, times = simulate(make_scheduler(), [(s.arrival, s) for s in (long, *late)], 1000.5, 0.01)
    assert times[long][0] < 60  # shorter prompts, which keep coming, do not starve it
    assert any(len(step.parts) > 1 for _, _, step in steps if step.is_prompt)


def test_keys_share_the_engine() -> None:
    """A key with 200 requests has half of the rows while another waits, and both get equally many tokens."""
    greedy = [sequence(64, 50, key="a", seed=i) for i in range(200)]
    fair = [sequence(64, 50, key="b", at=1.0, seed=i + 500) for i in range(20)]
    steps, times = simulate(make_scheduler(max_rows=8), [(s.arrival, s) for s in (*greedy, *fair)], 45_000, 0.01)
    end = max(times[s][-1] for s in fair)
    assert end < 5  # alone, 20 answers of 50 tokens take 1.25 s: 8 rows in a step of 10 ms
    during = [step for begin, _, step in steps if 1.5 < begin < end - 0.5 and not step.is_prompt]
    counts = [sum(part.sequence.request.key == key for step in during for part in step.parts) for key in "ab"]
    assert counts[1] > 0.4 * sum(counts)


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.integers(1, 90), st.sampled_from("ab"), st.floats(0, 3)),
        min_size=1,
        max_size=25,
    ),
    st.integers(10, 40),
    st.integers(1, 9),
)
@settings(max_examples=60)
def test_any_requests_end_without_losing_blocks(
    sizes: list[tuple[int, int, str, float]], blocks: int, max_rows: int
) -> None:
    sequences = [sequence(*size, key=key, at=at, seed=i % 3) for i, (*size, key, at) in enumerate(sizes)]
    sequences = [s for s in sequences if s.limit <= blocks * BLOCK]
    planner = make_scheduler(blocks, max_rows=max_rows, max_chunk=96)
    steps, times = simulate(planner, [(s.arrival, s) for s in sequences], 10_000, 0.01)
    for _, _, step in steps:
        assert len(step.parts) == len({part.sequence for part in step.parts}) <= max_rows
        assert all(part.size == 1 for part in step.parts) or step.is_prompt
        assert sum(part.size for part in step.parts) <= 96
    assert all(len(times[s]) == s.limit - len(s.request.prompt) for s in sequences)
    assert not planner._served


def test_a_part_has_its_drafts_after_the_known_tokens() -> None:
    one = sequence(3, 5)
    part = Part(one, 1, 2, (7, 8))
    assert part.tokens == [*one.tokens[1:], 7, 8]
    assert part.is_last


def test_more_than_eight_sequences_have_no_drafts() -> None:
    planner = make_scheduler(make_draft=lambda: lambda tokens, room: [1] * room)
    steps, _ = simulate(planner, [(0.0, sequence(5, 40, seed=i)) for i in range(9)], 1000, 0.01)
    assert not any(part.drafts for _, _, step in steps if len(step.parts) > 8 for part in step.parts)
