# SPDX-License-Identifier: Apache-2.0
"""`Generation`: what `Engine.submit` returns, the completions of a request while they are generated."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

from cupy_awq.llm.completion import Completion
from cupy_awq.llm.engine.request import Delta, Request

Listener = tuple[asyncio.AbstractEventLoop | None, Callable[[], None]]
"""A function to call when there is something new, and the event loop to call it in; see `Generation.listen`."""


class Generation:
    """The completions of one request. Threads may share it, and one of them may iterate over its deltas.

    What comes between two reads is one delta per completion, so a slow reader holds no more than the texts.

    Attributes:
        request: the request.
        cached_tokens: the number of tokens of the prompt that were in the cache.
        completion_tokens: the number of generated tokens of all completions, with stop tokens.
        first_token: the time of the first of them in seconds, or None.
        is_admitted: whether the request has left the queue.
    """

    def __init__(self, request: Request, on_cancel: Callable[[Generation], None]) -> None:
        self.request = request
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.first_token: float | None = None
        self.is_admitted = False
        self._on_cancel = on_cancel
        self._lock = threading.Lock()
        self._pending: dict[int, Delta] = {}
        self._unfinished = set(range(request.n))
        self._listener: Listener | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended."""
        return not self._unfinished

    def cancel(self) -> None:
        """End all completions with the reason "cancelled" before the next step. Later calls change nothing."""
        self._on_cancel(self)

    def __iter__(self) -> Iterator[Delta]:
        """Yield the deltas until all completions have ended."""
        ready, is_last = threading.Event(), False
        self.listen(ready.set)
        while not is_last:
            ready.wait()
            ready.clear()
            deltas, is_last = self.take()
            yield from deltas

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield the deltas until all completions have ended."""
        ready, is_last = asyncio.Event(), False
        self.listen(ready.set, asyncio.get_running_loop())
        while not is_last:
            await ready.wait()
            ready.clear()
            deltas, is_last = self.take()
            for delta in deltas:
                yield delta

    def listen(self, on_delta: Callable[[], None], loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Have a function called when the request leaves the queue, and after each step with deltas to `take`.

        It is called now if the request has left the queue. It replaces other functions.

        Args:
            on_delta: the function, which must not wait and raises nothing.
            loop: the running event loop, in which the function is called; None to call it in the engine's thread.
        """
        with self._lock:
            self._listener = loop, on_delta
            is_ready = self._pending or self.is_finished or self.is_admitted
        if is_ready:
            on_delta()

    def take(self) -> tuple[list[Delta], bool]:
        """Return what is new since the last call, one delta per completion, and whether it is the last."""
        with self._lock:
            deltas, self._pending = list(self._pending.values()), {}
            return deltas, self.is_finished

    def result(self) -> list[Completion]:
        """Wait for the end and return the completions, with the reasons of `Delta`.

        Raises RuntimeError if one of them ended with the reason "timeout" or "error".
        """
        completions = [Completion() for _ in range(self.request.n)]
        for delta in self:
            delta.add_to(completions[delta.choice])
            if delta.error:
                self.cancel()
                raise RuntimeError(delta.error)
        return completions

    def admit(self, cached_tokens: int) -> Listener | None:
        """Note that the request has left the queue, for the engine; return the function to call, or None."""
        with self._lock:
            self.cached_tokens, self.is_admitted = cached_tokens, True
            return self._listener

    def add(self, new: Delta) -> Listener | None:
        """Add to a completion, for the engine; return the function to call, or None."""
        with self._lock:
            if new.choice not in self._unfinished:
                return None
            if new.choice in self._pending:
                self._pending[new.choice] += new
            else:
                self._pending[new.choice] = new
            self.completion_tokens += len(new.tokens)
            if self.first_token is None and new.tokens:
                self.first_token = time.monotonic()
            if new.reason:
                self._unfinished.remove(new.choice)
            return self._listener
