# SPDX-License-Identifier: Apache-2.0
"""The tensor names of GGUF and the Hugging Face names for them, by architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cupy_awq.checkpoint.files import CheckpointError


@dataclass(frozen=True)
class Names:
    """The Hugging Face names of an architecture's tensors by GGUF name.

    Names in ``whole`` have their suffix ".weight" or ".bias", all others do not.

    Attributes:
        outer: the names of the tensors outside of the layers.
        layer: the names in ``model.layers.<i>`` for the names in ``blk.<i>``.
        experts: the name in ``model.layers.<i>``, with {} for the index of the expert, for each name in ``blk.<i>`` of
            a tensor [E, N, K] of all E experts.
        permuted: the projections whose rows GGUF permutes, by GGUF name. The value is the metadata field that holds
            their number of heads, without the prefix "<architecture>.". GGUF interleaves the two halves of each head,
            for a RoPE that rotates adjacent pairs.
        whole: the names in ``model.layers.<i>`` for names in ``blk.<i>``, both with their suffixes.
    """

    outer: Mapping[str, str]
    layer: Mapping[str, str]
    experts: Mapping[str, str]
    permuted: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)

    def to_gguf(self, name: str) -> tuple[str, int | None]:
        """Return the GGUF name for a Hugging Face name with its suffix, and the index of its expert or None.

        An unknown name is returned unchanged.

        >>> DEFAULT.to_gguf("model.layers.3.self_attn.q_proj.weight")
        ('blk.3.attn_q.weight', None)
        >>> DEFAULT.to_gguf("model.layers.0.mlp.experts.7.up_proj.weight")
        ('blk.0.ffn_up_exps.weight', 7)
        """
        stem, _, suffix = name.rpartition(".")
        outer, parts, experts = self._inverses
        if stem in outer:
            return f"{outer[stem]}.{suffix}", None
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
        if layer is None:
            return name, None
        number, part = layer.groups()
        for gguf, whole in self.whole.items():
            if whole == f"{part}.{suffix}":
                return f"blk.{number}.{gguf}", None
        expert = re.fullmatch(r"(.+\.)(\d{1,6})(\.\w+)", part)
        if expert is not None and (of_all := f"{expert[1]}{{}}{expert[3]}") in experts:
            return f"blk.{number}.{experts[of_all]}.{suffix}", int(expert[2])
        if part in parts:
            return f"blk.{number}.{parts[part]}.{suffix}", None
        return name, None

    @cached_property
    def _inverses(self) -> tuple[dict[str, str], ...]:
        return tuple({name: gguf for gguf, name in names.items()} for names in (self.outer, self.layer, self.experts))


DEFAULT = Names(
    outer={"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    layer={
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"attn_{p}": f"self_attn.{p}_proj" for p in "qkv"},
        **{f"attn_{p}_norm": f"self_attn.{p}_norm" for p in "qk"},
        "attn_output": "self_attn.o_proj",
        **{f"ffn_{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")},
    },
    experts={f"ffn_{p}_exps": f"mlp.experts.{{}}.{p}_proj" for p in ("gate", "up", "down")},
)
"""The names of Llama-like architectures, which apply to every architecture that `ARCHITECTURES` does not list."""

_LLAMA = replace(DEFAULT, permuted={"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"})
_GLM_LAYER = {
    **{name: part.replace("shared_expert.", "shared_experts.") for name, part in DEFAULT.layer.items()},
    "post_attention_norm": "post_attention_layernorm",
}
del _GLM_LAYER["ffn_norm"]

ARCHITECTURES: Mapping[str, Names] = {
    "llama": _LLAMA,
    "glm4moe": replace(DEFAULT, layer=_GLM_LAYER, whole={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}),
}
"""The names of the architectures that differ from `DEFAULT`, by ``general.architecture``."""

MIXTRAL = replace(
    _LLAMA,
    layer={**DEFAULT.layer, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        f"ffn_{p}_exps": f"block_sparse_moe.experts.{{}}.{name}"
        for p, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
)
"""The names of the architecture "llama" with experts."""


def find(metadata: Mapping[str, Any]) -> Names:
    """Return the names for the architecture in the metadata of a file."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        return DEFAULT  # a damaged file can hold an array here
    return MIXTRAL if arch == "llama" and "llama.expert_count" in metadata else ARCHITECTURES.get(arch, DEFAULT)


def find_permuted_heads(path: Path, metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of heads of each projection in `Names.permuted`, by GGUF name.

    Raises CheckpointError for a malformed number of heads.
    """
    counts = {}
    for name, key in find(metadata).permuted.items():
        arch = metadata["general.architecture"]
        # The number for a projection that has no field of its own.
        all_heads = metadata.get(f"{arch}.attention.head_count")
        count = metadata.get(f"{arch}.{key}", all_heads)
        if type(count) is not int or count < 1:
            raise CheckpointError(f"{path}: {arch}.{key}: expected a positive integer, got {count!r:.80}")
        counts[name] = count
    return counts
