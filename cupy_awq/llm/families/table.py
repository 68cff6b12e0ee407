# SPDX-License-Identifier: Apache-2.0
"""`Table`: the values of a config.json, validated one by one as a family reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupy_awq.llm.families.description import LinearSpec
from cupy_awq.llm.families.rope import Rope


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

    def flag(self, name: str) -> bool:
        """Return a boolean, False if it is missing. Raises ValueError for other values."""
        value = self.values.get(name, False)
        if type(value) is not bool:
            raise ValueError(f"{name}: expected true or false, got {value!r:.80}")
        return value

    def require(self, **supported: Any) -> None:
        """Raise ValueError unless each value is missing or the given one, which alone is supported."""
        for name, expected in supported.items():
            if self.values.get(name, expected) != expected:
                raise ValueError(f"{name}: expected {expected!r}, got {self.values[name]!r:.80}")

    def rope(self, dim: int, context: int) -> Rope:
        """Return the RoPE of heads of width ``dim``, whose parameters are ``rope_scaling`` or ``rope_parameters``.

        Raises ValueError for parameters that are invalid or not supported.
        """
        scaling = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if not isinstance(scaling, dict):
            raise ValueError(f"rope_scaling: expected an object, got {scaling!r:.80}")
        original = self.values.get("original_max_position_embeddings")
        if original is not None and scaling.get("rope_type", scaling.get("type")) in ("llama3", "yarn"):
            scaling = {**scaling, "original_max_position_embeddings": original}
        theta = scaling.get("rope_theta")
        theta = self.values.get("rope_theta", 10000.0) if theta is None else theta
        scaling = {name: value for name, value in scaling.items() if name != "rope_theta"}
        if scaling in ({"type": "default"}, {"rope_type": "default"}):
            scaling = {}
        return Rope(dim, theta, context, scaling, self.divisors)
