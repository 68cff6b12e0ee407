# SPDX-License-Identifier: Apache-2.0
"""Options of the server: address and keys, limits, deadlines, the model's sampling parameters, and its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import URL
from starlette.requests import Request as HttpRequest

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm import Engine, LanguageModel, QueueFullError, Request, load
from cupy_awq.serve.errors import ApiError
from cupy_awq.serve.limits import Limits
from cupy_awq.serve.listener import Listener
from cupy_awq.serve.server import Server, Settings
from cupy_awq.tools.command_line import main
from cupy_awq.tools.serve_command import read_sampling
from tests import llm_models
from tests.fake_engine import make_engine
from tests.serving import Running
from tests.test_project import ROOT

COMPLETE = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llm_models.folder(tmp_path_factory.mktemp("model"), llm_models.QWEN3)


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return load(folder, device="cpu", batch_invariant=True)


@pytest.fixture(scope="module")
def small(model: LanguageModel) -> Iterator[Running]:
    """Yield a server with small limits."""
    limits = Limits(
        body_bytes=1000, nesting=4, values=30, messages=2, tools=1, prompts=2, stops=2, stop_characters=3, n=2,
        grammar_characters=5,
    )  # fmt: skip
    with Running(Engine(model), limits=limits) as server:
        yield server


MESSAGE: Any = {"role": "user", "content": "x"}
TOOL: Any = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("inside", "beyond", "param"),
    [
        ({"x": "y" * 700}, {"x": "y" * 1000}, None),
        ({"x": [[[]]]}, {"x": [[[[]]]]}, "body"),
        ({"x": ["y"] * 16}, {"x": ["y"] * 17}, "body"),
        ({"messages": [MESSAGE] * 2}, {"messages": [MESSAGE] * 3}, "messages"),
        ({"stop": ["abc", "b"]}, {"stop": ["a", "b", "c"]}, "stop"),
        ({"stop": "abc"}, {"stop": "abcd"}, "stop"),
        ({"n": 2}, {"n": 3}, "n"),
        ({"regex": "a{5}"}, {"regex": "aaaaaa"}, "regex"),
    ],
)
def test_every_limit_is_the_largest_value(small: Running, inside: Any, beyond: Any, param: str | None) -> None:
    assert small.chat("x", **inside)[0] == 200
    status, reply = small.chat("x", **beyond)
    assert (status, reply["error"]["param"]) == (400 if param else 413, param)


def test_limits_of_prompts_and_tools(small: Running) -> None:
    assert small.complete(["x", "y"])[0] == small.complete([1, 2, 3])[0] == 200
    assert small.complete(["x", "y", "z"])[1]["error"]["param"] == "prompt"
    assert small.chat("x", tools=[TOOL], tool_choice="none")[0] == 200
    assert small.chat("x", tools=[TOOL] * 2, tool_choice="none")[1]["error"]["param"] == "tools"


@pytest.mark.parametrize("kind", ["waits", "runs"])
def test_a_client_sets_a_deadline_by_a_header(kind: str) -> None:
    engine, runner = make_engine(max_rows=1)
    runner.before_step = lambda step: time.sleep(5e-3)
    with Running(engine) as server, server.survives():
        if kind == "waits":
            engine.submit(Request((1,), max_tokens=100, ignore_stop_tokens=True))  # 0.5 s
        body = {"model": "tiny", "prompt": "x", "max_tokens": 900, "ignore_eos": True}
        status, reply = server.post(COMPLETE, body, {"X-Request-Timeout": "0.2"})
        assert (status, reply["error"]["code"]) == (503, "timeout")
        assert kind != "runs" or engine.stats().completion_tokens > 1
        for wrong in ("0", "-1", "nan", "soon"):
            status, reply = server.post(COMPLETE, body, {"X-Request-Timeout": wrong})
            assert (status, reply["error"]["message"][:17]) == (400, "x-request-timeout")


def test_a_request_without_sampling_parameters_has_those_of_the_model(model: LanguageModel) -> None:
    greedy = model.generate("x", raw=True, max_tokens=20)[0].text
    body = {"model": "tiny", "prompt": "x", "max_tokens": 20, "seed": 1}
    with Running(Engine(model), sampling={"top_k": 1}) as server:
        assert server.post(COMPLETE, body)[1]["choices"][0]["text"] == greedy
        assert server.post(COMPLETE, body | {"temperature": 2, "top_k": 0})[1]["choices"][0]["text"] != greedy


def test_sampling_parameters_are_read_from_generation_config(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": null, "top_k": 20, "do_sample": true, "eos_token_id": 1}')
    assert read_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20}
    for wrong in ('{"temperature": -1}', '{"top_k": "x"}', '{"top_p": NaN}', '{"top_p": 1e999}'):
        file.write_text(wrong)
        with pytest.raises(CheckpointError, match="generation_config"):
            read_sampling(tmp_path)


def test_the_command_takes_limits_and_ends_with_an_error_after_one_of_the_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in folder.iterdir():
        os.link(file, copy / file.name)
    (copy / "generation_config.json").write_text('{"temperature": 0.25}')
    seen, protocols = list[Any](), list[Any]()

    def run(self: Listener) -> None:
        app: Any = self.config.app
        protocols.append(self.config.http)
        seen.extend(cell.cell_contents for cell in app.routes[0].endpoint.__closure__)
        self._engine.error = RuntimeError("device")
        self._engine.close()

    monkeypatch.setattr(Listener, "run", run)
    limits = {"n": 3, "run_seconds": 0.5, "queued_per_row": 7, "queued_caches": 1, "connections": 9}
    options = [part for name, value in limits.items() for part in ("--limit", f"{name}={value}")]
    assert main(["serve", str(copy), "--device", "cpu", *options]) == 1
    (server,) = (one for one in seen if isinstance(one, Server))
    assert server._settings.limits == protocols[0].limits == Limits(**limits)
    assert server._engine._most_queued == (7 * 64, 32 * server._engine.stats().blocks)
    assert server._settings.sampling == {"temperature": 0.25}
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    words = capsys.readouterr().out.split()
    assert {f"{name}={value}" for name, value in vars(Limits()).items()} <= {word.strip(",;") for word in words}
    for wrong in ("n", "n=x", "n=0", "m=1", "n=1.5"):
        assert main(["serve", str(copy), "--device", "cpu", "--limit", wrong]) == 2
        assert "--limit: expected NAME=X with a name of body_bytes" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_end_the_process_soon(folder: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "cupy_awq", "serve", str(folder), *"--name tiny --device cpu --port 0".split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(re.search(r"serving .* at http://127\.0\.0\.1:[1-9]\d*/v1", line) for line in process.stderr)
        process.send_signal(number)
        assert process.wait(60) in (0, code)
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("option", "value"),
    [("port", "99999"), ("port", "-1"), ("drain-seconds", "-1"), ("drain-seconds", "inf"), ("inter-token-ms", "nan")],
)
def test_numbers_out_of_range_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "absent", f"--{option}={value}"]) == 2
    assert f"cupy_awq: error: argument --{option}: expected" in capsys.readouterr().err


def test_the_address_is_reported_once_the_port_is_taken(model: LanguageModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cupy_awq")
    with Running(Engine(model)) as server:
        assert f"serving tiny at http://127.0.0.1:{server.port}/v1" in caplog.messages
        caplog.clear()
        engine = Engine(model)
        with pytest.raises(OSError, match="in use"):
            Listener(engine, Settings("tiny"), port=server.port).run()
        with pytest.raises(QueueFullError):
            engine.submit("x")
    assert not caplog.messages


def test_a_port_that_is_taken_is_an_error_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(ROOT), "--port", str(port)]) == 2
    expected = f"host, port: expected a free address of this machine, got 127.0.0.1, {port}: "
    assert expected in capsys.readouterr().err


def test_a_port_for_others_needs_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["serve", "absent", "--host", "0.0.0.0"]
    assert main(command) == 2
    assert "expected an --api-key for an address other than 127.0.0.1" in capsys.readouterr().err
    assert main([*command, "--api-key", ""]) == 2
    assert "--api-key: expected a key, got an empty text" in capsys.readouterr().err


def test_no_host_header_makes_a_path_look_like_that_of_the_page(model: LanguageModel) -> None:
    with Engine(model) as engine:
        server = Server(engine, Settings("tiny", ("secret",)))
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"host", b"x/?")]}
        request = HttpRequest(scope)
        request._url = URL("http://x/?/v1/models")  # as Starlette 0.46 joins it
        with pytest.raises(ApiError, match="authorization"):
            server._check_access(request)
