# SPDX-License-Identifier: Apache-2.0
"""Tests with damaged and crafted files for every reader, in processes with limits of memory and time."""

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
from tests.format_files import global_name, pickled, save_folder, save_zip, tensor
from tests.tools import fuzz
from tests.tools.fuzz_readers import READERS, Reader, read_checkpoint, read_model, read_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory need Linux")

ALL = list(READERS.values())


def findings(outcomes: list[fuzz.Outcome]) -> list[fuzz.Outcome]:
    return [outcome for outcome in outcomes if outcome.finding]


def test_every_reader_accepts_its_seed_files() -> None:
    """Every reader accepts its undamaged files: if it refused them, mutations would test only the refusal."""
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


WIDE = b'{"a":[' + b"[]," * 20_000_000 + b"[]]}"
GGUF_BEGIN = struct.pack("<4sI", b"GGUF", 3)


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_tensor(shape: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    """Return the bytes of a GGUF file with one tensor."""
    entry = gguf_string(b"t") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return GGUF_BEGIN + struct.pack("<QQ", 1, 0) + entry + bytes(64)


def nested_pickle() -> bytes:
    """Return a pickle of nested tuples, each of which holds the preceding one twice: 2**1000 items to visit."""
    return b"\x80\x02]" + b"q\x00" * 1 + b"h\x00h\x00\x86" * 1000 + b"."


def put_json(path: Path, name: str, **changes: Any) -> None:
    """Write a model folder in which entries of the JSON file ``name`` are changed."""
    llm_models.folder(path, llm_models.LLAMA)
    table = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**table, **changes}))


def put_bytes(path: Path, name: str, data: bytes) -> None:
    llm_models.folder(path, llm_models.LLAMA)
    (path / name).write_bytes(data)


def read_file(path: Path) -> None:
    read_checkpoint(path / "f")


def put_pattern(path: Path, *patterns: str, modules: int = 1) -> None:
    """Write GPTQ modules with long names, and a configuration whose regular expressions are matched to these."""
    tensors: dict[str, Any] = {}
    for i in range(modules):
        name = "a" * 300 + str(i)
        parts: dict[str, Any] = {"qweight": np.zeros((1, 8), np.int32), "qzeros": np.zeros((1, 1), np.int32)}
        parts |= {"scales": np.ones((1, 8), np.float16), "g_idx": np.zeros(8, np.int32)}
        tensors |= {f"{name}.{part}": array for part, array in parts.items()}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {text: {} for text in patterns}}
    save_folder(path, tensors, {"quantization_config": settings})


def put_directory(path: Path, entries: int) -> None:
    """Write a zip archive whose directory lists one entry many times."""
    save_zip(path, {"a/data.pkl": pickled({})})
    body, _, _ = path.read_bytes().partition(b"PK\1\2")
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", *[0] * 9, 1, *[0] * 6) + b"a"
    size = entries * len(entry)
    end = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, size, len(body))
    end += struct.pack(
        "<4sIQI4s4H2IH", b"PK\6\7", 0, len(body) + size, 1, b"PK\5\6", 0, 0, *[2**16 - 1] * 2, *[2**32 - 1] * 2, 0
    )
    path.write_bytes(body + entry * entries + end)


def put_model(path: Path, **model: Any) -> None:
    """Write a model folder in which entries of the model in tokenizer.json are changed."""
    llm_models.folder(path, llm_models.LLAMA)
    table = json.loads((path / "tokenizer.json").read_text())
    put_json(path, "tokenizer.json", model={**table["model"], **model})


