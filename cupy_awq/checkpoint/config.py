# SPDX-License-Identifier: Apache-2.0
"""The quantization part of a checkpoint's configuration, in the words of AutoAWQ and transformers.

``config.json`` carries it as ``quantization_config`` (bits, group_size, zero_point, version, quant_method); older
folders of AutoAWQ carry ``quant_config.json`` or ``quantize_config.json`` (w_bit, q_group_size, zero_point, version).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cupy_awq.checkpoint.files import CheckpointError, read_object

SUPPORTED = "supported: quant_method 'awq', version 'gemm', 4 bits"


@dataclass(frozen=True)
class AwqConfig:
    """What a configuration says of every quantized module; ``zero_point`` None: it does not say."""

    file: Path
    group_size: int
    zero_point: bool | None


def read(folder: Path) -> AwqConfig | None:
    """The configuration of a folder; None if it has none. Raises CheckpointError for a format that is not supported."""
    table = None
    if (file := folder / "config.json").is_file():
        table = read_object(file).get("quantization_config")
    for name in ("quant_config.json", "quantize_config.json"):
        if table is None and (folder / name).is_file():
            file = folder / name
            table = read_object(file)
    if table is None:
        return None
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: expected quantization_config to be an object, got {table!r:.80}")
    method, version = table.get("quant_method"), table.get("version")
    if method is None and version is None:
        raise CheckpointError(f"{file}: expected a quant_method or a version, got neither; {SUPPORTED}")
    if method not in (None, "awq"):
        raise CheckpointError(f"{file}: quant_method is {method!r:.80}; {SUPPORTED}")
    if version is not None and str(version).lower() != "gemm":
        raise CheckpointError(f"{file}: version is {version!r:.80}; {SUPPORTED}")
    bits = table.get("bits", table.get("w_bit"))
    if bits != 4:
        raise CheckpointError(f"{file}: bits is {bits!r:.80}; {SUPPORTED}")
    group_size = table.get("group_size", table.get("q_group_size"))
    if type(group_size) is not int or not (group_size == -1 or group_size > 0):
        raise CheckpointError(f"{file}: expected a group_size of -1 or a positive integer, got {group_size!r:.80}")
    zero_point = table.get("zero_point")
    if not isinstance(zero_point, bool | None):
        raise CheckpointError(f"{file}: expected zero_point to be true or false, got {zero_point!r:.80}")
    return AwqConfig(file, group_size, zero_point)
