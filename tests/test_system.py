# SPDX-License-Identifier: Apache-2.0
"""The commands ``info`` without a checkpoint and ``cache``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cupy_awq
from cupy_awq.runtime import disk_cache, placement
from cupy_awq.tools.command_line import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))
    for name in ("gemv-sm80-0123.cubin", "gemv-sm80-0123.json", "gemv-sm90-4567.ptx", "tuned/h100.json", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 100)
    return tmp_path


def test_info_without_a_path_names_versions_and_the_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert cupy_awq.__version__ in text
    assert f"cache: {folder}: 4 files, " in text
    assert main(["info", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["versions"]["cupy_awq"] == cupy_awq.__version__
    assert content["cache"] == {"folder": str(folder), "files": 4, "bytes": 400}


def test_cache_clears_only_the_files_of_this_package(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert "4 files" in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0
    assert "0 files" in (text := capsys.readouterr().out)
    assert "deleted 4 files" in text
    assert [file.name for file in folder.rglob("*") if file.is_file()] == ["notes.txt"]


def test_a_cache_folder_that_does_not_exist_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "absent"))
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 0


@pytest.mark.parametrize(
    ("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("1", 1), (1, 1), ("cpu", -1)]
)
def test_a_device_has_the_same_names_in_functions_and_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, device: str | int, index: int
) -> None:
    monkeypatch.setattr(placement, "gpu_count", lambda: 2)
    assert placement.resolve(device) == index


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:1x", "CUDA", "", "cuda:\u0663", 2, -1, "cuda:2"])
def test_another_device_is_refused(monkeypatch: pytest.MonkeyPatch, device: str | int) -> None:
    monkeypatch.setattr(placement, "gpu_count", lambda: 2)
    with pytest.raises(ValueError, match="device: expected"):
        placement.resolve(device)
