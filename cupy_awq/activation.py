# SPDX-License-Identifier: Apache-2.0
"""The activations of GEMM epilogues: their public names, and their NumPy formulas for the CPU path.

To add an activation, follow ``.github/contributing/activation.md``. Operations on block-quantized weights support the
activations in ``EPILOGUE_ACTIVATIONS`` (`cupy_awq.kernels.epilogue`) and raise ValueError for all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

F32 = np.float32
LIMIT, SLOPE = F32(7), F32(1.702)
"""The bound of gate and up, and the factor in the sigmoid, of the kind "clampedsilu", the SwiGLU of gpt-oss."""


class Activation(NamedTuple):
    """The activation that an epilogue applies to x @ W + bias, with its parameters."""

    kind: str | None = None
    """The name of the function: a key of `FUNCTIONS`, "clamp" (to ``limits``), "clampedsilu", or None (identity)."""
    limits: tuple[float, float] = (0.0, 0.0)
    """The bounds (low, high) of "clamp"; unused by other kinds."""
    gated: bool = False
    """Whether the result is activation(first half of the columns) * (second half of the columns)."""

    def __call__(self, v: Any) -> Any:
        """Apply the activation to float32 or float64 values [..., N]. If it is gated, [M, N] becomes [M, N/2].

        >>> Activation("clamp", (0.0, 6.0))(np.array([[-1.0, 7.0]], np.float32))
        array([[0., 6.]], dtype=float32)
        """
        if self.gated:
            half = v.shape[1] // 2
            if self.kind == "clampedsilu":
                gate, up = np.minimum(v[:, :half], LIMIT), np.clip(v[:, half:], -LIMIT, LIMIT)
                return gate / (F32(1) + np.exp(-SLOPE * gate)) * (up + F32(1))
            return self._replace(gated=False)(v[:, :half]) * v[:, half:]
        if self.kind == "clamp":
            return np.clip(v, F32(self.limits[0]), F32(self.limits[1]))
        return v if self.kind is None else FUNCTIONS[self.kind](v)


def _silu(v: Any) -> Any:
    """Return v * sigmoid(v)."""
    return v / (F32(1) + np.exp(-v))


def _gelu(v: Any) -> Any:
    """Return GELU(v) in the tanh approximation."""
    inner = F32(0.7978845608028654) * (v + F32(0.044715) * v * v * v)
    return F32(0.5) * v * (F32(1) + np.tanh(inner))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {"silu": _silu, "gelu": _gelu}
"""The element-wise functions by name; each has an enumerator in ``cuda_src/common/epilogue.cuh``."""

ACTIVATIONS = {
    "relu": Activation("clamp", (0.0, math.inf)),
    "relu6": Activation("clamp", (0.0, 6.0)),
    **{name: Activation(name) for name in FUNCTIONS},
    "swiglu": Activation("silu", gated=True),
}
"""The activations that users can name, such as "swiglu"."""


def enumerator(kind: str | None) -> str:
    """Return the name of the enumerator for `Activation.kind` in ``cuda_src/common/epilogue.cuh``.

    >>> enumerator("silu"), enumerator(None)
    ('kSilu', 'kNone')
    """
    return f"k{(kind or 'none').capitalize()}"
