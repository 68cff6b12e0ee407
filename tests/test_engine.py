# SPDX-License-Identifier: Apache-2.0
"""The engine and its scheduler with a fake runner: random requests, cancellation, limits, fairness and latency."""

from __future__ import annotations

import asyncio
import itertools
import queue
import random
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq.llm import Engine, Generation, QueueFullError, Request
from cupy_awq.llm.decoder.block_pool import BLOCK, BlockPool
from cupy_awq.llm.engine import scheduler
from cupy_awq.llm.engine.scheduler import MIN_CHUNK, Part, Scheduler, Sequence, Step
from tests.fake_engine import STOP, completion, make_engine, next_token


def prompt(generator: random.Random, longest: int) -> tuple[int, ...]:
    """Return a random prompt of a small alphabet; many prompts share a beginning, which the cache can reuse."""
    start = [generator.randrange(2)] * (BLOCK * generator.randrange(3))
    return tuple(start + [generator.randrange(128) for _ in range(generator.randrange(1, longest))])


def finish(generation: Generation) -> list[tuple[list[int], str]]:
    return [(completion.tokens, completion.reason) for completion in generation.result()]


def check_request(generation: Generation) -> None:
    """Check that a request's completions are those of the request alone, or a beginning of them if it was cancelled."""
    request = generation.request
    for choice, (tokens, reason) in enumerate(finish(generation)):
        wanted = completion(request, choice)
        if reason == "cancelled":
            assert tokens == wanted[: len(tokens)]
        else:
            is_stopped = wanted[-1] == STOP and not request.ignore_stop_tokens
            assert (tokens, reason) == (wanted, "stop" if is_stopped else "length")


def run_random_requests(engine: Engine, count: int, seed: int) -> None:
    """Submit random requests from one thread and cancel 30% of them at random moments from another."""
    generator, live, doomed = random.Random(seed), list[Generation](), queue.SimpleQueue[Generation | None]()

    def cancel() -> None:
        for generation in iter(doomed.get, None):
            time.sleep(random.random() * 4e-3)
            generation.cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    for i in range(count):
        request = Request(
            prompt(generator, generator.choice((4, 40, 200))),
            max_tokens=generator.choice((1, 20, 150)),
            n=generator.choice((1, 1, 1, 3)),
            key=str(generator.randrange(3)),
            salt=str(generator.randrange(2)),
            ignore_stop_tokens=generator.random() < 0.5,
        )
        while True:
            try:
                live.append(engine.submit(request))
                break
            except QueueFullError:
                time.sleep(1e-3)
        if generator.random() < 0.3:
            doomed.put(live[-1])
        if i >= 100:
            check_request(live[i - 100])
    for generation in live[-100:]:
        check_request(generation)
    doomed.put(None)
    canceller.join()


