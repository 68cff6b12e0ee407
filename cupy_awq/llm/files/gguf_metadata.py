# SPDX-License-Identifier: Apache-2.0
"""The metadata of GGUF files for language models: sizes, RoPE and a byte-level BPE tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.llm import families
from cupy_awq.llm.extra import import_extra
from cupy_awq.llm.families.description import Decoder, Experts
from cupy_awq.llm.text.gguf_tokenizer import CONTROL, NORMAL, PRE_TOKENIZERS, UNUSED, USER_DEFINED, make_pre_tokenizer
from cupy_awq.llm.text.tokenizer import Tokenizer

SAMPLE = "Hello  world, it's 12345 \n\n\t(x) don't ÉTÉ 你好 résumé... \r\n  a_b! ３４ \U0001f600 fooBar e\u0301e end "
"""A text that different pre-tokenizers in `PRE_TOKENIZERS` split differently, so that the words identify one."""

GATINGS = {"softmax": 1, "sigmoid": 2}
"""The values of ``expert_gating_func`` for each `Router.scoring`."""

Metadata = dict[str, Any]


def describe_model(decoder: Decoder) -> tuple[Metadata, npt.NDArray[np.float32] | None]:
    """Return the metadata fields of a model, and the divisors of its RoPE frequencies [head_dim / 2] or None.

    Raises ValueError for RoPE parameters for which GGUF has no fields.
    """
    family = families.find(decoder.model_type)
    arch, settings = family.GGUF_ARCHITECTURE, family.settings(decoder)
    if settings.get("mlp_only_layers"):
        raise ValueError(f"mlp_only_layers: expected none for gguf, got {settings['mlp_only_layers']}")
    fields: Metadata = {"general.architecture": arch, "general.quantization_version": 2}
    for name, key in family.GGUF_KEYS.items():
        value = settings[name]
        fields[f"{arch}.{key}"] = float(np.float32(value)) if type(value) is float else value
    rope = decoder.layers[0].mixer.rope
    fields |= {f"{arch}.attention.value_length": settings["head_dim"], f"{arch}.rope.dimension_count": rope.dim}
    fields[f"{arch}.vocab_size"] = decoder.vocab
    if isinstance(block := decoder.layers[-1].feed_forward, Experts):
        fields[f"{arch}.expert_gating_func"] = GATINGS[block.router.scoring]
    if "num_nextn_predict_layers" in family.GGUF_KEYS:
        fields[f"{arch}.block_count"] += decoder.extra_layers
    scaling = dict(rope.scaling)
    if rope.kind == "llama3":
        return fields, (rope.unscaled() / rope.frequencies()[0]).astype(np.float32)
    divisors = np.array(rope.divisors, np.float32) if rope.divisors else None
    if rope.kind == "default":
        return fields, divisors
    known = {"type", "rope_type", "factor", "original_max_position_embeddings"}
    other = sorted(set(scaling) - known)
    if other or "factor" not in scaling:
        raise ValueError(f"rope_scaling: expected factor and original_max_position_embeddings alone, got {scaling!s}")
    factor = float(np.float32(scaling["factor"]))
    fields |= {f"{arch}.rope.scaling.type": rope.kind, f"{arch}.rope.scaling.factor": factor}
    if "original_max_position_embeddings" in scaling:
        fields[f"{arch}.rope.scaling.original_context_length"] = int(scaling["original_max_position_embeddings"])
    return fields, divisors


def describe_tokenizer(tokenizer: Tokenizer, vocab: int, stop_ids: Sequence[int]) -> Metadata:
    """Return the metadata fields of a byte-level BPE tokenizer.

    Args:
        tokenizer: the tokenizer.
        vocab: the number of rows of the embedding table; ids without a token become unused tokens.
        stop_ids: the ids of the tokens that end a text; GGUF stores only the first three.

    Raises ValueError if the tokenizer is not byte-level BPE, or if GGUF has no name for its pre-tokenizer.
    """
    table = json.loads(tokenizer.inner.to_str())
    model = table["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("unk_token") is not None:
        kind = "BPE with byte fallback" if model.get("byte_fallback") else model.get("type")
        raise ValueError(f"tokenizer: expected byte-level BPE for gguf, got {kind!s:.80}")
    pre = _find_pre_tokenizer(tokenizer)
    tokens, types = [f"[PAD{i}]" for i in range(vocab)], np.full(vocab, UNUSED, np.int32)
    added = {
        entry["id"]: (entry["content"], CONTROL if entry["special"] else USER_DEFINED)
        for entry in table["added_tokens"]
    }
    normal = {i: (text, NORMAL) for text, i in model["vocab"].items()}
    for i, (text, kind) in {**normal, **added}.items():
        if i >= vocab:
            raise ValueError(f"tokenizer: expected ids below {vocab}, the rows of the embedding table, got {i}")
        tokens[i], types[i] = text, kind
    pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    fields: Metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(pairs),
    }
    bos = tokenizer.encode("a")[:1]
    adds_bos = bos != tokenizer.encode("a", add_special_tokens=False)[:1]
    fields["tokenizer.ggml.add_bos_token"] = adds_bos
    named = tokenizer.inner.token_to_id(tokenizer.special.get("bos_token", ""))
    if adds_bos or named is not None:
        fields["tokenizer.ggml.bos_token_id"] = bos[0] if adds_bos else named
    for name, i in zip(("eos", "eot", "eom"), stop_ids, strict=False):
        fields[f"tokenizer.ggml.{name}_token_id"] = i
    if tokenizer.template is not None:
        fields["tokenizer.chat_template"] = tokenizer.template
    return fields


def _find_pre_tokenizer(tokenizer: Tokenizer) -> str:
    """Return the value of ``tokenizer.ggml.pre`` whose pre-tokenizer splits `SAMPLE` like ``tokenizer``."""
    tokenizers = import_extra("tokenizers")
    own = tokenizer.inner.pre_tokenizer
    words = None if own is None else own.pre_tokenize_str(SAMPLE)
    for name in PRE_TOKENIZERS:
        if words == make_pre_tokenizer(tokenizers, name).pre_tokenize_str(SAMPLE):
            return name
    raise ValueError(f"tokenizer: expected a pre-tokenizer of {', '.join(PRE_TOKENIZERS)} for gguf, got another")
