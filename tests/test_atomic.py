# SPDX-License-Identifier: Apache-2.0
"""Tests of files that are written in one step: full disks, read-only folders, and existing names."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cupy_awq import atomic, llm
from cupy_awq.checkpoint import CheckpointError, read, save
from cupy_awq.kernels import tuned
from cupy_awq.llm.files import ak48
from cupy_awq.runtime import device, disk_cache
from cupy_awq.tools.command_line import main
from tests import llm_models
from tests.checkpoint_files import module, sharded
from tests.test_formats_write import ones, open_weight
from tests.test_llm_quantize import TEXT, dense_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs limits of file sizes")

LIMITS = (0, 1, 100, 3000, 5000)
"""The sizes in bytes above which files cannot grow, so that the disk seems full at various points of a write."""


@contextlib.contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """Let every write in the context fail that makes a file larger than ``free_bytes``, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_an_older_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with atomic.create(path) as file:
        file.write(b"old")
    with contextlib.suppress(KeyboardInterrupt), atomic.create(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert all_files(tmp_path) == {"f": b"old"}
    with atomic.create(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert all_files(tmp_path) == {"f": b"new"}


def test_a_users_file_with_the_temporary_name_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda n: "0" * n)
    contents = open_weight(tmp_path / "in", ones(16))
    files = llm.read(llm_models.folder(tmp_path / "model", llm_models.QWEN3))
    writers: dict[str, Callable[[Path], object]] = {
        "f": lambda path: disk_cache.write(path, b"x"),
        "m.ak48": lambda path: ak48.write(files, path),
        "model": lambda path: save(path.parent, contents, "gptq"),
    }
    for name, write in writers.items():
        folder = tmp_path / f"out of {name}"
        folder.mkdir()
        taken = atomic.name_aside(folder / name)
        taken.write_text("mine")
        with pytest.raises(FileExistsError):
            write(folder / name)
        assert all_files(folder) == {taken.name: b"mine"}


@pytest.mark.parametrize("free_bytes", LIMITS)
def test_a_full_disk_leaves_no_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    contents = open_weight(tmp_path / "in", ones(16), **{f"t{i}": np.ones(600, np.float32) for i in range(3)})
    monkeypatch.setattr("cupy_awq.checkpoint.write.SHARD_BYTES", 3000)
    out = tmp_path / "out"
    message = rf"\] File too large: '{out}.*/[a-z0-9.-]+(json|safetensors)'$"
    with pytest.raises(OSError, match=message) as raised, full_disk(min(free_bytes, 2500)):
        save(out, contents, "gptq")
    assert raised.value.errno == errno.EFBIG
    assert all_files(out) == {}
    save(out, contents, "gptq")
    before = all_files(out)
    with pytest.raises(OSError, match=message), full_disk(min(free_bytes, 2500)):
        save(out, contents, "autoawq")
    assert all_files(out) == before


@pytest.mark.parametrize("free_bytes", LIMITS)
def test_a_command_with_a_full_disk_prints_one_line_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], free_bytes: int
) -> None:
    (tmp_path / "texts.txt").write_text(TEXT)
    model, dense = llm_models.folder(tmp_path / "m", llm_models.QWEN3), dense_folder(tmp_path / "d", llm_models.LLAMA)
    (tmp_path / "out").mkdir()
    options = ["--group-size", "16", "--samples", "4", "--sequence-length", "64", "--method", "rtn", "--resume"]
    options += ["--device", "cpu"]
    ak48_file, quantized = str(tmp_path / "out" / "m.ak48"), str(tmp_path / "out" / "q")
    commands = (
        ["convert", str(model), ak48_file],
        ["quantize", str(dense), quantized, "--calibration", str(tmp_path / "texts.txt"), *options],
    )
    for arguments, written in zip(commands, (ak48_file, quantized), strict=True):
        with full_disk(free_bytes):
            assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("cupy_awq: error: [Errno 27] File too large: ")
        assert written in error
        assert error.count("\n") == 1
        assert not Path(written).exists()
        assert not list((tmp_path / "out").rglob(f"*{atomic.SUFFIX}"))
    assert [main(arguments) for arguments in commands] == [0, 0]
    assert llm.load(quantized, device="cpu").score(TEXT[:50]).tokens == 49


