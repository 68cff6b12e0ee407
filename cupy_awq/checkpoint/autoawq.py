# SPDX-License-Identifier: Apache-2.0
"""The AutoAWQ "gemm" layout: ``<module>.qweight``, ``.scales``, ``.qzeros`` and ``.bias`` become one packed weight.

The layout is already the canonical one, so nothing is repacked here. A module is quantized where it has a ``qweight``;
those that a configuration excludes (``modules_to_not_convert``) have none and come out as the plain tensors they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq import check
from cupy_awq.checkpoint.config import AwqConfig
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.weight import PackedWeight


class Tensor(NamedTuple):
    """A view of a mapped file, and the file."""

    array: npt.NDArray[Any]
    file: Path


class Module(NamedTuple):
    """A quantized linear module on the CPU; its arrays are views of mapped files."""

    weight: PackedWeight
    bias: npt.NDArray[Any] | None


def gather(tensors: Mapping[str, Tensor], config: AwqConfig | None) -> dict[str, Module | Tensor]:
    """Quantized modules by their name, all other tensors by theirs, in the order of the file.

    Raises CheckpointError for a module whose tensors do not fit together or do not fit ``config``.
    """
    found: dict[str, Module | Tensor] = {}
    used = set()
    for name, tensor in tensors.items():
        module, suffix = _split(name)
        if suffix == "qweight":
            prefix = name.removesuffix("qweight")
            parts = {part: tensors.get(prefix + part) for part in ("scales", "qzeros", "bias")}
            found[module] = _module(tensor, parts, config, f"{tensor.file}: module {module!r}")
            used.update([name, *(prefix + part for part, value in parts.items() if value is not None)])
    for name, tensor in tensors.items():
        if name in used:
            continue
        if _split(name)[1] == "qzeros":
            raise CheckpointError(f"{tensor.file}: tensor {name!r}: expected a qweight beside it, got none")
        if name in found:
            raise CheckpointError(f"{tensor.file}: tensor {name!r}: a quantized module has the same name")
        found[name] = tensor
    return found


def _split(name: str) -> tuple[str, str]:
    module, _, suffix = name.rpartition(".")
    return module, suffix


def _module(qweight: Tensor, parts: dict[str, Tensor | None], config: AwqConfig | None, where: str) -> Module:
    scales, qzeros, bias = parts["scales"], parts["qzeros"], parts["bias"]
    if scales is None:
        raise CheckpointError(f"{where}: expected scales beside qweight, got none")
    if qzeros is None and config is not None and config.zero_point:
        raise CheckpointError(f"{where}: expected qzeros, since zero_point is true in {config.file}, got none")
    if qzeros is not None and qzeros.array.dtype != np.int32:
        raise CheckpointError(f"{where}: expected qzeros of int32, got {qzeros.array.dtype}")
    try:
        weight = PackedWeight(qweight.array, scales.array, None if qzeros is None else qzeros.array)
        if bias is not None:
            check.bias(bias.array, weight.shape[1])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from None
    if config is not None:
        expected = weight.shape[0] if config.group_size == -1 else config.group_size
        if weight.group_size != expected:
            raise CheckpointError(
                f"{where}: expected group_size {expected} of {config.file}, got {weight.group_size} from the shapes"
            )
    return Module(weight, None if bias is None else bias.array)
