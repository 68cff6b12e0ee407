# SPDX-License-Identifier: Apache-2.0
"""Qwen2-MoE (Qwen1.5-MoE): Qwen2 with experts, and a shared expert whose result a sigmoid multiplies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupy_awq.llm.families import llama, qwen3_moe
from cupy_awq.llm.families.description import Decoder, Experts
from cupy_awq.llm.families.table import Table

MODEL_TYPE = "qwen2_moe"
GGUF_ARCHITECTURE = "qwen2moe"
CLASS = "Qwen2MoeForCausalLM"
GGUF_KEYS: Mapping[str, str] = {
    **qwen3_moe.GGUF_KEYS,
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
GGUF_DEFAULTS: Mapping[str, Any] = {"norm_topk_prob": False}


def describe(table: Table) -> Decoder:
    """Return the description of a Qwen2-MoE model. Raises ValueError for an unsupported configuration."""
    width = table.integer("shared_expert_intermediate_size")
    shared = llama.gated_mlp(table, "mlp.shared_expert", width)
    gate = table.linear("mlp.shared_expert_gate", table.integer("hidden_size"), 1)
    renormalize = table.flag("norm_topk_prob")
    experts = qwen3_moe.describe_experts(table, renormalize=renormalize, shared=shared, shared_gate=gate)
    return llama.describe_like(
        table,
        MODEL_TYPE,
        qkv_bias=True,
        o_bias=False,
        kv_heads=16,
        feed_forward=lambda index: experts if qwen3_moe.is_sparse(table, index) else qwen3_moe.dense(table),
    )


def settings(decoder: Decoder) -> dict[str, Any]:
    """Return the configuration from which `describe` makes a decoder; see `llama.settings`."""
    shared = (layer.feed_forward.shared for layer in decoder.layers if isinstance(layer.feed_forward, Experts))
    width = next(mlp.down.k for mlp in shared if mlp is not None)
    return {**qwen3_moe.settings(decoder), "shared_expert_intermediate_size": width}
