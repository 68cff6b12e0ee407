# SPDX-License-Identifier: Apache-2.0
"""Upload of linear layers to the GPU, optionally with their columns in the activation order of the next layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint import Module
from cupy_awq.linear import AwqLinear
from cupy_awq.llm.files.model_files import DenseLinear, Int8Linear
from cupy_awq.packing import pack_int4, unpack_int4
from cupy_awq.weight import PackedWeight


def awq_linear(part: Module, batch_invariant: bool) -> AwqLinear:
    """Return the layer for a module whose arrays are on the GPU; a repacked layer does not keep its AWQ tensors."""
    weight, bias, order = part.weight, part.bias, part.order
    return AwqLinear(weight, bias=bias, keep_weight=False, batch_invariant=batch_invariant, order=order)


def take_columns(part: DenseLinear | Int8Linear, order: npt.NDArray[np.int32] | None) -> DenseLinear | Int8Linear:
    """Return a dense or 8-bit layer whose columns of y are permuted by ``order``; None keeps their order."""
    if order is None:
        return part
    dense = part.dequantize() if isinstance(part, Int8Linear) else part  # no format has both 8-bit codes and an order
    return DenseLinear(dense.weight[order], None if dense.bias is None else dense.bias[order])


def to_gpu(part: Module, column_order: npt.NDArray[np.int32] | None = None) -> Module:
    """Return a quantized layer with its arrays on the GPU and its columns permuted by ``column_order``."""
    import cupy

    columns = None if column_order is None else cupy.asarray(column_order)

    def place(a: npt.NDArray[Any] | None, *, is_packed: bool = False) -> Any:
        b = None if a is None else cupy.asarray(a)
        if b is None or columns is None:
            return b
        return pack_int4(unpack_int4(b)[:, columns]) if is_packed else cupy.ascontiguousarray(b[..., columns])

    weight = part.weight
    zeros = place(weight.qzeros, is_packed=weight.spec.zeros == "packed")
    placed = PackedWeight(place(weight.qweight, is_packed=True), place(weight.scales), zeros)
    return Module(placed, place(part.bias), None if part.order is None else cupy.asarray(part.order))


def form(part: Module) -> tuple[Any, ...]:
    """Return the properties of a layer that must be equal for layers to be concatenated."""
    spec = part.weight.spec
    return spec.k, spec.group_size, spec.dtype, spec.zeros, None if part.order is None else part.order.tobytes()
