# SPDX-License-Identifier: Apache-2.0
"""Tests of the command line with broken input, streams and file names: one line on stderr, never a traceback."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.numpy import save_file

from cupy_awq import checkpoint, llm
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.tensors import INDEX
from cupy_awq.llm import Completion, LanguageModel
from cupy_awq.llm.engine.core import Core
from cupy_awq.llm.files import ak48
from cupy_awq.tools import llm_commands
from cupy_awq.tools.command_line import main
from tests import checkpoint_files

PLAIN = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""The environment variables that make Python encode streams and arguments in ASCII."""
INVALID = b"caf\xe9 \xff"
CUT = b"(ended by --max-tokens)\n"


def run(
    arguments: list[str | bytes], shell: str = "", *, lines: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command with ``lines`` on stdin; ``shell``, such as a redirection, is appended to the command line."""
    command = ["bash", "-c", f'"$@" {shell}', "bash", sys.executable, "-m", "cupy_awq", *arguments]
    result = subprocess.run(
        command, input=lines, capture_output=True, check=False, env={**os.environ, **(env or {})}, timeout=100
    )
    assert b"Traceback" not in result.stderr, result.stderr.decode("utf-8", "replace")
    return result


@pytest.mark.parametrize(
    ("locale", "prompt"),
    [
        ({}, INVALID),
        (PLAIN, "café ☕".encode()),
        pytest.param({}, "café ☕".encode(), marks=pytest.mark.slow),
        pytest.param(PLAIN, INVALID, marks=pytest.mark.slow),
    ],
    ids=["utf-8-invalid", "posix-valid", "utf-8-valid", "posix-invalid"],
)
def test_prompts_of_any_bytes_in_any_locale_are_answered(path: Path, locale: dict[str, str], prompt: bytes) -> None:
    choices = ["--max-tokens", "5", "--device", "cpu"]
    result = run(["generate", str(path), prompt, *choices], env=locale)
    assert (result.returncode, result.stderr) == (0, CUT)
    wanted = llm.load(path, device="cpu").generate(prompt.decode("utf-8", "replace"), max_tokens=5)[0].text
    if not locale:
        assert result.stdout.decode() == wanted + "\n"
    result = run(["generate", str(path), prompt, b"two", *choices], env=locale)
    assert (result.returncode, result.stderr) == (0, CUT * 2)


@pytest.mark.parametrize("locale", [{}, PLAIN], ids=["utf-8", "posix"])
def test_chat_reads_lines_of_any_bytes_in_any_locale(path: Path, locale: dict[str, str]) -> None:
    result = run(
        ["chat", str(path), "--max-tokens", "3", "--device", "cpu"], lines=b"caf\xe9\n\xe2\x98\x95\n", env=locale
    )
    assert (result.returncode, result.stderr) == (0, CUT * 2)
    assert b"> " not in result.stdout


CLOSED = itertools.product(("generate", "chat", "info"), (">&-", "<&-", ">&- 2>&-", ">&- <&- 2>&-"))


@pytest.mark.parametrize(
    ("command", "shell"),
    [pytest.param(*case, marks=[pytest.mark.slow] if i % 3 else []) for i, case in enumerate(CLOSED)],
)
def test_closed_streams_are_no_error(path: Path, shell: str, command: str) -> None:
    more = {"generate": ["x", "--max-tokens", "2", "--device", "cpu"], "chat": ["--device", "cpu"], "info": []}
    result = run([command, str(path), *more[command]], shell)
    assert (result.returncode, result.stderr) == (0, CUT if command == "generate" and "2>" not in shell else b"")


def test_a_full_conversation_goes_on_after_one_line_on_stderr(path: Path) -> None:
    lines = b"Hi\n" + b"x" * 70 + b"\nMore\n"
    command = ["chat", str(path), "--context", "64", "--max-tokens", "2", "--device", "cpu"]
    result = run(command, lines=lines)
    assert result.returncode == 0
    assert b"conversation: expected fewer tokens than its capacity of 64" in result.stderr
    many = b"".join(b"message %d\n" % i for i in range(8))
    result = run([*command, "--drop-oldest"], lines=many)
    assert (result.returncode, result.stderr) == (0, CUT * 8)


class Terminal:
    """A stand-in for a terminal on which a user types ``lines``; it records what the program asks for."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.questions = iter(lines), list[str]()

    def isatty(self) -> bool:
        return True

    def input(self, question: str) -> str:
        self.questions.append(question)
        return next(self.lines, "")


Talk = Callable[..., tuple[list[str], str]]


@pytest.fixture
def talk(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Return a function that types lines into ``chat`` and returns the questions that were asked, and stderr."""

    def run_chat(lines: list[str], *options: str) -> tuple[list[str], str]:
        terminal = Terminal(lines)
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr("builtins.input", terminal.input)
        assert main(["chat", str(path), "--context", "64", "--device", "cpu", "--stats", *options]) == 0
        return [question for question in terminal.questions if question not in ("", "> ")], capsys.readouterr().err

    return run_chat


def test_chat_has_commands_and_a_prompt_on_a_terminal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"/help\nHi\n/reset\nHi\n/reset me\n/quit\nHi\n"
    command = ["chat", str(path), "--max-tokens", "3", "--device", "cpu"]
    result = run(command, lines=lines)
    assert (result.returncode, result.stderr) == (0, CUT * 3)
    shown = result.stdout.decode()
    assert shown.startswith(llm_commands.HELP + "\n")
    first, second, _ = shown.removeprefix(llm_commands.HELP + "\n").splitlines()
    assert first == second
    terminal = Terminal(["/quit"])
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", terminal.input)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(command) == 0
    assert terminal.questions == ["> "]


LONG = "x" * 70
FULL = "conversation: expected fewer tokens than its capacity of 64, got 89"


def test_chat_offers_to_drop_turns_only_if_there_are_any(talk: Talk) -> None:
    assert talk([LONG]) == ([], f"cupy_awq: error: {FULL}\n")
    assert talk([LONG], "--system", "x") == ([], f"cupy_awq: error: {FULL.replace('89', '100')}\n")


def test_chat_does_not_advise_an_option_that_is_given(talk: Talk) -> None:
    questions, err = talk(["Hi", LONG], "--drop-oldest", "--max-tokens", "2")
    assert questions == []
    assert err.endswith(f"cupy_awq: error: {FULL}\n")
    assert err.count("prompt ") == 1


def test_a_message_that_is_too_long_even_alone_has_no_stats(talk: Talk) -> None:
    questions, err = talk(["Hi", LONG, "y"], "--max-tokens", "2")
    assert len(questions) == 1
    assert questions[0].endswith("Drop the oldest turns? [Y/n] ")
    assert err.endswith(f"cupy_awq: error: {FULL}\n")
    assert err.count("prompt ") == 1
    assert talk(["Hi", "x" * 40, "y"], "--max-tokens", "2")[1].count("prompt ") == 2


def test_ctrl_c_during_the_prefill_prints_no_rate(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Core, "run", interrupted)
    assert talk(["Hi"]) == ([], "prompt  21 tokens\n")


def test_a_truncated_answer_is_followed_by_the_reason(talk: Talk, path: Path) -> None:
    assert talk(["Hi"], "--max-tokens", "2")[1].startswith("(ended by --max-tokens)\n")
    assert talk(["x" * 40])[1].startswith("(the conversation is full)\n")
    command = ["generate", str(path), "x" * 250, "--raw", "--device", "cpu"]
    assert run([*command, "--max-tokens", "6"]).stderr == CUT
    assert run([*command, "--max-tokens", "7"]).stderr == b"(the context is full)\n"
    text = llm.load(path, device="cpu").generate("Hello", max_tokens=9)[0].text
    assert run(["generate", str(path), "Hello", "--stop", text[0], "--device", "cpu"]).stderr == b""


@pytest.mark.parametrize("count", [1, 2])
def test_escape_sequences_of_a_model_never_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path, count: int
) -> None:
    def generate(_: LanguageModel, prompts: list[str], **options: Any) -> list[Completion]:
        if options["on_text"]:
            options["on_text"](0, "\x1b[2J")
        return [Completion("\x1b[2J", [1], "stop") for _ in prompts]

    monkeypatch.setattr(LanguageModel, "generate", generate)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["generate", str(path), *["\x07"] * count, "--device", "cpu"]) == 0
    assert capsys.readouterr().out == ("\\x1b[2J\n" if count == 1 else "\\x07\n\\x1b[2J\n\n" * count)


def test_an_error_during_loading_erases_the_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: Any, progress: Callable[[int, int], None], **__: Any) -> NoReturn:
        progress(1, 3)
        raise ValueError("m: expected weights, got none")

    monkeypatch.setattr(llm, "load", load)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["generate", "m", "x"]) == 2
    bar = "#" * 10 + " " * 20
    assert capsys.readouterr().err == f"\r[{bar}] \r\033[Kcupy_awq: error: m: expected weights, got none\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "MODEL", "--context", "0"], "capacity: expected 2..256"),
        (["info", ""], "path: expected a file or a folder, got an empty string"),
        (["generate", "", "x"], "path: expected a file or a folder, got an empty string"),
        (["info", "a\0b"], "path: expected a name that the file system can hold, got 'a\\x00b'"),
        (["info", "nothing\x1b[2J\ud800"], "nothing\\x1b[2J\\ud800"),
    ],
)
def test_a_wrong_path_or_context_is_one_printable_line(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([str(path) if a == "MODEL" else a for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.rstrip("\n").isprintable()


def test_info_and_errors_escape_names_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "e\x1b]0;owned\x07\u202e"
    tensors = {f"{evil}.{key.partition('.')[2]}": value for key, value in checkpoint_files.module("m").items()}
    save_file({**tensors, f"{evil}-plain": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": checkpoint_files.CONFIG}))
    assert evil + "-plain" in checkpoint.read(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07\\u202e" in out
    assert all(line.isprintable() for line in out.splitlines())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {evil: f"{evil}.safetensors", "\ud800": "b"}}))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(tmp_path)
    assert str(caught.value).isprintable()


def test_convert_keeps_a_file_of_the_user_and_leaves_no_partial_one(path: Path, tmp_path: Path) -> None:
    mine = tmp_path / "m.ak48.part"
    mine.write_text("mine")
    ak48.write(llm.read(path), tmp_path / "m.ak48")
    assert mine.read_text() == "mine"
    (tmp_path / "folder.ak48").mkdir()
    with pytest.raises(OSError, match=r"folder\.ak48"):
        ak48.write(llm.read(path), tmp_path / "folder.ak48")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder.ak48", "m.ak48", "m.ak48.part"]
    assert (tmp_path / "m.ak48").stat().st_mode & 0o777 == mine.stat().st_mode & 0o777
