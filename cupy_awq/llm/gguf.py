# SPDX-License-Identifier: Apache-2.0
"""The reader of language models in GGUF files: tensors, configuration and tokenizer.

The tensors are converted by `cupy_awq.checkpoint.gguf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.checkpoint import CheckpointError, gguf, gguf_file
from cupy_awq.checkpoint.gguf_dense import read_values
from cupy_awq.checkpoint.gguf_file import Blocks
from cupy_awq.llm import gguf_int8
from cupy_awq.llm.config import ModelConfig
from cupy_awq.llm.extra import import_extra
from cupy_awq.llm.model_files import ModelFiles
from cupy_awq.llm.tokenizer import Tokenizer, guarded

INT8_NAMES = ("_proj.weight", "lm_head.weight", "embed_tokens.weight")
"""The ends of the names of weights that a GPU multiplies in 8 bits; the embedding is a tied output head."""

PRE_TOKENIZERS = {
    "gpt-2": None,
    "default": None,
    "smollm": None,
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""The regular expression that splits text into words before BPE, by ``tokenizer.ggml.pre``; None for that of GPT-2."""


def read(path: Path) -> ModelFiles:
    """Open a GGUF file and validate its metadata. Tensors are converted when they are needed.

    Raises:
        CheckpointError: the file is damaged, or the model is not supported.
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
    tokenizer = partial(load_tokenizer, path, metadata)
    return ModelFiles(path, config, tensors, tokenizer, stop_ids, _int8_weights(path, metadata, blocks))


def _int8_weights(
    path: Path, metadata: Mapping[str, Any], blocks: Mapping[str, Blocks]
) -> dict[str, Callable[[], BlockQuantizedWeight]]:
    """Return the functions that read the linear layers and the embedding of types in `gguf_int8.CONVERTERS`."""
    return {
        key.removesuffix(".weight"): partial(_read_int8, block, heads, f"{path}: tensor {key!r:.200}")
        for key, block, heads in gguf.rename_tensors(path, metadata, blocks)
        if block.kind in gguf_int8.CONVERTERS and len(block.shape) == 2 and key.endswith(INT8_NAMES)
    }


def _read_int8(block: Blocks, heads: int | None, where: str) -> BlockQuantizedWeight:
    return gguf_int8.read_weight(gguf.restore_rows(block, heads), where)


ROPE_SCALING = frozenset({"type", "factor", "original_context_length", "finetuned"})
"""The supported metadata fields of ``rope.scaling``; ``finetuned`` has no effect."""


def _config(metadata: Mapping[str, Any], blocks: Mapping[str, Blocks]) -> ModelConfig:
    """Return the configuration for GGUF metadata. Raises ValueError if a value is invalid or not supported."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ValueError(f"general.architecture: expected text, got {_shown(arch)}")

    def get(name: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        if type(value) not in kinds:
            raise ValueError(f"{arch}.{name}: expected {kinds[0].__name__}, got {_shown(value)}")
        return value

    heads, hidden = get("attention.head_count", (int,)), get("embedding_length", (int,))
    if "token_embd.weight" not in blocks:
        raise ValueError("token_embd.weight: expected a tensor of this name, got none")
    head_dim = get("attention.key_length", (int,), hidden // heads if heads else 0)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := get(name, (int,), head_dim)) != head_dim:
            raise ValueError(f"{arch}.{name}: expected the head dimension {head_dim}, got {value!r:.80}")
    prefix = f"{arch}.rope.scaling."
    for key in metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in ROPE_SCALING:
            raise ValueError(f"{key:.200}: expected {', '.join(sorted(ROPE_SCALING))} of {prefix}, got this field")
    scaling: dict[str, Any] = {}
    factors: tuple[float, ...] = ()
    kind = get("rope.scaling.type", (str,), "none")
    if "rope_freqs.weight" in blocks:
        factors = tuple(read_values(blocks["rope_freqs.weight"], "rope_freqs.weight").ravel().tolist())
    elif kind != "none":
        original = metadata.get(f"{prefix}original_context_length")
        scaling = {"rope_type": kind, "factor": get("rope.scaling.factor", (float, int))}
        if original is not None:
            scaling["original_max_position_embeddings"] = get("rope.scaling.original_context_length", (int,))
    return ModelConfig(
        model_type=arch,
        hidden=hidden,
        intermediate=get("feed_forward_length", (int,)),
        layers=get("block_count", (int,)),
        heads=heads,
        kv_heads=get("attention.head_count_kv", (int,), heads),
        head_dim=head_dim,
        vocab=blocks["token_embd.weight"].shape[0],
        context=get("context_length", (int,)),
        eps=get("attention.layer_norm_rms_epsilon", (float, int)),
        rope_theta=get("rope.freq_base", (float, int), 10000.0),
        rope_scaling=scaling,
        rope_factors=factors,
        tied="output.weight" not in blocks,
        qk_norm=arch == "qwen3",
    )


def _shown(value: Any) -> str:
    """Return a metadata value as text for an error message; of an array, which may be huge, only its length."""
    return f"{len(value)} values" if isinstance(value, (list, np.ndarray)) else f"{value!r:.80}"


def load_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer in the metadata of a file. Raises CheckpointError if it is missing or not supported."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(kind, str) or kind != "gpt2" or not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(
            f"{path}: expected tokenizer.ggml.model gpt2 with pre one of {known}, got {_shown(kind)} with {_shown(pre)}"
        )
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    merges = metadata.get("tokenizer.ggml.merges")
    if not (isinstance(tokens, list) and isinstance(merges, list) and isinstance(types, np.ndarray)):
        raise CheckpointError(f"{path}: expected tokenizer.ggml.tokens, a token_type for each, and merges")
    if len(tokens) != len(types):
        raise CheckpointError(f"{path}: expected a token_type for each of {len(tokens)} tokens, got {len(types)}")
    template = metadata.get("tokenizer.chat_template")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    texts = {}
    for name in ("bos", "eos"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        texts[f"{name}_token"] = str(tokens[i]) if type(i) is int and 0 <= i < len(tokens) else ""
    # If the field add_bos_token is missing, only the pre-tokenizer llama-bpe implies a BOS token.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") is True and type(bos) is int
    with guarded(str(path)):
        inner = _build(pre, tokens, types, merges)
        return Tokenizer(
            inner, template if isinstance(template, str) else None, texts, bos if adds_bos else None, str(path)
        )


def _build(pre: str, tokens: list[str], types: Any, merges: list[str]) -> Any:
    """Return a ``tokenizers.Tokenizer`` for a vocabulary and its merges. Raises the library's errors unchanged."""
    tokenizers = import_extra("tokenizers")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    inner = tokenizers.Tokenizer(bpe)
    inner.pre_tokenizer = _pre_tokenizer(tokenizers, pre)
    inner.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = tokenizers.normalizers.NFC()
    for special, token_type in ((True, 3), (False, 4)):  # control tokens (type 3), user-defined tokens (type 4)
        ids = np.flatnonzero(types == token_type).tolist()
        inner.add_tokens([tokenizers.AddedToken(tokens[i], special=special, normalized=False) for i in ids])
    return inner


def _pre_tokenizer(tokenizers: Any, pre: str) -> Any:
    """Return the pre-tokenizer for ``tokenizer.ggml.pre``, which splits text into words and words into bytes."""
    steps = tokenizers.pre_tokenizers
    pattern, to_bytes = PRE_TOKENIZERS[pre], partial(steps.ByteLevel, add_prefix_space=False)
    if pattern is not None:
        return steps.Sequence([steps.Split(tokenizers.Regex(pattern), "isolated"), to_bytes(use_regex=False)])
    digits = [steps.Digits(individual_digits=True)] if pre == "smollm" else []
    return steps.Sequence([*digits, to_bytes(use_regex=True)])
