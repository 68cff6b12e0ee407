# SPDX-License-Identifier: Apache-2.0
"""`CheckpointError`, and JSON objects from untrusted files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_JSON_BYTES = 100_000_000
"""The largest header, index and configuration file that is read: the limit of the safetensors format."""

MAX_JSON_DEPTH = 100
"""The deepest nesting of arrays and objects in a JSON text."""

MAX_JSON_VALUES = 1 << 22
"""The most values in a JSON text; a header of 400,000 tensors has as many. Each takes about 80 bytes when parsed."""

_SCAN_BYTES = 1 << 24
"""The bytes of a JSON text that `check_json` scans at a time."""


class CheckpointError(ValueError):
    """An unsupported or damaged checkpoint; the message names the file, and the tensor or module if there is one.

    Names in files are untrusted: the message is one line without control characters, whatever they hold.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    r"""Return a text with escapes for control characters, line ends, invisible characters and lone surrogates.

    >>> print(printable("a\x1b[2Jb\n"))
    a\x1b[2Jb\n
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return a path. Raises TypeError for another type and ValueError for "", which would be the current folder."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected a str or an os.PathLike, got {type(path).__name__}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"path: expected a name of text, got {type(text).__name__}")
    if not text:
        raise ValueError("path: expected a file or a folder, got an empty string")
    try:
        has_nul = b"\0" in os.fsencode(text)
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        has_nul = True
    if has_nul:
        raise ValueError(f"path: expected a name that the file system can hold, got {text!a:.200}")
    return Path(text)


def check_json(text: bytes, where: str) -> None:
    """Raise CheckpointError if a JSON text has more values or deeper nesting than any checkpoint."""
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in text else text
    depth, values, in_string = 0, 1, 0
    for start in range(0, len(plain), _SCAN_BYTES):
        part = np.frombuffer(plain, np.uint8, min(_SCAN_BYTES, len(plain) - start), start)
        quotes = np.cumsum(part == ord('"'), dtype=np.uint8)  # the parity survives the overflow
        outside = (quotes + np.uint8(in_string)) % 2 == 0
        in_string = (in_string + int(quotes[-1])) % 2
        step = _STEPS[part[(_KINDS[part] != 0) & outside]]
        values += int(np.count_nonzero(step >= 0))
        depths = depth + np.cumsum(step, dtype=np.int64)
        if depths.size:
            if depths.max() > MAX_JSON_DEPTH:
                raise CheckpointError(
                    f"{where}: expected JSON nested at most {MAX_JSON_DEPTH} deep, got deeper nesting"
                )
            depth = int(depths[-1])
        if values > MAX_JSON_VALUES:
            raise CheckpointError(f"{where}: expected JSON of at most {MAX_JSON_VALUES} values, got more")


def _byte_table(values: dict[str, int]) -> npt.NDArray[np.int8]:
    """Return int8 [256] with a value for some characters and 0 for all others."""
    table = np.zeros(256, np.int8)
    for characters, value in values.items():
        table[list(characters.encode())] = value
    return table


_KINDS = _byte_table({"[{]},": 1})
_STEPS = _byte_table({"[{": 1, "]}": -1})


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in ``text``.

    Raises CheckpointError, whose message starts with ``where``, for other JSON, malformed JSON, duplicate keys, and
    more values or deeper nesting than any checkpoint has.
    """
    check_json(text, where)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for name, value in pairs:
            if name in table:
                raise ValueError(f"duplicate key {name!r:.200}")
            table[name] = value
        return table

    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected JSON, got {error!s:.400}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError for any other content."""
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_JSON_BYTES} bytes of JSON, got {size}")
    return parse_object(path.read_bytes(), str(path))
