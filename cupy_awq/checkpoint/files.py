# SPDX-License-Identifier: Apache-2.0
"""The error of an unusable checkpoint, and JSON read from files that may lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 100_000_000
"""Header, index and configuration files are refused above this size, the limit of the safetensors format."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and, where there is one, the tensor."""


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``text``. ``where`` opens the message of the CheckpointError that anything else raises."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"duplicate key {next(n for n in names if names.count(n) > 1)!r}")
        return table

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected JSON, got {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``; CheckpointError for anything else."""
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_JSON_BYTES} bytes of JSON, got {size}")
    return parse_object(path.read_bytes(), str(path))