SPECIAL_TOKEN = {"id": "<|end|>", "ids": [256], "tokens": ["<|end|>"]}
TEMPLATE_OF_TOKENS = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] + [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}] * 400_000,
    "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
    "special_tokens": {"<|end|>": SPECIAL_TOKEN},
}
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

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
    "safetensors of 4 million names": (
        lambda path: raw(path / "f", b"{" + b",".join(b'"%d":0' % i for i in range(4_000_000)) + b"}", b""),
        read_file,
    ),
    "GGUF with 8 million texts": (
        lambda path: (path / "f").write_bytes(
            GGUF_BEGIN
            + struct.pack("<QQ", 0, 1)
            + gguf_string(b"a")
            + struct.pack("<IIQ", 9, 8, 8_000_000)
            + bytes(64_000_000)
        ),
        read_file,
    ),
    "GGUF with 4 million tensors": (
        lambda path: (path / "f").write_bytes(GGUF_BEGIN + struct.pack("<QQ", 4_000_000, 0) + bytes(100_000_000)),
        read_file,
    ),
    "torch.save with 10 million opcodes": (
        lambda path: save_zip(path / "f", {"a/data.pkl": b"\x80\x02)" + b"\x85" * 10_000_000 + b"."}),
        read_file,
    ),
    "torch.save with 3 million entries": (lambda path: put_directory(path / "f", 3_000_000), read_file),
    "tokenizer.json with 700,000 tokens": (
        lambda path: put_model(path, vocab={f"{i:x}": i for i in range(700_000)}),
        read_tokenizer,
    ),
    "tokenizer.json with 1.2 million merges": (
        lambda path: put_model(path, merges=["a b"] * 1_200_000),
        read_tokenizer,
    ),
    "tokenizer.json with 100,000 special tokens": (
        lambda path: put_json(
            path, "tokenizer.json", added_tokens=[{**ADDED, "id": i, "content": f"<{i}>"} for i in range(100_000)]
        ),
        read_tokenizer,
    ),
    "tokenizer.json with a long special token": (
        lambda path: put_json(path, "tokenizer.json", added_tokens=[{**ADDED, "id": 256, "content": "y" * 50_000_000}]),
        read_tokenizer,
    ),
    "tokenizer.json that adds 400,000 tokens": (
        lambda path: put_json(path, "tokenizer.json", post_processor=TEMPLATE_OF_TOKENS),
        read_tokenizer,
    ),
    "tokenizer.json that repeats the text": (
        lambda path: put_json(
            path,
            "tokenizer.json",
            post_processor={**TEMPLATE_OF_TOKENS, "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 200},
        ),
        read_tokenizer,
    ),
    "tokenizer.json that encodes bytes 30 times": (
        lambda path: put_json(
            path, "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTES] * 30}
        ),
        read_tokenizer,
    ),
    "tokenizer.json of a long Unigram": (
        lambda path: put_model(path, type="Unigram", unk_id=0, vocab=[["x" * i, -1.0] for i in range(1, 3000)]),
        read_tokenizer,
    ),
    "pattern of nested repetitions": (
        lambda path: put_pattern(path, "+:" + "(" * 40 + "a?" + "){1,99}" * 40 + "b"),
        read_checkpoint,
    ),
    "pattern of nested look-aheads": (
        lambda path: put_pattern(path, "+:" + "(?=.*" * 60 + "a" + ")" * 60 + "b"),
        read_checkpoint,
    ),
    "3000 patterns for 1000 modules": (
        lambda path: put_pattern(path, *(f"+:.*(b|c)+{i}$" for i in range(3000)), modules=1000),
        read_checkpoint,
    ),
    "shard with a long name": (
        lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "' + "x" * 5000 + '"}}'),
        read_checkpoint,
    ),
}


BOUNDED = {"tokenizer.json that repeats the text", "tokenizer.json of a long Unigram", "pattern of nested look-aheads"}
"""The crafted files that are accepted: a sandboxed worker with limits of its own does what they ask for."""


LARGEST = {
    "safetensors of 600,000 duplicate names",
    "torch.save with 10 million opcodes",
    "tokenizer.json with 700,000 tokens",
    "tokenizer.json that adds 400,000 tokens",
}
"""The crafted files that take seconds to write or to refuse; the others have their kinds of items too."""


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] if x in LARGEST else []) for x in BOMBS])
def test_a_crafted_file_is_refused_within_seconds_and_a_gigabyte(name: str) -> None:
    write, read = BOMBS[name]
    (outcome,) = fuzz.run([Reader("bomb", write, (".",), read)], [fuzz.UNCHANGED], workers=1)
    assert not outcome.finding
    assert outcome.kind == ("accepted" if name in BOUNDED else "CheckpointError")
