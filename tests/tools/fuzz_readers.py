# SPDX-License-Identifier: Apache-2.0
"""The readers that `fuzz` runs, each with its seed files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cupy_awq import checkpoint, llm
from cupy_awq.checkpoint.gguf.write import write_gguf
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.families.description import LinearSpec
from cupy_awq.llm.files import ak48
from tests import (
    checkpoint_files,
    format_files,
    llm_models,
    packers,
    test_formats,
    test_formats_experts,
    test_formats_gguf,
    test_header_limits,
    test_llm_sentencepiece,
)

PARTS = tuple(f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3))
"""The names of the parts of a GGUF file that is split in three."""

MESSAGES = [{"role": "user", "content": "Hi <|im_end|> é"}, {"role": "assistant", "content": "Ok."}]

TEMPLATE = """{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] | trim }}{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}{% set index = messages | length - 1 - loop.index0 %}{% endfor %}
{%- for message in messages %}
    {%- if message.role in ['user', 'assistant'] and not loop.last or ns.last >= 0 %}
        {%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>' }}
    {%- else %}{{ raise_exception('no ' ~ message.role) }}{% endif %}
{%- endfor %}
{%- macro line(x) %}{{ x | tojson }}{% endmacro %}{{ line({'a': [1, 'b']}) }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@dataclass(frozen=True)
class Reader:
    """A reader of untrusted files.

    Attributes:
        name: the name of the reader.
        write: a function that writes the seed files into a folder.
        targets: the names of the files, of which one is mutated.
        read: a function that reads the folder as completely as a program would.
    """

    name: str
    write: Callable[[Path], object]
    targets: tuple[str, ...]
    read: Callable[[Path], object]


def read_checkpoint(path: Path) -> None:
    contents = checkpoint.read(path)
    checkpoint.summarize(contents)
    for name in contents:
        contents[name]


def read_model(path: Path) -> None:
    files = llm.read(path)
    for name in files.int8_weights:
        n, k = files.tensors[f"{name}.weight"]().shape
        files.read_int8_module(LinearSpec(name, k, n))
    build_model(files, NumpyOps(files.config, expand_weights=False))


def read_tokenizer(path: Path) -> None:
    tokenizer = llm.read(path).load_tokenizer()
    stream = tokenizer.stream()
    for token in tokenizer.encode("Hello <|im_end|> wörld\n 12")[:50]:
        stream.step(token)
    tokenizer.decode(tokenizer.encode_chat(MESSAGES)[:200])


def _write_ak48(path: Path) -> None:
    ak48.write(llm.read(llm_models.folder(path, llm_models.QWEN3)), path / "m.ak48")


def _write_template(path: Path) -> None:
    llm_models.folder(path, llm_models.LLAMA)
    (path / "chat_template.jinja").write_text(TEMPLATE)


def _write_rope(path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "truncate": False,
    }
    llm_models.folder(path, {**llm_models.LLAMA, "rope_scaling": rope})
    (path / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')


def _write_shards(path: Path) -> None:
    checkpoint_files.sharded(path, [checkpoint_files.module("a"), checkpoint_files.module("b")])


def _write_plain(path: Path) -> None:
    save_file(
        {"a": np.ones((4, 3), np.float16), "b": np.arange(5), "c": np.ones(0, np.float32)}, path / "m.safetensors"
    )


def _write_gguf(path: Path) -> None:
    llm_models.gguf_file(path / "m.gguf", {"ffn_down": "Q8_0", "attn_v": "Q4_0"})


def _write_split(path: Path) -> None:
    """Write a GGUF model in three parts, without the whole file."""
    _write_gguf(path)
    test_header_limits.split(path / "m.gguf", 3)
    (path / "m.gguf").unlink()


def _write_gguf_kinds(path: Path) -> None:
    kinds = ("Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "Q5_0")
    names = ("attn_q", "attn_k", "attn_v", "ffn_up", "ffn_down", "other")
    tensors = {
        f"blk.0.{name}.weight": (kind, test_formats_gguf.random_blocks(kind, 8, 256))
        for name, kind in zip(names, kinds, strict=True)
    }
    test_formats_gguf.write(path / "m.gguf", tensors, **test_formats_gguf.HEADS)


def _write_sentence_piece(path: Path) -> None:
    test_llm_sentencepiece.model_file(path / "m.gguf")


def _write_fused(path: Path) -> None:
    """Write a folder whose experts are fused, one tensor [experts, ...] per projection, as compressed-tensors."""
    packed = [packers.compressed_tensors(w) for w in test_formats_experts.WEIGHTS]
    tensors = {f"mlp.experts.up_proj_{part[7:]}": np.stack([parts[part] for parts in packed]) for part in packed[0]}
    format_files.save_folder(path, tensors, {"quantization_config": test_formats_experts.COMPRESSED})


def _write_converted(path: Path) -> None:
    """Write a GGUF file by converting a compressed-tensors folder with this package's own writer."""
    packed = {f"model.layers.0.mlp.up_proj.{part}": a for part, a in packers.compressed_tensors(_SYMMETRIC).items()}
    config = {"quantization_config": packers.compressed_tensors_config(_SYMMETRIC)}
    contents = checkpoint.read(format_files.save_folder(path / "source", packed, config))
    write_gguf(path / "m.gguf", contents, {"general.architecture": "qwen2"})


_SYMMETRIC = dataclasses.replace(test_formats_experts.WEIGHTS[0], zeros=np.full((2, 16), 8, np.uint8))


def _first_cases() -> dict[str, dict[str, Any]]:
    """Return, for each checkpoint format, the first of the recorded checkpoints in tests/formats_vectors.npz."""
    cases: dict[str, dict[str, Any]] = {}
    for case in test_formats.VECTORS:
        if case["format"] != "gguf-q4_k":  # GGUF's Q4_K is recorded as bare blocks, not as a file
            cases.setdefault(case["format"], case)
    return cases


def _format_reader(name: str, case: dict[str, Any]) -> Reader:
    def write(path: Path) -> None:
        test_formats.saved(path, case)

    if name == "llm-awq-v2":
        return Reader(name, write, ("model-v2.pt",), lambda path: read_checkpoint(path / "model-v2.pt"))
    return Reader(name, write, ("config.json", "model.safetensors"), read_checkpoint)


def _all_readers() -> list[Reader]:
    return [
        Reader("safetensors", _write_plain, ("m.safetensors",), lambda path: read_checkpoint(path / "m.safetensors")),
        Reader("shards", _write_shards, ("model.safetensors.index.json", "config.json"), read_checkpoint),
        Reader("config.json", _write_rope, ("config.json", "config.json", "generation_config.json"), read_model),
        Reader("model", lambda path: llm_models.folder(path, llm_models.QWEN2), ("model.safetensors",), read_model),
        Reader(
            "tokenizer.json",
            lambda path: llm_models.folder(path, llm_models.LLAMA),
            ("tokenizer.json", "tokenizer.json", "tokenizer_config.json"),
            read_tokenizer,
        ),
        Reader("template", _write_template, ("chat_template.jinja",), read_tokenizer),
        Reader("gguf", _write_gguf, ("m.gguf",), lambda path: read_model(path / "m.gguf")),
        Reader("gguf parts", _write_split, PARTS, lambda path: read_model(path / PARTS[0])),
        Reader("gguf tokenizer", _write_gguf, ("m.gguf",), lambda path: read_tokenizer(path / "m.gguf")),
        Reader("gguf sentencepiece", _write_sentence_piece, ("m.gguf",), lambda path: read_tokenizer(path / "m.gguf")),
        Reader("gguf types", _write_gguf_kinds, ("m.gguf",), lambda path: read_checkpoint(path / "m.gguf")),
        Reader("fused experts", _write_fused, ("config.json", "model.safetensors"), read_checkpoint),
        Reader("gguf written", _write_converted, ("m.gguf",), lambda path: read_checkpoint(path / "m.gguf")),
        Reader("ak48", _write_ak48, ("m.ak48",), lambda path: read_model(path / "m.ak48")),
        *(_format_reader(name, case) for name, case in _first_cases().items()),
    ]


READERS = {reader.name: reader for reader in _all_readers()}
"""Every reader of untrusted files in the package, by name."""
