# SPDX-License-Identifier: Apache-2.0
"""The quantization entry of a checkpoint's configuration, as AutoAWQ and transformers write it.

``config.json`` has it under ``quantization_config`` (bits, group_size, zero_point, version, quant_method). Older
AutoAWQ folders have ``quant_config.json`` or ``quantize_config.json`` (w_bit, q_group_size, zero_point, version).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cupy_awq.checkpoint.files import CheckpointError, read_object


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantization entry of a checkpoint's configuration, which holds for every quantized module.

    Attributes:
        file: the configuration file, for error messages.
        format: (quant_method, version), such as ("awq", "gemm").
        group_size: rows of W [K, N] that share a scale; -1 stands for K.
        zero_point: whether modules store zero points; None if the entry does not say.
    """

    file: Path
    format: tuple[str, str]
    group_size: int
    zero_point: bool | None


def read(folder: Path, formats: Collection[tuple[str, str]]) -> QuantizationConfig | None:
    """Return a folder's quantization entry, or None if it has none.

    Raises CheckpointError for a malformed entry, and for one whose format is not in ``formats`` or not of 4 bits.
    """
    entry = None
    if (file := folder / "config.json").is_file():
        entry = read_object(file).get("quantization_config")
    for name in ("quant_config.json", "quantize_config.json"):
        if entry is None and (folder / name).is_file():
            file = folder / name
            entry = read_object(file)
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise CheckpointError(f"{file}: quantization_config: expected an object, got {entry!r:.80}")
    method, version = entry.get("quant_method"), entry.get("version")
    if method is None and version is None:
        raise CheckpointError(f"{file}: quantization_config: expected a quant_method or a version, got neither")
    # AutoAWQ's own files have no quant_method, and some of transformers' no version.
    method, version = "awq" if method is None else method, "gemm" if version is None else version
    found = str(method), str(version).lower()
    if found not in formats:
        supported = " or ".join(f"quant_method {m!r} with version {v!r}" for m, v in formats)
        got = f"quant_method {method!r:.80} with version {version!r:.80}"
        raise CheckpointError(f"{file}: quantization_config: expected {supported}, got {got}")
    bits = entry.get("bits", entry.get("w_bit"))
    if bits != 4:
        raise CheckpointError(f"{file}: bits: expected 4, got {bits!r:.80}")
    group_size = entry.get("group_size", entry.get("q_group_size"))
    if type(group_size) is not int or not (group_size == -1 or group_size > 0):
        raise CheckpointError(f"{file}: group_size: expected -1 or a positive integer, got {group_size!r:.80}")
    zero_point = entry.get("zero_point")
    if not isinstance(zero_point, bool | None):
        raise CheckpointError(f"{file}: zero_point: expected true or false, got {zero_point!r:.80}")
    return QuantizationConfig(file, found, group_size, zero_point)
