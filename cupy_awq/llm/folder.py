# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder: config.json, safetensors, tokenizer.json, generation_config.json and a chat template."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from cupy_awq import checkpoint
from cupy_awq.checkpoint import CheckpointError, Contents, Module, Tensor
from cupy_awq.checkpoint.files import read_object
from cupy_awq.llm import config
from cupy_awq.llm.source import Array, Source
from cupy_awq.llm.tokenizer import Tokenizer


def read(path: Path) -> Source:
    """The model in a folder. Raises CheckpointError for an unusable one, OSError for one that cannot be read."""
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: expected a config.json, got none")
    table = read_object(file)
    contents = checkpoint.read(path)
    tensors = {name: partial(_read, contents, name) for name in contents}
    return Source(
        path, config.from_hugging_face(table, str(file)), tensors, partial(tokenizer, path), stop_ids(path, table)
    )


def _read(contents: Contents, name: str) -> Module | Array:
    item = contents[name]
    return item.array if isinstance(item, Tensor) else item


def stop_ids(path: Path, table: dict[str, Any]) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, or else of the configuration: one id or several."""
    file = path / "generation_config.json"
    generation = read_object(file) if file.is_file() else {}
    ids = generation.get("eos_token_id", table.get("eos_token_id"))
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(i for i in ids if type(i) is int)


def tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder, with its chat template. Raises CheckpointError if there is none that can be used."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: expected a tokenizer.json, got none")
    settings = read_object(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    template = settings.get("chat_template")
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str | None):
        raise CheckpointError(f"{path}: expected chat_template to be text, got {type(template).__name__}")
    special = {name: _token(settings.get(name)) for name in ("bos_token", "eos_token")}
    return Tokenizer.from_file(file, template, special)


def _token(value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""
