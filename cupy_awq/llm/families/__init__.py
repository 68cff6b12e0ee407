# SPDX-License-Identifier: Apache-2.0
"""The families of decoders: how a configuration becomes a `Decoder`, and how formats name its parts.

A family is a module of this package with the attributes of `Family`; `FAMILIES` finds all of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from cupy_awq.llm.families.description import Decoder
from cupy_awq.llm.families.table import Table


@runtime_checkable
class Family(Protocol):
    """A family of decoders.

    Attributes:
        MODEL_TYPE: the ``model_type`` of Hugging Face.
        GGUF_ARCHITECTURE: the ``general.architecture`` of GGUF.
        CLASS: the name of the class in transformers.
        GGUF_KEYS: the metadata field of GGUF, after the architecture, for each name of config.json.
        GGUF_DEFAULTS: the values for metadata fields that a file need not have, by name of config.json.
    """

    @property
    def MODEL_TYPE(self) -> str: ...
    @property
    def GGUF_ARCHITECTURE(self) -> str: ...
    @property
    def CLASS(self) -> str: ...
    @property
    def GGUF_KEYS(self) -> Mapping[str, str]: ...
    @property
    def GGUF_DEFAULTS(self) -> Mapping[str, Any]: ...

    def describe(self, table: Table) -> Decoder:
        """Return the description for a configuration. Raises ValueError if it is invalid or not supported."""
        ...

    def settings(self, decoder: Decoder) -> dict[str, Any]:
        """Return the configuration, under Hugging Face's names, from which `describe` makes a decoder.

        It does not say which projections have biases, and it has no divisors of RoPE frequencies.
        """
        ...


_MODULES = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
FAMILIES: Mapping[str, Family] = {module.MODEL_TYPE: module for module in _MODULES if isinstance(module, Family)}
"""The families by model type."""


def find(model_type: Any) -> Family:
    """Return the family that serves a model type. Raises ValueError if there is none."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type: expected one of {', '.join(FAMILIES)}, got {model_type!r:.80}")
    return FAMILIES[model_type]


def find_gguf(architecture: str, has_experts: bool) -> Family:
    """Return the family that serves a ``general.architecture`` of GGUF. Raises ValueError if there is none."""
    known = {
        (family.GGUF_ARCHITECTURE, "num_experts_per_tok" in family.GGUF_KEYS): family for family in FAMILIES.values()
    }
    if (architecture, has_experts) not in known:
        names = ", ".join(dict.fromkeys(name for name, _ in known))
        found = f"{architecture!r:.80} {'with' if has_experts else 'without'} experts"
        raise ValueError(f"general.architecture: expected one of {names}, got {found}")
    return known[architecture, has_experts]


def describe(table: Table) -> Decoder:
    """Return the description of a decoder for its configuration, whose ``model_type`` names the family.

    Raises ValueError if the configuration is invalid or not supported.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> table = Table({"model_type": "llama", **sizes, "vocab_size": 100, "max_position_embeddings": 512})
    >>> [linear.name for linear in describe(table).layers[0].linears][:3]
    ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj']
    """
    return find(table.values.get("model_type")).describe(table)
