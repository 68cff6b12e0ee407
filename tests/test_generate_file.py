# SPDX-License-Identifier: Apache-2.0
"""The command `generate --input --output`: each prompt is answered once, even if a run is killed and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cupy_awq import llm
from cupy_awq.llm.prompt_answerer import answer_all
from cupy_awq.tools.command_line import main
from tests import llm_models


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llm_models.folder(tmp_path_factory.mktemp("model") / "m", llm_models.LLAMA)


def generate(folder: Path, source: Path, target: Path) -> int:
    options = ["--device", "cpu", "--max-tokens", "5"]
    return main(["generate", str(folder), "--input", str(source), "--output", str(target), *options])


def test_prompts_are_answered_in_order_and_once(folder: Path, tmp_path: Path) -> None:
    texts = [f"{i} é" for i in range(150)]  # more prompts than an engine runs at the same time
    source = write(tmp_path / "in.jsonl", [{"id": f"p{i}", "prompt": text} for i, text in enumerate(texts)])
    target = tmp_path / "out.jsonl"
    assert generate(folder, source, target) == 0
    answers = read(target)
    assert [answer["id"] for answer in answers] == [f"p{i}" for i in range(150)]
    wanted = llm.load(folder, device="cpu").generate(texts[7], max_tokens=5)[0]
    assert answers[7] == {"id": "p7", "text": wanted.text, "reason": wanted.reason, "tokens": len(wanted.tokens)}
    lines = target.read_text().splitlines(keepends=True)
    # What a killed run leaves: 100 whole lines and the beginning of one.
    target.write_text("".join(lines[:100]) + lines[100][:9])
    assert generate(folder, source, target) == 0
    assert read(target) == answers
    assert generate(folder, source, target) == 0
    assert read(target) == answers


def test_invalid_prompts_have_errors_and_others_have_answers(folder: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    source = write(tmp_path / "in.jsonl", [{"prompt": messages}, {"prompt": "x" * 900}, {"prompt": 7}, {"prompt": "y"}])
    assert generate(folder, source, tmp_path / "out.jsonl") == 1
    found = read(tmp_path / "out.jsonl")
    assert [answer["id"] for answer in found] == [1, 2, 3, 4]
    assert ["error" in answer for answer in found] == [False, True, True, False]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["x"], "line 1: expected an object with a prompt, got AttributeError"),
        ([{"id": 1}], "line 1: expected an object with a prompt, got KeyError"),
        ([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], "line 2: expected an id of its own, got 1 again"),
    ],
)
def test_files_that_are_no_prompts_are_refused(
    folder: Path, tmp_path: Path, lines: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl") == 2
    assert message in capsys.readouterr().err
    (tmp_path / "out.jsonl").write_text("{}\n")
    assert generate(folder, write(tmp_path / "in.jsonl", [{"prompt": "x"}]), tmp_path / "out.jsonl") == 2
    assert "expected answers of an earlier run, got KeyError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["x", "--input", "a", "--output", "b"], ["--input", "a"], ["x", "--output", "b"]]
)
def test_prompts_come_from_one_place(folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder), *arguments]) == 2
    assert "generate: expected prompts, or --input and --output" in capsys.readouterr().err


def test_an_answerer_adds_answers_to_a_batch_and_refuses_unknown_options(folder: Path) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        llm.PromptAnswerer("no such model", nonsense=1)
    with pytest.raises(ValueError, match="n: expected 1"):
        llm.PromptAnswerer("no such model", n=2)
    answerer = llm.PromptAnswerer(str(folder), device="cpu", raw=True, max_tokens=3)
    batch = answerer({"id": [1, 2], "prompt": ["Hi", 7]})
    found = [json.loads(answer) for answer in batch["answer"]]
    assert batch["id"] == [1, 2]
    assert found[0]["text"] == llm.load(folder, device="cpu").generate("Hi", raw=True, max_tokens=3)[0].text
    assert found[1]["error"].startswith("prompt: expected a text")


def test_every_prompt_is_answered_though_the_queue_has_room_for_few(folder: Path) -> None:
    """Prompts of 120 tokens fill a queue of 1,280 tokens before the engine has twice as many as it runs."""
    prompts = [f"{i:0120}" for i in range(100)]
    with llm.Engine(llm.load(folder, device="cpu", batch_invariant=True), cache_tokens=640) as engine:
        found = list(answer_all(engine, prompts, raw=True, max_tokens=3))
        assert [answer["tokens"] for answer in found] == [3] * 100
        alone = list(answer_all(engine, prompts[7:9], raw=True, max_tokens=3))
    assert alone == found[7:9]


def test_a_failed_engine_ends_the_answers_with_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with llm.Engine(llm.load(folder, device="cpu")) as engine:
        monkeypatch.setattr(engine._core._runner, "launch", lambda *_: 1 / 0)
        with pytest.raises(llm.QueueFullError, match="division by zero"):
            list(answer_all(engine, ["x"] * 10, raw=True, max_tokens=3))
