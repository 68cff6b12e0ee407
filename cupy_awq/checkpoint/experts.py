# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture-of-experts layer: a key for each expert, and the stacked weights of all.

Files hold ``<layer>.experts.<E>.<projection>`` for each expert, or tensors [E, ...] of all: MLX under
``<layer>.switch_mlp.<projection>``, fused modules under ``<layer>.experts.<projection>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.module import Parts
from cupy_awq.checkpoint.tensors import Module, Tensor

Array = npt.NDArray[Any]

FUSED = ("switch_mlp", "experts")
"""The names of a module that holds all experts of a layer."""


def name_expert(name: str, expert: int) -> str | None:
    """Return the key of one expert of a fused module, or None for the name of another module.

    >>> name_expert("model.layers.0.mlp.switch_mlp.up_proj", 3)
    'model.layers.0.mlp.experts.3.up_proj'
    """
    parent, _, projection = name.rpartition(".")
    layer, _, fused = parent.rpartition(".")
    if fused not in FUSED:
        return None
    return f"{layer}.experts.{expert}.{projection}" if layer else f"experts.{expert}.{projection}"


def split(name: str, file: Path, tensors: Mapping[str, Tensor], codes: str) -> Iterator[tuple[str, Parts]]:
    """Yield key and tensors of a module, or of each expert where its codes have three axes, as views.

    Raises CheckpointError for tensors whose first axes differ, and for three axes in a module without experts.
    """
    array = tensors[codes].array
    if array.ndim != 3:
        yield name, Parts(name, file, codes, tensors)
        return
    count = len(array)
    where = f"{file}: module {name!r:.200}"
    if name_expert(name, 0) is None or 0 in array.shape:
        raise CheckpointError(f"{where}: {codes}: expected two axes, got shape {list(array.shape)}")
    for part, tensor in tensors.items():
        if part != "weight_shape" and tensor.array.shape[:1] != (count,):
            found = list(tensor.array.shape)
            raise CheckpointError(f"{where}: {part}: expected {count} experts as {codes} has, got shape {found}")
    for expert in range(count):
        slices = {part: Tensor(_slice(part, tensor.array, expert, count), file) for part, tensor in tensors.items()}
        yield str(name_expert(name, expert)), Parts(name, file, codes, slices, expert)


def _slice(part: str, array: Array, expert: int, count: int) -> Array:
    if part == "weight_shape" and array.ndim == 1:
        return array[-2:]
    return np.asarray(array[expert])


class Stack(NamedTuple):
    """The weights of all experts of one projection, for a grouped product."""

    qweight: Array
    """Codes [E, K, N/8] int32."""
    scales: Array
    """Scales [E, K/G, N]."""
    qzeros: Array | None
    """Zero points [E, K/G, N/8] int32 or offsets [E, K/G, N]; None where every zero point is 8."""
    bias: Array | None
    """Biases [E, N], or None."""
    order: npt.NDArray[np.int32] | None
    """The permutation of x for each expert, [E, K]; None where no expert has one."""


def stack(contents: Mapping[str, Module | Tensor], layer: str, projection: str, count: int | None = None) -> Stack:
    """Return the stacked weights of ``<layer>.experts.<E>.<projection>`` for all E.

    Args:
        contents: a checkpoint, as `cupy_awq.checkpoint.read` returns it. Each expert is converted once.
        layer: the name before ``.experts``, such as "model.layers.0.mlp".
        projection: the name after the number, such as "up_proj".
        count: the number of experts that the model has; None for those up to the largest number.

    Raises:
        CheckpointError: a missing expert, or experts of different forms; the message names the first such one.
    """
    prefix, suffix = f"{layer}.experts.", f".{projection}"
    if count is None:
        middles = [
            name[len(prefix) : -len(suffix)] for name in contents if name.startswith(prefix) and name.endswith(suffix)
        ]
        count = 1 + max((int(middle) for middle in middles if middle.isascii() and middle.isdigit()), default=0)
    first = _read_expert(contents, f"{prefix}0{suffix}")
    arrays: list[Any] = [
        None if part is None else np.empty((count, *part.shape), part.dtype) for part in _list_arrays(first)
    ]
    order = None
    for expert in range(count):
        name = f"{prefix}{expert}{suffix}"
        module = first if expert == 0 else _read_expert(contents, name)
        expected, found = _describe(first), _describe(module)
        if expected != found:
            raise CheckpointError(f"module {name!r:.200}: expected {expected} as expert 0 has, got {found}")
        for target, part in zip(arrays, _list_arrays(module), strict=True):
            if target is not None:
                target[expert] = part
        if module.order is not None:
            if order is None:
                order = np.tile(np.arange(module.weight.shape[0], dtype=np.int32), (count, 1))
            order[expert] = module.order
    qweight, scales, qzeros, bias = arrays
    return Stack(qweight, scales, qzeros, bias, order)


def _list_arrays(module: Module) -> tuple[Array | None, ...]:
    weight = module.weight
    return weight.qweight, weight.scales, weight.qzeros, module.bias


def _read_expert(contents: Mapping[str, Module | Tensor], name: str) -> Module:
    module = contents.get(name)
    if not isinstance(module, Module):
        found = "none" if module is None else "a dense tensor"
        raise CheckpointError(f"module {name!r:.200}: expected a quantized expert, got {found}")
    return module


def _describe(module: Module) -> str:
    (k, n), weight = module.weight.shape, module.weight
    bias = "no bias" if module.bias is None else f"a bias of {module.bias.dtype}"
    zeros = "symmetric" if weight.qzeros is None else str(weight.spec.zeros)
    return f"K={k}, N={n}, group_size={weight.group_size}, {zeros} zeros, {weight.dtype}, {bias}"
