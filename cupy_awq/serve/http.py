# SPDX-License-Identifier: Apache-2.0
"""HTTP details: deadlines of connections, bodies of limited size, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Awaitable
from typing import Any, ClassVar

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from cupy_awq.serve.errors import ApiError
from cupy_awq.serve.limits import Limits


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with limits for connections that wait for the headers of a request.

    Attributes:
        limits: the limits, of which a subclass may have others.
    """

    limits: ClassVar[Limits] = Limits()
    _deadline: asyncio.TimerHandle | None = None
    _waiting: ClassVar[dict[Protocol, None]] = {}  # in the order in which they began to wait

    def connection_made(self, transport: Any) -> None:
        """Start the deadline of the first request, and give requests the transport of the connection."""
        super().connection_made(transport)
        # asyncio does so too, but not for connections of a socket that was made without the number of the protocol.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.app_state = {**self.app_state, "transport": transport}
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
            self._deadline = self.loop.call_later(self.limits.header_seconds, self.transport.close)
            self._waiting[self] = None
            if len(self._waiting) > self.limits.connections:
                oldest = next(iter(self._waiting))
                oldest._stop_waiting()
                oldest.transport.close()

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body of a JSON request. Raises ApiError if it has another type, is too large or comes too slowly."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type: expected application/json, got {kind!r:.80}")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(415, f"content-encoding: expected none, got {encoding!r:.80}")
    parts: list[bytes] = []

    async def read() -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limits.body_bytes:
                raise ApiError(413, f"body: expected at most {limits.body_bytes} bytes, got more")
            parts.append(part)

    try:
        await asyncio.wait_for(read(), limits.body_seconds)
    except asyncio.TimeoutError:
        raise ApiError(408, f"body: expected it within {limits.body_seconds:.0f} s, got a part") from None
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
