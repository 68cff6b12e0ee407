# SPDX-License-Identifier: Apache-2.0
"""The reader of Hugging Face folders: config.json, safetensors, generation_config.json and tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cupy_awq import checkpoint
from cupy_awq.checkpoint import CheckpointError, Contents, replacement
from cupy_awq.checkpoint.files import MAX_SETTINGS_NAMES, check_downloaded, read_object
from cupy_awq.llm import families
from cupy_awq.llm.families.description import Decoder
from cupy_awq.llm.families.table import Table
from cupy_awq.llm.files.model_files import ModelFiles
from cupy_awq.llm.text.chat_template import MAX_TEMPLATE_CHARACTERS
from cupy_awq.llm.text.tokenizer import Tokenizer, read_file

PREFIXES = ("model.language_model.", "language_model.model.")
"""The prefixes with which models for several kinds of input name the tensors of their decoder."""
HEAD_PREFIX = "language_model."
"""The prefix that such models can put before the name of the output head."""


def read(path: Path) -> ModelFiles:
    """Open a Hugging Face folder and validate its headers. Tensors are read when they are needed.

    The decoder of a model for several kinds of input, whose configuration is ``text_config``, is read like a model of
    its own.

    Raises:
        CheckpointError: a file is missing or damaged, or the model is not supported.
        OSError: a file cannot be read.
    """
    file = replacement.find(path, "config.json")
    if not file.is_file():
        raise CheckpointError(f"{path}: expected a config.json, got none")
    table = _select_text(read_object(file, MAX_SETTINGS_NAMES))
    contents = checkpoint.read(path)
    decoder = describe(table, str(file))
    names = _name_tensors(list(contents), decoder)
    tensors = {name: partial(contents.read, stored) for name, stored in names.items()}
    return ModelFiles(path, decoder, tensors, partial(load_tokenizer, path), read_stop_ids(path, table))


def describe(table: Mapping[str, Any], where: str) -> Decoder:
    """Return the description of a decoder for ``table``, a parsed config.json.

    Raises CheckpointError, whose message starts with ``where``, if the table is invalid or the model not supported.
    """
    try:
        return families.describe(Table(table))
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _select_text(table: dict[str, Any]) -> dict[str, Any]:
    """Return ``text_config``, completed by the values beside it, of a configuration that has one, or else ``table``."""
    text = table.get("text_config")
    return {**table, **text} if isinstance(text, dict) and "model_type" in text else table


def _name_tensors(stored: Sequence[str], decoder: Decoder) -> dict[str, str]:
    """Return the stored name of each tensor by its name in ``decoder``, or by itself if the decoder has none for it."""
    root, _, table = decoder.embedding.rpartition(".")
    for prefix in PREFIXES:
        if not {f"{prefix}{table}", f"{prefix}{table}.weight"}.isdisjoint(stored):
            break
    else:
        return {name: name for name in stored}
    found = {}
    for name in stored:
        if name.startswith(prefix):
            found[f"{root}.{name.removeprefix(prefix)}"] = name
        elif name.startswith(HEAD_PREFIX + decoder.head.name):
            found[name.removeprefix(HEAD_PREFIX)] = name
        else:
            found.setdefault(name, name)
    return found


def check_names(path: Path, contents: Contents, decoder: Decoder) -> None:
    """Raise ValueError if tensors are stored under other names than those in ``decoder``, as in a larger model."""
    if decoder.embedding not in contents and f"{decoder.embedding}.weight" not in contents:
        raise ValueError(f"{path}: expected a text model with {decoder.embedding}.weight, got one with other names")


def write_settings(files: ModelFiles, folder: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json of a model to a folder.

    Raises ValueError if config.json cannot represent the model: it has divisors of RoPE frequencies (``rope_freqs`` of
    GGUF), or biases that the model type does not support.
    """
    decoder = files.config
    if any(layer.mixer.rope.divisors for layer in decoder.layers):
        raise ValueError(f"{files.path}: rope_freqs.weight: expected none for a Hugging Face folder, got divisors")
    family = families.find(decoder.model_type)
    table = {
        "architectures": [family.CLASS],
        **family.settings(decoder),
        "attention_bias": _choose_attention_bias(files, family.settings(decoder)),
        "torch_dtype": "float16",
        "eos_token_id": list(files.stop_ids),
    }
    (folder / "config.json").write_text(json.dumps(table, indent=2) + "\n")
    tokenizer = files.load_tokenizer()
    tokenizer.inner.save(str(folder / "tokenizer.json"))
    special = {name: text for name, text in tokenizer.special.items() if text}
    template = {} if tokenizer.template is None else {"chat_template": tokenizer.template}
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")


def _choose_attention_bias(files: ModelFiles, settings: Mapping[str, Any]) -> bool:
    """Return the value of ``attention_bias`` that, with ``settings``, describes the model and the biases in its files.

    Raises ValueError if there is none.
    """
    layer = files.config.layers[0]
    biases = {linear.name for linear in layer.linears if files.read_linear(linear, layer.name).bias is not None}
    for value in (False, True):
        values = {**settings, "attention_bias": value}
        found = [families.describe(Table(values, biases_as_stored=is_stored)) for is_stored in (False, True)]
        if files.config in found and {x.name for x in found[0].layers[0].linears if x.bias} == biases:
            return value
    raise ValueError(
        f"{files.path}: expected biases as {files.config.model_type} has, got {', '.join(sorted(biases)) or 'none'}"
    )


