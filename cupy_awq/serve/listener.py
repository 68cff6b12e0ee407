# SPDX-License-Identifier: Apache-2.0
"""`Listener`: the HTTP server that listens on a port, from its start until the last reply."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from typing import Any

import uvicorn

from cupy_awq.llm import Engine
from cupy_awq.serve.http import Protocol
from cupy_awq.serve.server import Server, Settings

LOG = logging.getLogger(__name__)


class Listener(uvicorn.Server):
    """A server on a port. Call `run`; it ends by SIGINT or SIGTERM, or when the engine fails.

    Args:
        engine: the engine, which is closed at the end.
        settings: the settings of the endpoints.
        host, port: the address; port 0 is a free one.
        drain_seconds: the time in seconds that running requests get at the end.
    """

    def __init__(
        self, engine: Engine, settings: Settings, *, host: str = "127.0.0.1", port: int = 0, drain_seconds: float = 0.0
    ) -> None:
        self._engine, self._drain_seconds, self._name = engine, drain_seconds, settings.name
        super().__init__(
            uvicorn.Config(
                Server(engine, settings).app,
                host=host,
                port=port,
                http=type("LimitedProtocol", (Protocol,), {"limits": settings.limits, "_waiting": {}}),
                ws="none",
                loop="asyncio",
                lifespan="off",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(drain_seconds) + 5,
            )
        )

    async def startup(self, sockets: Any = None) -> None:
        """Listen on the address and report it. Raises OSError if that is not possible."""
        host = self.config.host
        try:
            listening = listen(host, self.config.port)
        except OSError:
            self._engine.close()
            raise
        await super().startup(listening)
        shown = f"[{host}]" if ":" in host else host
        LOG.info("serving %s at http://%s:%d/v1", self._name, shown, listening[0].getsockname()[1])

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server shuts down, which it also does after an error of the engine."""
        return await super().on_tick(counter) or self._engine.error is not None

    async def shutdown(self, sockets: Any = None) -> None:
        """Accept no connections, let running requests end, and close the engine."""
        closing = asyncio.to_thread(self._engine.close, self._drain_seconds)
        await asyncio.gather(closing, super().shutdown(sockets))


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets on all addresses of a host that this machine has, with one port; 0 is a free one.

    A name such as localhost may have an IPv4 and an IPv6 address. Raises OSError if no address, or the port of one of
    them, is available.
    """
    sockets: list[socket.socket] = []
    refused = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with contextlib.ExitStack() as opened:
            for family, address in dict.fromkeys((family, address) for family, *_, address in found):
                shared = sockets[0].getsockname()[1] if sockets else port
                try:
                    new = socket.create_server((address[0], shared, *address[2:]), family=family)
                except OSError as error:
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    refused = error
                else:
                    sockets.append(opened.enter_context(new))
            if not sockets:
                raise refused
            opened.pop_all()
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise OSError(f"host, port: expected a free address of this machine, got {host}, {port}: {reason}") from None
    return sockets
