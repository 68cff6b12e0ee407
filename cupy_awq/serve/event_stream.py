# SPDX-License-Identifier: Apache-2.0
"""`EventStream`: a reply that grows with its completions, as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from cupy_awq.llm import Delta, Generation
from cupy_awq.serve import replies
from cupy_awq.serve.errors import ApiError
from cupy_awq.serve.http import until_disconnect
from cupy_awq.serve.replies import Reply

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """A response of server-sent events, which ends early if the client leaves or stops reading.

    After each step of the engine, events go straight to the connection, without a task that waits for them: with 256
    streams, tasks and layers of the server would take longer than the step. If the connection's buffer is not empty,
    they wait, and deltas are joined, until a task has sent what is there.

    Args:
        reply: the reply.
        generations: its completions, by prompt.
        first: their deltas so far, with the index of the prompt.
        on_end: a function that is called at the end in any case.
        send_seconds: the time after which a client that reads nothing is given up.
    """

    def __init__(
        self,
        reply: Reply,
        generations: Sequence[Generation],
        first: Sequence[tuple[int, Delta]],
        on_end: Callable[[], None],
        send_seconds: float,
    ) -> None:
        self._reply, self._generations, self._first, self._on_end = reply, generations, first, on_end
        self._send_seconds = send_seconds
        self._unfinished = set(range(len(generations)))
        self._transport: Any = None
        self._write: Callable[[bytes], None] = self._keep
        self._waiting = b""
        self._wakes = asyncio.Event()
        self._sending_since = math.inf
        self._error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers and the events, until the completions end, the client leaves or reads no more."""
        self._transport = scope.get("state", {}).get("transport")
        if self._transport is not None and scope["http_version"] == "1.1":
            self._write = self._write_chunk
        try:
            with contextlib.suppress(OSError, ClientDisconnect):
                async with until_disconnect(receive, self._watch_reader()):
                    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                    await self._send_all(send)
        finally:
            self._unfinished.clear()
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        if self._first:  # an empty chunk would be the end
            self._write(b"".join(self._reply.event(i, delta) for i, delta in self._first))
        for i, generation in enumerate(self._generations):
            generation.listen(functools.partial(self._flush, i), asyncio.get_running_loop())
        while self._unfinished or self._waiting:
            await self._wakes.wait()
            self._wakes.clear()
            if self._waiting:
                self._sending_since = time.monotonic()
                await send({"type": "http.response.body", "body": self._waiting, "more_body": True})
                self._sending_since, self._waiting = math.inf, b""
                for i in tuple(self._unfinished):
                    self._flush(i)
        if self._error is not None:
            raise self._error  # before the end of the body, so that the reply does not look complete
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": b""})

    def _flush(self, i: int) -> None:
        """Write the new events of a prompt, unless earlier ones wait."""
        if self._waiting or i not in self._unfinished:
            return
        events = []
        try:
            deltas, is_last = self._generations[i].take()
            for delta in deltas:
                events.append(self._reply.event(i, replies.check(delta)))  # also if a later one raises
            if is_last:
                self._unfinished.remove(i)
                events += [] if self._unfinished else self._reply.end(self._generations)
        except ApiError as error:
            events.append(replies.encode_event(error.to_json()))
            self._unfinished.clear()
        except Exception as error:
            self._error = error
            self._unfinished.clear()
        if events:
            self._write(b"".join(events))
        if not self._unfinished:
            self._wakes.set()

    def _write_chunk(self, data: bytes) -> None:
        """Write a chunk of HTTP/1.1 to the connection, or keep it for the task if earlier ones are still there."""
        if self._transport.get_write_buffer_size():
            self._keep(data)
        elif not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _keep(self, data: bytes) -> None:
        self._waiting = data
        self._wakes.set()

    async def _watch_reader(self) -> None:
        """Reset the connection when events have waited too long: a task per stream is cheaper than one per event."""
        while time.monotonic() - self._sending_since < self._send_seconds:
            await asyncio.sleep(self._send_seconds / 8)
        if self._transport is not None:
            self._transport.abort()  # an end would wait until the client has read what is buffered
