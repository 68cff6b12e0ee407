# SPDX-License-Identifier: Apache-2.0
"""A server on loopback in a thread of the test, and a client of it by sockets alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from cupy_awq.llm import Engine
from cupy_awq.serve.listener import Listener
from cupy_awq.serve.server import Settings

PATIENCE = 20
"""The multiple of the time of an honest answer before an attack that it may take after it, if that is over 1 s."""


class Running:
    """A server of an engine in a thread, on a free port of loopback; it stops at the end of the context."""

    def __init__(self, engine: Engine, drain_seconds: float = 0.0, **settings: Any) -> None:
        self.engine = engine
        self.listener = Listener(engine, Settings("tiny", **settings), drain_seconds=drain_seconds)
        self._thread = threading.Thread(target=self.listener.run)
        self._thread.start()
        while not self.listener.started:
            time.sleep(1e-3)
        self.port = self.listener.servers[0].sockets[0].getsockname()[1]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.listener.should_exit = True
        self._thread.join()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the reply; ``body`` is JSON unless it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        reply = connection.getresponse()
        content = reply.read()
        connection.close()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, content

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Return the status and the parsed JSON of the reply to a POST request."""
        status, _, content = self.request("POST", path, body, headers)
        return status, json.loads(content)

    def chat(self, text: str = "Hello", **options: Any) -> tuple[int, Any]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, **options}
        return self.post("/v1/chat/completions", {"max_tokens": 8, **body})

    def complete(self, prompt: Any = "Hello", **options: Any) -> tuple[int, Any]:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8, **options}
        return self.post("/v1/completions", body)

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """Yield the events of a stream; the last is "[DONE]" if it is complete."""
        status, headers, content = self.request("POST", path, body | {"stream": True})
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        for event in content.decode().split("\n\n")[:-1]:
            data = event.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)

    @contextlib.contextmanager
    def survives(self, headers: dict[str, str] | None = None) -> Iterator[None]:
        """Check that an honest request gets the same text before and after the context, and that no block is lost.

        The second answer takes at most 1 s, or `PATIENCE` times as long as the first.
        """

        def ask() -> tuple[str, float]:
            body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "honest"}]}
            began = time.monotonic()
            status, reply = self.post("/v1/chat/completions", {**body, "temperature": 0, "max_tokens": 8}, headers)
            assert status == 200, reply
            return reply["choices"][0]["message"]["content"], time.monotonic() - began

        text, alone = ask()
        yield
        after, seconds = ask()
        assert after == text
        assert seconds < max(1.0, PATIENCE * alone)
        self.wait_until_idle()
        assert self.engine.is_healthy(5)

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        """Wait until no request runs and all blocks are free."""
        end = time.monotonic() + seconds
        while (stats := self.engine.stats()).running or stats.waiting or self.engine._sequences:
            assert time.monotonic() < end, stats
            time.sleep(1e-3)
        assert stats.free_blocks == stats.blocks


def leave(server: Running, body: dict[str, Any], seconds: float, path: str = "/v1/completions") -> None:
    """Send a request and reset the connection after a time, like a client that dies."""
    data = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(seconds)
