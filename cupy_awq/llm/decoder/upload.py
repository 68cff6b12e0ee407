# SPDX-License-Identifier: Apache-2.0
"""Upload of linear layers to the GPU, optionally with their columns in the activation order of the next layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.checkpoint import Module
from cupy_awq.linear import AwqLinear
from cupy_awq.llm.files.model_files import DenseLinear, Int8Module
from cupy_awq.packing import namespace, pack_int4, unpack_int4
from cupy_awq.runtime import placement
from cupy_awq.weight import PackedWeight


def awq_linear(part: Module, batch_invariant: bool) -> AwqLinear:
    """Return the layer for a module whose arrays are on the GPU; a repacked layer does not keep its AWQ tensors."""
    weight, bias, order = part.weight, part.bias, part.order
    return AwqLinear(weight, bias=bias, keep_weight=False, batch_invariant=batch_invariant, order=order)


def take_columns(part: DenseLinear | Int8Module, order: Array | None) -> DenseLinear | Int8Module:
    """Return a dense or 8-bit layer whose columns of y are permuted by ``order``; None keeps their order."""
    if order is None:
        return part
    # no format with 8-bit codes has an activation order
    dense = part.dequantize() if isinstance(part, Int8Module) else part
    return DenseLinear(dense.weight[order], None if dense.bias is None else dense.bias[order])


def take_module_columns(part: Module, order: Array | None) -> Module:
    """Return a quantized layer whose columns of y are permuted by ``order``, on its device; None keeps them."""
    if order is None:
        return part

    def take(a: Array, is_packed: bool) -> Array:
        return pack_int4(unpack_int4(a)[:, order]) if is_packed else namespace(a).ascontiguousarray(a[:, order])

    weight, bias = part.weight, None if part.bias is None else part.bias[order]
    zeros = None if weight.qzeros is None else take(weight.qzeros, weight.spec.zeros == "packed")
    return Module(PackedWeight(take(weight.qweight, True), take(weight.scales, False), zeros), bias, part.order)


def to_gpu(part: Module, index: int, column_order: npt.NDArray[np.int32] | None = None) -> Module:
    """Return a quantized layer with its arrays on GPU ``index`` and its columns permuted by ``column_order``."""

    def place(a: Array | None) -> Any:
        return None if a is None else placement.to_device(a, index)

    weight = part.weight
    placed = PackedWeight(place(weight.qweight), place(weight.scales), place(weight.qzeros))
    return take_module_columns(Module(placed, place(part.bias), place(part.order)), place(column_order))


def form(part: Module) -> tuple[Any, ...]:
    """Return the properties of a layer that must be equal for layers to be concatenated."""
    spec = part.weight.spec
    return spec.k, spec.group_size, spec.dtype, spec.zeros, None if part.order is None else part.order.tobytes()
