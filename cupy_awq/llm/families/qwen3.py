# SPDX-License-Identifier: Apache-2.0
"""Qwen3: Llama with an RMSNorm of each head of q and k."""

from __future__ import annotations

from cupy_awq.llm.families import llama
from cupy_awq.llm.families.description import Decoder
from cupy_awq.llm.families.table import Table

MODEL_TYPE = GGUF_ARCHITECTURE = "qwen3"
CLASS = "Qwen3ForCausalLM"
GGUF_KEYS, GGUF_DEFAULTS = llama.GGUF_KEYS, llama.GGUF_DEFAULTS
settings = llama.settings


def describe(table: Table) -> Decoder:
    """Return the description of a Qwen3 model. Raises ValueError for an unsupported configuration."""
    bias = table.flag("attention_bias")
    return llama.describe_like(
        table, MODEL_TYPE, qkv_bias=bias, o_bias=bias, head_norms=True, kv_heads=32, head_dim=128
    )
