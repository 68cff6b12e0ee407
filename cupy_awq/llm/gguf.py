# SPDX-License-Identifier: Apache-2.0
"""The reader of GGUF files of language models: tensors, the model's configuration and the tokenizer.

`cupy_awq.checkpoint.gguf` converts the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq.checkpoint import CheckpointError, gguf, gguf_file
from cupy_awq.checkpoint.gguf_dense import read_values
from cupy_awq.checkpoint.gguf_file import Blocks
from cupy_awq.llm.config import ModelConfig
from cupy_awq.llm.extra import import_extra
from cupy_awq.llm.model_files import ModelFiles
from cupy_awq.llm.tokenizer import Tokenizer

PRE_TOKENIZERS = {
    "gpt-2": None,
    "default": None,
    "smollm": None,
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""The regular expression of each ``tokenizer.ggml.pre`` that splits text into words before merging; None: GPT-2's."""


def read(path: Path) -> ModelFiles:
    """Return the model of a GGUF file.

    Raises:
        CheckpointError: the file is damaged, or the model is of an unsupported kind.
        OSError: the file cannot be read.
    """
    metadata, blocks = gguf_file.read(path)
    try:
        config = _config(metadata, blocks)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    contents = gguf.open_tensors(path, metadata, blocks)
    tensors = {name: partial(contents.read, name) for name in contents}
    stop = metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")
    stop_ids = tuple(i for i in stop if type(i) is int)
    return ModelFiles(path, config, tensors, partial(load_tokenizer, path, metadata), stop_ids)


def _config(metadata: Mapping[str, Any], blocks: Mapping[str, Blocks]) -> ModelConfig:
    arch = metadata.get("general.architecture")

    def get(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        if value is None:
            raise ValueError(f"{arch}.{name}: expected a value, got none")
        return value

    heads, hidden = get("attention.head_count"), get("embedding_length")
    if "token_embd.weight" not in blocks:
        raise ValueError("token_embd.weight: expected a tensor of this name, got none")
    head_dim = get("attention.key_length", hidden // heads if heads else 0)
    for name in ("attention.value_length", "rope.dimension_count"):
        if get(name, head_dim) != head_dim:
            raise ValueError(f"{arch}.{name}: expected the head dimension {head_dim}, got {get(name)!r:.80}")
    scaling: dict[str, Any] = {}
    kind = get("rope.scaling.type", "none")
    if "rope_freqs.weight" in blocks:
        factors = read_values(blocks["rope_freqs.weight"], "rope_freqs.weight")
        scaling = {"rope_type": "factors", "factors": tuple(factors.tolist())}
    elif kind != "none":
        original = metadata.get(f"{arch}.rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": get("rope.scaling.factor")}
        scaling["original_max_position_embeddings"] = original
    return ModelConfig(
        model_type=str(arch),
        hidden=hidden,
        intermediate=get("feed_forward_length"),
        layers=get("block_count"),
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=blocks["token_embd.weight"].shape[0],
        context=get("context_length"),
        eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tied="output.weight" not in blocks,
        qk_norm=arch == "qwen3",
    )


def load_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that the metadata of a file describe. Raises CheckpointError if they describe none."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(
            f"{path}: expected tokenizer.ggml.model gpt2 with pre one of {known}, got {kind!r:.80} with {pre!r:.80}"
        )
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    merges = metadata.get("tokenizer.ggml.merges")
    lists = isinstance(tokens, list) and isinstance(merges, list) and isinstance(types, np.ndarray)
    if not lists or len(tokens) != len(types):  # type: ignore[arg-type]
        raise CheckpointError(f"{path}: expected tokenizer.ggml.tokens, a token_type for each, and merges")
    tokenizers = import_extra("tokenizers")
    try:
        pairs = [tuple(merge.split(" ")) for merge in merges]  # type: ignore[union-attr]
        vocabulary = {token: i for i, token in enumerate(tokens)}  # type: ignore[arg-type]
        bpe = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
        inner = tokenizers.Tokenizer(bpe)
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"{path}: expected a valid tokenizer, got {error}") from None
    inner.pre_tokenizer = _pre_tokenizer(tokenizers, pre)
    inner.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = tokenizers.normalizers.NFC()
    for special, token_type in ((True, 3), (False, 4)):  # control tokens, then user-defined ones
        ids = np.flatnonzero(types == token_type).tolist()
        inner.add_tokens(
            [tokenizers.AddedToken(tokens[i], special=special, normalized=False) for i in ids]  # type: ignore[index]
        )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    texts = {}
    for name in ("bos", "eos"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        texts[f"{name}_token"] = tokens[i] if type(i) is int and 0 <= i < len(tokens) else ""  # type: ignore[index,arg-type]
    # A file says whether to add BOS; without that field, llama-bpe adds it.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        inner, template if isinstance(template, str) else None, texts, bos if adds_bos and type(bos) is int else None
    )


def _pre_tokenizer(tokenizers: Any, pre: str) -> Any:
    """Return the `tokenizers` object that splits text into words and words into bytes."""
    steps = tokenizers.pre_tokenizers
    pattern, to_bytes = PRE_TOKENIZERS[pre], partial(steps.ByteLevel, add_prefix_space=False)
    if pattern is not None:
        return steps.Sequence([steps.Split(tokenizers.Regex(pattern), "isolated"), to_bytes(use_regex=False)])
    digits = [steps.Digits(individual_digits=True)] if pre == "smollm" else []
    return steps.Sequence([*digits, to_bytes(use_regex=True)])
