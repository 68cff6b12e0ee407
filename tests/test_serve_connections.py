# SPDX-License-Identifier: Apache-2.0
"""Attacks on the server by its sockets: malformed, endless and slow requests, idle connections and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cupy_awq.llm import Engine, load
from cupy_awq.serve.http import Protocol, until_disconnect
from cupy_awq.serve.limits import Limits
from cupy_awq.serve.listener import listen
from tests import llm_models
from tests.fake_engine import make_engine
from tests.serving import Running, leave

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
SECONDS = 10.0
"""The time in seconds for the end of an attack: other tests run at the same time."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = llm_models.folder(tmp_path_factory.mktemp("model"), llm_models.QWEN3)
    with Running(Engine(load(folder, device="cpu", batch_invariant=True), max_rows=8, cache_tokens=1024)) as server:
        yield server


@pytest.fixture
def server(running: Running) -> Iterator[Running]:
    with running.survives():
        yield running


def read_status(connection: socket.socket) -> int | None:
    """Return the HTTP status of the reply on a socket, or None if the server closed the connection without one."""
    data = b""
    with contextlib.suppress(OSError):
        while b"\r\n" not in data and (part := connection.recv(4096)):
            data += part
    return int(data.split()[1]) if data else None


@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked", f"Content-Length: {1 << 30}"])
def test_a_large_body_is_refused_while_it_arrives(server: Running, framing: str) -> None:
    """The client would go on to 1 GiB."""
    part, sent = bytes(1 << 16), 0
    piece = part if framing.startswith("C") else b"10000\r\n" + part + b"\r\n"
    with server.connect() as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
        connection.sendall(head.encode())
        with contextlib.suppress(OSError):
            while sent < 1 << 30:
                connection.sendall(piece)
                sent += len(part)
        assert read_status(connection) in (413, None)
    assert sent < 1 << 26


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200_000 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_malformed_requests_are_refused(server: Running, data: bytes) -> None:
    with server.connect() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        assert read_status(connection) in (400, 401, 403, 404, 431, 501, None)


def test_smuggled_and_pipelined_requests_are_requests_of_their_own(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        time.sleep(0.3)
        assert connection.recv(65536).count(b"HTTP/1.1 200") == 3
    with server.connect() as connection:
        both = "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{both}\r\n0\r\n\r\nGET /metrics".encode())
        assert read_status(connection) in (400, 415)


