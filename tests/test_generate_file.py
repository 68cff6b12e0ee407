# SPDX-License-Identifier: Apache-2.0
"""The command `generate --input --output`: each prompt is answered once, even if a run is killed and continued."""

from __future__ import annotations

import json
import os
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


def test_files_are_checked_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert generate(tmp_path, source, tmp_path / "absent" / "out.jsonl") == 2
    assert "out.jsonl: expected a file in a folder that exists, got none" in capsys.readouterr().err
    assert generate(tmp_path, write(tmp_path / "in.jsonl", [1]), tmp_path / "out.jsonl") == 2
    assert "in.jsonl: line 1: expected an object with a prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'"x"\n', "line 1: expected an object with a prompt, got str"),
        (b'{"id": 1}\n', "line 1: expected an object with a prompt, got one with id"),
        (b'{"prompt": "a"}\n{"prompt": }\n', "line 2, column 12: expected JSON, got 'Expecting value'"),
        (b'{"prompt": "\xff"}\n', "line 1: expected JSON in UTF-8, got 'utf-8' codec can't decode byte 0xff"),
        (b'{"id": NaN, "prompt": "a"}\n', "line 1: expected JSON in UTF-8, got NaN, which JSON does not have"),
        (b'{"id": [1], "prompt": "a"}\n', "line 1: id: expected a text or an integer, got list"),
        (
            b'{"prompt": "a", "max_tokens": 1}\n',
            "line 1: max_tokens: expected an option of the command, for all prompts",
        ),
        (b'{"id": true, "prompt": "a"}\n', "line 1: id: expected a text or an integer, got bool"),
        (
            b'{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n',
            "line 2: expected an id of its own, got 1, which line 1 has",
        ),
        (
            b'{"id": 2, "prompt": "a"}\n{"prompt": "b"}\n',
            "line 2: expected an id of its own, got 2, the number of the line, as it has no id, which line 1 has",
        ),
    ],
)
def test_files_that_are_no_prompts_are_refused(
    folder: Path, tmp_path: Path, data: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(data)
    target.write_bytes(b'{"id": 1, "te')
    assert generate(folder, source, target) == 2
    assert message in capsys.readouterr().err
    assert target.read_bytes() == b'{"id": 1, "te'


@pytest.mark.parametrize(
    "data",
    [
        b"notes without a line end",
        b"{}\n",
        b'{"id": 7, "prompt": "mine"}\n',
        b'{"id": 7, "prompt": "mine"}',
        b'{"id": 7, "text": "x"}\n{"id": 8, "name": "mine"}',
        b'{"id": 7, "text": "x"}\nnotes',
    ],
)
def test_a_file_without_answers_stays_as_it_is(
    folder: Path, tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may also be the file of prompts itself."""
    target = tmp_path / "out.jsonl"
    target.write_bytes(data)
    for source in (write(tmp_path / "in.jsonl", [{"prompt": "x"}]), target):
        assert generate(folder, source, target) == 2
        assert "of an earlier run, " in capsys.readouterr().err
        assert target.read_bytes() == data


def test_only_a_line_feed_ends_a_line_and_blank_lines_are_no_prompts(folder: Path, tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = json.dumps({"id": text, "prompt": text}, ensure_ascii=False)
    source.write_bytes(f'\ufeff{line}\r\n\n \t\n{{"prompt": "x"}}'.encode())
    for _ in range(2):
        assert generate(folder, source, target) == 0
        assert [json.loads(line)["id"] for line in target.read_bytes().split(b"\n")[:-1]] == [text, 4]


def test_an_id_with_a_lone_surrogate_is_kept(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": "\ud800", "prompt": "x"}, {"id": "\U0001f600", "prompt": "\udc00"}])
    for _ in range(2):
        generate(folder, source, tmp_path / "out.jsonl")
        assert [answer["id"] for answer in read(tmp_path / "out.jsonl")] == ["\ud800", "\U0001f600"]


def test_answers_go_to_pipes_and_devices_which_are_not_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, pipe = write(tmp_path / "in.jsonl", [{"prompt": "x"}]), tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert generate(folder, source, pipe) == 0
    assert json.loads(os.read(reader, 4096))["id"] == 1
    os.close(reader)
    assert generate(folder, source, Path("/dev/full")) == 2
    assert "No space left" in capsys.readouterr().err


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
