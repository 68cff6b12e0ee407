# SPDX-License-Identifier: Apache-2.0
"""The epilogue of ``cuda_src/common/epilogue.cuh``: its compile-time constants, and the refusal of an activation."""

from __future__ import annotations

from cupy_awq.activation import enumerator
from cupy_awq.kernels.dtypes import TYPES

EPILOGUE_ACTIVATIONS = (None, "clamp")
"""The kinds of activation (see `cupy_awq.activation`) of convolutions and of GEMMs of 8-bit x."""


def clamp_refusal(activation: str | None) -> str | None:
    """Return the reason why kernels that can only clamp do not support an activation, or None if they do."""
    if activation not in EPILOGUE_ACTIVATIONS:
        return f"has no activation {activation}, only {', '.join(filter(None, EPILOGUE_ACTIVATIONS))}"
    return None


def epilogue_defines(
    activation: str | None, bias_dtype: str | None, *, gated: bool = False, residual: bool = False
) -> tuple[tuple[str, int | str], ...]:
    """Return the compile-time constants (name, value) of ``EpilogueOptions``."""
    return (
        ("ACTIVATION", enumerator(activation)),
        ("GATED", int(gated)),
        ("HAS_BIAS", int(bias_dtype is not None)),
        ("BIAS", TYPES[bias_dtype or "float16"]),
        ("HAS_RESIDUAL", int(residual)),
    )
