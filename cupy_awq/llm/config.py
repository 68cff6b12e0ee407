# SPDX-License-Identifier: Apache-2.0
"""The configuration of a decoder: its sizes and constants, and the frequencies of its RoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint import CheckpointError

MODEL_TYPES = ("llama", "qwen2", "qwen3")
LIMITS = {"layers": 1 << 10, "heads": 1 << 10, "head_dim": 1 << 10, "hidden": 1 << 17, "intermediate": 1 << 19}
LIMITS |= {"kv_heads": 1 << 10, "vocab": 1 << 22, "context": 1 << 25}
"""The largest accepted sizes, far above any model; a larger one means a damaged file."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a decoder of the Llama family.

    Attributes:
        model_type: "llama", "qwen2" or "qwen3".
        hidden: the width of the residual stream.
        intermediate: the width of the MLP.
        layers: the number of decoder layers.
        heads, kv_heads: the number of query heads, and of key and value heads.
        head_dim: the width of a head.
        vocab: the number of tokens of the vocabulary.
        context: the largest number of positions the model was trained for.
        eps: the epsilon of RMSNorm.
        rope_theta, rope_scaling: the RoPE parameters of a Hugging Face configuration; ``rope_scaling["rope_type"]`` is
            "default", "linear", "llama3" or "yarn", or "factors", which divides each frequency by one of ``factors``.
        tied: True if the output head shares its weight with the embedding table.
        qk_norm: True if each head of q and k passes an RMSNorm before RoPE.

    Raises:
        ValueError: a size is out of range, or rope_scaling is unknown or incomplete.

    >>> ModelConfig("llama", 64, 128, 2, 4, 2, 16, 100, 512).heads
    4
    """

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise ValueError(f"model_type: expected one of {', '.join(MODEL_TYPES)}, got {self.model_type!r:.80}")
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= limit:
                raise ValueError(f"{name}: expected an integer in 1..{limit}, got {value!r:.80}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a multiple of kv_heads={self.kv_heads}, got {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}")
        for name in ("eps", "rope_theta"):
            if not _is_positive(getattr(self, name)):
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)!r:.80}")
        self.rope_frequencies()

    @property
    def q_width(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    def rope_frequencies(self) -> tuple[npt.NDArray[np.float64], float]:
        """Return RoPE's radians per position, float64 [head_dim / 2], and YaRN's factor of cosine and sine (else 1)."""
        plain = self.rope_theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        scaling = self.rope_scaling
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return plain, 1.0
        if kind == "factors":
            factors = np.asarray(scaling["factors"], np.float64)
            if factors.shape != plain.shape or not (np.isfinite(factors) & (factors > 0)).all():
                raise ValueError(
                    f"rope_scaling: factors: expected {plain.size} positive numbers, got shape {factors.shape}"
                )
            return plain / factors, 1.0
        if kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"rope_type: expected default, linear, llama3 or yarn, got {kind!r:.80}")
        factor = self._rope_number("factor")
        if kind == "linear":
            return plain / factor, 1.0
        original = self._rope_number("original_max_position_embeddings", self.context)
        return self._llama3(plain, factor, original) if kind == "llama3" else self._yarn(plain, factor, original)

    def _llama3(
        self, plain: npt.NDArray[np.float64], factor: float, original: float
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Return Llama 3.1's frequencies: those of long waves are divided by ``factor``, with a ramp to short waves."""
        low, high = self._rope_number("low_freq_factor"), self._rope_number("high_freq_factor")
        if low >= high:
            raise ValueError(f"low_freq_factor: expected less than high_freq_factor={high}, got {low}")
        turns = original * plain / (2 * math.pi)  # over the original context
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - kept) * plain / factor + kept * plain, 1.0

    def _yarn(
        self, plain: npt.NDArray[np.float64], factor: float, original: float
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Return YaRN's frequencies and factor (arXiv 2309.00071); the ramp's ends are rounded as in transformers."""

        def pair(turns: float) -> float:
            """Return the index of the frequency that makes ``turns`` turns over the original context."""
            return self.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.rope_theta))

        low = max(math.floor(pair(self._rope_number("beta_fast", 32.0))), 0)
        high = min(math.ceil(pair(self._rope_number("beta_slow", 1.0))), self.head_dim - 1)
        ramp = np.clip((np.arange(plain.size) - low) / max(high - low, 1e-3), 0, 1)
        attention = self._rope_number("attention_factor", max(1.0, 0.1 * math.log(factor) + 1.0))
        return plain * (1 - ramp) + plain / factor * ramp, attention

    def _rope_number(self, name: str, default: float | None = None) -> float:
        value = self.rope_scaling.get(name)
        value = default if value is None else value
        if not _is_positive(value):
            raise ValueError(f"rope_scaling: {name}: expected a positive number, got {value!r:.80}")
        return float(value)  # type: ignore[arg-type]


def from_hugging_face(table: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the configuration in a parsed config.json.

    Raises CheckpointError, whose message opens with ``where``, if it is invalid or of an unsupported model.
    """
    for name, supported in (("hidden_act", "silu"), ("mlp_bias", False), ("use_sliding_window", False)):
        if table.get(name, supported) != supported:
            raise CheckpointError(f"{where}: {name}: expected {supported!r}, got {table[name]!r:.80}")
    rope = table.get("rope_parameters") or table.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{where}: rope_scaling: expected an object, got {rope!r:.80}")
    try:
        heads, hidden = _integer(table, "num_attention_heads"), _integer(table, "hidden_size")
        head_dim = table.get("head_dim")
        return ModelConfig(
            model_type=table.get("model_type", ""),
            hidden=hidden,
            intermediate=_integer(table, "intermediate_size"),
            layers=_integer(table, "num_hidden_layers"),
            heads=heads,
            kv_heads=table.get("num_key_value_heads", heads),
            head_dim=hidden // heads if head_dim is None else head_dim,
            vocab=_integer(table, "vocab_size"),
            context=_integer(table, "max_position_embeddings"),
            eps=table.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", table.get("rope_theta", 10000.0)),
            rope_scaling=rope,
            tied=table.get("tie_word_embeddings", False) is True,
            qk_norm=table.get("model_type") == "qwen3",
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _integer(table: Mapping[str, Any], name: str) -> int:
    value = table.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value!r:.80}")
    return value


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0
