# SPDX-License-Identifier: Apache-2.0
"""`save`: quantized weights and plain arrays as a checkpoint that `load` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq import check, checkpoint
from cupy_awq.check import Array
from cupy_awq.checkpoint import Contents, Module, ModuleSpec, Tensor
from cupy_awq.checkpoint.files import check_path
from cupy_awq.checkpoint.module import Pending
from cupy_awq.checkpoint.write import write_file
from cupy_awq.linear import AwqLinear
from cupy_awq.weight import PackedWeight

FORMAT = "compressed-tensors"
"""The format that `save` writes, the only one that holds symmetric weights, an order and several group sizes."""


def save(path: str | os.PathLike[str], weights: Mapping[str, PackedWeight | AwqLinear | Array], /) -> None:
    """Write weights and arrays by name as a checkpoint in the format compressed-tensors, which `load` reads.

    Codes, scales, zero points, biases and orders are read as they were, bit by bit. An existing checkpoint at ``path``
    is replaced in one step: after an error or a kill, the old one or the new one is complete.

    Args:
        path: the folder to write, or a file name that ends in ".safetensors".
        weights: a `PackedWeight`, an `AwqLinear` without activation, of which weight, bias and order are written, or a
            plain array for each name; on the CPU or a GPU. A layer's ``x_dtype`` is not written.

    Raises:
        OSError: a file cannot be written, or the folder has safetensors files of another checkpoint.
        TypeError: an argument has an unsupported type.
        ValueError: the format cannot hold a weight (float offsets, or K is not a multiple of 8), a layer has an
            activation or has freed its weight, or two names clash. In this case nothing is written.

    >>> import tempfile
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cupy_awq.save(folder, {"up_proj": weight})
    ...     print(cupy_awq.load(folder, device="cpu")["up_proj"].shape)
    (32, 16)
    """
    target = check_path(path)
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: expected a mapping from names to weights, got {type(weights).__name__}")
    contents = Contents({_check_name(name): _make_entry(name, item) for name, item in weights.items()}, "", FORMAT)

    def check_result(result: Path) -> None:
        if differing := set(weights) ^ set(checkpoint.read(result)):
            raise ValueError(f"weights: expected names that do not clash, got {min(differing)!r:.200}")

    if target.suffix == ".safetensors":
        write_file(target, contents, FORMAT, check=check_result)
    else:
        checkpoint.save(target, contents, FORMAT, check=check_result)


def _check_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"weights: expected names of type str, got {type(name).__name__}")
    if not name:
        raise ValueError("weights: expected names, got an empty one")
    return name


def _make_entry(name: str, item: Any) -> Pending | Tensor:
    """Return a weight as a module of a checkpoint, or an array as a tensor, both on the CPU."""
    if isinstance(item, PackedWeight):
        return _make_module(item, None, None)
    if isinstance(item, AwqLinear):
        if item.activation is not None:
            raise ValueError(
                f"weights: {name!r:.200}: expected a layer without activation, got {item.activation!r:.80}"
            )
        return _make_module(item.weight, item.bias, item.order)
    check.device_id(item, f"weights: {name!r:.200}")
    return Tensor(_to_host(item), Path())


def _make_module(weight: PackedWeight, bias: Array | None, order: Array | None) -> Pending:
    spec = ModuleSpec(
        *weight.shape,
        weight.group_size,
        weight.spec.zeros,
        weight.dtype,
        has_order=order is not None,
        bias_dtype=None if bias is None else bias.dtype,
    )

    def convert() -> Module:
        zeros = None if weight.qzeros is None else _to_host(weight.qzeros)
        packed = PackedWeight(_to_host(weight.qweight), _to_host(weight.scales), zeros)
        return Module(packed, *(None if array is None else _to_host(array) for array in (bias, order)))

    return Pending(spec, convert)


def _to_host(array: Array) -> np.ndarray[Any, Any]:
    """Return an array in host memory, contiguous along all axes."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.get(), order="C")
