# SPDX-License-Identifier: Apache-2.0
"""The reader of language models in GGUF files: tensors, configuration and tokenizer.

The tensors are converted by `cupy_awq.checkpoint.gguf.tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.gguf import container, q8, tensors
from cupy_awq.checkpoint.gguf.container import Blocks
from cupy_awq.checkpoint.gguf.dense import read_values
from cupy_awq.llm import families
from cupy_awq.llm.families.description import Decoder, Experts
from cupy_awq.llm.families.table import Table
from cupy_awq.llm.files.gguf_metadata import GATINGS
from cupy_awq.llm.files.model_files import ModelFiles
from cupy_awq.llm.text.gguf_tokenizer import list_stop_ids, load_tokenizer, show


def read(path: Path) -> ModelFiles:
    """Open a GGUF file and validate its metadata. Tensors are converted when they are needed.

    Raises:
        CheckpointError: the file is damaged, or the model is not supported.
        OSError: the file cannot be read.
    """
    metadata, blocks = container.read(path)
    try:
        decoder = _describe(metadata, blocks)
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    contents = tensors.open_tensors(path, metadata, blocks)
    reads = {name: partial(contents.read, name) for name in contents}
    tokenizer = partial(load_tokenizer, path, metadata)
    int8_weights = _int8_weights(path, metadata, blocks, decoder)
    return ModelFiles(path, decoder, reads, tokenizer, list_stop_ids(metadata), int8_weights)


def _int8_weights(
    path: Path, metadata: Mapping[str, Any], blocks: Mapping[str, Blocks], decoder: Decoder
) -> dict[str, Callable[[], BlockQuantizedWeight]]:
    """Return `ModelFiles.int8_weights`: functions that read weights of the types in `q8.CONVERTERS`, by name."""
    # The embedding table can also be the output head.
    linears = {f"{layer.name}.{linear.name}" for layer in decoder.layers for linear in layer.linears}
    linears |= {decoder.head.name, decoder.embedding}
    return {
        name: partial(_read_int8, block, heads, f"{path}: tensor {name + '.weight'!r:.200}")
        for key, block, heads in tensors.rename_tensors(path, metadata, blocks)
        if block.kind in q8.CONVERTERS and len(block.shape) == 2
        if key.endswith(".weight") and (name := key.removesuffix(".weight")) in linears
    }


def _read_int8(block: Blocks, heads: int | None, where: str) -> BlockQuantizedWeight:
    return q8.read_weight(tensors.restore_rows(block, heads), where)


ROPE_FIELDS = {
    "rope": ("dimension_count", "freq_base", "scale_linear"),
    "rope.scaling": ("factor", "finetuned", "original_context_length", "type"),
}
"""The supported metadata fields: the last part of the name, by what stands before it; ``finetuned`` has no effect."""
FLOATS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor")
"""The names of config.json whose values are not integers."""
COUNTS = ("first_k_dense_replace", "num_nextn_predict_layers")
"""The names of config.json whose values may be 0."""


def _describe(metadata: Mapping[str, Any], blocks: Mapping[str, Blocks]) -> Decoder:
    """Return the description for GGUF metadata. Raises ValueError if a value is invalid or not supported."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ValueError(f"general.architecture: expected text, got {show(arch)}")
    family = families.find_gguf(arch, f"{arch}.expert_count" in metadata)

    def get(name: str, kinds: tuple[type, ...], default: Any = None, least: int = 1) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        if type(value) not in kinds:
            raise ValueError(f"{arch}.{name}: expected {kinds[0].__name__}, got {show(value)}")
        if kinds == (int,) and value < least:
            raise ValueError(f"{arch}.{name}: expected an integer from {least}, got {value!r:.80}")
        return value

    for key in metadata:
        group, _, name = key.removeprefix(f"{arch}.").rpartition(".")
        if key.startswith(f"{arch}.rope.") and name not in ROPE_FIELDS.get(group, ()):
            known = ", ".join(ROPE_FIELDS.get(group, ROPE_FIELDS["rope"]))
            raise ValueError(f"{key:.200}: expected {known} of {arch}.{group:.200}., got this field")
    values: dict[str, Any] = {"model_type": family.MODEL_TYPE, "rope_theta": 10000.0, **family.GGUF_DEFAULTS}
    for name, key in family.GGUF_KEYS.items():
        if name == "num_key_value_heads":
            values[name] = values["num_attention_heads"]
        elif name == "head_dim":
            values[name] = values["hidden_size"] // values["num_attention_heads"]
        default = values.get(name)
        kinds = (float, int) if name in FLOATS else (bool,) if type(default) is bool else (int,)
        value = get(key, kinds, default, 0 if name in COUNTS else 1)
        # Files hold float32; its shortest decimal is the number of config.json: 1e-6, not 9.99999997e-7.
        values[name] = float(str(np.float32(value))) if name in FLOATS else value
    head_dim = values["head_dim"]
    if (value := get("attention.value_length", (int,), head_dim)) != head_dim:
        raise ValueError(f"{arch}.attention.value_length: expected the head dimension {head_dim}, got {value!r:.80}")
    if "token_embd.weight" not in blocks:
        raise ValueError("token_embd.weight: expected a tensor of this name, got none")
    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in blocks:
        divisors = tuple(read_values(blocks["rope_freqs.weight"], "rope_freqs.weight").ravel().tolist())
    values["num_hidden_layers"] -= values.get("num_nextn_predict_layers", 0)  # in GGUF, these layers count too
    values |= {
        "partial_rotary_factor": get("rope.dimension_count", (int,), head_dim) / head_dim,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in blocks,
        "vocab_size": blocks["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in blocks,
        "rope_scaling": _scaling(metadata, arch, get),
    }
    decoder = families.describe(Table(values, divisors, biases_as_stored=True))
    if isinstance(block := decoder.layers[-1].feed_forward, Experts):
        gating = GATINGS[block.router.scoring]
        if (found := get("expert_gating_func", (int,), gating)) != gating:
            raise ValueError(f"{arch}.expert_gating_func: expected {gating}, got {found}")
    return decoder


def _scaling(metadata: Mapping[str, Any], arch: str, get: Callable[..., Any]) -> dict[str, Any]:
    """Return ``rope_scaling`` of config.json; as in llama.cpp, a factor without a type is that of linear scaling.

    ``get`` is the function of `_describe`.
    """
    # Files of 2023 have the name scale_linear for the factor.
    names = [name for name in ("rope.scaling.factor", "rope.scale_linear") if f"{arch}.{name}" in metadata]
    kind = get("rope.scaling.type", (str,), "linear" if names else "none")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": get(names[0] if names else "rope.scaling.factor", (float, int))}
    if f"{arch}.rope.scaling.original_context_length" in metadata:
        scaling["original_max_position_embeddings"] = get("rope.scaling.original_context_length", (int,))
    return scaling