@pytest.fixture
def limited(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Yield a server with the limits of a test."""
    engine, _ = make_engine(max_rows=8)
    with Running(engine, limits=Limits(**request.param)) as server, server.survives():
        yield server


@pytest.mark.parametrize("limited", [{"header_seconds": 0.3, "body_seconds": 0.3}], indirect=True)
def test_headers_and_bodies_have_deadlines(limited: Running) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    for sent, status in ((b"", None), (head, None), (head + b"Content-Length: 10\r\n\r\n{", 408)):
        with limited.connect() as connection:
            connection.sendall(sent)
            began = time.monotonic()
            assert read_status(connection) == status
            assert 0.2 < time.monotonic() - began < SECONDS
    with limited.connect() as connection:  # the second request on one connection
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_status(connection) == 200
        connection.sendall(b"GET /he")
        began = time.monotonic()
        while connection.recv(4096):
            pass
        assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    ("limited", "count"),
    [({"connections": 100}, 300), pytest.param({}, 5000, marks=pytest.mark.slow)],
    indirect=["limited"],
)
def test_idle_connections_do_not_keep_others_out(limited: Running, count: int) -> None:
    """The server closes those that have waited longest, once more than a limit have sent no request."""
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(limited.connect()) for _ in range(count)]
        idle[0].settimeout(5)
        assert idle[0].recv(1) == b""
        assert limited.chat()[0] == 200
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_status(idle[-1]) == 200


@pytest.mark.parametrize("read_bytes", [0, 1])
def test_a_reader_that_stops_or_takes_a_byte_at_a_time_is_given_up(read_bytes: int) -> None:
    """Its request ends long before its tokens, and the connection is reset."""
    engine, runner = make_engine(blocks=300, max_rows=8)
    runner.before_step = lambda step: time.sleep(5e-3)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 8}
    data = json.dumps(body).encode()
    limits = Limits(send_seconds=0.3)
    with Running(engine, limits=limits) as server, server.survives(), socket.socket() as connection:
        server.listener.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        while not engine.stats().running:
            time.sleep(1e-3)
        while engine.stats().running:
            time.sleep(0.05)
            connection.recv(read_bytes) if read_bytes else None
        assert engine.stats().completion_tokens < 8 * 900
        while server.listener.server_state.connections:
            time.sleep(1e-3)  # an end without a reset would wait for the reader


def test_a_client_of_http_1_0_gets_the_same_events(server: Running) -> None:
    """Its events are not written as chunks of HTTP/1.1, straight to the connection."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 9, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    with server.connect() as connection:
        head = f"POST {COMPLETE} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    *events, end = reply.partition(b"\r\n\r\n")[2].decode().split("\n\n")[:-1]
    texts = ["".join(event["choices"][0]["text"] for event in found) for found in (
        [json.loads(event.removeprefix("data: ")) for event in events], [*server.stream(COMPLETE, body)][:-1]
    )]  # fmt: skip
    assert end == "data: [DONE]"
    assert texts[0] == texts[1] != ""


def test_events_are_sent_at_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nagle's algorithm would hold those of a kept connection until the client acknowledges earlier ones, for 40 ms."""
    begin, options = Protocol.connection_made, []

    def connection_made(self: Protocol, transport: asyncio.Transport) -> None:
        begin(self, transport)
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Protocol, "connection_made", connection_made)
    assert server.complete()[0] == 200
    assert options
    assert all(options)


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_clients_that_leave_at_any_stage_leave_nothing_behind(server: Running, count: int) -> None:
    generator = random.Random(0)
    for _ in range(count):
        body = {
            "prompt": "x" * generator.choice((1, 200)),
            "max_tokens": generator.choice((1, 200)),
            "ignore_eos": True,
        }
        body |= {"stream": generator.random() < 0.5, "n": generator.choice((1, 4))}
        leave(server, body, generator.random() * 0.02)


def test_a_client_that_leaves_as_its_reply_ends_cancels_nothing_after_it() -> None:
    """Both happen in one turn of the event loop; the task goes on after the context, and is not cancelled."""

    async def respond() -> int:
        result, disconnect = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, str]:
            await disconnect.wait()
            return {"type": "http.disconnect"}

        def end() -> None:
            disconnect.set()
            result.set()

        asyncio.get_running_loop().call_later(0.01, end)
        async with until_disconnect(receive):
            await result.wait()
        await asyncio.sleep(0.01)
        return 1

    assert asyncio.run(respond()) == 1


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let every name have these addresses."""

    def find(host: str, port: int, **options: Any) -> list[Any]:
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        rest = {True: (0, 0), False: ()}
        return [(families[":" in a], socket.SOCK_STREAM, 6, "", (a, port, *rest[":" in a])) for a in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", find)


def test_a_name_with_two_addresses_is_served_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is the same; an address that this machine does not have is left out."""
    resolve(monkeypatch, "127.0.0.1", "::1", "192.0.2.1")
    sockets = listen("localhost", 0)
    monkeypatch.undo()
    try:
        assert len({one.getsockname()[1] for one in sockets}) == 1
        assert [one.getsockname()[0] for one in sockets] == ["127.0.0.1", "::1"]
        for one in sockets:
            socket.create_connection(one.getsockname()[:2], timeout=5).close()
    finally:
        for one in sockets:
            one.close()


def test_a_port_in_use_at_one_address_and_a_foreign_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "127.0.0.1", "127.0.0.2")
    with socket.create_server(("127.0.0.2", 0)) as used, pytest.raises(OSError, match="in use"):
        listen("localhost", used.getsockname()[1])
    resolve(monkeypatch, "192.0.2.1")
    with pytest.raises(OSError, match="assign requested address"):
        listen("elsewhere", 0)
