# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3, SmolLM2, and the models that share their architecture.

`describe` also serves families that differ in biases and in RMSNorms of heads alone (`qwen2`, `qwen3`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cupy_awq.llm.families.description import (
    Attention,
    Decoder,
    Experts,
    LayerSpec,
    Mlp,
    NormSpec,
    check_sizes,
)
from cupy_awq.llm.families.table import Table

MODEL_TYPE = GGUF_ARCHITECTURE = "llama"
CLASS = "LlamaForCausalLM"
GGUF_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
GGUF_DEFAULTS: Mapping[str, Any] = {}


def describe(table: Table) -> Decoder:
    """Return the description of a Llama model. Raises ValueError for an unsupported configuration."""
    has_biases = table.flag("attention_bias")
    return describe_like(table, MODEL_TYPE, qkv_bias=has_biases, o_bias=has_biases)


def describe_like(
    table: Table,
    model_type: str,
    *,
    qkv_bias: bool,
    o_bias: bool,
    head_norms: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotated: float = 1.0,
    feed_forward: Callable[[int], Mlp | Experts] | None = None,
) -> Decoder:
    """Return the description of a model that differs from Llama only in the arguments.

    Args:
        table: the configuration.
        model_type: the model type.
        qkv_bias, o_bias: whether the projections to q, k and v, and the output projection, have biases.
        head_norms: whether an RMSNorm is applied to each head of q and k before RoPE.
        kv_heads, head_dim: the values for a configuration without them, if not the number of heads and the hidden size
            divided by it.
        rotated: the part of each head that RoPE rotates.
        feed_forward: the feed-forward block by index of the layer, or None for the same MLP in each layer.

    Raises:
        ValueError: a value is missing, invalid or not supported.
    """
    table.require(hidden_act="silu", mlp_bias=False, use_sliding_window=False, partial_rotary_factor=rotated)
    kinds = table.values.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ValueError(f"layer_types: expected 'full_attention' for every layer, got {kinds!r:.80}")
    tied = table.flag("tie_word_embeddings")
    heads, hidden = table.integer("num_attention_heads"), table.integer("hidden_size")
    values = {"num_key_value_heads": kv_heads, "head_dim": head_dim, **table.values}
    kv_heads, head_dim = values["num_key_value_heads"], values["head_dim"]
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = hidden // heads if head_dim is None else head_dim
    count = table.integer("num_hidden_layers")
    vocab, context = table.integer("vocab_size"), table.integer("max_position_embeddings")
    check_sizes(layers=count, heads=heads, head_dim=head_dim, hidden=hidden)
    check_sizes(kv_heads=kv_heads, vocab=vocab, context=context)
    eps, rope = table.values.get("rms_norm_eps", 1e-6), table.rope(head_dim, context, rotated)
    wide, narrow = heads * head_dim, kv_heads * head_dim
    attention = Attention(
        heads,
        kv_heads,
        head_dim,
        rope,
        q=table.linear("self_attn.q_proj", hidden, wide, qkv_bias),
        k=table.linear("self_attn.k_proj", hidden, narrow, qkv_bias),
        v=table.linear("self_attn.v_proj", hidden, narrow, qkv_bias),
        o=table.linear("self_attn.o_proj", wide, hidden, o_bias),
        q_norm=NormSpec("self_attn.q_norm", head_dim, eps) if head_norms else None,
        k_norm=NormSpec("self_attn.k_norm", head_dim, eps) if head_norms else None,
    )
    mlp = None if feed_forward is not None else gated_mlp(table, "mlp", table.integer("intermediate_size"))
    blocks = [feed_forward(i) if mlp is None else mlp for i in range(count)]  # type: ignore[misc]
    norms = NormSpec("input_layernorm", hidden, eps), NormSpec("post_attention_layernorm", hidden, eps)
    return Decoder(
        model_type,
        vocab,
        hidden,
        rope.scaled_context,
        tuple(LayerSpec(f"model.layers.{i}", attention, block, *norms) for i, block in enumerate(blocks)),
        NormSpec("model.norm", hidden, eps),
        "model.embed_tokens",
        table.linear("lm_head", hidden, vocab),
        tied,
        table.integer("num_nextn_predict_layers", 0),
    )


def gated_mlp(
    table: Table, prefix: str, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Mlp:
    """Return the description of an MLP whose linear layers have the names ``prefix`` and ``names``."""
    check_sizes(intermediate=width)
    hidden = table.integer("hidden_size")
    gate, up, down = (f"{prefix}.{name}" for name in names)
    return Mlp(table.linear(gate, hidden, width), table.linear(up, hidden, width), table.linear(down, width, hidden))


def settings(decoder: Decoder) -> dict[str, Any]:
    """Return the configuration, under Hugging Face's names, from which `describe` makes a decoder.

    It does not say which projections have biases, and it has no divisors of RoPE frequencies.
    """
    layer = decoder.layers[0]
    attention = layer.mixer
    dense = [layer.feed_forward.down.k for layer in decoder.layers if isinstance(layer.feed_forward, Mlp)]
    return {
        "model_type": decoder.model_type,
        "hidden_size": decoder.hidden,
        **({"intermediate_size": dense[0]} if dense else {}),
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": decoder.vocab,
        "max_position_embeddings": attention.rope.context,
        "rms_norm_eps": decoder.norm.eps,
        "rope_theta": attention.rope.theta,
        "rope_scaling": dict(attention.rope.scaling) or None,
        "tie_word_embeddings": decoder.tied,
        "hidden_act": "silu",
        **({"num_nextn_predict_layers": decoder.extra_layers} if decoder.extra_layers else {}),
    }
