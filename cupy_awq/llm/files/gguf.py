# SPDX-License-Identifier: Apache-2.0
"""The reader of language models in GGUF files: tensors, configuration and tokenizer.

The tensors are converted by `cupy_awq.checkpoint.gguf.tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.gguf import container as gguf_file
from cupy_awq.checkpoint.gguf import q8 as gguf_int8
from cupy_awq.checkpoint.gguf import tensors as gguf
from cupy_awq.checkpoint.gguf.container import Blocks
from cupy_awq.checkpoint.gguf.dense import read_values
from cupy_awq.llm.config import ModelConfig
from cupy_awq.llm.files.model_files import ModelFiles
from cupy_awq.llm.text.gguf_tokenizer import load_tokenizer, show

INT8_NAMES = ("_proj.weight", "lm_head.weight", "embed_tokens.weight")
"""The name endings of weights that a GPU can keep in 8 bits; the embedding table can also be the output head."""


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
    """Return `ModelFiles.int8_weights`: functions that read weights of the types in `gguf_int8.CONVERTERS`, by name."""
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
        raise ValueError(f"general.architecture: expected text, got {show(arch)}")

    def get(name: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        if type(value) not in kinds:
            raise ValueError(f"{arch}.{name}: expected {kinds[0].__name__}, got {show(value)}")
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
