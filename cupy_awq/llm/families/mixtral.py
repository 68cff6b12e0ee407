# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Llama with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupy_awq.llm.families import llama
from cupy_awq.llm.families.description import Decoder, Experts, Router
from cupy_awq.llm.families.table import Table

MODEL_TYPE = "mixtral"
GGUF_ARCHITECTURE = "llama"
CLASS = "MixtralForCausalLM"
GGUF_KEYS: Mapping[str, str] = {
    **llama.GGUF_KEYS,
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
GGUF_DEFAULTS = llama.GGUF_DEFAULTS


def describe(table: Table) -> Decoder:
    """Return the description of a Mixtral model. Raises ValueError for an unsupported configuration."""
    table.require(sliding_window=None)
    table = table.with_defaults(rope_theta=1e6, rms_norm_eps=1e-5)
    count, width = table.integer("num_local_experts"), table.integer("intermediate_size")
    linear = table.linear("block_sparse_moe.gate", table.integer("hidden_size"), count)
    expert = llama.gated_mlp(table, "block_sparse_moe.experts.{}", width, ("w1", "w3", "w2"))
    experts = Experts(Router(linear, table.integer("num_experts_per_tok")), expert)
    return llama.describe_like(
        table, MODEL_TYPE, qkv_bias=False, o_bias=False, kv_heads=8, feed_forward=lambda index: experts
    )


def settings(decoder: Decoder) -> dict[str, Any]:
    """Return the configuration from which `describe` makes a decoder; see `llama.settings`."""
    experts = next(layer.feed_forward for layer in decoder.layers if isinstance(layer.feed_forward, Experts))
    return {
        **llama.settings(decoder),
        "intermediate_size": experts.expert.down.k,
        "num_local_experts": experts.router.linear.n,
        "num_experts_per_tok": experts.router.top_k,
    }
