# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: Llama with biases of the projections to q, k and v."""

from __future__ import annotations

from cupy_awq.llm.families import llama
from cupy_awq.llm.families.description import Decoder
from cupy_awq.llm.families.table import Table

MODEL_TYPE = GGUF_ARCHITECTURE = "qwen2"
CLASS = "Qwen2ForCausalLM"
GGUF_KEYS, GGUF_DEFAULTS = llama.GGUF_KEYS, llama.GGUF_DEFAULTS
settings = llama.settings


def describe(table: Table) -> Decoder:
    """Return the description of a Qwen2 model. Raises ValueError for an unsupported configuration."""
    table.flag("attention_bias")
    return llama.describe_like(table, MODEL_TYPE, qkv_bias=True, o_bias=False, kv_heads=32)
