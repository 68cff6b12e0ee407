# SPDX-License-Identifier: Apache-2.0
"""The unfinished work of `quantize`: what a later run continues, refuses and deletes."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cupy_awq import atomic, llm
from cupy_awq.llm.calibrate import unfinished_work
from cupy_awq.tools.command_line import main
from tests import llm_models
from tests.test_atomic import all_files
from tests.test_llm_quantize import OPTIONS, TEXT, dense_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs links and locks")

RTN = {**OPTIONS, "method": "rtn"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return dense_folder(tmp_path / "dense", llm_models.LLAMA)


def stop_after_one_layer(done: int, *_: Any) -> None:
    if done == 1:
        raise KeyboardInterrupt


def leave_work(model: Path) -> Path:
    """Interrupt the quantization of a model after one layer and return the folder with its unfinished work."""
    with pytest.raises(KeyboardInterrupt):
        llm.quantize(model, model.with_name("new"), [TEXT], progress=stop_after_one_layer, **RTN)
    return model.with_name("new.partial")


def resume(model: Path, texts: list[str] | None = None, **options: Any) -> None:
    llm.quantize(model, model.with_name("new"), [TEXT] if texts is None else texts, resume=True, **{**RTN, **options})


@pytest.mark.parametrize("name", ["notes.txt", "layer-00000.txt", "model", "settings.json.bak", "layer-1.json"])
def test_a_folder_with_files_of_others_is_refused_and_kept(model: Path, name: str) -> None:
    work = leave_work(model)
    (work / name).write_text("mine")
    before = all_files(work)
    with pytest.raises(FileExistsError, match=rf"expected unfinished work alone, got a file of others: '{name}'"):
        resume(model)
    assert all_files(work) == before
    (work / name).unlink()
    resume(model)
    assert not work.exists()


@pytest.mark.parametrize("names", [["a.txt"], ["layer-00000.json"], ["layer-00000.json", "lock"]])
def test_a_foreign_folder_of_this_name_is_refused_and_kept(model: Path, names: list[str]) -> None:
    work = model.with_name("new.partial")
    work.mkdir()
    for name in names:
        (work / name).write_text("{}")
    with pytest.raises(FileExistsError, match="expected unfinished work"):
        resume(model)
    assert sorted(all_files(work)) == names
    assert not model.with_name("new").exists()


def test_links_are_not_followed(model: Path, tmp_path: Path) -> None:
    work = leave_work(model)
    work.rename(tmp_path / "elsewhere")
    work.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="expected a folder of unfinished work, got another kind of file"):
        resume(model)
    work.unlink()
    (tmp_path / "elsewhere").rename(work)
    (work / "layer-00001.safetensors").symlink_to(model / "model.safetensors")
    before = all_files(model)
    with pytest.raises(FileExistsError, match=r"got a file of others: 'layer-00001\.safetensors'"):
        resume(model)
    assert all_files(model) == before


def change_weight(model: Path) -> None:
    """Change one value of a model's file, but neither its size nor its times, which could reveal that."""
    file = model / "model.safetensors"
    times = file.stat()
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def change_text(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        table = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**table, "more": 1}))

    return change


CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "weight": (change_weight, {}, r"model\.safetensors has changed$"),
    "configuration": (change_text("config.json"), {}, r"config\.json has changed$"),
    "tokenizer": (change_text("tokenizer_config.json"), {}, r"tokenizer_config\.json has changed$"),
    "new file": (lambda model: (model / "vocab.json").write_text("{}"), {}, r"vocab\.json is new$"),
    "text": (lambda model: None, {"texts": [TEXT[:-1] + "?"]}, "the calibration text has changed$"),
    "texts cut elsewhere": (lambda model: None, {"texts": [TEXT[:9], TEXT[9:]]}, "the calibration text has changed$"),
    "group size": (lambda model: None, {"group_size": 32}, "group_size '?32'? instead of '?16'?$"),
    "zeros": (lambda model: None, {"symmetric": True}, "symmetric 'True' instead of 'False'$"),
    "ignore": (lambda model: None, {"ignore": "q_proj"}, "ignore 'q_proj' instead of None$"),
    "samples": (lambda model: None, {"samples": 3}, "samples 3 instead of 4, the calibration text has changed$"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_is_noticed_and_listed(model: Path, name: str) -> None:
    change, options, message = CHANGES[name]
    work = leave_work(model)
    before = all_files(work)
    change(model)
    with pytest.raises(ValueError, match=r"expected unfinished work with the settings of this run, got .*") as raised:
        resume(model, **options)
    assert raised.match(message)
    assert "Recipe(" not in str(raised.value)
    assert len(str(raised.value)) < 400 + len(str(work))
    assert all_files(work) == before


def test_a_changed_layer_is_noticed(model: Path) -> None:
    work = leave_work(model)
    file = work / "layer-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"layer-00000\.safetensors: expected the file that quantize wrote"):
        resume(model)


def test_a_second_run_at_once_is_refused(model: Path) -> None:
    work = leave_work(model)
    with (
        atomic.lock(work / unfinished_work.LOCK),
        pytest.raises(BlockingIOError, match="lock: expected no other process that writes here, got one"),
    ):
        resume(model)
    seen: list[str] = []

    def resume_again(step: str) -> None:
        with pytest.raises(BlockingIOError):
            resume(model)
        seen.append(step)

    resume(model, on_step=resume_again)
    assert "write files" in seen
    assert not work.exists()


def test_an_error_before_the_first_layer_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        llm.quantize(model, tmp_path / "new", [TEXT], progress=lambda *_: stop_after_one_layer(1), **RTN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def test_unfinished_work_is_private(model: Path) -> None:
    assert stat.S_IMODE(leave_work(model).stat().st_mode) == 0o700


def test_the_command_says_how_to_continue_after_ctrl_c(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text(TEXT)
    options = ["--group-size", "16", "--samples", "4", "--sequence-length", "64", "--method", "rtn", "--device", "cpu"]
    arguments = ["quantize", str(model), str(tmp_path / "new"), "--calibration", str(tmp_path / "texts.txt"), *options]
    save_layer = unfinished_work.UnfinishedWork.save_layer

    def interrupt(self: unfinished_work.UnfinishedWork, *values: Any) -> None:
        save_layer(self, *values)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(unfinished_work.UnfinishedWork, "save_layer", interrupt)
        assert main(arguments) == 130
    work = tmp_path / "new.partial"
    assert f"stopped; the finished layers are in {work}: continue with --resume\n" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert len(np.unique([len(data) for data in all_files(tmp_path / "new").values()])) > 1
    assert not work.exists()
