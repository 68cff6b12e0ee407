# SPDX-License-Identifier: Apache-2.0
"""HTTP details: deadlines of connections, bodies of limited size, streams of events, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cupy_awq.serve.errors import ApiError

HEADER_SECONDS, BODY_SECONDS = 10.0, 30.0
"""The times in seconds in which the headers of a request, and then its body, must arrive."""

SEND_SECONDS = 60.0
"""The time in seconds after which a client that reads nothing is given up."""

MAX_WAITING = 1024
"""The largest number of connections that wait for headers. Beyond it, the one that has waited longest is closed."""


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, which closes a connection if request headers take longer than `HEADER_SECONDS`."""

    _deadline: asyncio.TimerHandle | None = None
    _waiting: ClassVar[dict[Protocol, None]] = {}  # in the order in which they began to wait

    def connection_made(self, transport: Any) -> None:
        """Start the deadline of the first request, and give requests a function that resets the connection."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse bytes; the deadline runs while a request has begun whose headers are incomplete."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline for the headers of a request."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)
            self._waiting[self] = None
            if len(self._waiting) > MAX_WAITING:
                oldest = next(iter(self._waiting))
                oldest._stop_waiting()
                oldest.transport.close()

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a JSON request. Raises ApiError if it has another type, is too large or comes too slowly."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" or request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, f"content-type: expected uncompressed application/json, got {kind!r:.80}")
    parts: list[bytes] = []

    async def read() -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise ApiError(413, f"body: expected at most {limit} bytes, got more")
            parts.append(part)

    try:
        await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"body: expected it within {BODY_SECONDS:.0f} s, got a part") from None
    return b"".join(parts)


@contextlib.asynccontextmanager
async def until_disconnect(receive: Receive, *others: Awaitable[None]) -> AsyncIterator[None]:
    """Cancel what the context awaits, and raise ClientDisconnect, if the client leaves or one of ``others`` ends.

    The context is no task of its own, so its first result is used at once.
    """
    body, is_open, has_left = asyncio.current_task(), True, False

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def leave(_: object) -> None:
        nonlocal has_left
        # A watcher that has ended calls this in the next turn of the loop, perhaps after the context.
        if is_open and not has_left and body is not None:
            has_left = True
            body.cancel()

    watchers = [*map(asyncio.ensure_future, (watch(), *others))]
    for watcher in watchers:
        watcher.add_done_callback(leave)
    try:
        yield
    except asyncio.CancelledError:
        if not has_left:
            raise
        if sys.version_info >= (3, 11) and body is not None:
            body.uncancel()
        raise ClientDisconnect from None
    finally:
        is_open = False
        for watcher in watchers:
            watcher.remove_done_callback(leave)
            watcher.cancel()


class EventStream:
    """A response of server-sent events, which ends early if the client leaves or stops reading.

    Args:
        events: the data of the events.
        on_end: a function that is called at the end in any case, even if no event was asked for.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        self._events, self._on_end = events, on_end
        self._sending_since = math.inf
        self._abort: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers and one event after the other, until the events end, the client leaves or reads no more."""
        self._abort = scope.get("state", {}).get("abort", self._abort)
        try:
            with contextlib.suppress(OSError, ClientDisconnect):
                async with until_disconnect(receive, self._watch_reader()):
                    await self._send_all(send)
        finally:
            self._on_end()
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events:
            message = {"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True}
            self._sending_since = time.monotonic()
            await send(message)
            self._sending_since = math.inf
        await send({"type": "http.response.body", "body": b""})

    async def _watch_reader(self) -> None:
        """Reset the connection when an event has waited too long: a task per stream is cheaper than one per event."""
        while time.monotonic() - self._sending_since < SEND_SECONDS:
            await asyncio.sleep(SEND_SECONDS / 8)
        self._abort()  # an end would wait until the client has read what is buffered
