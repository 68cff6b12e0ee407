# SPDX-License-Identifier: Apache-2.0
"""The engine and its scheduler with a fake runner: random requests, cancellation, limits, fairness and latency."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from typing import Any

import pytest

from cupy_awq.llm import Engine, Generation, QueueFullError, Request
from cupy_awq.llm.decoder.block_pool import BLOCK
from cupy_awq.llm.engine import scheduler
from cupy_awq.llm.engine.runner import Launch, Outcome
from cupy_awq.llm.engine.scheduler import Step
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


def half_right(tokens: Any, room: int) -> list[int]:
    """Return a right draft and a wrong one after two texts of three."""
    return [next_token(tokens, 0), 1][:room] if len(tokens) % 3 else []


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [{}, {"make_draft": lambda: half_right}, {"is_ahead": True}, {"is_ahead": True, "make_draft": lambda: half_right}],
)
def test_random_requests_leave_no_block_behind(
    count: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random requests, cancelled or not, get the tokens they would get alone, and at the end all cache blocks are free.

    The cache is small, so sequences are preempted: their blocks are taken and their tokens computed again later.
    """
    monkeypatch.setattr(scheduler, "EXPECTED_TOKENS", 0)
    engine, runner = make_engine(blocks=13, max_rows=8, **options)
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


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_sequence_is_preempted_and_goes_on_with_the_same_tokens(
    is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted sequence gets the same tokens, also if its next step had been launched ahead."""
    monkeypatch.setattr(scheduler, "EXPECTED_TOKENS", 0)
    engine, runner = make_engine(blocks=10, max_rows=4, is_ahead=is_ahead)
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
    fast, fast_runner = make_engine(make_draft=lambda: oracle)
    with plain, fast:
        assert finish(plain.submit(request)) == finish(fast.submit(request))
    assert len(plain_runner.steps) == 64
    assert len(fast_runner.steps) == 1 + -(-63 // 8)


def test_drafts_pause_while_few_are_correct() -> None:
    """A text whose drafts are all wrong has 12 steps with drafts, then four after each 64 tokens."""
    for wrong, least, most in ((1, 16, 60), (0, 290, 300)):

        def draft(tokens: Any, room: int, wrong: int = wrong) -> list[int]:
            return [next_token(tokens, 0) ^ wrong]

        engine, runner = make_engine(make_draft=lambda draft=draft: draft)
        with engine:
            check_request(engine.submit(Request((1, 2, 3), max_tokens=600, ignore_stop_tokens=True)))
        drafted = [step for step in runner.steps if any(part.drafts for part in step.parts)]
        assert least <= len(drafted) <= most


# Requests that end before their last token


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


def test_an_error_while_the_inbox_is_read_ends_the_requests_in_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("broken")

    monkeypatch.setattr(engine._core, "begin", fail)
    with engine._changed:  # so that the engine reads all three at once
        live = [engine.submit(Request((i,))) for i in range(3)]
    engine._thread.join()
    assert all(generation.is_finished for generation in live)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_exhausted_memory_ends_the_requests_of_the_step_alone(is_ahead: bool) -> None:
    """Only the requests of the step get the error; others go on, also one whose step has been launched ahead."""
    engine, runner = make_engine(is_ahead=is_ahead)

    def fail(step: Step) -> None:
        if any(part.sequence.request.key == "big" for part in step.parts):
            raise MemoryError

    runner.before_step = fail
    with engine:
        other = engine.submit(Request((5, 6), max_tokens=900, ignore_stop_tokens=True))
        next(iter(other))
        with pytest.raises(RuntimeError, match="memory: expected enough"):
            engine.submit(Request((1,), key="big")).result()
        check_request(engine.submit(Request((1,))))
        other.result()
        assert other.completion_tokens == 900


def test_memory_that_ends_while_a_step_runs_keeps_the_tokens_of_the_step_before() -> None:
    engine, runner = make_engine(is_ahead=True)
    launch, others = runner.launch, list[Generation]()

    def fail() -> list[Outcome]:
        raise MemoryError

    def launch_or_fail(step: Step, samplers: Any) -> Launch:
        """Submit a request that fails when the first one's last token has been launched and not been received."""
        launched = launch(step, samplers)
        sequence = step.parts[0].sequence
        if sequence.request.prompt_logprobs is not None:
            return Launch(fail, False)
        if not others and len(sequence.tokens) + sequence.ahead + 1 >= sequence.limit:
            others.append(engine.submit(Request((9, 9, 9), prompt_logprobs=1, max_tokens=3)))
        return launched

    runner.launch = launch_or_fail  # type: ignore[method-assign]
    request = Request((1, 2, 3), max_tokens=6, ignore_stop_tokens=True)
    with engine:
        assert engine.submit(request).result()[0].tokens == completion(request)
        with pytest.raises(RuntimeError, match=r"^memory: expected enough, got none$"):
            others[0].result()


def test_chunks_are_at_most_those_of_the_runner() -> None:
    engine, runner = make_engine(max_chunk=1000)
    with engine:
        check_request(engine.submit(Request(tuple(range(100)) * 3, max_tokens=2)))
    assert {part.size for step in runner.steps if step.is_prompt for part in step.parts} == {128, 44}


def test_chunks_that_choose_no_token_give_no_delta() -> None:
    engine, runner = make_engine(max_chunk=64)
    runner.before_step = lambda step: time.sleep(2e-3)
    with engine:
        deltas = list(engine.submit(Request((1,) * 300, max_tokens=3, ignore_stop_tokens=True)))
    assert all(delta.tokens for delta in deltas)


def test_memory_that_ends_at_a_preemption_leaves_the_text_as_it_was() -> None:
    engine, runner = make_engine(blocks=13, max_rows=4, max_chunk=32, is_ahead=True)
    failures: list[int] = []

    def before_step(step: Step) -> None:
        if not failures and engine.stats().preemptions:
            failures.append(1)
            raise MemoryError

    runner.before_step = before_step
    requests = [
        Request(tuple((b + i) % 11 for i in range(60 + b)), max_tokens=300, ignore_stop_tokens=True, key=str(b))
        for b in (0, 3)
    ]
    with engine:
        results = []
        for generation in [engine.submit(request) for request in requests]:
            try:
                results.append(generation.result()[0].tokens)
            except RuntimeError as error:
                results.append(str(error))
    right = [completion(request)[: runner.max_tokens - len(request.prompt)] for request in requests]
    assert failures
    assert "memory: expected enough, got none" in results
    assert all(
        result in (expected, "memory: expected enough, got none")
        for result, expected in zip(results, right, strict=True)
    )


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
