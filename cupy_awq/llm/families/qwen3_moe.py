# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupy_awq.llm.families import llama
from cupy_awq.llm.families.description import Decoder, Experts, Mlp, Router
from cupy_awq.llm.families.table import Table

MODEL_TYPE = "qwen3_moe"
GGUF_ARCHITECTURE = "qwen3moe"
CLASS = "Qwen3MoeForCausalLM"
GGUF_KEYS: Mapping[str, str] = {
    **{name: key for name, key in llama.GGUF_KEYS.items() if name != "intermediate_size"},
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
}
GGUF_DEFAULTS: Mapping[str, Any] = {"norm_topk_prob": True}


def describe(table: Table) -> Decoder:
    """Return the description of a Qwen3-MoE model. Raises ValueError for an unsupported configuration."""
    bias = table.flag("attention_bias")
    experts = describe_experts(table, renormalize=table.flag("norm_topk_prob"))
    return llama.describe_like(
        table,
        MODEL_TYPE,
        qkv_bias=bias,
        o_bias=bias,
        head_norms=True,
        kv_heads=4,
        feed_forward=lambda index: experts if is_sparse(table, index) else dense(table),
    )


def describe_experts(table: Table, renormalize: bool, **shared: Any) -> Experts:
    """Return the experts of Qwen's models; ``shared`` has the fields of `Experts` for a shared expert."""
    count = table.integer("num_experts")
    linear = table.linear("mlp.gate", table.integer("hidden_size"), count)
    router = Router(linear, table.integer("num_experts_per_tok"), renormalize)
    return Experts(router, llama.gated_mlp(table, "mlp.experts.{}", table.integer("moe_intermediate_size")), **shared)


def dense(table: Table) -> Mlp:
    """Return the MLP of a layer without experts."""
    return llama.gated_mlp(table, "mlp", table.integer("intermediate_size"))


def is_sparse(table: Table, index: int) -> bool:
    """Return whether a layer has experts: every ``decoder_sparse_step``-th one that ``mlp_only_layers`` does not list.

    Raises ValueError if one of them is malformed.
    """
    dense_layers = table.values.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(type(layer) is not int for layer in dense_layers):
        raise ValueError(f"mlp_only_layers: expected a list of integers, got {dense_layers!r:.80}")
    return index not in dense_layers and (index + 1) % table.integer("decoder_sparse_step", 1) == 0


def settings(decoder: Decoder) -> dict[str, Any]:
    """Return the configuration from which `describe` makes a decoder; see `llama.settings`."""
    blocks = [layer.feed_forward for layer in decoder.layers]
    experts = next(block for block in blocks if isinstance(block, Experts))
    return {
        **llama.settings(decoder),
        "num_experts": experts.router.linear.n,
        "num_experts_per_tok": experts.router.top_k,
        "moe_intermediate_size": experts.expert.down.k,
        "norm_topk_prob": experts.router.renormalize,
        "mlp_only_layers": [i for i, block in enumerate(blocks) if isinstance(block, Mlp)],
    }
