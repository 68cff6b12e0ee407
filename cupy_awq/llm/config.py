# SPDX-License-Identifier: Apache-2.0
"""The configuration of a decoder: sizes, constants and RoPE frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint import CheckpointError

MODEL_TYPES = ("llama", "qwen2", "qwen3")
LIMITS = {"layers": 1 << 10, "heads": 1 << 10, "head_dim": 1 << 10, "hidden": 1 << 17, "intermediate": 1 << 19}
LIMITS |= {"kv_heads": 1 << 10, "vocab": 1 << 22, "context": 1 << 25}
"""The largest accepted value of each size, far above that of any model: a larger value indicates a damaged file."""

ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
}
"""The supported keys of ``rope_scaling`` for each type of RoPE scaling, in addition to `COMMON_ROPE_KEYS`."""

COMMON_ROPE_KEYS = frozenset({"type", "rope_type", "rope_theta"})
"""The keys of ``rope_scaling`` that every type of RoPE scaling supports."""

REQUIRED = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "partial_rotary_factor": 1.0}
"""The entries of config.json that could change the architecture, each with its default, the only supported value."""

DEFAULTS: dict[str, dict[str, int]] = {
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""The default values of sizes that config.json may omit, as in transformers, by model type."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a decoder of the Llama family.

    Attributes:
        model_type: "llama", "qwen2" or "qwen3".
        hidden: the width of the residual stream, in elements.
        intermediate: the width of the MLP, in elements.
        layers: the number of decoder layers.
        heads, kv_heads: the number of query heads, and the number of key-value heads.
        head_dim: the width of a head, in elements.
        vocab: the number of tokens in the vocabulary.
        context: the context length that the model was trained for, in tokens.
        eps: the epsilon of RMSNorm.
        rope_theta: the base of the RoPE frequencies.
        rope_scaling: the parameters of RoPE scaling, as in a Hugging Face configuration: ``rope_type``, which is
            "default", "linear", "llama3" or "yarn", and the keys that `ROPE_KEYS` lists for this type.
        rope_factors: head_dim / 2 divisors, one for each RoPE frequency (``rope_freqs`` of GGUF); () without divisors.
        tied: whether the output head shares its weight with the embedding table.
        qk_norm: whether an RMSNorm is applied to each head of q and k before RoPE.
        biases: the names of the projections with a bias, such as "q_proj"; None to apply all biases in the file (GGUF).

    Raises:
        ValueError: a field is out of range or not supported, or rope_scaling is incomplete or has an unknown key.

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
    rope_factors: tuple[float, ...] = ()
    tied: bool = False
    qk_norm: bool = False
    biases: frozenset[str] | None = None

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
        """The total width of all query heads in elements, heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The total width of all key heads (and of all value heads) in elements, kv_heads * head_dim."""
        return self.kv_heads * self.head_dim

    def rope_frequencies(self) -> tuple[npt.NDArray[np.float64], float]:
        """Return the RoPE frequencies in radians per position, float64 [head_dim / 2], and a factor for cos and sin.

        The factor differs from 1 only with YaRN. Raises ValueError for invalid RoPE parameters.
        """
        kind = self.rope_scaling.get("rope_type", self.rope_scaling.get("type", "default"))
        if not isinstance(kind, str) or kind not in ROPE_KEYS:
            raise ValueError(f"rope_type: expected {', '.join(ROPE_KEYS)}, got {kind!r:.80}")
        for name in self.rope_scaling:
            if name not in ROPE_KEYS[kind] | COMMON_ROPE_KEYS:
                known = ", ".join(sorted(ROPE_KEYS[kind])) or "no keys"
                raise ValueError(f"rope_scaling: {name!r:.80}: expected {known} for rope_type {kind!r}, got this key")
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            frequencies, attention = self._scaled_frequencies(kind)
            if self.rope_factors:
                if len(self.rope_factors) != len(frequencies) or not all(map(_is_positive, self.rope_factors)):
                    raise ValueError(f"rope_factors: expected {len(frequencies)} positive numbers, got others")
                frequencies = frequencies / np.asarray(self.rope_factors, np.float64)
        if not (np.isfinite(frequencies).all() and (frequencies >= 0).all() and _is_positive(attention)):
            raise ValueError(f"rope_scaling: expected parameters of finite frequencies, got {self.rope_scaling!s:.200}")
        return frequencies, attention

    def _scaled_frequencies(self, kind: str) -> tuple[npt.NDArray[np.float64], float]:
        plain = float(self.rope_theta) ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        if kind == "default":
            return plain, 1.0
        if kind == "linear":
            return plain / self._rope_number("factor"), 1.0
        original = self._rope_number("original_max_position_embeddings", self.context)
        if kind == "llama3":
            return self._llama3(plain, self._rope_number("factor"), original)
        return self._yarn(plain, self._yarn_factor(original), original)

    def _yarn_factor(self, original: float) -> float:
        """Return YaRN's scaling factor; if it is null, context / ``original``, as in transformers.

        Raises ValueError if it is missing or not positive.
        """
        if "factor" not in self.rope_scaling:
            raise ValueError("rope_scaling: factor: expected a positive number, got none")
        return self._rope_number("factor", self.context / original)

    def _llama3(
        self, plain: npt.NDArray[np.float64], factor: float, original: float
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Return Llama 3.1's RoPE frequencies (low ones divided by ``factor``) and the factor 1 for cos and sin."""
        low, high = self._rope_number("low_freq_factor"), self._rope_number("high_freq_factor")
        if low >= high:
            raise ValueError(f"low_freq_factor: expected less than high_freq_factor={high}, got {low}")
        turns = original * plain / (2 * math.pi)  # periods of each frequency in the original context
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - kept) * plain / factor + kept * plain, 1.0

    def _yarn(
        self, plain: npt.NDArray[np.float64], factor: float, original: float
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Return YaRN's frequencies and its factor for cos and sin (arXiv 2309.00071), computed as in transformers."""
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta: expected above 1 for rope_type 'yarn', got {self.rope_theta}")
        truncate = self.rope_scaling.get("truncate", True)
        if type(truncate) is not bool:
            raise ValueError(f"rope_scaling: truncate: expected true or false, got {truncate!r:.80}")

        def pair(turns: float) -> float:
            """Return the fractional index of the frequency that has ``turns`` periods in the original context."""
            waves = original / (turns * 2 * math.pi)
            if not _is_positive(waves):
                raise ValueError(f"rope_scaling: beta_fast, beta_slow: expected numbers of turns, got {turns}")
            return self.head_dim * math.log(waves) / (2 * math.log(self.rope_theta))

        low, high = pair(self._rope_number("beta_fast", 32.0)), pair(self._rope_number("beta_slow", 1.0))
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        width = high - low or 0.001  # like transformers, accept a negative width (beta_slow > beta_fast)
        ramp = np.clip((np.arange(plain.size) - low) / width, 0, 1)
        scale, scale_all = (self._rope_number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
        log_factor = 0.1 * math.log(max(factor, 1.0))
        ratio = (scale * log_factor + 1) / (scale_all * log_factor + 1) if scale and scale_all else log_factor + 1
        return plain * (1 - ramp) + plain / factor * ramp, self._rope_number("attention_factor", ratio)

    def _rope_number(self, name: str, default: float | None = None) -> float:
        """Return the positive number ``rope_scaling[name]``, or ``default`` if it is missing or null.

        If ``name`` starts with "mscale", 0 also gives the default. Raises ValueError for any other value, and if the
        default is needed but None.
        """
        value = self.rope_scaling.get(name)
        if value is None or (name.startswith("mscale") and _is_number(value) and value == 0):
            value = default
        if (value != default and not _is_positive(value)) or value is None:
            raise ValueError(f"rope_scaling: {name}: expected a positive number, got {value!r:.80}")
        return float(value)


def from_hugging_face(table: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the configuration for ``table``, a parsed config.json.

    Raises CheckpointError, whose message starts with ``where``, if the table is invalid or the model not supported.
    """
    for name, supported in REQUIRED.items():
        if table.get(name, supported) != supported:
            raise CheckpointError(f"{where}: {name}: expected {supported!r}, got {table[name]!r:.80}")
    kinds = table.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise CheckpointError(f"{where}: layer_types: expected 'full_attention' for every layer, got {kinds!r:.80}")
    rope = table.get("rope_scaling") or table.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{where}: rope_scaling: expected an object, got {rope!r:.80}")
    try:
        return _from_tables(table, rope)
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _from_tables(table: Mapping[str, Any], rope: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration for ``table``, a parsed config.json, and the RoPE parameters ``rope``.

    Raises ValueError if a value is invalid or not supported.
    """
    model_type = table.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type: expected one of {', '.join(MODEL_TYPES)}, got {model_type!r:.80}")
    table = {**DEFAULTS.get(model_type, {}), **table}
    tied = table.get("tie_word_embeddings", False)
    if type(tied) is not bool:
        raise ValueError(f"tie_word_embeddings: expected true or false, got {tied!r:.80}")
    original = table.get("original_max_position_embeddings")
    if original is not None and rope.get("rope_type", rope.get("type")) in ("llama3", "yarn"):
        rope = {**rope, "original_max_position_embeddings": original}
    heads, hidden = _integer(table, "num_attention_heads"), _integer(table, "hidden_size")
    head_dim, kv_heads = table.get("head_dim"), table.get("num_key_value_heads")
    theta = rope.get("rope_theta")
    return ModelConfig(
        model_type=model_type,
        hidden=hidden,
        intermediate=_integer(table, "intermediate_size"),
        layers=_integer(table, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=hidden // heads if head_dim is None else head_dim,
        vocab=_integer(table, "vocab_size"),
        context=_integer(table, "max_position_embeddings"),
        eps=table.get("rms_norm_eps", 1e-6),
        rope_theta=table.get("rope_theta", 10000.0) if theta is None else theta,
        rope_scaling=rope,
        tied=tied,
        qk_norm=model_type == "qwen3",
        biases=frozenset(_biases(model_type, table.get("attention_bias", False))),
    )


def _biases(model_type: str, attention_bias: Any) -> Sequence[str]:
    """Return the names of the attention projections that have a bias in transformers."""
    if type(attention_bias) is not bool:
        raise ValueError(f"attention_bias: expected true or false, got {attention_bias!r:.80}")
    if model_type == "qwen2":
        return "q_proj", "k_proj", "v_proj"
    return ("q_proj", "k_proj", "v_proj", "o_proj") if attention_bias else ()


def _integer(table: Mapping[str, Any], name: str) -> int:
    value = table.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value!r:.80}")
    return value


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite float, or an integer within the range of float64."""
    return (type(value) is int and abs(value) < 1 << 1023) or (type(value) is float and math.isfinite(value))


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0
