# SPDX-License-Identifier: Apache-2.0
"""Folders and files as users and attackers give them: what is copied, what is found, and what an error says."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import cupy_awq
from cupy_awq import checkpoint, llm
from cupy_awq.checkpoint import CheckpointError, files, model_folder
from cupy_awq.llm.files import ak48
from cupy_awq.llm.files.convert import convert
from cupy_awq.tools import quantize_command
from cupy_awq.tools.command_line import main
from tests import llm_models
from tests.backends import fewer
from tests.test_convert import model_folder as make_model
from tests.test_llm_quantize import OPTIONS, TEXT, dense_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs links and modes")

SECRET = b"a secret of another folder"


@pytest.fixture(params=["convert", "quantize"])
def copying(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[], Path]]:
    """Return a model's folder and a function that converts or quantizes it and returns the new folder."""
    out = tmp_path / "out"
    if request.param == "convert":
        folder = llm_models.folder(tmp_path / "model", llm_models.LLAMA)

        def run() -> Path:
            convert(str(folder), out, "gptq")
            return out
    else:
        folder = dense_folder(tmp_path / "model", llm_models.LLAMA)

        def run() -> Path:
            llm.quantize(folder, out, [TEXT], method="rtn", **OPTIONS)
            return out

    return folder, run


def names_and_secrets(folder: Path) -> list[str]:
    """Return the names of a folder's files; fail if one is a link or holds SECRET, which lies outside of the folder."""
    for file in folder.rglob("*"):
        assert not file.is_symlink()
        assert file.is_dir() or SECRET not in file.read_bytes()
    return sorted(file.name for file in folder.iterdir())


def test_files_of_other_names_are_not_copied(copying: tuple[Path, Callable[[], Path]]) -> None:
    folder, run = copying
    for name in (
        ".env",
        "secrets.json",
        "notes.txt",
        "id_rsa",
        "train.jinja",
        "old.model",
        "x.py",
        "private.json.jinja",
    ):
        (folder / name).write_bytes(SECRET)
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "LICENSE").write_text("free")
    found = names_and_secrets(run())
    assert set(found) - {"quantization_report.json", "quantization_report.txt", "quantization_report.png"} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "LICENSE",
    }


LINKS = [
    "../secret",
    "ABSOLUTE",
    "/proc/self/environ",
    "../other/vocab.json",
    "link",
    "blobs/../../secret",
    "/dev/zero",
]


@pytest.mark.parametrize("target", LINKS)
def test_a_link_out_of_the_folder_is_refused_before_any_work(
    copying: tuple[Path, Callable[[], Path]], target: str
) -> None:
    folder, run = copying
    name = "merges.txt" if target.startswith("..") else "LICENSE"
    (folder.parent / "secret").write_bytes(SECRET)
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "vocab.json").write_bytes(SECRET)
    (folder / "blobs").mkdir()
    (folder / "link").symlink_to("../secret")
    (folder / name).symlink_to(str(folder.parent / "secret") if target == "ABSOLUTE" else target)
    with pytest.raises(CheckpointError, match=rf"{name}: expected a file of the folder, got a link that leads out"):
        run()
    assert not (folder.parent / "out").exists()
    assert not list(folder.parent.glob("out.*"))


@pytest.mark.parametrize("depth", ["../blobs", "../../blobs"])
def test_links_of_the_hubs_cache_are_followed(tmp_path: Path, depth: str) -> None:
    folder = llm_models.folder(tmp_path / "model", llm_models.LLAMA)
    cache = tmp_path / "cache"
    snapshot = cache / "snapshots" / "abc"
    blobs = (snapshot / depth).resolve() if depth == "../../blobs" else cache / "snapshots" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{i}")
        (snapshot / file.name).symlink_to(f"{depth}/{i}")
    convert(str(snapshot), tmp_path / "out", "gptq")
    assert names_and_secrets(tmp_path / "out") == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    outside = tmp_path / "elsewhere"
    blobs.rename(outside)  # the folder of blobs is replaced by a link that leads elsewhere
    blobs.symlink_to(outside)
    with pytest.raises(CheckpointError, match="got a link that leads out of it"):
        convert(str(snapshot), tmp_path / "again", "gptq")


