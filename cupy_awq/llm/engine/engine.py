# SPDX-License-Identifier: Apache-2.0
"""`Engine`: one thread that runs the requests of many callers on one model.

The life of a request: `submit` checks it and puts it into the inbox; between two steps the thread reads the inbox,
cancellations too; the scheduler admits the request as a sequence, whose blocks may already hold a prefix of the prompt;
steps run the prompt in chunks, then one token at a time together with other sequences; each token becomes text, which
the caller's iterator receives; at a stop token, a stop string or a limit the sequence leaves and releases its blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cupy_awq.llm.decoder.block_pool import BLOCK
from cupy_awq.llm.engine.core import NO_MEMORY, Core, TextModel
from cupy_awq.llm.engine.generation import Generation, Listener
from cupy_awq.llm.engine.request import Delta, QueueFullError, Request
from cupy_awq.llm.engine.runner import Runner, make_runner
from cupy_awq.llm.engine.scheduler import Draft, Sequence
from cupy_awq.llm.generate_arguments import Prompt, show_count
from cupy_awq.runtime import placement

LOG = logging.getLogger(__name__)

YIELD_SECONDS = 1e-3
"""The largest time that the thread leaves to event loops after a step, while the next one runs: without the competition
for the interpreter's lock, they send the new tokens sooner."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine.

    Attributes:
        running, waiting: the numbers of sequences.
        free_blocks, blocks: the numbers of free blocks, which may hold cached prefixes, and of all blocks.
        preemptions, prompt_tokens, cached_tokens, completion_tokens, steps: totals since the start; ``prompt_tokens``
            includes ``cached_tokens``, which did not run.
    """

    running: int
    waiting: int
    free_blocks: int
    blocks: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    steps: int


class Engine:
    """An engine for a model. It is a context manager; threads may share it.

    Sequences share one paged cache, and prompts reuse the prefixes of earlier ones. On a GPU, steps are launched ahead
    of the host, so text and HTTP take no time from it.

    Text does not depend on other requests if the model was loaded with ``batch_invariant=True``; else the bits of
    logits, and so the choice between two almost equally likely tokens, depend on the rows of a step.

    Args:
        model: the model, which nothing else may use until `close`.
        max_rows: the largest number of sequences in a step.
        cache_tokens: the number of tokens whose keys and values fit into the cache; by default those that fit into an
            eighth of the memory, or into the free memory of a GPU.
        inter_token_seconds: the bound for the time between two tokens while prompts of others run.
        max_chunk: the largest number of prompt tokens per step; at most and by default that of the back
            end.
        queued_per_row: the largest number of waiting requests, as a multiple of ``max_rows``.
        queued_caches: the largest number of waiting tokens, as a multiple of those in the cache.
        make_draft: a function that returns a function of a text that guesses its next tokens, such as
            `draft.NgramDraft`, or None. Drafts change no text with a batch-invariant model.
        make_runner: a function with the arguments of `runner.make_runner`; for tests.

    Raises:
        ValueError: a number is not positive, or the cache does not fit into memory.

    Example::

        with cupy_awq.llm.Engine(cupy_awq.llm.load("smollm2", device="cpu")) as engine:
            answers = [engine.submit(f"What is {i} + {i}?") for i in range(8)]
            print([answer.result()[0].text for answer in answers])
    """

    def __init__(
        self,
        model: TextModel,
        *,
        max_rows: int = 64,
        cache_tokens: int | None = None,
        inter_token_seconds: float = 0.05,
        max_chunk: int | None = None,
        queued_per_row: int = 4,
        queued_caches: int = 2,
        make_draft: Callable[[], Draft] | None = None,
        make_runner: Callable[..., Runner] = make_runner,
    ) -> None:
        counts = {"max_rows": max_rows, "cache_tokens": cache_tokens, "max_chunk": max_chunk}
        for name, value in {**counts, "queued_per_row": queued_per_row, "queued_caches": queued_caches}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if not inter_token_seconds > 0:
            raise ValueError(f"inter_token_seconds: expected more than 0, got {inter_token_seconds}")
        self.model, self.max_rows = model, max_rows
        with placement.use_device(model.model.ops.device_index):
            has_drafts = make_draft is not None
            runner = make_runner(model.model, max_rows, model.config.context, cache_tokens, has_drafts=has_drafts)
        limits: dict[str, Any] = {"max_chunk": max_chunk, "inter_token_seconds": inter_token_seconds}
        self._core = Core(model, runner, max_rows=max_rows, make_draft=make_draft, **limits)
        self._scheduler = self._core.scheduler
        self.max_tokens = runner.max_tokens
        self._most_queued = queued_per_row * max_rows, queued_caches * BLOCK * runner.blocks
        self._sequences: dict[Generation, list[Sequence]] = {}
        self._generations: dict[Sequence, Generation] = {}
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Generation, list[Sequence] | None]] = deque()
        self._queued: dict[Generation, int] = {}  # the tokens of the requests that have not left the queue
        self._is_closing = False
        self._is_idle = True
        self._beat = time.monotonic()
        self._totals = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "steps": 0}
        self._woken: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._delivered = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cupy_awq engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        prompt: Prompt | Request,
        /,
        *,
        raw: bool = False,
        special_tokens: bool | None = None,
        template_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generation:
        """Queue a prompt and return its `Generation`, from which any thread or event loop can read.

        Args:
            prompt: a text or messages, or a `Request`, which has all options.
            raw, special_tokens, template_args: as for `LanguageModel.generate`.
            options: the fields of `Request` besides the prompt, such as ``max_tokens``, ``sampling`` and ``stop``.

        Raises:
            TypeError, ValueError: an option is invalid, or the prompt leaves no room for a token.
            QueueFullError: too many requests wait; or the engine is closed.
        """
        if isinstance(prompt, Request):
            request = prompt
        else:
            encode = functools.partial(self.model.encode, raw=raw, special_tokens=special_tokens)
            ids = encode(prompt, template_args=template_args, limit=self.max_tokens)
            request = Request(tuple(ids), continues=raw, **options)
        self.check(request)
        generation = Generation(request, self._cancel)
        limit = min(len(request.prompt) + request.max_tokens, self.max_tokens)
        sequences = [Sequence(request, choice, limit, time.monotonic()) for choice in range(request.n)]
        with self._changed:
            if self.error is not None or self._is_closing:
                raise QueueFullError("engine: expected a running engine, got one that is closed")
            tokens, (most, most_tokens) = sum(self._queued.values()), self._most_queued
            if len(self._queued) >= most or (tokens and tokens + len(request.prompt) > most_tokens):
                got = f"{len(self._queued)} of {tokens}"
                raise QueueFullError(f"queue: expected room for a request of {len(request.prompt)} tokens, got {got}")
            self._queued[generation] = len(request.prompt)
            self._inbox.append((generation, sequences))
            self._changed.notify()
        return generation

    def check(self, request: Request) -> None:
        """Raise ValueError if the vocabulary, the context or the cache does not permit a request."""
        vocab, size = self.model.config.vocab, len(request.prompt)
        for token in (min(request.prompt), max(request.prompt), max(request.logit_bias, default=0)):
            if not 0 <= token < vocab:
                raise ValueError(f"prompt, logit_bias: expected tokens of 0 to {vocab - 1}, got {token}")
        if size >= self.max_tokens:
            got = show_count(size, self.max_tokens)
            raise ValueError(f"prompt: expected fewer tokens than the context of {self.max_tokens}, got {got}")

    def is_healthy(self, seconds: float = 60.0) -> bool:
        """Return whether the thread runs and has begun a step, or had nothing to do, in the last ``seconds``."""
        return self._thread.is_alive() and (self._is_idle or time.monotonic() - self._beat < seconds)

    def stats(self) -> EngineStats:
        """Return the present numbers of sequences and blocks, and the totals since the start."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.rows),
            waiting=len(self._queued),
            free_blocks=scheduler.pool.free,
            blocks=scheduler.pool.size,
            preemptions=scheduler.preemptions,
            **self._totals,
        )

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait up to ``drain_seconds`` for the others, cancel the rest and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(drain_seconds)
        with self._changed:
            self._inbox.extend((generation, None) for generation in list(self._sequences))
            self._changed.notify()
        self._thread.join()

    def _cancel(self, generation: Generation) -> None:
        with self._changed:
            self._inbox.append((generation, None))
            self._changed.notify()

    def _run(self) -> None:
        """Run steps until the engine is closed; end all requests if one fails for a reason other than memory."""
        try:
            with placement.use_device(self.model.model.ops.device_index):
                while self._read_inbox():
                    self._step()
        except BaseException as error:
            LOG.exception("engine: a step failed; all requests end")
            with self._changed:
                self.error = error
            for generation in {**self._sequences, **self._queued}:
                for choice in range(generation.request.n):
                    self._notify(generation.add(Delta(choice, reason="error", error=f"engine: {error!s:.200}")))
            self._wake()

    def _read_inbox(self) -> bool:
        """Apply what callers asked for, and wait if there is nothing to do; return False when the engine may end."""
        with self._changed:
            self._is_idle = not self._sequences
            while not (self._inbox or self._sequences or self._is_closing):
                self._changed.wait()
            self._is_idle, self._beat = False, time.monotonic()
            inbox = list(self._inbox)
            self._inbox.clear()
        for generation, sequences in inbox:
            if sequences is None:
                self._end(generation, "cancelled")
            else:
                self._begin(generation, sequences)
        for sequence in self._scheduler.expired(time.monotonic()):
            waited = sequence.admitted is None
            message = "request: expected to start in time, got none" if waited else "request: its time is over"
            if sequence in self._generations:  # not ended with another completion of its request
                self._end(self._generations[sequence], "timeout", message)
        self._wake()
        return not self._is_closing or bool(self._sequences)

    def _begin(self, generation: Generation, sequences: list[Sequence]) -> None:
        self._sequences[generation] = sequences
        self._generations |= dict.fromkeys(sequences, generation)
        self._totals["prompt_tokens"] += len(generation.request.prompt)
        self._core.begin(sequences, shares_prompt=True)

    def _step(self) -> None:
        step = self._scheduler.next_step(time.monotonic())
        if step is None and not self._core.is_ahead:
            return
        parts = () if step is None else step.parts
        if self._queued:
            for part in parts:
                self._leave_queue(part.sequence)
        try:
            found = self._core.run(step)
        except MemoryError:
            for generation in {self._generations[part.sequence] for part in parts}:
                self._end(generation, "error", NO_MEMORY)
            step, found = None, self._core.run(None)  # before a sequence of the step before, if preempted, runs again
        self._totals["steps"] += step is not None
        for sequence, delta in found:
            self._totals["completion_tokens"] += len(delta.tokens)
            self._notify(self._generations[sequence].add(delta))
            if delta.reason:
                self._forget(sequence)
        if self._wake() and self._core.is_ahead:
            self._delivered.wait(YIELD_SECONDS)

    def _leave_queue(self, sequence: Sequence) -> None:
        """Count a request out of the queue when its first sequence runs."""
        generation = self._generations[sequence]
        if self._dequeue(generation):
            self._notify(generation.admit(sequence.cached))
            self._totals["cached_tokens"] += sequence.cached

    def _dequeue(self, generation: Generation) -> bool:
        with self._changed:
            return self._queued.pop(generation, None) is not None

    def _end(self, generation: Generation, reason: str, error: str = "") -> None:
        """End all completions of a request."""
        sequences = list(self._sequences.get(generation, ()))
        self._core.end(sequences)
        for sequence in sequences:
            self._notify(generation.add(Delta(sequence.choice, reason=reason, error=error)))
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended from all tables, and its request if it has no other."""
        generation = self._generations.pop(sequence)
        self._sequences[generation].remove(sequence)
        if not self._sequences[generation]:
            del self._sequences[generation]
            self._dequeue(generation)
            pool = self._scheduler.pool
            if not self._sequences and pool.free < pool.size:
                raise RuntimeError(f"blocks: expected {pool.size} free ones in an idle engine, got {pool.free}")

    def _notify(self, listener: Listener | None) -> None:
        """Call the function of a reader; event loops are told once per step."""
        loop, on_delta = listener or (None, None)
        if loop is not None and on_delta is not None:
            self._woken.setdefault(loop, []).append(on_delta)
        elif on_delta is not None:
            on_delta()

    def _wake(self) -> bool:
        """Tell event loops of new deltas; return whether there are any."""
        has_woken, self._woken, woken = bool(self._woken), {}, self._woken
        self._delivered.clear()
        for loop, functions in woken.items():
            with contextlib.suppress(RuntimeError):  # the reader's event loop may have been closed
                loop.call_soon_threadsafe(_call_all, functions, self._delivered)
        return has_woken


def _call_all(functions: Iterable[Callable[[], None]], delivered: threading.Event) -> None:
    for function in functions:
        function()
    asyncio.get_running_loop().call_soon(delivered.set)  # after the tasks that the functions have woken
