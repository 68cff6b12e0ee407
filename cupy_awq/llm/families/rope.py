# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings (RoPE): frequencies of every scaling, and the table of rotations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

SCALING_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
}
"""The supported keys of ``rope_scaling`` for each type of RoPE scaling, in addition to `COMMON_KEYS`."""

COMMON_KEYS = frozenset({"type", "rope_type", "rope_theta"})
"""The keys of ``rope_scaling`` that every type of RoPE scaling supports."""


@dataclass(frozen=True)
class Rope:
    """The rotary position embedding of a head.

    Attributes:
        dim: the number of elements of a head that are rotated, the first ones, in pairs (i, i + dim / 2).
        theta: the base of the frequencies.
        context: the context length in tokens, the default of ``original_max_position_embeddings``.
        scaling: the parameters of RoPE scaling, as in a Hugging Face configuration: ``rope_type``, which is "default",
            "linear", "llama3" or "yarn", and the keys that `SCALING_KEYS` lists for this type.
        divisors: dim / 2 numbers that divide the frequencies (``rope_freqs`` of GGUF); () without divisors.

    Raises:
        ValueError: a field is out of range or not supported, or ``scaling`` is incomplete or has an unknown key.

    >>> Rope(4, 100.0, 64).frequencies()
    (array([1. , 0.1]), 1.0)
    """

    dim: int
    theta: float
    context: int
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not is_positive(self.theta):
            raise ValueError(f"rope_theta: expected a positive number, got {self.theta!r:.80}")
        self.frequencies()

    def table(self, positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the cosines and sines of the rotation at each position, float32 [positions, dim / 2]."""
        frequencies, factor = self.frequencies()
        angles = np.arange(positions)[:, None] * frequencies
        return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)

    def order_heads(self, head_dim: int) -> npt.NDArray[np.int64]:
        """Return the order of a head's elements in which the pairs become (i, i + head_dim / 2).

        >>> Rope(4, 100.0, 64).order_heads(8)
        array([0, 1, 4, 5, 2, 3, 6, 7])
        """
        pairs = np.arange(self.dim).reshape(2, -1)
        others = np.arange(self.dim, head_dim).reshape(2, -1)
        return np.concatenate([pairs, others], axis=1).reshape(-1)

    def frequencies(self) -> tuple[npt.NDArray[np.float64], float]:
        """Return the frequencies in radians per position, float64 [dim / 2], and a factor for cosines and sines.

        The factor differs from 1 only with YaRN. Raises ValueError for invalid parameters.
        """
        kind = self.kind
        if not isinstance(kind, str) or kind not in SCALING_KEYS:
            raise ValueError(f"rope_type: expected {', '.join(SCALING_KEYS)}, got {kind!r:.80}")
        for name in self.scaling:
            if name not in SCALING_KEYS[kind] | COMMON_KEYS:
                known = ", ".join(sorted(SCALING_KEYS[kind])) or "no keys"
                raise ValueError(f"rope_scaling: {name!r:.80}: expected {known} for rope_type {kind!r}, got this key")
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            frequencies, attention = self._scaled(kind)
            if self.divisors:
                if len(self.divisors) != len(frequencies) or not all(map(is_positive, self.divisors)):
                    raise ValueError(f"rope_factors: expected {len(frequencies)} positive numbers, got others")
                frequencies = frequencies / np.asarray(self.divisors, np.float64)
        if not (np.isfinite(frequencies).all() and (frequencies >= 0).all() and is_positive(attention)):
            raise ValueError(f"rope_scaling: expected parameters of finite frequencies, got {self.scaling!s:.200}")
        return frequencies, attention

    @property
    def kind(self) -> Any:
        """The type of RoPE scaling, "default" without scaling."""
        return self.scaling.get("rope_type", self.scaling.get("type", "default"))

    @property
    def scaled_context(self) -> int:
        """The context length with scaling: with YaRN, the original context length times the factor."""
        if self.kind != "yarn":
            return self.context
        original = self._number("original_max_position_embeddings", self.context)
        return round(original * self._yarn_factor(original))

    def unscaled(self) -> npt.NDArray[np.float64]:
        """Return the frequencies without scaling and divisors, float64 [dim / 2]."""
        plain: npt.NDArray[np.float64] = float(self.theta) ** (-np.arange(0, self.dim, 2) / self.dim)
        return plain

    def _scaled(self, kind: str) -> tuple[npt.NDArray[np.float64], float]:
        plain = self.unscaled()
        if kind == "default":
            return plain, 1.0
        if kind == "linear":
            return plain / self._number("factor"), 1.0
        original = self._number("original_max_position_embeddings", self.context)
        if kind == "llama3":
            return self._llama3(plain, self._number("factor"), original)
        return self._yarn(plain, self._yarn_factor(original), original)

    def _yarn_factor(self, original: float) -> float:
        """Return YaRN's scaling factor; if it is null, context / ``original``, as in transformers.

        Raises ValueError if it is missing or not positive.
        """
        if "factor" not in self.scaling:
            raise ValueError("rope_scaling: factor: expected a positive number, got none")
        return self._number("factor", self.context / original)

    def _llama3(
        self, plain: npt.NDArray[np.float64], factor: float, original: float
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Return Llama 3.1's RoPE frequencies (low ones divided by ``factor``) and the factor 1 for cos and sin."""
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        if low >= high:
            raise ValueError(f"low_freq_factor: expected less than high_freq_factor={high}, got {low}")
        turns = original * plain / (2 * math.pi)  # periods of each frequency in the original context
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - kept) * plain / factor + kept * plain, 1.0

    def _yarn(
        self, plain: npt.NDArray[np.float64], factor: float, original: float
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Return YaRN's frequencies and its factor for cos and sin (arXiv 2309.00071), computed as in transformers."""
        if self.theta <= 1:
            raise ValueError(f"rope_theta: expected above 1 for rope_type 'yarn', got {self.theta}")
        truncate = self.scaling.get("truncate", True)
        if type(truncate) is not bool:
            raise ValueError(f"rope_scaling: truncate: expected true or false, got {truncate!r:.80}")

        def pair(turns: float) -> float:
            """Return the fractional index of the frequency that has ``turns`` periods in the original context."""
            waves = original / (turns * 2 * math.pi)
            if not is_positive(waves):
                raise ValueError(f"rope_scaling: beta_fast, beta_slow: expected numbers of turns, got {turns}")
            return self.dim * math.log(waves) / (2 * math.log(self.theta))

        low, high = pair(self._number("beta_fast", 32.0)), pair(self._number("beta_slow", 1.0))
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        width = high - low or 0.001  # like transformers, accept a negative width (beta_slow > beta_fast)
        ramp = np.clip((np.arange(plain.size) - low) / width, 0, 1)
        scale, scale_all = (self._number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
        log_factor = 0.1 * math.log(max(factor, 1.0))
        ratio = (scale * log_factor + 1) / (scale_all * log_factor + 1) if scale and scale_all else log_factor + 1
        return plain * (1 - ramp) + plain / factor * ramp, self._number("attention_factor", ratio)

    def _number(self, name: str, default: float | None = None) -> float:
        """Return the positive number ``scaling[name]``, or ``default`` if it is missing or null.

        If ``name`` starts with "mscale", 0 also gives the default. Raises ValueError for any other value, and if the
        default is needed but None.
        """
        value = self.scaling.get(name)
        if value is None or (name.startswith("mscale") and _is_number(value) and value == 0):
            value = default
        if (value != default and not is_positive(value)) or value is None:
            raise ValueError(f"rope_scaling: {name}: expected a positive number, got {value!r:.80}")
        return float(value)


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite float, or an integer within the range of float64."""
    return (type(value) is int and abs(value) < 1 << 1023) or (type(value) is float and math.isfinite(value))


def is_positive(value: Any) -> bool:
    """Return whether a value is a positive finite number."""
    return _is_number(value) and value > 0
