# SPDX-License-Identifier: Apache-2.0
"""Limits on what the headers of all files of a checkpoint hold together, and GGUF models of several parts."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq import checkpoint, llm
from cupy_awq.checkpoint import CheckpointError, files, safetensors
from cupy_awq.checkpoint.gguf import container
from cupy_awq.checkpoint.tensors import INDEX
from cupy_awq.llm.files.convert import convert
from tests import llm_models
from tests.checkpoint_files import entry, raw
from tests.test_llm_quantize import TEXT

MEMORY_BYTES = 1 << 28
"""The most memory, in bytes, that refusing a file may take."""


def refused(path: Path, message: str) -> None:
    """Check that reading a checkpoint raises ``message`` as a CheckpointError, within seconds and little memory."""
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.read(path)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 20


def write_shards(folder: Path, count: int, header: dict[str, Any]) -> None:
    """Write ``count`` shards that are hard links to one file, and an index with a tensor for each of them."""
    shard = raw(folder / "shard", header, b"")
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for name in names:
        os.link(shard, folder / name)
    tensors = list(header)[:count]
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(zip(tensors, names, strict=True))}))


def set_limits(monkeypatch: pytest.MonkeyPatch, nbytes: int, tensors: int) -> None:
    monkeypatch.setattr(files.HeaderLimits.__init__, "__defaults__", (nbytes, tensors))


@pytest.mark.parametrize(("nbytes", "tensors"), [(10**8, 4_000), (200_000, 400_000)])
def test_many_links_to_one_shard_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, tensors: int
) -> None:
    """Each of 100 shards is within the limits on headers, but all together are not: reading ends at the limit."""
    write_shards(tmp_path, 100, {f"t{i}": entry("F16", [0], [0, 0]) for i in range(200)})
    set_limits(monkeypatch, nbytes, tensors)
    parsed: list[str] = []

    def parse(text: bytes, where: str) -> dict[str, Any]:
        parsed.append(where)
        return files.parse_object(text, where)

    monkeypatch.setattr(safetensors, "parse_object", parse)
    message = "at most 400000 tensors in all files" if tensors < 400_000 else "headers of at most 100000000 bytes"
    refused(tmp_path, message)
    assert 10 < len(parsed) < 30
    set_limits(monkeypatch, 10**8, 400_000)
    assert len(checkpoint.read(tmp_path)) == 100


def test_a_file_has_the_limit_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, 10**8, 9)
    raw(tmp_path / "model.safetensors", {f"t{i}": entry("F16", [0], [0, 0]) for i in range(10)}, b"")
    with pytest.raises(CheckpointError, match="expected at most 400000 tensors in all files"):
        checkpoint.read(tmp_path)


def gguf_header(fields: int, tensors: int = 0, version: bytes = struct.pack("<I", 3)) -> bytes:
    return container.MAGIC + version + struct.pack("<QQ", tensors, fields)


def text_field(key: bytes, length: int) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<IQ", container.STRING_TYPE, length)


@pytest.mark.parametrize("form", ["value", "key", "array", "many values"])
def test_sparse_texts_of_gigabytes_are_refused(tmp_path: Path, form: str) -> None:
    """A header may claim a text of gigabytes, which a sparse file holds as zeros: it is refused without being read."""
    size = 2 << 30
    header = {
        "value": gguf_header(1) + text_field(b"k", size - 100),
        "key": gguf_header(1) + struct.pack("<Q", size - 100),
        "array": gguf_header(1)
        + struct.pack("<Q1sIIQQ", 1, b"k", container.ARRAY_TYPE, container.STRING_TYPE, 1, size - 200),
        "many values": gguf_header(60) + text_field(b"k", 60 << 20),
    }[form]
    path = tmp_path / "m.gguf"
    with open(path, "wb") as file:
        file.write(header)
        if form == "many values":
            for i in range(59):
                file.seek(60 << 20, os.SEEK_CUR)
                file.write(text_field(b"%d" % i, 60 << 20))
            file.seek(60 << 20, os.SEEK_CUR)
            file.write(b"\0")
        else:
            file.truncate(size)
    refused(path, rf"m\.gguf: expected at most {container.MAX_TEXT_BYTES} bytes of texts, got more")


@given(st.lists(st.text(max_size=20), max_size=8), st.integers(0, 200))
def test_the_limit_counts_the_bytes_of_all_texts(texts: list[str], limit: int) -> None:
    data = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts)
    array = struct.pack("<IIQ", container.ARRAY_TYPE, container.STRING_TYPE, len(texts)) + data
    cursor = container._Cursor(memoryview(array), Path("m"), container._Limits(text_bytes=limit))
    if sum(len(text.encode()) for text in texts) <= limit:
        assert cursor.value() == texts
        assert cursor.limits.text_bytes == limit - sum(len(text.encode()) for text in texts)
    else:
        with pytest.raises(CheckpointError, match="bytes of texts, got more"):
            cursor.value()


@pytest.mark.parametrize("version", [2, 3])
def test_a_big_endian_file_is_named(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_header(0, version=struct.pack(">I", version)))
    for read in (checkpoint.read, llm.read):
        with pytest.raises(CheckpointError, match=r"expected GGUF version 2 or 3, got a big-endian file: convert it"):
            read(path)


def split(path: Path, count: int) -> list[Path]:
    """Split a GGUF file in ``count`` parts as llama.cpp does, with all metadata in the first; return their paths."""
    reader = gguf.GGUFReader(path)
    each = -(-len(reader.tensors) // count)
    parts = []
    for number in range(count):
        part = path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(part, "llama")
        writer.kv_data[0].clear()
        if number == 0:
            for name, found in reader.fields.items():
                if not name.startswith("GGUF."):
                    sub = found.types[-1] if found.types[0] == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(name, found.contents(), found.types[0], sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number * each : (number + 1) * each]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    llm_models.gguf_file(tmp_path / "m.gguf", {})
    return split(tmp_path / "m.gguf", 3)


def test_a_split_model_is_the_whole_model(tmp_path: Path, parts: list[Path]) -> None:
    whole, found = container.read(tmp_path / "m.gguf"), container.read(parts[0])
    assert str(found[0]) == str(whole[0])
    assert {name: block.data.tobytes() for name, block in found[1].items()} == {
        name: block.data.tobytes() for name, block in whole[1].items()
    }
    (tmp_path / "m.gguf").rename(tmp_path / "whole")
    scores = [llm.load(path, device="cpu").score(TEXT[:50]) for path in (parts[0], tmp_path / "whole", tmp_path)]
    assert scores[0] == scores[1] == scores[2]
    convert(str(parts[0]), tmp_path / "again.gguf", "gguf")
    assert container.read(tmp_path / "again.gguf")[1].keys() == whole[1].keys()
    for part in parts[1:]:
        for read in (checkpoint.read, llm.read):
            with pytest.raises(CheckpointError, match=r"expected the first part of a split model, m-00001-of"):
                read(part)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, parts: list[Path]) -> None:
    third = parts[2].read_bytes()
    parts[2].unlink()
    refused(parts[0], r"expected all 3 parts of a split model, got no m-00003-of-00003\.gguf")
    parts[2].write_bytes(parts[1].read_bytes())
    refused(parts[0], r"m-00003-of-00003\.gguf: expected part 2 of 3, got split\.no 1 of 3")
    parts[2].write_bytes(third)
    parts[0].rename(tmp_path / "first.gguf")
    refused(tmp_path / "first.gguf", r"the first part of a split model, \*-00001-of-00003\.gguf, got another")


@pytest.mark.parametrize("count", [0, 2**16 - 1, -1, "x"])
def test_a_wrong_number_of_parts_is_refused(tmp_path: Path, count: Any) -> None:
    value = struct.pack("<IQ", container.STRING_TYPE, 1) + b"x" if count == "x" else struct.pack("<Ii", 5, count)
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(gguf_header(1) + struct.pack("<Q11s", 11, b"split.count") + value + bytes(64))
    refused(path, r"split\.count: expected an integer in 1\.\.1000, got")


def test_a_missing_tensor_of_one_part_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_header(1) + struct.pack("<Q19sIi", 19, b"split.tensors.count", 5, 3) + bytes(64))
    refused(path, r"split\.tensors\.count: expected 0 tensors, got 3")
    assert not np.any(np.frombuffer(path.read_bytes()[-64:], np.uint8))