def test_a_full_disk_keeps_the_tuned_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))
    path = tuned.write(device.nominal(80), {"8x8": {"1": "first"}})
    before = all_files(tmp_path)
    with pytest.raises(OSError, match=f"File too large: '{path}'$"), full_disk(20):
        tuned.write(device.nominal(80), {"16x16": {"1": "second"}})
    assert all_files(tmp_path) == before


@pytest.mark.parametrize("name", ["file/out", "file", "no/folder"])
def test_a_target_that_cannot_be_written_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "texts.txt").write_text(TEXT)
    (tmp_path / "file").write_text("mine")
    model, dense = llm_models.folder(tmp_path / "m", llm_models.QWEN3), dense_folder(tmp_path / "d", llm_models.LLAMA)
    options = ["--calibration", str(tmp_path / "texts.txt"), "--group-size", "16", "--samples", "4", "--device", "cpu"]
    converted = tmp_path / ("file.ak48" if name == "file" else f"{name}/m.ak48")
    commands = [["convert", str(model), str(converted)]]
    (tmp_path / "file.ak48").mkdir()
    if name != "no/folder":  # only `quantize` and `save` create missing parent folders
        target = str(tmp_path / name)
        commands.append(["quantize", str(dense), target, *options, "--sequence-length", "64", "--method", "rtn"])
        with pytest.raises(OSError, match=r"^\[Errno \d+\] .*'$"):
            save(target, open_weight(tmp_path / "in", ones(16)), "gptq")
    for arguments in commands:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("cupy_awq: error: ")
        assert str(tmp_path / name.partition("/")[0]) in error
        assert f"{atomic.SUFFIX}'" not in error
        assert error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) in (
        ["d", "file", "file.ak48", "in", "m", "texts.txt"],
        ["d", "file", "file.ak48", "m", "texts.txt"],
    )


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to become another user")
def test_a_folder_of_another_user_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    tmp_path.chmod(0o755)
    os.seteuid(54321)
    try:
        with pytest.raises(PermissionError) as raised, atomic.create(path):
            pass
    finally:
        os.seteuid(0)
    assert raised.value.filename == str(path)


def test_save_replaces_its_own_files_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (open_weight(tmp_path / name, ones(group)) for name, group in (("a", 16), ("b", 32)))
    out = tmp_path / "out"
    monkeypatch.setattr("cupy_awq.checkpoint.write.SHARD_BYTES", 300)
    save(out, first, "gptq")
    (out / "tokenizer.json").write_text("{}")
    assert len(list(out.glob("*.safetensors"))) > 1
    monkeypatch.setattr("cupy_awq.checkpoint.write.SHARD_BYTES", 10**9)
    save(out, second, "autoawq")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert read(out).specs["a.m"].group_size == 32
    save(out, read(out), "gptq")  # the folder is both source and target
    assert read(out).specs["a.m"].group_size == 32
    (out / "adapter.safetensors").write_bytes(b"mine")
    before = all_files(out)
    with pytest.raises(FileExistsError, match=r"adapter\.safetensors: expected a folder without safetensors files of"):
        save(out, first, "gptq")
    assert all_files(out) == before


def test_a_lone_shard_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path, [module("a"), module("b")])
    for file in tmp_path.glob("*.json"):
        file.unlink()
    shards = sorted(tmp_path.glob("*.safetensors"))
    for name in ("model-00001.safetensors", "model-00001-of-00002.safetensors", "x-00010-of-00010.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        shutil.copy(shards[0], folder / name)
        with pytest.raises(CheckpointError, match=rf"{name}: expected all shards and model\.safetensors\.index\.json"):
            read(folder)
    (folder / name).rename(folder / "model-00001-of-00001.safetensors")
    assert len(read(folder)) > 0
