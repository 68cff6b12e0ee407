# SPDX-License-Identifier: Apache-2.0
"""The quantization entry of a checkpoint folder's configuration files.

``config.json`` holds the entry under ``quantization`` (MLX), ``compression_config`` (early compressed-tensors) or
``quantization_config`` (other formats); in a multimodal model, the last two may be inside ``text_config``. Older
AutoGPTQ and AutoAWQ folders have a separate file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupy_awq.checkpoint import replacement
from cupy_awq.checkpoint.files import MAX_SETTINGS_NAMES, CheckpointError, read_object

FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
"""The names of separate files that contain only the entry, in order of precedence."""

MLX = "quantization"
HUGGING_FACE = "quantization_config"
COMPRESSION = "compression_config"


@dataclass(frozen=True)
class Entry:
    """The quantization entry of a configuration.

    Attributes:
        file: the path of the configuration file, for error messages.
        key: the key of the entry in ``config.json``, or "" if the file contains nothing but the entry.
        table: the entry as parsed from JSON.
    """

    file: Path
    key: str
    table: Mapping[str, Any]


def read(folder: Path) -> Entry | None:
    """Return the quantization entry of a folder, or None without one.

    Raises CheckpointError if the entry is malformed.
    """
    if (file := replacement.find(folder, "config.json")).is_file():
        table = read_object(file, MAX_SETTINGS_NAMES)
        text = table.get("text_config")
        mlx = table.get(MLX)
        if isinstance(mlx, dict) and "bits" in mlx:
            return Entry(file, MLX, mlx)
        for parent in (table, text if isinstance(text, dict) else {}):
            for key in (HUGGING_FACE, COMPRESSION):
                if parent.get(key) is not None:
                    return _make_entry(file, key, parent[key])
    for name in FILES:
        if (file := folder / name).is_file():
            return _make_entry(file, "", read_object(file, MAX_SETTINGS_NAMES))
    return None


def _make_entry(file: Path, key: str, table: Any) -> Entry:
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: {key}: expected an object, got {table!r:.80}")
    return Entry(file, key, table)