@pytest.mark.parametrize("count", [250, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("draft", [None, lambda tokens, room: [next_token(tokens, 0), 1][:room]])
def test_random_requests_leave_no_block_behind(count: int, draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests, cancelled or not, get the tokens they would get alone, and at the end all cache blocks are free.

    The cache is small, so sequences are preempted: their blocks are taken and their tokens computed again later.
    """
    monkeypatch.setattr(scheduler, "EXPECTED_TOKENS", 0)
    engine, runner = make_engine(blocks=13, max_rows=8, draft=draft)
    # Requests that come slowly, on a busy machine, wait for each other.
    runner.before_step = lambda step: time.sleep(4e-3 if len(engine._queued) < 4 else 0)
    with engine:
        run_random_requests(engine, count, seed=count)
        wait_until_idle(engine)
        stats = engine.stats()
        engine._scheduler.check()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.blocks)
    assert stats.preemptions
    assert stats.cached_tokens
    assert engine.error is None


def wait_until_idle(engine: Engine) -> None:
    while engine._sequences or engine._inbox:
        time.sleep(1e-3)


def test_a_sequence_is_preempted_and_goes_on_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "EXPECTED_TOKENS", 0)
    engine, runner = make_engine(blocks=10, max_rows=4)
    prompts = [tuple(7 * i + j for j in range(60)) for i in range(4)]
    with engine:
        generations = [engine.submit(Request(p, max_tokens=200, ignore_stop_tokens=True)) for p in prompts]
        for generation in generations:
            check_request(generation)
        assert engine.stats().preemptions
        # Tokens that are computed again after a preemption are not counted twice.
        assert engine.stats().prompt_tokens == 240
    assert max(len(step.parts) for step in runner.steps) > 1


def test_drafts_that_are_always_right_save_steps_and_change_nothing() -> None:
    def oracle(tokens: Any, room: int) -> list[int]:
        known = list(tokens)
        for _ in range(room):
            known.append(next_token(known, 0))
        return known[len(tokens) :]

    request = Request((1, 2, 3), max_tokens=64, ignore_stop_tokens=True)
    plain, plain_runner = make_engine()
    fast, fast_runner = make_engine(draft=oracle)
    with plain, fast:
        assert finish(plain.submit(request)) == finish(fast.submit(request))
    assert len(plain_runner.steps) == 64
    assert len(fast_runner.steps) == 1 + -(-63 // 8)


def test_drafts_pause_while_few_are_correct_and_above_eight_rows() -> None:
    """A text whose drafts are all wrong has 12 steps with drafts, then four after each 64 tokens."""
    for wrong, least, most in ((1, 16, 60), (0, 290, 300)):

        def draft(tokens: Any, room: int, wrong: int = wrong) -> list[int]:
            return [next_token(tokens, 0) ^ wrong]

        engine, runner = make_engine(draft=draft)
        with engine:
            check_request(engine.submit(Request((1, 2, 3), max_tokens=600, ignore_stop_tokens=True)))
        drafted = [step for step in runner.steps if any(part.drafts for part in step.parts)]
        assert least <= len(drafted) <= most
    planner = make_scheduler(draft=lambda tokens, room: [1] * room)
    steps, _ = simulate(planner, [(0.0, sequence(5, 40, seed=i)) for i in range(9)], 1000, 0.01)
    assert not any(part.drafts for _, _, step in steps if len(step.parts) > 8 for part in step.parts)


# Requests that end early


def test_cancellation_works_at_every_stage_and_twice() -> None:
    engine, runner = make_engine(max_rows=1)
    gate = threading.Semaphore(0)
    runner.before_step = lambda step: gate.acquire() and None
    with engine:
        # A prompt of 500 tokens runs in four chunks of at most 128.
        running = engine.submit(Request(tuple(range(100)) * 5, max_tokens=50))
        queued = engine.submit(Request((1,), max_tokens=50))
        for generation in (queued, running, running):
            generation.cancel()
        gate.release(1000)
        assert finish(queued) == finish(running) == [([], "cancelled")]
        running.cancel()
        wait_until_idle(engine)
        assert len(runner.steps) <= 1
        check_request(engine.submit(Request((1, 2), max_tokens=5)))
        decoding = engine.submit(Request((3,), max_tokens=900, ignore_stop_tokens=True))
        next(iter(decoding))
        decoding.cancel()
        assert decoding.result()[0].reason == "cancelled"
    assert engine.stats().free_blocks == engine.stats().blocks


def test_times_of_waiting_and_running_are_limited() -> None:
    engine, runner = make_engine(max_rows=1)
    runner.before_step = lambda step: time.sleep(0.01)
    with engine:
        long = engine.submit(Request((1,), max_tokens=900, ignore_stop_tokens=True, run_seconds=0.3))
        queued = engine.submit(Request((2,), queue_seconds=0.05))
        with pytest.raises(RuntimeError, match="request: expected to start in time"):
            queued.result()
        assert not long.is_finished
        with pytest.raises(RuntimeError, match="request: its time is over"):
            long.result()
        check_request(engine.submit(Request((2,), max_tokens=5, queue_seconds=0.5)))


def test_a_full_queue_refuses_more() -> None:
    engine, runner = make_engine(max_rows=2)
    gate = threading.Semaphore(0)
    runner.before_step = lambda step: gate.acquire() and None
    with engine:
        live = []
        with pytest.raises(QueueFullError, match="queue: expected room for a request of 1 tokens, got 8"):
            live += [engine.submit(Request((i,), max_tokens=2)) for i in range(20)]
        gate.release(10**6)
        wait_until_idle(engine)
        check_request(engine.submit(Request((5,), max_tokens=2)))
    with pytest.raises(QueueFullError, match="got one that is closed"):
        engine.submit(Request((1,)))


def test_a_prompt_that_never_fits_is_refused_at_once() -> None:
    engine, _ = make_engine(blocks=4)
    with engine:
        with pytest.raises(ValueError, match="prompt: expected fewer tokens than the context of 128, got 128"):
            engine.submit(Request((1,) * 128))
        with pytest.raises(ValueError, match="expected tokens of 0 to 263, got 264"):
            engine.submit(Request((264,)))
        with pytest.raises(ValueError, match="expected tokens of 0 to 263, got 900"):
            engine.submit(Request((1,), logit_bias={900: 1.0}))
        (last,) = engine.submit(Request((1,) * 127, max_tokens=50, ignore_stop_tokens=True)).result()
        assert (len(last.tokens), last.reason) == (1, "length")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ()}, "prompt: expected at least one token"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"n": 10**9}, "n: expected 1 to 8, got 1000000000"),
        ({"n": True}, "n: expected an integer, got True"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: expected 0 to 20, got -1"),
        ({"logprobs": 21}, "logprobs: expected 0 to 20, got 21"),
        ({"min_tokens": 300}, "min_tokens: expected 0 to 256, got 300"),
        ({"presence_penalty": float("nan")}, "presence_penalty: expected -2 to 2, got nan"),
        ({"frequency_penalty": "1"}, "frequency_penalty: expected a number, got '1'"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias: expected 0 to 2147483648, got -1"),
        ({"logit_bias": {1: 101.0}}, "logit_bias: expected -100 to 100, got 101"),
        ({"logit_bias": dict.fromkeys(range(301), 0.0)}, "logit_bias: expected at most 300 tokens, got 301"),
    ],
)
def test_invalid_requests_are_refused(options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Request(**{"prompt": (1,), **options})


def test_an_error_of_a_step_ends_all_requests_and_the_engine_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine, runner = make_engine()

    def fail(step: Step) -> None:
        raise OSError("device lost")

    runner.before_step = fail
    live = [engine.submit(Request((i,), n=2)) for i in range(3)]
    for generation in live:
        with pytest.raises(RuntimeError, match="engine: device lost"):
            generation.result()
    engine._thread.join()
    assert not engine.is_healthy()
    assert "device lost" in str(engine.error)
    assert "all requests end" in caplog.text
    with pytest.raises(QueueFullError):
        engine.submit(Request((1,)))
    engine.close()


def test_exhausted_memory_ends_the_requests_of_the_step_alone() -> None:
    engine, runner = make_engine()

    def fail(step: Step) -> None:
        if any(part.sequence.request.key == "big" for part in step.parts):
            raise MemoryError

    runner.before_step = fail
    with engine:
        with pytest.raises(RuntimeError, match="memory: expected enough"):
            engine.submit(Request((1,), key="big")).result()
        check_request(engine.submit(Request((1,))))


def test_a_step_that_hangs_makes_the_engine_unhealthy() -> None:
    engine, runner = make_engine()
    gate = threading.Semaphore(0)
    runner.before_step = lambda step: gate.acquire() and None
    with engine:
        assert engine.is_healthy(0)  # an engine without work is healthy, however long ago its last step was
        generation = engine.submit(Request((1,), max_tokens=1))
        while engine.is_healthy(0.05):
            time.sleep(0.01)
        gate.release(100)
        check_request(generation)


def test_close_waits_for_what_runs_and_cancels_the_rest() -> None:
    engine, runner = make_engine()
    runner.before_step = lambda step: time.sleep(1e-3)
    short = engine.submit(Request((1,), max_tokens=20))
    long = engine.submit(Request((2,), max_tokens=900, ignore_stop_tokens=True))
    engine.close(drain_seconds=0.3)
    check_request(short)
    assert long.result()[0].reason == "cancelled"


def test_event_loops_and_threads_read_at_the_same_time() -> None:
    engine, _ = make_engine(max_rows=32)

    async def read(i: int) -> list[int]:
        return [c.token async for delta in engine.submit(Request((i,), max_tokens=30)) for c in delta.tokens]

    async def read_all() -> list[list[int]]:
        return await asyncio.gather(*(read(i) for i in range(20)))

    found: dict[int, Any] = {}
    with engine:
        threads = [threading.Thread(target=lambda k=k: found.update({k: asyncio.run(read_all())})) for k in range(3)]
        for thread in threads:
            thread.start()
        for i in range(20):
            check_request(engine.submit(Request((i,), max_tokens=30)))
        for thread in threads:
            thread.join()
    assert list(found.values()) == [[completion(Request((i,), max_tokens=30)) for i in range(20)]] * 3


def test_a_slow_reader_gets_joined_deltas() -> None:
    engine, _ = make_engine()
    with engine:
        generation = engine.submit(Request((1,), max_tokens=200, n=2, ignore_stop_tokens=True))
        wait_until_idle(engine)
        deltas = list(generation)
    assert [(delta.choice, len(delta.tokens), delta.reason) for delta in deltas] == [
        (0, 200, "length"),
        (1, 200, "length"),
    ]
    assert generation.completion_tokens == 400


def test_text_is_detokenized_and_ends_at_stop_strings_and_special_tokens() -> None:
    engine, _ = make_engine()
    with engine:
        whole = engine.submit(Request((9,), max_tokens=40, ignore_stop_tokens=True)).result()[0]
        stop = whole.text[5:8]
        (stopped,) = engine.submit(Request((9,), max_tokens=40, ignore_stop_tokens=True, stop=(stop,))).result()
        assert (stopped.text, stopped.reason) == (whole.text[: whole.text.index(stop)], "stop")
        assert len(stopped.tokens) < 40


def simulate(planner: Scheduler, arrivals: list[tuple[float, Sequence]], rate: float, decode: float) -> Any:
    """Run sequences by the scheduler on a simulated clock; return the steps and the times of each sequence's tokens.

    ``rate`` is in prompt tokens per second, ``decode`` in seconds per decode step; a step is (start, end, step).
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
        seconds = sum(part.size for part in step.parts) / rate if step.is_prompt else decode
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


def test_long_prompts_do_not_delay_a_stream_beyond_the_bound() -> None:
    stream = sequence(32, 400)
    flood = [sequence(8192, 4, at=0.05 * i, seed=i + 1) for i in range(6)]
    arrivals = [(s.arrival, s) for s in (stream, *flood)]
    _, times = simulate(make_scheduler(), arrivals, rate=45_000, decode=0.002)
    gaps = [b - a for a, b in itertools.pairwise(times[stream])]
    assert max(gaps[1:]) <= 0.02 * 1.1
    # Decode steps make room for chunks of prompts, so many gaps between tokens are longer than a decode step.
    assert sum(gap > 0.015 for gap in gaps) >= 50


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
    assert times[long][0] < 60  # the long prompt gets its turn although shorter ones keep coming
    assert any(len(step.parts) > 1 for _, _, step in steps if step.is_prompt)


def test_keys_share_the_engine() -> None:
    """An API key with 200 requests gets no more of the batch's rows than another one with 20."""
    greedy = [sequence(64, 50, key="a", seed=i) for i in range(200)]
    fair = [sequence(64, 50, key="b", at=1.0, seed=i + 500) for i in range(20)]
    steps, times = simulate(make_scheduler(max_rows=8), [(s.arrival, s) for s in (*greedy, *fair)], 45_000, 0.01)
    end = max(times[s][-1] for s in fair)
    assert end < 5  # alone, its 20 * 50 tokens at 8 per step of 10 ms would take 1.25 s
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
