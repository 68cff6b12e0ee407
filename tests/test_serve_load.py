# SPDX-License-Identifier: Apache-2.0
"""The server under load, with an engine without a model: clients that leave, floods of one key, and deadlines."""

from __future__ import annotations

import threading
import time

import pytest

from cupy_awq.llm import Request
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


def test_a_request_that_waits_too_long_gets_503() -> None:
    engine, runner = make_engine(max_rows=1)
    runner.before_step = lambda step: time.sleep(5e-3)
    with Running(engine, limits=Limits(queue_seconds=0.1)) as server, server.survives():
        long = engine.submit(Request((1,), max_tokens=400, ignore_stop_tokens=True))
        for stream in (False, True):
            status, headers, _ = server.request("POST", COMPLETE, {"model": "tiny", "prompt": "x", "stream": stream})
            assert (status, headers["retry-after"]) == (503, "1")
        long.cancel()
