# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5, 4.6 and 4.7: experts chosen by sigmoids with a correction bias, a shared expert, dense first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupy_awq.llm.families import llama, qwen3_moe
from cupy_awq.llm.families.description import Decoder, Experts, Mlp, Router
from cupy_awq.llm.families.table import Table

MODEL_TYPE = "glm4_moe"
GGUF_ARCHITECTURE = "glm4moe"
CLASS = "Glm4MoeForCausalLM"
GGUF_KEYS: Mapping[str, str] = {
    **llama.GGUF_KEYS,
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
}
GGUF_DEFAULTS: Mapping[str, Any] = {
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}


def describe(table: Table) -> Decoder:
    """Return the description of a GLM-4.5 model. Raises ValueError for an unsupported configuration."""
    table = table.with_defaults(rms_norm_eps=1e-5, topk_group=1)
    width = table.integer("moe_intermediate_size")
    groups, kept = table.integer("n_group", 1), table.integer("topk_group")
    router = Router(
        table.linear("mlp.gate", table.integer("hidden_size"), table.integer("n_routed_experts")),
        table.integer("num_experts_per_tok"),
        table.flag("norm_topk_prob", default=True),
        "sigmoid",
        "mlp.gate.e_score_correction_bias",
        (groups, kept) if groups > 1 else None,
        table.number("routed_scaling_factor", 1.0),
    )
    shared = llama.gated_mlp(table, "mlp.shared_experts", width * table.integer("n_shared_experts", 1))
    experts = Experts(router, llama.gated_mlp(table, "mlp.experts.{}", width), shared)
    first = table.values.get("first_k_dense_replace", 1)
    if type(first) is not int or first < 0:
        raise ValueError(f"first_k_dense_replace: expected an integer that is not negative, got {first!r:.80}")
    return llama.describe_like(
        table,
        MODEL_TYPE,
        qkv_bias=table.flag("attention_bias"),
        o_bias=False,
        head_norms=table.flag("use_qk_norm"),
        kv_heads=8,
        rotated=table.rotated_part(0.5),
        feed_forward=lambda index: qwen3_moe.dense(table) if index < first else experts,
    )


def settings(decoder: Decoder) -> dict[str, Any]:
    """Return the configuration from which `describe` makes a decoder; see `llama.settings`.

    Unlike there, it has the biases of q, k and v unless the files decide.
    """
    blocks, attention = [layer.feed_forward for layer in decoder.layers], decoder.layers[0].mixer
    experts = next(block for block in blocks if isinstance(block, Experts))
    router, width = experts.router, experts.expert.down.k
    groups = router.groups or (1, 1)
    return {
        **llama.settings(decoder),
        "partial_rotary_factor": attention.rope.dim / attention.head_dim,
        "attention_bias": bool(attention.q.bias),
        "use_qk_norm": attention.q_norm is not None,
        "n_routed_experts": router.linear.n,
        "num_experts_per_tok": router.top_k,
        "moe_intermediate_size": width,
        "n_shared_experts": 1 if experts.shared is None else experts.shared.down.k // width,
        "first_k_dense_replace": sum(isinstance(block, Mlp) for block in blocks),
        "norm_topk_prob": router.renormalize,
        "routed_scaling_factor": router.scale,
        "n_group": groups[0],
        "topk_group": groups[1],
        "num_nextn_predict_layers": decoder.extra_layers,
    }
