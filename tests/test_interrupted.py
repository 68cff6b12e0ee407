# SPDX-License-Identifier: Apache-2.0
"""Writing that an error or Ctrl-C ends at any moment: always the whole old or the whole new checkpoint.

`test_killed.py` ends processes by SIGKILL.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cupy_awq import atomic, llm
from cupy_awq.checkpoint import read, replacement, save
from cupy_awq.checkpoint import write as checkpoint_write
from cupy_awq.llm.files.convert import convert
from tests import llm_models
from tests.file_faults import fail_at_each
from tests.test_atomic import all_files
from tests.test_convert import model_folder
from tests.test_killed import describe, two_checkpoints
from tests.test_llm_quantize import OPTIONS, TEXT, dense_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGINT")

USER_FILES = {"notes.txt": b"mine", "tokenizer.json": b"{}"}


def make_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], None], Callable[[], None]]:
    """Return a folder, a function that writes the first checkpoint there, and one that replaces it by the second."""
    contents, out = two_checkpoints(tmp_path), tmp_path / "out"

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for name, data in USER_FILES.items():
            (out / name).write_bytes(data)
        (out / "config.json").write_text('{"model_type": "x", "first": 1}')
        monkeypatch.setattr(checkpoint_write, "SHARD_BYTES", 3000)
        save(out, contents[0], "autoawq")
        monkeypatch.setattr(checkpoint_write, "SHARD_BYTES", 10**9)

    return out, prepare, lambda: save(out, contents[1], "gptq")


def visible_files(folder: Path) -> dict[str, bytes]:
    """Return all files by name, except temporary ones that an interrupted write has left behind."""
    return {name: data for name, data in all_files(folder).items() if atomic.SUFFIX not in name}


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
def test_an_error_at_each_file_operation_of_save_keeps_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    out, prepare, run = make_save(tmp_path, monkeypatch)
    prepare()
    old = visible_files(out)
    run()
    new = visible_files(out)
    values = [describe(contents) for contents in two_checkpoints(tmp_path / "again")]
    seen: set[str] = set()

    def check(raised: bool) -> None:
        found = visible_files(out)
        assert USER_FILES.items() <= found.items()
        if found in (old, new):
            seen.add("old" if found == old else "new")
            assert raised or found == new
        else:  # moving the old files back failed, too: the new ones are in force
            assert lasts
            assert describe(read(out)) == values[1]
            seen.add("journal")
        assert describe(read(out)) in values
        run()
        assert visible_files(out) == new

    assert fail_at_each(out, run, prepare, check, lasts=lasts) > 20
    assert seen >= ({"old", "new", "journal"} if lasts else {"old", "new"})


def test_a_kill_after_each_rename_of_save_leaves_a_checkpoint_that_the_next_save_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves the folder as a kill would: a failed rename whose roll back does nothing."""
    out, prepare, run = make_save(tmp_path, monkeypatch)
    values = [describe(contents) for contents in two_checkpoints(tmp_path / "again")]
    roll_back = replacement._roll_back
    prepare()
    run()
    new = visible_files(out)
    seen: list[int] = []

    def check(raised: bool) -> None:
        if raised:
            seen.append(values.index(describe(read(out))))
        with monkeypatch.context() as patched:
            patched.setattr(replacement, "_roll_back", roll_back)
            run()
        assert visible_files(out) == new

    monkeypatch.setattr(replacement, "_roll_back", lambda *_: None)
    fail_at_each(out, run, prepare, check)
    assert set(seen) == {0, 1}
    assert seen == sorted(seen)  # after the first moment with the new values, no old value appears


@pytest.mark.parametrize("name", ["m.gguf", "m.ak48", "gptq"])
def test_an_error_at_each_file_operation_of_convert_keeps_the_old_file(tmp_path: Path, name: str) -> None:
    source = model_folder(tmp_path / "in", llm_models.QWEN3, 32)
    out = tmp_path / "out"
    target, format_name = out / name, name.rpartition(".")[2]

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        if name != "gptq":
            target.write_bytes(b"old")

    def check(raised: bool) -> None:
        found = all_files(out)
        if raised:
            assert visible_files(out) in (old, new)
        else:
            assert found == new

    prepare()
    old = visible_files(out)
    convert(str(source), target, format_name, force=True)
    new = visible_files(out)
    count = fail_at_each(out, lambda: convert(str(source), target, format_name, force=True), prepare, check)
    assert count >= (30 if name == "gptq" else 4)


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_at_file_operations_of_quantize_leaves_no_model_and_can_resume(tmp_path: Path, step: int) -> None:
    model, out = dense_folder(tmp_path / "dense", llm_models.LLAMA), tmp_path / "out"
    options = {**OPTIONS, "method": "rtn"}
    llm.quantize(model, tmp_path / "whole", [TEXT], **options)

    def read_files(folder: Path) -> dict[str, bytes]:
        """Return all files by name; of the reports, which have times, only that they are there."""
        return {name: b"" if "report" in name else data for name, data in all_files(folder).items()}

    whole = read_files(tmp_path / "whole")

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()

    def run() -> None:
        llm.quantize(model, out / "new", [TEXT], resume=True, **options)

    def check(raised: bool) -> None:
        if raised and not (out / "new").exists():
            run()
        assert read_files(out / "new") == whole

    fail_at_each(out, run, prepare, check, step=step)


def interrupt_during(run: Callable[[], None], delay_s: float) -> None:
    """Call ``run`` in a child process, interrupt it after a time, as Ctrl-C does, and wait for its end."""
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(started, b".")
            run()
        finally:
            os._exit(0)
    os.close(started)
    os.read(ready, 1)
    os.close(ready)
    time.sleep(delay_s)
    os.kill(child, signal.SIGINT)
    os.waitpid(child, 0)


@pytest.mark.parametrize("loops", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_an_interrupted_save_keeps_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loops: int
) -> None:
    out, prepare, run = make_save(tmp_path, monkeypatch)
    prepare()
    old = visible_files(out)
    start = time.monotonic()
    run()
    elapsed = time.monotonic() - start
    new = visible_files(out)
    seen = set()
    for seed in range(loops):
        prepare()
        interrupt_during(run, random.Random(seed).uniform(0, 1.3 * elapsed))
        found = visible_files(out)
        assert found in (old, new)
        seen.add(found == new)
    assert seen == {False, True}
