# SPDX-License-Identifier: Apache-2.0
"""Damaged and crafted files of every reader, read in processes with limits of memory and time."""

from __future__ import annotations

import json
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import llm_models
from tests.checkpoint_files import raw
from tests.format_files import global_name, pickled, save_zip, tensor
from tests.tools import fuzz
from tests.tools.fuzz_readers import READERS, Reader, read_checkpoint, read_model, read_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory need Linux")

ALL = list(READERS.values())


def findings(outcomes: list[fuzz.Outcome]) -> list[fuzz.Outcome]:
    return [outcome for outcome in outcomes if outcome.finding]


def test_every_reader_accepts_its_seed_files() -> None:
    """Otherwise mutations would only find that the seeds are wrong."""
    assert {outcome.kind for outcome in fuzz.run(ALL, [fuzz.UNCHANGED])} == {"accepted"}


def test_a_few_damaged_files_of_every_reader_raise_an_error_that_names_them() -> None:
    assert not findings(fuzz.run(ALL, range(12)))


@pytest.mark.slow
def test_ten_thousand_damaged_files_raise_an_error_that_names_them() -> None:
    outcomes = fuzz.run(ALL, range(1000, 1000 + -(-10_000 // len(ALL))))
    print(fuzz.summarize(outcomes))
    assert len(outcomes) >= 10_000
    assert not findings(outcomes)


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda path: (_ for _ in ()).throw(KeyError(str(path))), "KeyError"),
        (lambda path: (_ for _ in ()).throw(ValueError("no file")), "ValueError"),
        (lambda path: (_ for _ in ()).throw(ValueError(f"{path} \x1b[2J")), "ValueError"),
        (lambda path: np.ones(1 << 28), "MemoryError"),
        (lambda path: __import__("os").kill(__import__("os").getpid(), 9), "ended"),
    ],
)
def test_the_fuzzer_finds_other_errors_memory_and_ends(read: Callable[[Path], object], kind: str) -> None:
    reader = Reader("planted", lambda path: (path / "f").write_bytes(b"x"), ("f",), read)
    (outcome,) = findings(fuzz.run([reader], [0]))
    assert outcome.kind.endswith(kind)


def test_the_fuzzer_finds_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.3)
    reader = Reader(
        "planted", lambda path: (path / "f").write_bytes(b"x"), ("f",), lambda path: __import__("time").sleep(9)
    )
    outcomes = fuzz.run([reader], [0, 1], workers=1)
    assert [outcome.kind for outcome in outcomes] == ["hang", "hang"]


# Crafted files

WIDE = b'{"a":[' + b"[]," * 20_000_000 + b"[]]}"
GGUF_BEGIN = struct.pack("<4sI", b"GGUF", 3)


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_tensor(shape: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    """Return a file of one tensor."""
    entry = gguf_string(b"t") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return GGUF_BEGIN + struct.pack("<QQ", 1, 0) + entry + bytes(64)


def nested_pickle() -> bytes:
    """Return a pickle that nests a tuple in itself 1000 times, doubled each time."""
    return b"\x80\x02]" + b"q\x00" * 1 + b"h\x00h\x00\x86" * 1000 + b"."


def put_json(path: Path, name: str, **changes: Any) -> None:
    """Change entries of a JSON file of a model folder."""
    llm_models.folder(path, llm_models.LLAMA)
    table = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**table, **changes}))


def put_bytes(path: Path, name: str, data: bytes) -> None:
    llm_models.folder(path, llm_models.LLAMA)
    (path / name).write_bytes(data)


def read_file(path: Path) -> None:
    read_checkpoint(path / "f")


GROWS = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "l"}, "content": "l" * 60}] * 5}

BOMBS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "safetensors of 20 million arrays": (lambda path: raw(path / "f", WIDE, b""), read_file),
    "safetensors of 600,000 duplicate names": (
        lambda path: raw(path / "f", b"{" + b",".join(b'"%d":0' % (i // 2) for i in range(1_200_000)) + b"}", b""),
        read_file,
    ),
    "safetensors nested 10 million deep": (lambda path: raw(path / "f", b'{"a":' + b"[" * 10_000_000, b""), read_file),
    "safetensors of one long string": (lambda path: raw(path / "f", b'{"' + b'\\"' * 20_000_000, b""), read_file),
    "safetensors of 50,000 empty tensors": (
        lambda path: raw(
            path / "f",
            {str(i): {"dtype": "F16", "shape": [0, 2**62], "data_offsets": [0, 0]} for i in range(50_000)},
            b"",
        ),
        read_file,
    ),
    "torch.save with a huge storage": (
        lambda path: save_zip(path / "f", {"a/data.pkl": pickled({"t": tensor("0", "uint8", (1 << 40,), 1 << 40)})}),
        read_file,
    ),
    "torch.save of another call": (
        lambda path: save_zip(path / "f", {"a/data.pkl": pickled({"t": global_name("os", "system")})}),
        read_file,
    ),
    "torch.save that doubles": (lambda path: save_zip(path / "f", {"a/data.pkl": nested_pickle()}), read_file),
    "torch.save compressed": (
        lambda path: save_zip(path / "f", {"a/data.pkl": bytes(200_000_000)}, zipfile.ZIP_DEFLATED),
        read_file,
    ),
    "GGUF with 2**60 fields": (
        lambda path: (path / "f").write_bytes(GGUF_BEGIN + struct.pack("<QQ", 0, 1 << 60)),
        read_file,
    ),
    "GGUF with an empty tensor at 2**63": (
        lambda path: (path / "f").write_bytes(gguf_tensor((0, 32), 1 << 63)),
        read_file,
    ),
    "GGUF with axes of 2**62": (lambda path: (path / "f").write_bytes(gguf_tensor((1 << 62, 0), 0)), read_file),
    "GGUF with axes of 2**64 - 1": (
        lambda path: (path / "f").write_bytes(gguf_tensor(((1 << 64) - 1,) * 4, 0, kind=24)),
        read_file,
    ),
    "config.json of 20 million arrays": (lambda path: put_bytes(path, "config.json", WIDE), read_model),
    "config.json with a number of 400 digits": (
        lambda path: put_json(path, "config.json", rms_norm_eps=10**400),
        read_model,
    ),
    "config.json of a huge model": (
        lambda path: put_json(path, "config.json", num_hidden_layers=1024, vocab_size=1 << 22),
        read_model,
    ),
    "tokenizer.json of 20 million arrays": (lambda path: put_bytes(path, "tokenizer.json", WIDE), read_tokenizer),
    "tokenizer.json that lengthens texts": (
        lambda path: put_json(path, "tokenizer.json", normalizer=GROWS),
        read_tokenizer,
    ),
    "chat template of nested loops": (
        lambda path: put_json(
            path,
            "tokenizer_config.json",
            chat_template="{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        ),
        read_tokenizer,
    ),
    "chat template that repeats": (
        lambda path: put_json(path, "tokenizer_config.json", chat_template="{{ 'x' * 3000000000 }}"),
        read_tokenizer,
    ),
    "chat template of 90 MB": (
        lambda path: put_bytes(path, "chat_template.jinja", b"{{ messages }}" * 6_500_000),
        read_tokenizer,
    ),
    "shard with a long name": (
        lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "' + "x" * 5000 + '"}}'),
        read_checkpoint,
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_crafted_file_is_refused_within_seconds_and_a_gigabyte(name: str) -> None:
    write, read = BOMBS[name]
    (outcome,) = fuzz.run([Reader("bomb", write, (".",), read)], [fuzz.UNCHANGED], workers=1)
    assert not outcome.finding
    assert outcome.kind == "CheckpointError"