def read_stop_ids(path: Path, table: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text.

    These are ``eos_token_id`` of generation_config.json and of ``table``, the parsed config.json, and the id of
    ``eos_token`` in the tokenizer's settings: files that are fine-tuned from others often name only one of them.

    Raises:
        CheckpointError: an ``eos_token_id`` is neither null, an integer nor a list of them.
    """
    ids: list[int] = []
    inner = table.get("text_config")
    sources = [(path / "generation_config.json", _read_optional(path / "generation_config.json"))]
    sources += [(path / "config.json", part) for part in (table, inner) if isinstance(part, dict)]
    for file, part in sources:
        found = part.get("eos_token_id")
        for value in found if isinstance(found, list) else [found]:
            if value is not None and type(value) is not int:
                raise CheckpointError(f"{file}: eos_token_id: expected an integer or a list of them, got {value!r:.80}")
            ids += [value] if value is not None and value >= 0 else []
    _, special, added = _read_special(path)
    named = _find_token(path, special.get("eos_token"), added)
    return tuple(dict.fromkeys(ids if named is None else [*ids, named]))


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer and chat template of a folder. Raises CheckpointError if a file is missing or damaged."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: expected a tokenizer.json, got none")
    settings, special, added = _read_special(path)
    template, where = settings.get("chat_template"), path / "tokenizer_config.json"
    if (path / "chat_template.jinja").is_file():
        where = path / "chat_template.jinja"
        template = _read_template(where)
    if isinstance(template, list):  # several templates with names; "default" is the chat template
        entries = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next((entry.get("template") for entry in entries), None)
    if not isinstance(template, str | None):
        raise CheckpointError(f"{where}: chat_template: expected text, got {type(template).__name__}")
    return Tokenizer.from_file(file, template, special, added=added, template_where=str(where))


def _read_optional(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if there is no such file."""
    return read_object(file, MAX_SETTINGS_NAMES) if file.is_file() else {}


def _read_special(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return tokenizer_config.json, the special tokens as a template's variables, and the tokens to add as in `build`.

    As in transformers, ``added_tokens_decoder`` of tokenizer_config.json has the added tokens; without it,
    added_tokens.json has them, and special_tokens_map.json precedes tokenizer_config.json.

    Raises CheckpointError if an added token is malformed.
    """
    file = path / "tokenizer_config.json"
    settings, named = _read_optional(file), _read_optional(path / "special_tokens_map.json")
    decoder = settings.get("added_tokens_decoder")
    merged = {**named, **settings} if decoder is not None else {**settings, **named}
    special: dict[str, Any] = {}
    for name, value in [*named.items(), *settings.items(), *merged.items()]:
        if name.endswith("_token") and (text := _token_text(value)):
            special[name] = text
    others = merged.get("additional_special_tokens") or merged.get("extra_special_tokens")
    if isinstance(others, dict):
        special |= {name: text for name, value in others.items() if (text := _token_text(value))}
    others = [text for value in others if (text := _token_text(value))] if isinstance(others, list) else []
    if others:
        special["additional_special_tokens"] = others
    texts = [*(text for text in special.values() if isinstance(text, str)), *others]
    if decoder is None:
        file = path / "added_tokens.json"
        table = {i: {"content": text, "special": text in texts} for text, i in _read_optional(file).items()}
        entries = list(table.items())
    else:
        entries = list(decoder.items()) if isinstance(decoder, dict) else [("", decoder)]
    added = sorted((_read_added(i, entry, file) for i, entry in entries), key=lambda token: int(token["id"]))
    known = {token["content"] for token in added}
    added += [{"id": None, "content": t, "special": True, "normalized": False} for t in texts if t not in known]
    return settings, special, added


def _read_added(i: Any, entry: Any, file: Path) -> dict[str, Any]:
    """Return an added token as `build` expects it, from its id and its entry in ``added_tokens_decoder``."""
    text = entry.get("content") if isinstance(entry, dict) else None
    number = int(i) if isinstance(i, str) and i.isdecimal() and len(i) < 10 else i
    if not isinstance(text, str) or type(number) is not int or number < 0:
        raise CheckpointError(f"{file}: added tokens: expected ids with texts, got {i!r:.40}: {entry!r:.80}")
    is_special = entry.get("special") is True
    flags = {name: entry.get(name) is True for name in ("lstrip", "rstrip", "single_word")}
    normalized = entry.get("normalized", not is_special) is True
    return {"id": number, "content": text, "special": is_special, "normalized": normalized, **flags}


def _find_token(path: Path, text: str | None, added_tokens: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the id of a token by its text, or None if the tokenizer's files do not have it."""
    if text is None:
        return None
    for token in added_tokens:
        if token["content"] == text and token["id"] is not None:
            found: int = token["id"]
            return found
    file = path / "tokenizer.json"
    table = read_file(file)[1] if file.is_file() else {}
    model, added = table.get("model"), table.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    known = {entry.get("content"): entry.get("id") for entry in entries if isinstance(entry.get("content"), str)}
    value = known.get(text, vocabulary.get(text) if isinstance(vocabulary, dict) else None)
    return value if type(value) is int else None


def _read_template(file: Path) -> str:
    with open(file, "rb") as opened:
        data = opened.read(4 * MAX_TEMPLATE_CHARACTERS + 1)
    check_downloaded(data, str(file))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: expected a chat template in UTF-8, got {error}") from None


def _token_text(value: Any) -> str:
    """Return the text of a special token, given as text or as {"content": text} in JSON; "" for any other value."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""
