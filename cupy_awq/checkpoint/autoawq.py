# SPDX-License-Identifier: Apache-2.0
"""The AutoAWQ "gemm" format: ``<module>.qweight``, ``.scales``, ``.qzeros`` and ``.bias`` make one module.

The tensors already have the layout of `PackedWeight`, so none is repacked or copied. A module without a ``qweight``
(``modules_to_not_convert`` in the configuration) was not quantized; its tensors stay plain.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cupy_awq import check
from cupy_awq.checkpoint.config import QuantizationConfig
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.tensors import Module, Tensor
from cupy_awq.weight import PackedWeight


def read_modules(tensors: Mapping[str, Tensor], config: QuantizationConfig | None) -> dict[str, Module | Tensor]:
    """Return the quantized modules and the remaining tensors by name, in the order of ``tensors``.

    Raises CheckpointError for a module whose tensors contradict each other or ``config``.
    """
    contents: dict[str, Module | Tensor] = {}
    used = set()
    for name, tensor in tensors.items():
        module, suffix = _split(name)
        if suffix == "qweight":
            prefix = name.removesuffix("qweight")
            parts = {part: tensors.get(prefix + part) for part in ("scales", "qzeros", "bias")}
            contents[module] = _module(tensor, parts, config, f"{tensor.file}: module {module!r}")
            used.update([name, *(prefix + part for part, value in parts.items() if value is not None)])
    for name, tensor in tensors.items():
        if name in used:
            continue
        if _split(name)[1] == "qzeros":
            raise CheckpointError(f"{tensor.file}: tensor {name!r}: expected a qweight beside it, got none")
        if name in contents:
            raise CheckpointError(f"{tensor.file}: tensor {name!r}: expected a unique name, got that of a module")
        contents[name] = tensor
    return contents


def _split(name: str) -> tuple[str, str]:
    """Return (module, suffix) of a tensor's name; the module is "" for a tensor at the root."""
    module, _, suffix = name.rpartition(".")
    return module, suffix


def _module(
    qweight: Tensor, parts: Mapping[str, Tensor | None], config: QuantizationConfig | None, where: str
) -> Module:
    """Return the module of validated tensors. ``where`` starts the message of a CheckpointError."""
    scales, qzeros, bias = parts["scales"], parts["qzeros"], parts["bias"]
    if scales is None:
        raise CheckpointError(f"{where}: scales: expected a tensor beside qweight, got none")
    if qzeros is None and config is not None and config.zero_point:
        raise CheckpointError(f"{where}: qzeros: expected a tensor since {config.file} has zero_point true, got none")
    if qzeros is not None and qzeros.array.dtype != np.int32:
        raise CheckpointError(f"{where}: qzeros: expected int32, got {qzeros.array.dtype}")
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
                f"{where}: group_size: expected {expected} as in {config.file}, got {weight.group_size} from the shapes"
            )
    return Module(weight, None if bias is None else bias.array)
