# SPDX-License-Identifier: Apache-2.0
"""`Generation`: what `Engine.submit` returns, the completions of a request while they are generated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from cupy_awq.llm.completion import Completion
from cupy_awq.llm.engine.request import Delta, Request


class Generation:
    """The completions of one request. Threads may share it, and one of them may iterate over its deltas.

    What comes between two reads is one delta per completion, so a slow reader holds no more than the texts.

    Attributes:
        request: the request.
        cached_tokens: the number of tokens of the prompt that were in the cache.
        completion_tokens: the number of generated tokens of all completions, with stop tokens.
    """

    def __init__(self, request: Request, on_cancel: Callable[[Generation], None]) -> None:
        self.request = request
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._pending: dict[int, Delta] = {}
        self._unfinished = set(range(request.n))
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended."""
        return not self._unfinished

    def cancel(self) -> None:
        """End all completions with the reason "cancelled" before the next step. Later calls change nothing."""
        self._on_cancel(self)

    def __iter__(self) -> Iterator[Delta]:
        """Yield the deltas until all completions have ended."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self.is_finished)
                deltas, is_last = self._take()
            yield from deltas
            if is_last:
                return

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield the deltas until all completions have ended."""
        ready = asyncio.Event()
        with self._changed:
            self._waiter = asyncio.get_running_loop(), ready
        while True:
            with self._changed:
                ready.clear()
                deltas, is_last = self._take()
            for delta in deltas:
                yield delta
            if is_last:
                return
            await ready.wait()

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

    def add(self, new: Delta) -> tuple[asyncio.AbstractEventLoop, asyncio.Event] | None:
        """Add to a completion, for the engine; return the event loop and the event of a waiting reader, or None."""
        with self._changed:
            if new.choice not in self._unfinished:
                return None
            if new.choice in self._pending:
                self._pending[new.choice] += new
            else:
                self._pending[new.choice] = new
            self.completion_tokens += len(new.tokens)
            if new.reason:
                self._unfinished.remove(new.choice)
            self._changed.notify_all()
            return self._waiter

    def _take(self) -> tuple[list[Delta], bool]:
        """Return the pending deltas, and whether they are the last."""
        deltas, self._pending = list(self._pending.values()), {}
        return deltas, self.is_finished
