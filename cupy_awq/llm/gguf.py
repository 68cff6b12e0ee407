# SPDX-License-Identifier: Apache-2.0
"""A model in a GGUF file: Q4_0 and Q4_1 blocks carry over exactly, all else becomes float16.

A block of 32 values along K is a group: its codes stay as they are, Q4_0's scale d is W = (q - 8) * d, which is the
symmetric form, and Q4_1's scale and minimum are W = q * d + m, the form with offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.llm import gguf_file
from cupy_awq.llm.config import Config
from cupy_awq.llm.extra import needed
from cupy_awq.llm.gguf_file import Blocks
from cupy_awq.llm.source import Array, Source
from cupy_awq.llm.tokenizer import Tokenizer
from cupy_awq.packing import pack_int4
from cupy_awq.weight import PackedWeight

GROUP = 32
CARRIED = ("Q4_0", "Q4_1")

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{p}": f"self_attn.{p}_proj" for p in "qkv"},
    **{f"attn_{p}_norm": f"self_attn.{p}_norm" for p in "qk"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}

SPLITS = {
    "gpt-2": None,
    "default": None,
    "smollm": None,
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""tokenizer.ggml.pre: the expression that splits text into words before merging; None: that of GPT-2."""


def read(path: Path) -> Source:
    """The model in a GGUF file. Raises CheckpointError for an unusable one, OSError for one that cannot be read."""
    metadata, blocks = gguf_file.read(path)
    try:
        config = _config(metadata, blocks)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    tensors: dict[str, Callable[[], Module | Array]] = {}
    for name, block in blocks.items():
        target, heads = _target(name, config)
        if target is None:
            continue
        bias = blocks.get(name.removesuffix("weight") + "bias")
        if block.kind in CARRIED and len(block.shape) == 2 and block.shape[0] % 8 == 0 and "_proj" in target:
            tensors[target.removesuffix(".weight")] = partial(_module, block, heads, bias)
        else:
            tensors[target] = partial(_dense, block, heads)
    stop = metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")
    ids = tuple(i for i in stop if type(i) is int)
    return Source(path, config, tensors, partial(read_tokenizer, path, metadata), ids)


