# SPDX-License-Identifier: Apache-2.0
"""`CheckpointError`, and JSON objects from untrusted files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 100_000_000
"""The largest header, index and configuration file that is read: the limit of the safetensors format."""


class CheckpointError(ValueError):
    """An unsupported or damaged checkpoint; the message names the file, and the tensor or module if there is one."""


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in ``text``.

    Raises CheckpointError, whose message starts with ``where``, for other JSON, malformed JSON and duplicate keys.
    """

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
    """Return the JSON object in a file. Raises CheckpointError for any other content."""
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_JSON_BYTES} bytes of JSON, got {size}")
    return parse_object(path.read_bytes(), str(path))