def test_pipes_devices_and_huge_files_are_not_copied(copying: tuple[Path, Callable[[], Path]]) -> None:
    folder, run = copying
    os.mkfifo(folder / "merges.txt")  # a pipe that nobody writes to: reading it would never end
    with pytest.raises(CheckpointError, match=r"merges\.txt: expected a regular file, got another kind"):
        run()
    (folder / "merges.txt").unlink()
    with open(folder / "merges.txt", "wb") as file:
        file.truncate(200 << 30)  # a sparse file of 200 GiB, which must be refused unread
    with pytest.raises(CheckpointError, match=r"merges\.txt: expected at most 100000000 bytes, got 214748364800"):
        run()
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("umask", fewer([0o022, 0o077, 0o002]))
@pytest.mark.parametrize("mode", fewer([0o600, 0o640, 0o644, 0o400]))
def test_no_copy_is_more_public_than_its_source(
    copying: tuple[Path, Callable[[], Path]], mode: int, umask: int
) -> None:
    folder, run = copying
    for file in folder.iterdir():
        file.chmod(0o644)
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).chmod(mode)
    folder.chmod(0o750)
    before = os.umask(umask)
    try:
        out = run()
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in [*out.iterdir(), out]}
    private = (mode | 0o600) & 0o666 & ~umask
    assert modes.pop("out") == 0o750 & ~umask
    assert modes.pop("config.json") == modes.pop("tokenizer_config.json") == 0o644 & ~umask
    assert set(modes.values()) == {private}


@pytest.mark.parametrize("name", ["m.gguf", "m.ak48"])
def test_a_converted_file_is_as_private_as_its_source(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path / "in", llm_models.QWEN3, 32)
    (folder / "model.safetensors").chmod(0o600)
    convert(str(folder), tmp_path / name, name[2:])
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    (folder / "model.safetensors").chmod(0o644)
    # The file that is replaced was private, so the new one must be, too.
    convert(str(folder), tmp_path / name, name[2:], force=True)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["m.gguf", "m.ak48"])
def test_convert_replaces_a_file_only_with_force(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model(tmp_path / "in", llm_models.QWEN3, 32)
    (tmp_path / name).write_bytes(b"mine")
    assert main(["convert", str(folder), str(tmp_path / name)]) == 2
    assert f"{name}: expected a new file, got an existing one; --force" in capsys.readouterr().err
    assert (tmp_path / name).read_bytes() == b"mine"
    assert main(["convert", str(folder), str(tmp_path / name), "--force"]) == 0
    assert len(llm.read(tmp_path / name).tensors) > 0


def test_convert_refuses_a_result_that_would_not_be_read_as_its_source(tmp_path: Path) -> None:
    """A conversion is refused if tensor names would clash, or mean something else, in the other format."""
    folder = make_model(tmp_path / "in", llm_models.QWEN3, 32)
    tensors = load_file(folder / "model.safetensors")
    dense = np.ones((64, 64), np.float16)
    cases = {
        "blk.0.attn_q.weight": ["gguf"],
        "token_embd.weight": ["gguf"],
        "x.weight_packed": ["compressed-tensors"],
        "x.weight_scale": ["compressed-tensors"],
        "model.layers.0.mlp.experts.w_packed": ["gptq"],
    }
    for i, (name, formats) in enumerate(cases.items()):
        extra = {name: dense}
        if name.endswith("w_packed"):
            extra["model.layers.0.mlp.experts.w.weight_packed"] = dense
        save_file({**tensors, **extra}, folder / "model.safetensors")
        for format_name in formats:
            target = tmp_path / f"{i}-{format_name}{'.gguf' if format_name == 'gguf' else ''}"
            with pytest.raises(ValueError, match=r"(expected|twice)") as raised:
                convert(str(folder), target, format_name)
            assert ".part" not in str(raised.value)
            assert not target.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


@pytest.mark.parametrize("format_name", ["autoawq", "gptq", "compressed-tensors"])
def test_a_dense_gguf_file_becomes_a_folder_that_can_be_read(tmp_path: Path, format_name: str) -> None:
    kinds = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "Q8_0")
    llm_models.gguf_file(tmp_path / "m.gguf", kinds)
    convert(str(tmp_path / "m.gguf"), tmp_path / "out", format_name)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert sorted(checkpoint.read(tmp_path / "out")) == sorted(checkpoint.read(tmp_path / "m.gguf"))
    assert llm.load(tmp_path / "out", device="cpu").score(TEXT[:50]).tokens == 49


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4976698672\n"


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ],
)
def test_a_git_lfs_pointer_in_a_folder_is_named(tmp_path: Path, name: str) -> None:
    folder = llm_models.folder(tmp_path / "model", llm_models.LLAMA)
    (folder / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name}.*: expected the file, got a pointer of Git LFS"):
        llm.load(folder, device="cpu")


@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors", "m.pt", "m.bin", "m", "m.ak48", "m-00002-of-00002.gguf"])
def test_a_git_lfs_pointer_is_named_whatever_the_file_is_called(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    for read in (checkpoint.read, cupy_awq.load, llm.read):
        with pytest.raises(CheckpointError, match="expected the file, got a pointer of Git LFS to it: run git lfs"):
            read(tmp_path / name)


def test_a_git_lfs_pointer_is_no_calibration_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"a\.txt: expected the file, got a pointer of Git LFS"):
        quantize_command.read_texts(tmp_path)


