# SPDX-License-Identifier: Apache-2.0
"""Tests of damaged and inconsistent checkpoints: each raises one CheckpointError with the file and the tensor."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from cupy_awq import CheckpointError, load
from cupy_awq.checkpoint import files, safetensors
from cupy_awq.checkpoint.tensors import INDEX
from cupy_awq.runtime import placement
from cupy_awq.tools.demo import SMOLLM2_MLP
from tests.checkpoint_files import CONFIG, G, K, N, Tensors, check_refusal, entry, folder, module, raw, sharded


def refused(path: Path, *fragments: str) -> None:
    check_refusal(functools.partial(load, device="cpu"), path, *fragments)


@pytest.mark.parametrize("size", [0, 3, 7])
def test_file_without_a_header_length_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(bytes(size))
    refused(tmp_path / "f", f"expected a safetensors file of at least 8 bytes, got {size}")


@pytest.mark.parametrize("length", [3, 10**6, 2**63, 2**64 - 1])
def test_header_length_beyond_the_file_is_refused(tmp_path: Path, length: int) -> None:
    refused(
        raw(tmp_path / "f", b"{}", b"", length), "header", f"got a length of {length}" if length > 3 else "at most 2"
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not json",
        b"[1, 2]",
        b"\xff\xfe{}",
        b'{"a": ',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": 1, "a": 2}',
        b"{}\0\0",
    ],
    ids=["empty", "text", "list", "not-utf8", "cut", "deep-list", "deep-object", "huge-integer", "twice", "nul"],
)
def test_header_that_is_not_a_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    refused(raw(tmp_path / "f", text, b""), "header: expected")


def test_truncated_file_is_refused_and_names_the_tensor(tmp_path: Path) -> None:
    save_file({"cut": np.ones(100, np.float32)}, tmp_path / "f")
    whole = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(whole[:-1])
    refused(tmp_path / "f", "tensor 'cut'", "399 bytes")
    (tmp_path / "f").write_bytes(whole[:20])
    refused(tmp_path / "f", "truncated")


@pytest.mark.parametrize(
    ("bad", "fragment"),
    [
        (5, "expected an object"),
        ({}, "expected a dtype"),
        (entry(dtype="F17"), "got 'F17'"),
        (entry(dtype=["F16"]), "expected a dtype"),
        (entry(dtype="F4"), "expected a dtype"),
        (entry(shape=4), "expected a shape"),
        (entry(shape=(-4,)), "expected a shape"),
        (entry(shape=(4.0,)), "expected a shape"),
        (entry(shape=(True, 4)), "expected a shape"),
        (entry(shape=(1,) * 33), "at most 32"),
        (entry(shape=(5,)), "expected 10 bytes for float16 [5], got 8"),
        (entry(shape=(2**40, 2**40)), ", got 8"),
        (entry(shape=(10**3000, 0), offsets=(0, 0)), "expected a shape"),
        (entry(shape=(2**63, 0), offsets=(0, 0)), "expected a shape"),
        (entry(shape=(2**63 - 1,) * 5), ", got 8"),
        (entry(shape=(2**62, 2**62, 0), offsets=(0, 0)), "shape"),
        (entry(dtype="F32"), "expected 16 bytes for float32 [4], got 8"),
        (entry(offsets=(0, 2**63)), "begin <= end"),
        (entry(offsets=(0, 2**63 - 1)), "expected data within 8 bytes"),
        (entry(offsets=(8, 16)), "expected data within 8 bytes"),
        (entry(offsets=(8, 0)), "begin <= end"),
        (entry(offsets=(-8, 0)), "begin <= end"),
        (entry(offsets=(0,)), "begin <= end"),
        (entry(offsets=None), "begin <= end"),
        (entry(offsets={"0": 8}), "begin <= end"),
    ],
)
def test_inconsistent_tensor_entry_is_refused_and_named(tmp_path: Path, bad: Any, fragment: str) -> None:
    refused(
        raw(tmp_path / "f", {"good": entry(shape=(0,), offsets=(0, 0)), "bad": bad}, bytes(8)), "tensor 'bad'", fragment
    )


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    header = {"one": entry(), "two": entry(offsets=(4, 12))}
    refused(raw(tmp_path / "f", header, bytes(12)), "tensor 'two'", "overlap")


def test_two_tensors_with_the_same_bytes_are_refused(tmp_path: Path) -> None:
    refused(raw(tmp_path / "f", {"one": entry(), "two": entry()}, bytes(8)), "tensor 'two'", "overlap")


def test_gap_between_tensors_is_refused(tmp_path: Path) -> None:
    header = {"one": entry(), "two": entry(offsets=(12, 20))}
    refused(raw(tmp_path / "f", header, bytes(20)), "tensor 'two'", "gap")


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    refused(raw(tmp_path / "f", {"one": entry()}, bytes(9)), "expected 8 bytes of tensors, got 9")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(data=st.data())
def test_random_damage_raises_checkpoint_error_or_leaves_readable_arrays(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "whole").exists():
        save_file(module("a"), tmp_path / "whole")
    content = bytearray((tmp_path / "whole").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content)) | st.just(len(content))) :]
    (tmp_path / "f").write_bytes(content)
    found = None
    with contextlib.suppress(CheckpointError):
        found = safetensors.read(tmp_path / "f")
    if found is not None:
        assert sum(array.nbytes for array in found.values()) == len(content) - 8 - int.from_bytes(content[:8], "little")
        assert all(array.tobytes() is not None for array in found.values())


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (lambda t: t.pop("m.scales"), ["scales: expected a tensor beside qweight, got none"]),
        (lambda t: t.pop("m.qzeros"), ["qzeros: expected a tensor", "config.json has zero_point true, got none"]),
        (lambda t: t.update({"m.qweight": t["m.qweight"].astype(np.int64)}), ["qweight", "int32", "int64"]),
        (lambda t: t.update({"m.qzeros": t["m.qzeros"].view(np.uint32)}), ["qzeros", "int32", "uint32"]),
        (lambda t: t.update({"m.qzeros": np.ones((K // G, N), np.float16)}), ["qzeros", "int32", "float16"]),
        (lambda t: t.update({"m.scales": t["m.scales"].astype(np.float64)}), ["scales", "float16", "float64"]),
        (
            lambda t: t.update({"m.scales": np.ones((3, N), np.float16)}),
            ["scales: expected", "a divisor of K = 64", "got float16 [3, 16]"],
        ),
        (lambda t: t.update({"m.scales": np.ones((0, N), np.float16)}), ["scales"]),
        (
            lambda t: t.update({"m.scales": np.ones((2, N + 8), np.float16)}),
            ["scales: expected", "N = 16", "got float16 [2, 24]"],
        ),
        (
            lambda t: t.update({"m.qzeros": np.ones((1, N // 8), np.int32)}),
            ["qzeros: expected int32", "got int32 [1, 2]"],
        ),
        (
            lambda t: t.update({"m.qweight": np.ones((0, N // 8), np.int32)}),
            ["qweight: expected at least one element", "got int32 [0, 2]"],
        ),
        (
            lambda t: t.update({"m.qweight": np.ones((K, 2, 1), np.int32)}),
            ["qweight: expected", "got int32 [64, 2, 1]"],
        ),
        (lambda t: t.update({"m.bias": np.ones(N + 1, np.float16)}), ["bias: expected", "got float16 [17]"]),
        (lambda t: t.update({"m.bias": np.ones(N, np.int32)}), ["bias", "int32"]),
        (
            lambda t: t.update(module("m", g=16)),
            [f"group_size: expected {G} as in", "config.json", "got 16 from the shapes"],
        ),
        # GPTQ packs along K: its qweight is [K/8, N], its scales and qzeros have AWQ's shapes.
        (
            lambda t: t.update({"m.qweight": np.ones((K // 8, N), np.int32)}),
            ["qweight: expected the layout of awq gemm", "config.json", "as gptq has"],
        ),
    ],
)
def test_module_with_inconsistent_tensors_is_refused(
    tmp_path: Path, change: Callable[[Tensors], object], fragments: list[str]
) -> None:
    tensors = module("m")
    change(tensors)
    refused(folder(tmp_path, tensors), str(tmp_path / "model.safetensors"), "module 'm'", *fragments)


def test_qzeros_without_qweight_are_refused(tmp_path: Path) -> None:
    refused(folder(tmp_path, {"m.qzeros": np.ones((2, 2), np.int32)}), "tensor 'm.qzeros'", "qweight")


def test_tensor_named_like_a_module_is_refused(tmp_path: Path) -> None:
    refused(folder(tmp_path, module("m") | {"m": np.ones(3, np.float32)}), "tensor 'm'", "got that of a module")


@pytest.mark.parametrize(
    ("quantization", "fragment"),
    [
        ([1], "quantization_config: expected an object"),
        ({}, "neither"),
        ({"bits": 4, "group_size": 32, "desc_act": False}, "neither"),
        (CONFIG | {"quant_method": "gptq"}, "expected the layout of gptq"),
        (CONFIG | {"quant_method": "compressed-tensors"}, "format: expected 'pack-quantized', got None"),
        (CONFIG | {"version": "gemv"}, "expected the layout of awq gemv"),
        (CONFIG | {"version": "gemv_fast"}, "expected the layout of awq gemv_fast"),
        (CONFIG | {"version": ["gemm"]}, "version: expected gemm, gemv or gemv_fast, got ['gemm']"),
        (CONFIG | {"bits": 3}, "bits: expected 4, got 3"),
        (CONFIG | {"bits": None}, "bits: expected 4, got None"),
        (CONFIG | {"group_size": 0}, "group_size"),
        (CONFIG | {"group_size": -2}, "group_size"),
        (CONFIG | {"group_size": "32"}, "group_size"),
        (CONFIG | {"group_size": True}, "group_size"),
        ({key: value for key, value in CONFIG.items() if key != "group_size"}, "got None"),
        (CONFIG | {"zero_point": "yes"}, "zero_point"),
    ],
)
def test_configuration_of_another_format_is_refused(tmp_path: Path, quantization: Any, fragment: str) -> None:
    refused(folder(tmp_path, module("a"), quantization), "config.json", fragment)


def test_unsupported_format_is_answered_with_the_supported_ones(tmp_path: Path) -> None:
    refused(
        folder(tmp_path, module("a"), CONFIG | {"quant_method": "bitsandbytes"}),
        "quant_method: expected awq, gptq, ",
        "compressed-tensors",
        "got 'bitsandbytes'",
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "\0"])
def test_configuration_that_is_not_a_json_object_is_refused(tmp_path: Path, text: str) -> None:
    folder(tmp_path, module("a"))
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "config.json: expected")


def test_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path, [module("a"), module("b")])
    (tmp_path / weight_map["b.scales"]).unlink()
    refused(tmp_path, "tensor 'b.", "00002-of-00002.safetensors in the folder, got no such file")


def test_tensor_missing_from_its_shard_is_refused(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path, [module("a"), module("b")])
    weight_map["ghost"] = weight_map["b.scales"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, "tensor 'ghost'", "00002-of-00002.safetensors", "got a shard without it")


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "..", ".", "", "a\\b", "a\0b", None, 3, ["x"]])
def test_index_with_a_path_out_of_its_folder_is_refused(tmp_path: Path, shard: Any) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    save_file(module("a"), tmp_path / "x.safetensors")
    (inner / INDEX).write_text(json.dumps({"weight_map": {"a.qweight": shard}}))
    refused(inner, "tensor 'a.qweight'", "name of a file")


@pytest.mark.parametrize("text", ["[]", "nope", "{}", '{"weight_map": []}'])
def test_index_without_a_weight_map_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    refused(tmp_path, INDEX, "expected")


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "got 0")


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    save_file(module("a"), tmp_path / "one.safetensors")
    save_file(module("b"), tmp_path / "two.safetensors")
    refused(tmp_path, "got 2")


def test_huge_json_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder(tmp_path, module("a"))
    with open(tmp_path / "config.json", "r+b") as opened:
        opened.truncate(1 << 40)
    refused(tmp_path, "config.json", "at most 100000000 bytes")


def test_missing_path_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere", device="cpu")


@pytest.mark.parametrize("path", [None, 3, ["a"], b"bytes"])
def test_path_of_another_type_is_a_type_error(path: Any) -> None:
    with pytest.raises(TypeError, match=r"path: expected a str or an os\.PathLike, got"):
        load(path)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:", "cuda:x", "cuda:-1", "cuda:1000000", -1, 10**6])
def test_missing_device_is_a_value_error(device: Any) -> None:
    with pytest.raises(ValueError, match=r"device: expected .* got"):
        load(SMOLLM2_MLP, device=device)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "0", 0])
def test_a_gpu_that_is_not_there_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setattr(placement, "gpu_count", lambda: 0)
    with pytest.raises(ValueError, match=f"device: expected cpu or None, as CuPy sees no GPU, got {device!r}"):
        load(SMOLLM2_MLP, device=device)


@pytest.mark.parametrize("device", [1.0, True, ["cpu"], b"cpu"])
def test_device_of_another_type_is_a_type_error(device: Any) -> None:
    with pytest.raises(TypeError, match="device: expected"):
        load(SMOLLM2_MLP, device=device)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (b"{" + b",".join(b'"k%d":0' % i for i in range(60_000)) + b',"k59999":1}', "duplicate key 'k59999'"),
        (b'{"a":[' + b"[]," * 5_000_000 + b"[]]}", "at most 4194304 values"),
        (b'{"a":' + b"[" * 101 + b"]" * 101 + b"}", "nested at most 100 deep"),
        (b'{"a":"\\\\",' + b'"b":' + b"[" * 101, "nested at most 100 deep"),
    ],
    ids=["duplicate", "values", "deep", "deep-after-an-escape"],
)
def test_header_that_would_take_minutes_or_gigabytes_is_refused_at_once(
    tmp_path: Path, text: bytes, fragment: str
) -> None:
    began = time.process_time()
    refused(raw(tmp_path / "f", text, b""), "header: expected JSON", fragment)
    assert time.process_time() - began < 4


def test_brackets_and_quotes_inside_strings_are_not_counted() -> None:
    value = {"[" * 200 + '"' + "\\" * 3: ["{" * 200, '\\"[', "]" * 300]}
    assert files.parse_object(json.dumps(value).encode(), "f") == value


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"m\.safetensors: expected a folder or a regular file, got neither$"):
        load(tmp_path / "m.safetensors", device="cpu")
    with pytest.raises((CheckpointError, FileNotFoundError)):
        load(tmp_path / "absent.safetensors", device="cpu")


@pytest.mark.parametrize("name", ["m.safetensors", INDEX])
def test_a_folder_with_a_pipe_or_a_device_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    for kind, make in (("pipe", os.mkfifo), ("device", lambda path: os.symlink("/dev/zero", path))):
        (tmp_path / kind).mkdir()
        make(tmp_path / kind / name)
        with pytest.raises(CheckpointError, match=r"expected model\.safetensors, .* or one safetensors file, got 0"):
            load(tmp_path / kind, device="cpu")


def test_nesting_is_counted_across_the_parts_of_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_SCAN_BYTES", 7)
    value = {"[[[[[[[[[": [[["]]]", {"a": ["{" * 200]}]]]}
    assert files.parse_object(json.dumps(value).encode(), "f") == value
    with pytest.raises(CheckpointError, match="nested at most 100 deep"):
        files.parse_object(b'{"abcdef":' + b"[" * 100 + b"]" * 100 + b"}", "f")
