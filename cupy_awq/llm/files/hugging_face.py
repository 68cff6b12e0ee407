# SPDX-License-Identifier: Apache-2.0
"""The reader of Hugging Face folders: config.json, safetensors, generation_config.json and tokenizer files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from cupy_awq import checkpoint
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.files import read_object
from cupy_awq.llm import config
from cupy_awq.llm.files.model_files import ModelFiles
from cupy_awq.llm.text.chat_template import MAX_TEMPLATE_CHARACTERS
from cupy_awq.llm.text.tokenizer import Tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The class name in transformers for each model type."""


def read(path: Path) -> ModelFiles:
    """Open a Hugging Face folder and validate its headers. Tensors are read when they are needed.

    Raises:
        CheckpointError: a file is missing or damaged, or the model is not supported.
        OSError: a file cannot be read.
    """
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: expected a config.json, got none")
    table = read_object(file)
    contents = checkpoint.read(path)
    tensors = {name: partial(contents.read, name) for name in contents}
    model_config = config.from_hugging_face(table, str(file))
    return ModelFiles(path, model_config, tensors, partial(load_tokenizer, path), read_stop_ids(path, table))


def write_settings(files: ModelFiles, folder: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json of a model to a folder.

    Raises ValueError if config.json cannot represent the model: it has divisors of RoPE frequencies (``rope_freqs`` of
    GGUF), or biases that the model type does not support.
    """
    settings = files.config
    if settings.rope_factors:
        raise ValueError(f"{files.path}: rope_freqs.weight: expected none for a Hugging Face folder, got divisors")
    biases = settings.biases if settings.biases is not None else _find_biases(files)
    expected = {"qwen2": frozenset({"q_proj", "k_proj", "v_proj"})}.get(settings.model_type, frozenset())
    with_all = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
    if biases not in (expected, with_all):
        raise ValueError(f"{files.path}: expected biases as {settings.model_type} has, got {', '.join(sorted(biases))}")
    table = {
        "model_type": settings.model_type,
        "architectures": [ARCHITECTURES[settings.model_type]],
        "hidden_size": settings.hidden,
        "intermediate_size": settings.intermediate,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "vocab_size": settings.vocab,
        "max_position_embeddings": settings.context,
        "rms_norm_eps": settings.eps,
        "rope_theta": settings.rope_theta,
        "rope_scaling": dict(settings.rope_scaling) or None,
        "attention_bias": settings.model_type != "qwen2" and biases == with_all,
        "tie_word_embeddings": settings.tied,
        "hidden_act": "silu",
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


def _find_biases(files: ModelFiles) -> frozenset[str]:
    """Return the names of the projections of layer 0 that have a bias."""
    config, found = files.config, set()
    for name, k, n in (
        ("q_proj", config.hidden, config.q_width),
        ("k_proj", config.hidden, config.kv_width),
        ("v_proj", config.hidden, config.kv_width),
        ("o_proj", config.q_width, config.hidden),
    ):
        if files.read_linear(f"model.layers.0.self_attn.{name}", k, n).bias is not None:
            found.add(name)
    return frozenset(found)


def read_stop_ids(path: Path, table: dict[str, Any]) -> tuple[int, ...]:
    """Return the stop ids: ``eos_token_id`` of generation_config.json, or else of ``table``, the parsed config.json."""
    file = path / "generation_config.json"
    generation = read_object(file) if file.is_file() else {}
    ids = generation.get("eos_token_id", table.get("eos_token_id"))
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(i for i in ids if type(i) is int)


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer and chat template of a folder. Raises CheckpointError if a file is missing or damaged."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: expected a tokenizer.json, got none")
    settings = read_object(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    template = settings.get("chat_template")
    if (path / "chat_template.jinja").is_file():
        template = _read_template(path / "chat_template.jinja")
    if isinstance(template, list):  # several templates with names; "default" is the chat template
        entries = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next((entry.get("template") for entry in entries), None)
    if not isinstance(template, str | None):
        raise CheckpointError(f"{path}: chat_template: expected text, got {type(template).__name__}")
    special = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token")}
    return Tokenizer.from_file(file, template, special)


def _read_template(file: Path) -> str:
    with open(file, "rb") as opened:
        data = opened.read(4 * MAX_TEMPLATE_CHARACTERS + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: expected a chat template in UTF-8, got {error}") from None


def _token_text(value: Any) -> str:
    """Return the text of a special token, given as text or as {"content": text} in JSON; "" for any other value."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""