HUB_NAMES = {
    "Qwen/Qwen3-8B": "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B",
    "unsloth/Qwen3-8B-GGUF": "hf download unsloth/Qwen3-8B-GGUF ",
    "https://huggingface.co/Qwen/Qwen2.5-0.5B": "hf download Qwen/Qwen2.5-0.5B ",
    "hf.co/a_b/c-d.e/": "hf download a_b/c-d.e ",
    "hf.co/unsloth/Qwen3-8B-GGUF:Q4_K_M": "hf download unsloth/Qwen3-8B-GGUF ",
    "https://huggingface.co/Qwen/Qwen3-8B/tree/main": "hf download Qwen/Qwen3-8B ",
}


@pytest.mark.parametrize("name", HUB_NAMES)
def test_a_name_on_the_hub_says_how_to_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for open_model in (llm.load, llm.read, cupy_awq.load, checkpoint.read):
        with pytest.raises(FileNotFoundError, match=re.escape(HUB_NAMES[name])):
            open_model(name)
    with pytest.raises(FileNotFoundError, match=re.escape(HUB_NAMES[name])):
        llm.quantize(name, tmp_path / "out", [TEXT])
    for arguments in (["info", name], ["generate", name, "x"], ["convert", name, "m.gguf"]):
        assert main(arguments) == 2
        assert HUB_NAMES[name] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a/b/c", "nothing", "/a/b", "./a/b", "../a", "a/b.gguf", "a/..", "a b/c", "~/x"])
def test_other_paths_get_no_hint(name: str) -> None:
    assert files.find_hub_hint(name) == ""


@pytest.mark.parametrize("name", ["m.gguf", "m", "sha256-0123", "m.bin", "m.safetensors", "m.Q4_0.GGUF"])
def test_the_content_decides_that_a_file_is_gguf(tmp_path: Path, name: str) -> None:
    llm_models.gguf_file(tmp_path / "made", {})
    (tmp_path / "made").rename(tmp_path / name)
    assert llm.load(tmp_path / name, device="cpu").score(TEXT[:50]).tokens == 49
    assert len(cupy_awq.load(tmp_path / name, device="cpu")) > 10
    convert(str(tmp_path / name), tmp_path / "again.gguf", "gguf")
    assert sorted(checkpoint.read(tmp_path / "again.gguf")) == sorted(checkpoint.read(tmp_path / name))


def test_the_content_decides_that_a_file_is_ak48(tmp_path: Path) -> None:
    folder = llm_models.folder(tmp_path / "model", llm_models.QWEN3)
    ak48.write(llm.read(folder), folder / "model")
    assert len(llm.read(folder / "model").tensors) > 10


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    llm_models.gguf_file(tmp_path / "m.Q4_1.gguf", {})
    (tmp_path / "mmproj-m-f16.gguf").write_bytes(b"GGUF")
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "config.json").write_text("{}")  # as in some repositories of GGUF files
    assert llm.load(tmp_path, device="cpu").score(TEXT[:50]).tokens == 49
    assert list(checkpoint.read(tmp_path)) == list(checkpoint.read(tmp_path / "m.Q4_1.gguf"))
    shutil.copy(tmp_path / "m.Q4_1.gguf", tmp_path / "m.Q8_0.gguf")
    for read in (checkpoint.read, llm.read):
        with pytest.raises(
            CheckpointError, match=r"expected one GGUF model, got 2; give the path of one: m\.Q4_1\.gguf"
        ):
            read(tmp_path)


def test_a_pipe_or_a_folder_with_a_models_name_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    for read in (checkpoint.read, llm.read):
        with pytest.raises(CheckpointError, match="expected a folder"):
            read(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["mlp.up_proj.weight", "self_attn.v_proj.weight", "input_layernorm.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_quantize_names_the_tensor_with_nan(tmp_path: Path, name: str, value: float) -> None:
    model = dense_folder(tmp_path / "dense", llm_models.LLAMA)
    tensors = load_file(model / "model.safetensors")
    tensors[f"model.layers.1.{name}"].reshape(-1)[3] = value
    save_file(tensors, model / "model.safetensors")
    message = rf"model\.safetensors: tensor 'model\.layers\.1\.{name}': expected finite values, got NaN or infinity"
    with pytest.raises(CheckpointError, match=message):
        llm.quantize(model, tmp_path / "new", [TEXT], **OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def test_the_list_of_copied_files_holds_what_models_load(tmp_path: Path) -> None:
    """Every file that this package's readers open by name is copied to a converted folder, and nothing executable."""
    needed = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert needed <= set(model_folder.COPIED)
    wrong: dict[str, Any] = {name: name for name in model_folder.COPIED if "/" in name or name.endswith(".py")}
    assert not wrong
