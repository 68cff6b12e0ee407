# SPDX-License-Identifier: Apache-2.0
"""The types of arrays and options in signatures, for type checkers."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypedDict, TypeVar

from cupy_awq.check import Array, StridedArray

ArrayT = TypeVar("ArrayT", bound=StridedArray)
"""The type of x and of the result: a NumPy array or a CuPy array."""


class CudaArray(Protocol):
    """The type of an array of another library on a GPU, for which the result is a CuPy array."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


ActivationName = Literal["relu", "relu6", "silu", "gelu", "swiglu"]
"""The names of activations (`cupy_awq.activation.ACTIVATIONS`)."""

AnyActivation = ActivationName | tuple[float, float] | None
"""The activations of a GEMM: a name, (low, high) to clamp, or None."""

Clamp = Literal["relu", "relu6"] | tuple[float, float] | None
"""The activations of operations on block-quantized weights."""


class LayerOptions(TypedDict, total=False):
    """The keyword arguments of a call of a `cupy_awq.AwqLinear` layer, all optional."""

    residual: Array | None
    out: Array | None
    dtype: Any


class GemvOptions(LayerOptions, total=False):
    """The keyword arguments of `cupy_awq.gemv`, all optional."""

    bias: Array | None
    activation: AnyActivation
    kernel: str | None


class GemmOptions(GemvOptions, total=False):
    """The keyword arguments of `cupy_awq.gemm`, all optional."""

    split_k: int | None
    batch_invariant: bool
