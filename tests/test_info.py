# SPDX-License-Identifier: Apache-2.0
"""Tests of the command ``info`` (formats, layers, sizes and kernels of checkpoints) and of the table of formats."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import cupy_awq
from cupy_awq.checkpoint import catalog as formats
from cupy_awq.checkpoint import detect, write
from cupy_awq.tools import testing
from cupy_awq.tools.demo import SMOLLM2_MLP
from tests.test_cli import mistake, output


def test_info_counts_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = testing.random_weight(np.random.default_rng(0), 64, 16, 32)
    tensors = {
        "a.qweight": weight.qweight,
        "a.scales": weight.scales,
        "a.qzeros": weight.qzeros,
        "a.bias": np.ones(16, np.float16),
        "head": np.ones((3, 5), ml_dtypes.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    facts = json.loads(output(capsys, "info", str(tmp_path), "--json"))
    nbytes = 64 * 8 + 2 * 16 * 2 + 2 * 8 + 16 * 2
    sizes = {"bytes": nbytes, "fp16_bytes": 64 * 16 * 2 + 32, "ratio": nbytes / (64 * 16 * 2 + 32)}
    layer = {"name": "a", "k": 64, "n": 16, "group_size": 32, "zeros": "packed", "dtype": "float16", "bias": True}
    found = facts.pop("format")
    assert found.pop("found").startswith("Format awq gemm: int32 [64, 2] of 'a.qweight' in ")
    form = {"format": "awq gemm", "bits": 4, "group_size": 32, "symmetric": False, "act_order": False}
    assert found == form | {"exceptions": {}, "roundings": {}}
    (shape,) = facts.pop("kernels")["shapes"]
    assert shape.pop("kernels").keys() == {"1", "512"}
    assert shape == {"k": 64, "n": 16, "group_size": 32, "zeros": "packed", "dtype": "float16", "layers": 1}
    assert facts == {
        "path": str(tmp_path),
        "layers": [layer | sizes],
        "others": [{"name": "head", "shape": [3, 5], "dtype": "bfloat16", "bytes": 30}],
        "total": {"layers": sizes, "other_bytes": 30},
    }
    text = output(capsys, "info", str(tmp_path))
    assert "1 quantized layer: 624 B, 0.300 of the 2.08 kB in fp16\n1 other tensor: 30 B\ntotal: 654 B\n" in text


def test_info_of_the_shipped_folder(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "info", str(SMOLLM2_MLP))
    text, _, kernels = text.partition("\n\nkernels on ")
    found, form, _, header, *rows, _, total = text.splitlines()
    assert found.startswith("Format awq gemm: version 'gemm' in ")
    assert form == "4 bits, group size 64, asymmetric"
    assert header.split() == "layer zeros scales bias K N group size bytes ratio to fp16".split()
    assert [row.split()[4:] for row in rows] == [
        ["1536", "576", "64", "477", "kB", "0.270"],
        ["576", "1536", "64", "477", "kB", "0.270"],
        ["576", "1536", "64", "477", "kB", "0.270"],
    ]
    assert total == "3 quantized layers: 1.43 MB, 0.270 of the 5.31 MB in fp16"
    _, header, down, up = kernels.splitlines()
    assert header.split() == "KxN zeros scales 1 row 512 rows group size layers".split()
    assert down.split()[:3] == ["1536x576", "packed", "float16"]
    assert up.split()[:3] == ["576x1536", "packed", "float16"]
    assert [line.split()[-2:] for line in (down, up)] == [["64", "1"], ["64", "2"]]


def test_info_names_the_kernels_that_explain_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(output(capsys, "info", str(SMOLLM2_MLP), "--json"))["kernels"]
    for shape in facts["shapes"]:
        for m, name in shape["kernels"].items():
            table = cupy_awq.explain(int(m), shape["k"], shape["n"], shape["group_size"], layer=True)
            assert [line.split()[1] for line in table.splitlines() if line.startswith("->")] == [name]


def test_info_formats_and_the_readme_list_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "info", "--formats")
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8").splitlines()
    rows = formats.list_readme_rows()
    start = readme.index(rows[0])
    assert readme[start : start + len(rows)] == rows
    for row in formats.FORMATS:
        assert row.name in text
        assert any(row.name in line for line in rows)
    recognized = " ".join(row.recognized for row in formats.FORMATS) + " compressed-tensors"
    assert all(method.removeprefix("intel/") in recognized for method in detect.METHODS)
    assert {row.writer for row in formats.FORMATS if row.writer} == {*write.WRITERS, "gguf"}
    assert {row.writer for row in formats.FORMATS if row.order and row.writer} == {
        name for name, writer in write.WRITERS.items() if writer.holds_order
    }


def test_info_of_an_unknown_format_says_what_was_found_and_what_is_supported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "junk.bin").write_bytes(b"hello there")
    (tmp_path / "model.ckpt").write_bytes(b"hello there")
    expected = "expected a folder, or a safetensors, GGUF or llm-awq (.pt) file, got a file that begins with b'hell'"
    assert expected in mistake(capsys, "info", str(tmp_path / "model.ckpt"))
    assert "got 0 of them and junk.bin; give the path of the file" in mistake(capsys, "info", str(tmp_path))
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    assert "No quantized modules. `info --formats` lists what" in output(capsys, "info", str(tmp_path))
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "exl3"}}')
    message = mistake(capsys, "info", str(tmp_path))
    assert "quant_method: expected awq, gptq, auto-round, " in message
    assert "got 'exl3'" in message


def test_info_names_modules_that_differ_and_what_is_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {}
    for name, words in (("a", 8), ("b", 8), ("gate", 16)):
        tensors[f"{name}.weight"] = np.zeros((16, words), np.uint32)
        tensors |= {f"{name}.{part}": np.ones((16, 2), np.float16) for part in ("scales", "biases")}
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = {"bits": 4, "group_size": 32, "gate": {"bits": 8, "group_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": quantization}))
    lines = output(capsys, "info", str(tmp_path)).splitlines()
    assert lines[0].startswith("Format mlx: quantization with 4 bits in ")
    assert lines[1:4] == [
        "4 bits, group size 32, asymmetric",
        "exception: gate.weight: 8 bits",
        "rounded: 8-bit codes to dense float16 (1 module)",
    ]


def test_info_of_a_file_without_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({}, tmp_path / "f")
    assert output(capsys, "info", str(tmp_path / "f")) == "0 quantized layers: 0 B\n"


def test_info_of_a_damaged_file_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f").write_bytes(b"12345678901234567890")
    assert str(tmp_path / "f") in mistake(capsys, "info", str(tmp_path / "f"))
