# SPDX-License-Identifier: Apache-2.0
"""The activations of the epilogue: what a user may name, and their formulas in float32 NumPy.

To add one, add its formula to FUNCTIONS here, and its enumerator and case to ``cuda_src/common/epilogue.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

F32 = np.float32


class Activation(NamedTuple):
    """The activation that an epilogue applies to x @ W + bias."""

    kind: str | None = None
    """A key of FUNCTIONS, "clamp" (to ``limits``) or None."""
    limits: tuple[float, float] = (0.0, 0.0)
    """The lowest and highest result of "clamp"."""
    gated: bool = False
    """Whether the activated first half of the columns multiplies the second half."""

    def __call__(self, v: Any) -> Any:
        """Return the activation of float32 values [M, N], which has N/2 columns if gated.

        >>> Activation("clamp", (0.0, 6.0))(np.array([[-1.0, 7.0]], np.float32))
        array([[0., 6.]], dtype=float32)
        """
        if self.gated:
            half = v.shape[1] // 2
            return self._replace(gated=False)(v[:, :half]) * v[:, half:]
        if self.kind == "clamp":
            return np.clip(v, F32(self.limits[0]), F32(self.limits[1]))
        return v if self.kind is None else FUNCTIONS[self.kind](v)


def _silu(v: Any) -> Any:
    """Return v * sigmoid(v)."""
    return v / (F32(1) + np.exp(-v))


def _gelu(v: Any) -> Any:
    """Return GELU in its tanh form."""
    inner = F32(0.7978845608028654) * (v + F32(0.044715) * v * v * v)
    return F32(0.5) * v * (F32(1) + np.tanh(inner))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {"silu": _silu, "gelu": _gelu}
"""The formulas, by the name of the activation; ``kSilu`` of epilogue.cuh is "silu" here."""

ACTIVATIONS = {
    "relu": Activation("clamp", (0.0, math.inf)),
    "relu6": Activation("clamp", (0.0, 6.0)),
    **{name: Activation(name) for name in FUNCTIONS},
    "swiglu": Activation("silu", gated=True),
}
"""The activations that have a name."""


def enumerator(kind: str | None) -> str:
    """Return the enumerator of an activation's kind in ``cuda_src/common/epilogue.cuh``.

    >>> enumerator("silu"), enumerator(None)
    ('kSilu', 'kNone')
    """
    return f"k{(kind or 'none').capitalize()}"
