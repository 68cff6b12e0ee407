# SPDX-License-Identifier: Apache-2.0
"""The server under load, with an engine without a model: clients that leave, floods of one key, and deadlines."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

from cupy_awq.llm import Request
from cupy_awq.llm.engine.runner import Launch
from cupy_awq.llm.engine.scheduler import Step
from cupy_awq.serve.limits import Limits
from tests.fake_engine import make_engine
from tests.serving import Running, leave

COMPLETE = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
def test_generation_ends_when_the_client_leaves(stream: bool) -> None:
    engine, runner = make_engine()
    runner.before_step = lambda step: time.sleep(2e-3)
    with Running(engine) as server, server.survives():
        leave(server, {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": stream}, 0.1)
        server.wait_until_idle()
        assert 0 < engine.stats().completion_tokens < 900


def test_a_key_that_floods_the_queue_gets_429_and_others_are_served() -> None:
    engine, runner = make_engine(max_rows=4)
    runner.before_step = lambda step: time.sleep(2e-3)
    with Running(engine, keys=("a", "b")) as server, server.survives({"Authorization": "Bearer b"}):
        body = {"model": "tiny", "prompt": "x" * 50, "max_tokens": 100, "ignore_eos": True}
        statuses: list[int] = []

        def flood() -> None:
            statuses.append(server.post(COMPLETE, body, {"Authorization": "Bearer a"})[0])

        threads = [threading.Thread(target=flood) for _ in range(40)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        began, status = time.monotonic(), 429
        while status == 429:
            status, _ = server.post(COMPLETE, {**body, "max_tokens": 5}, {"Authorization": "Bearer b"})
        assert status == 200
        assert time.monotonic() - began < 10
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429}


def test_headers_are_sent_while_the_prompt_runs() -> None:
    """The event loop then has less to do between the first token and its event."""
    engine, runner = make_engine(is_ahead=True)
    launch, is_ended = runner.launch, threading.Event()

    def launch_slowly(step: Step, samplers: Any) -> Launch:
        launched = launch(step, samplers)
        return launched._replace(finish=lambda: launched.finish() if is_ended.wait(10) else [])

    runner.launch = launch_slowly  # type: ignore[method-assign]
    with Running(engine) as server, server.connect() as connection:
        body = b'{"model": "tiny", "prompt": "x", "max_tokens": 2, "ignore_eos": true, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        headers = connection.recv(1 << 16)
        is_ended.set()
        events = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert headers.startswith(b"HTTP/1.1 200")
        assert b"data: " not in headers
        assert events.count(b"data: ") == 3
        body = headers.partition(b"\r\n\r\n")[2] + events
        assert body.endswith(b"\r\n0\r\n\r\n")
        assert len(re.findall(rb"^0\r\n", body, re.MULTILINE)) == 1  # no empty chunk ends the body early
        samples = server.request("GET", "/metrics")[2].decode()
        assert "cupy_awq_time_to_first_token_seconds_count 1.0" in samples


def test_a_request_that_waits_too_long_gets_503() -> None:
    engine, runner = make_engine(max_rows=1)
    runner.before_step = lambda step: time.sleep(5e-3)
    with Running(engine, limits=Limits(queue_seconds=0.1)) as server, server.survives():
        long = engine.submit(Request((1,), max_tokens=400, ignore_stop_tokens=True))
        for stream in (False, True):
            status, headers, _ = server.request("POST", COMPLETE, {"model": "tiny", "prompt": "x", "stream": stream})
            assert (status, headers["retry-after"]) == (503, "1")
        long.cancel()
