# SPDX-License-Identifier: Apache-2.0
"""`Table`: the values of a config.json, validated one by one as a family reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cupy_awq.llm.families.description import LinearSpec
from cupy_awq.llm.families.rope import Rope, is_positive


@dataclass(frozen=True)
class Table:
    """The configuration of a model under Hugging Face's names.

    Attributes:
        values: the parsed config.json, or what another format stores under the names of config.json.
        divisors: the divisors of the RoPE frequencies, which only GGUF stores (`Rope.divisors`).
        biases_as_stored: whether the files decide which linear layers have a bias, as GGUF has no field for it.

    >>> Table({"hidden_size": 64}).integer("hidden_size")
    64
    """

    values: Mapping[str, Any]
    divisors: tuple[float, ...] = ()
    biases_as_stored: bool = False

    def with_defaults(self, **defaults: Any) -> Table:
        """Return the configuration with values for names that it does not have."""
        return replace(self, values={**defaults, **self.values})

    def linear(self, name: str, k: int, n: int, bias: bool = False) -> LinearSpec:
        """Return the description of a linear layer; ``bias`` says whether it has a bias in transformers."""
        return LinearSpec(name, k, n, None if self.biases_as_stored else bias)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; ``default`` replaces a missing value, null and 0. Raises ValueError for others."""
        value = self.values.get(name)
        if not value and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: expected a positive integer, got {value!r:.80}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a positive number; ``default`` replaces a missing value and null. Raises ValueError for others."""
        value = self.values.get(name)
        if value is None:
            return default
        if not is_positive(value):
            raise ValueError(f"{name}: expected a positive number, got {value!r:.80}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean; ``default`` replaces a missing value. Raises ValueError for other values."""
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise ValueError(f"{name}: expected true or false, got {value!r:.80}")
        return value

    def require(self, **supported: Any) -> None:
        """Raise ValueError unless each value is missing or the given one, which alone is supported."""
        for name, expected in supported.items():
            if self.values.get(name, expected) != expected:
                raise ValueError(f"{name}: expected {expected!r}, got {self.values[name]!r:.80}")

    def rotated_part(self, default: float) -> float:
        """Return the part of a head that RoPE rotates, ``partial_rotary_factor``; ``default`` replaces a missing one.

        Raises ValueError unless it is positive and at most 1.
        """
        inner = self._rope_parameters()
        part = Table(inner if "partial_rotary_factor" in inner else self.values).number(
            "partial_rotary_factor", default
        )
        if part > 1:
            raise ValueError(f"partial_rotary_factor: expected at most 1, got {part}")
        return part

    def _rope_parameters(self) -> dict[str, Any]:
        scaling = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if not isinstance(scaling, dict):
            raise ValueError(f"rope_scaling: expected an object, got {scaling!r:.80}")
        return scaling

    def rope(self, head_dim: int, context: int, rotated: float = 1.0) -> Rope:
        """Return the RoPE of heads, whose parameters are ``rope_scaling`` or ``rope_parameters``.

        ``rotated`` is the part of a head that is rotated. Raises ValueError for parameters that are invalid or not
        supported.
        """
        scaling = self._rope_parameters()
        original = self.values.get("original_max_position_embeddings")
        if original is not None and scaling.get("rope_type", scaling.get("type")) in ("llama3", "yarn"):
            scaling = {**scaling, "original_max_position_embeddings": original}
        theta = scaling.get("rope_theta")
        theta = self.values.get("rope_theta", 10000.0) if theta is None else theta
        read = {"rope_theta": scaling.get("rope_theta"), "partial_rotary_factor": rotated}
        scaling = {name: value for name, value in scaling.items() if name not in read or value != read[name]}
        if scaling in ({"type": "default"}, {"rope_type": "default"}):
            scaling = {}
        return Rope(int(head_dim * rotated), theta, context, scaling, self.divisors)