def _config(metadata: Mapping[str, Any], blocks: Mapping[str, Blocks]) -> Config:
    arch = metadata.get("general.architecture")

    def get(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        if value is None:
            raise ValueError(f"{arch}.{name} is missing")
        return value

    heads, hidden = get("attention.head_count"), get("embedding_length")
    if "token_embd.weight" not in blocks:
        raise ValueError("token_embd.weight is missing")
    head_dim = get("attention.key_length", hidden // heads if heads else 0)
    for name in ("attention.value_length", "rope.dimension_count"):
        if get(name, head_dim) != head_dim:
            raise ValueError(f"{arch}.{name} must be the head dimension {head_dim}, got {get(name)!r:.80}")
    scaling: dict[str, Any] = {}
    kind = get("rope.scaling.type", "none")
    if "rope_freqs.weight" in blocks:
        scaling = {"rope_type": "factors", "factors": tuple(_dense(blocks["rope_freqs.weight"], None).tolist())}
    elif kind != "none":
        original = metadata.get(f"{arch}.rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": get("rope.scaling.factor")}
        scaling["original_max_position_embeddings"] = original
    return Config(
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


def _target(name: str, config: Config) -> tuple[str | None, int | None]:
    """The Hugging Face name of a tensor, None if the model has no use for it; and the heads whose rows are permuted."""
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}", None
    block, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if block != "blk" or part not in LAYER_NAMES:
        return None, None
    # Llama's files hold the halves of each head of q and k interleaved, for a RoPE of neighbouring pairs.
    permuted = {"attn_q": config.heads, "attn_k": config.kv_heads} if config.model_type == "llama" else {}
    return f"model.layers.{number}.{LAYER_NAMES[part]}.{suffix}", permuted.get(part)


def _rows(data: Array, heads: int | None) -> Array:
    """Rows [N, ...] with each head's pairs (2i, 2i + 1) brought to (i, i + head_dim / 2)."""
    if heads is None:
        return data
    n, *rest = data.shape
    if n % (2 * heads):
        raise CheckpointError(f"expected rows for {heads} heads, got {n}")
    return data.reshape(heads, n // heads // 2, 2, *rest).swapaxes(1, 2).reshape(n, *rest)


def _module(block: Blocks, heads: int | None, bias: Blocks | None) -> Module:
    n, k = block.shape
    halves = 1 if block.kind == "Q4_0" else 2  # of a block's header: scale, and minimum
    data = _rows(block.data, heads).reshape(n, k // GROUP, 2 * halves + GROUP // 2)
    header = np.ascontiguousarray(data[..., : 2 * halves]).view(np.float16)
    # Byte j holds values j and j + 16; the axes become (group, half, j, row).
    pairs = np.ascontiguousarray(data[..., 2 * halves :].transpose(1, 2, 0))
    codes = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=1).reshape(k, n)
    scales, *offsets = (np.ascontiguousarray(header[..., i].T) for i in range(halves))
    weight = PackedWeight(pack_int4(codes), scales, offsets[0] if offsets else None)
    return Module(weight, None if bias is None else _dense(bias, heads))


def _dense(block: Blocks, heads: int | None) -> Array:
    if block.kind in ("F16", "F32"):
        values = block.data.view(block.kind.replace("F", "f").replace("16", "2").replace("32", "4"))
    else:
        gguf = needed("gguf")
        with np.errstate(over="ignore", invalid="ignore"):  # of a damaged file, whose logits will tell
            try:
                values = gguf.quants.dequantize(block.data, gguf.GGMLQuantizationType[block.kind]).astype(np.float16)
            except NotImplementedError:
                raise CheckpointError(f"values of type {block.kind} cannot be read") from None
    return _rows(values.reshape(block.shape), heads)


def read_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a file's metadata describe. Raises CheckpointError if there is none that can be built."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in SPLITS:
        raise CheckpointError(
            f"{path}: expected tokenizer.ggml.model gpt2 with pre of {', '.join(SPLITS)}, got {kind!r:.80}, {pre!r:.80}"
        )
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    merges = metadata.get("tokenizer.ggml.merges")
    lists = isinstance(tokens, list) and isinstance(merges, list) and isinstance(types, np.ndarray)
    if not lists or len(tokens) != len(types):  # type: ignore[arg-type]
        raise CheckpointError(f"{path}: expected tokenizer.ggml.tokens, a token_type for each, and merges")
    tokenizers = needed("tokenizers")
    try:
        pairs = [tuple(merge.split(" ")) for merge in merges]  # type: ignore[union-attr]
        vocabulary = {token: i for i, token in enumerate(tokens)}  # type: ignore[arg-type]
        bpe = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
        inner = tokenizers.Tokenizer(bpe)
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"{path}: the tokenizer cannot be built: {error}") from None
    steps = tokenizers.pre_tokenizers
    split, by_bytes = SPLITS[pre], partial(steps.ByteLevel, add_prefix_space=False)
    if split is not None:
        words = [steps.Split(tokenizers.Regex(split), "isolated"), by_bytes(use_regex=False)]
    else:
        words = [*([steps.Digits(individual_digits=True)] if pre == "smollm" else []), by_bytes(use_regex=True)]
    inner.pre_tokenizer = steps.Sequence(words)
    inner.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = tokenizers.normalizers.NFC()
    for special, wanted in ((True, 3), (False, 4)):  # control tokens, and those that users defined
        ids = np.flatnonzero(types == wanted).tolist()
        inner.add_tokens(
            [tokenizers.AddedToken(tokens[i], special=special, normalized=False) for i in ids]  # type: ignore[index]
        )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    texts = {}
    for name in ("bos", "eos"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        texts[f"{name}_token"] = tokens[i] if type(i) is int and 0 <= i < len(tokens) else ""  # type: ignore[index,arg-type]
    # Files say whether bos is added; without a word, those made for llama-bpe add it.
    adds = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        inner, template if isinstance(template, str) else None, texts, bos if adds and type(bos) is int else None
    )
