# SPDX-License-Identifier: Apache-2.0
"""The experts of mixture-of-experts layers: conversion between one module per expert and stacked tensors [E, ...].

A file holds either one module ``<layer>.experts.<index>.<projection>`` per expert, or fused tensors [E, ...] for all E
experts, named ``<layer>.switch_mlp.<projection>`` (MLX) or ``<layer>.experts.<projection>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint.files import CheckpointError, check_count
from cupy_awq.checkpoint.module import Module
from cupy_awq.checkpoint.module_tensors import ModuleTensors
from cupy_awq.checkpoint.tensors import Tensor

Array = npt.NDArray[Any]

FUSED_PARTS = ("packed", "scale", "zero_point", "shape", "g_idx")
"""The suffixes of fused tensors whose names join module and part with an underscore instead of a dot."""

FUSED = ("switch_mlp", "experts")
"""The name components that mark a fused module, which holds all experts of a layer."""


MIXTRAL_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""The names of the projections of an expert of Mixtral and MiniMax-M2 by those in MLX's files."""


def rename_fused(names: Iterable[str]) -> dict[str, str]:
    """Map the names of fused tensors that join module and part with an underscore to the usual names, with a dot.

    compressed-tensors has written ``experts.gate_up_proj_packed`` for ``experts.gate_up_proj.weight_packed``.

    >>> rename_fused(["mlp.experts.down_proj_packed", "mlp.gate_scale"])
    {'mlp.experts.down_proj_packed': 'mlp.experts.down_proj.weight_packed'}
    """
    parts: dict[str, tuple[str, str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        if parent.rpartition(".")[2] == "experts":
            for part in FUSED_PARTS:
                if last.endswith(f"_{part}"):
                    parts[name] = name.removesuffix(f"_{part}"), part
    return {name: f"{module}.weight_{part}" for name, (module, part) in parts.items() if f"{module}_packed" in parts}


def name_expert(name: str, expert: int) -> str | None:
    """Return the module name of one expert of the fused module ``name``, or None if ``name`` is not a fused module.

    >>> name_expert("model.layers.0.mlp.switch_mlp.up_proj", 3)
    'model.layers.0.mlp.experts.3.up_proj'
    >>> name_expert("model.layers.0.block_sparse_moe.switch_mlp.up_proj", 3)
    'model.layers.0.block_sparse_moe.experts.3.w3'
    """
    parent, _, projection = name.rpartition(".")
    layer, _, fused = parent.rpartition(".")
    if fused not in FUSED:
        return None
    if fused == "switch_mlp" and layer.rpartition(".")[2] == "block_sparse_moe":
        projection = MIXTRAL_PROJECTIONS.get(projection, projection)
    return f"{layer}.experts.{expert}.{projection}" if layer else f"experts.{expert}.{projection}"


def split(name: str, file: Path, tensors: Mapping[str, Tensor], codes: str) -> Iterator[tuple[str, ModuleTensors]]:
    """Yield (module name, tensors) for the module ``name``, or for each expert if its codes are fused (three axes).

    Args:
        name: the name of the module.
        file: the file of its codes, for error messages.
        tensors: the tensors of the module by suffix; each expert gets views of these tensors.
        codes: the suffix of the codes.

    Raises:
        CheckpointError: the first axes of the tensors differ, or the codes have three axes, but ``name`` is not the
            name of a fused module; or there are too many experts.
    """
    array = tensors[codes].array
    if array.ndim != 3:
        yield name, ModuleTensors(name, file, codes, tensors)
        return
    count = len(array)
    where = f"{file}: module {name!r:.200}"
    if name_expert(name, 0) is None or 0 in array.shape:
        raise CheckpointError(f"{where}: {codes}: expected two axes, got shape {list(array.shape)}")
    check_count(count, where)
    for part, tensor in tensors.items():
        if part != "weight_shape" and tensor.array.shape[:1] != (count,):
            found = list(tensor.array.shape)
            raise CheckpointError(f"{where}: {part}: expected {count} experts as {codes} has, got shape {found}")
    for expert in range(count):
        slices = {part: Tensor(_slice(part, tensor.array, expert), file) for part, tensor in tensors.items()}
        yield str(name_expert(name, expert)), ModuleTensors(name, file, codes, slices, expert)


def _slice(part: str, array: Array, expert: int) -> Array:
    if part == "weight_shape" and array.ndim == 1:
        return array[-2:]
    return np.asarray(array[expert])


class StackedExperts(NamedTuple):
    """The weights of all E experts of one projection, stacked to one array each.

    A grouped GEMM takes them: row i of y is ``x[i] @ W[e] + bias[e]``, with the expert e of the row and W[e] [K, N].
    """

    qweight: Array
    """The codes, int32 [E, K, N/8]."""
    scales: Array
    """The scales, float16 or bfloat16 [E, K/G, N]."""
    qzeros: Array | None
    """The zero points, int32 [E, K/G, N/8], or float offsets [E, K/G, N]; None if every zero point is 8."""
    bias: Array | None
    """The biases [E, N], or None without biases."""
    order: npt.NDArray[np.int32] | None
    """The permutation of the columns of x for each expert, int32 [E, K]; None if no expert has one."""


def stack(
    contents: Mapping[str, Module | Tensor], layer: str, projection: str, count: int | None = None
) -> StackedExperts:
    """Stack the weights of the modules ``<layer>.experts.<index>.<projection>`` of all experts.

    Args:
        contents: a checkpoint from `cupy_awq.checkpoint.read`. Each expert is converted once.
        layer: the prefix of the names before ".experts", such as "model.layers.0.mlp".
        projection: the name after the expert's index, such as "up_proj".
        count: the number of experts of the model; None for one more than the largest index in ``contents``.

    Raises:
        CheckpointError: an expert is missing, or differs from expert 0 in its shape, group size, dtype, form of the
            zero points, or dtype of the bias; the message names the first such expert. Or there are too many.
    """
    prefix, suffix = f"{layer}.experts.", f".{projection}"
    if count is None:
        middles = [
            name[len(prefix) : -len(suffix)] for name in contents if name.startswith(prefix) and name.endswith(suffix)
        ]
        # 20 digits suffice: more exceed every limit too, and can take long to convert to an integer.
        indices = (int(middle[:20]) for middle in middles if middle.isascii() and middle.isdigit())
        count = 1 + max(indices, default=0)
    check_count(count, f"module {layer!r:.200}")
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
    return StackedExperts(qweight, scales, qzeros, bias, order)


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
