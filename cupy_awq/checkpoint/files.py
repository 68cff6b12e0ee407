# SPDX-License-Identifier: Apache-2.0
"""`CheckpointError`, validation of paths, and parsing of JSON objects from untrusted files."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import re
import stat
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

MAX_JSON_BYTES = 100_000_000
"""The largest size in bytes of a header, index or configuration file: the limit of the safetensors format."""

MAX_JSON_DEPTH = 100
"""The deepest accepted nesting of arrays and objects in a JSON text."""

MAX_JSON_VALUES = 1 << 22
"""The largest accepted number of values in a JSON text, enough for a safetensors header of 400,000 tensors.

A parsed value takes about 80 bytes, so the limit bounds the memory to about 340 MB.
"""

MAX_JSON_NAMES = 1 << 21
"""The largest accepted number of object keys in a JSON text. A parsed key takes about 200 bytes."""

MAX_SETTINGS_NAMES = 1 << 18
"""The largest accepted number of object keys in a configuration, which is parsed in less than a second.

A tokenizer's settings with 16,384 added tokens have 115,000. Twice as many values are accepted.
"""

MAX_MODULES = 1 << 17
"""The largest accepted number of modules and tensors in a checkpoint, counting each expert.

The largest models have about 70,000. Each takes a few hundred bytes, but its tensors can have two bytes in the file.
"""

MAX_TENSORS = 400_000
"""The largest accepted number of tensors in all files of a checkpoint together.

The largest models have about 300,000. Each takes about 1 kB of memory, but only about 50 bytes of a header.
"""

MAX_NAME_BYTES = 255
"""The maximum length of a file name on common file systems, in bytes."""

_SCAN_BYTES = 1 << 24
"""The number of bytes of a JSON text that `check_json` scans at a time."""


LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of a Git LFS pointer: a text of three lines in the place of a large file that was not downloaded."""

HUB_NAME = re.compile(
    r"(?:https?:/{1,2}huggingface\.co/|hf\.co/|hf:/{1,2})?([\w-][\w.-]*/[\w-][\w.-]*)"
    r"(?:[:@][\w.-]+|/(?:tree|blob|resolve)/.*)?/?"
)
"""The regular expression for the name or address of a model on the Hugging Face Hub; its group is owner/name.

A tag such as ":Q4_K_M" and the address of a revision are ignored.
"""


class CheckpointError(ValueError):
    """The error for an unsupported or damaged checkpoint.

    The message names the file and, if known, the tensor or the module. Names in files are untrusted, so control
    characters and line ends in the message are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    r"""Return ``text`` with control characters, line ends, invisible characters and lone surrogates escaped.

    >>> print(printable("a\x1b[2Jb\n"))
    a\x1b[2Jb\n
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as a Path.

    Raises TypeError unless ``path`` is a str or an os.PathLike of text. Raises ValueError if it is empty (`Path` would
    take an empty path for the current folder) or contains characters that a file name cannot have.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected a str or an os.PathLike, got {type(path).__name__}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"path: expected a name of text, got {type(text).__name__}")
    if not text:
        raise ValueError("path: expected a file or a folder, got an empty string")
    try:
        has_nul = b"\0" in os.fsencode(text)
    except UnicodeEncodeError:  # the text has a lone surrogate that does not stand for a byte
        has_nul = True
    if has_nul:
        raise ValueError(f"path: expected a name that the file system can hold, got {text!a:.200}")
    return Path(text)


def find_hub_hint(path: str | os.PathLike[str]) -> str:
    """Return the end of an error message that says how to download a model, or "" if ``path`` is no name on the Hub.

    >>> find_hub_hint("Qwen/Qwen3-8B")
    '; a model of this name on the Hugging Face Hub is not downloaded: hf download Qwen/Qwen3-8B --local-dir Qwen3-8B'
    """
    name = HUB_NAME.fullmatch(os.fspath(path))
    if name is None or name[1].endswith((".gguf", ".safetensors", ".ak48", ".json", ".pt", ".bin")):
        return ""
    command = f"hf download {name[1]} --local-dir {name[1].partition('/')[2]}"
    return f"; a model of this name on the Hugging Face Hub is not downloaded: {command}"


def check_downloaded(begin: bytes, where: str) -> None:
    """Raise CheckpointError, whose message starts with ``where``, if a file begins like a Git LFS pointer."""
    if begin.startswith(LFS_POINTER):
        raise CheckpointError(f"{where}: expected the file, got a pointer of Git LFS to it: run git lfs pull")


@dataclass
class HeaderLimits:
    """The limits that remain for the headers of the next files of a checkpoint, as all files share one limit.

    Attributes:
        nbytes: the number of bytes of JSON that the headers may still have.
        tensors: the number of tensors that the files may still have.
    """

    nbytes: int = MAX_JSON_BYTES
    tensors: int = MAX_TENSORS

    def take(self, where: str, nbytes: int, tensors: int = 0) -> None:
        """Subtract a header's size. Raises CheckpointError, whose message starts with ``where``, if it is too large."""
        self.nbytes -= nbytes
        self.tensors -= tensors
        if self.nbytes < 0:
            raise CheckpointError(f"{where}: expected headers of at most {MAX_JSON_BYTES} bytes in all files, got more")
        if self.tensors < 0:
            raise CheckpointError(f"{where}: expected at most {MAX_TENSORS} tensors in all files, got more")


_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_maps_lock = threading.Lock()


def map_file(file: BinaryIO) -> mmap.mmap:
    """Return the memory map of an open file, read-only, whose pages `release_pages` can free."""
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with _maps_lock:
        _maps.add(mapped)
    return mapped


def release_pages() -> None:
    """Free the memory that holds pages of mapped files, where the system can; they are read again when needed.

    Call it after a copy of tensors, so that files and copies are not in memory at once. This matters most where a GPU
    shares memory with the CPU.
    """
    with _maps_lock:
        maps = list(_maps)
    for mapped in maps:
        if hasattr(mapped, "madvise"):
            with contextlib.suppress(OSError):  # locked pages
                mapped.madvise(mmap.MADV_DONTNEED)


def check_file_name(name: object, where: str) -> str:
    """Return ``name``, which an untrusted file gives to a file in its own folder.

    Raises CheckpointError, whose message starts with ``where``, unless it is the name of a file: with a path separator,
    it could escape the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{where}: expected the name of a file in the folder, got {name!r:.80}")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise CheckpointError(f"{where}: expected a name of at most {MAX_NAME_BYTES} bytes, got {name!r:.80}")
    return name


def check_json(text: bytes, where: str, max_names: int = MAX_JSON_NAMES) -> None:
    """Raise CheckpointError if a JSON text has more than ``max_names`` keys or twice as many values, or is too deep."""
    max_values = MAX_JSON_VALUES // MAX_JSON_NAMES * max_names
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in text else text
    depth, values, names, in_string = 0, 1, 0, 0
    for start in range(0, len(plain), _SCAN_BYTES):
        part = np.frombuffer(plain, np.uint8, min(_SCAN_BYTES, len(plain) - start), start)
        # parity says whether a byte is in a string; uint8 may wrap
        quotes = np.cumsum(part == ord('"'), dtype=np.uint8)
        outside = (quotes + np.uint8(in_string)) % 2 == 0
        in_string = (in_string + int(quotes[-1])) % 2
        step = _STEPS[part[(_KINDS[part] != 0) & outside]]
        values += int(np.count_nonzero(step >= 0))
        names += int(np.count_nonzero((part == ord(":")) & outside))
        depths = depth + np.cumsum(step, dtype=np.int64)
        if depths.size:
            if depths.max() > MAX_JSON_DEPTH:
                raise CheckpointError(
                    f"{where}: expected JSON nested at most {MAX_JSON_DEPTH} deep, got deeper nesting"
                )
            depth = int(depths[-1])
        if values > max_values:
            raise CheckpointError(f"{where}: expected JSON of at most {max_values} values, got more")
        if names > max_names:
            raise CheckpointError(f"{where}: expected JSON of at most {max_names} names, got more")


def _byte_table(values: dict[str, int]) -> npt.NDArray[np.int8]:
    """Return a table int8 [256] by byte: ``values[text]`` for each character of each key ``text``, 0 for all others."""
    table = np.zeros(256, np.int8)
    for characters, value in values.items():
        table[list(characters.encode())] = value
    return table


_KINDS = _byte_table({"[{]},": 1})
_STEPS = _byte_table({"[{": 1, "]}": -1})


def check_count(count: int, where: str) -> None:
    """Raise CheckpointError, whose message starts with ``where``, if ``count`` exceeds `MAX_MODULES`."""
    if count > MAX_MODULES:
        raise CheckpointError(f"{where}: expected at most {MAX_MODULES} modules and tensors, got {count}")


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause Python's cyclic garbage collector, which would repeatedly scan all objects while many are created."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_object(text: bytes, where: str, max_names: int = MAX_JSON_NAMES) -> dict[str, Any]:
    """Parse ``text`` as a JSON object.

    Raises CheckpointError, whose message starts with ``where``, if the text is malformed, is not an object, has
    duplicate keys or exceeds the limits of `check_json`.
    """
    check_downloaded(text, where)
    check_json(text, where, max_names)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ValueError(f"duplicate key {name!r:.200}")
        return table

    try:
        with paused_collector():
            value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected JSON, got {error!s:.400}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_object(path: Path, max_names: int = MAX_JSON_NAMES) -> dict[str, Any]:
    """Read the JSON object in a file, which has at most ``max_names`` keys.

    Raises the same errors as `parse_object`, CheckpointError for more than `MAX_JSON_BYTES` bytes, and OSError.
    """
    return parse_object(read_small_file(path), str(path), max_names)


def read_small_file(path: Path) -> bytes:
    """Return the bytes of a regular file.

    Raises CheckpointError if the file has more than `MAX_JSON_BYTES` bytes or is not a regular file, and OSError.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path}: expected a regular file, got another kind")
        if found.st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: expected at most {MAX_JSON_BYTES} bytes, got {found.st_size}")
        data = file.read(MAX_JSON_BYTES + 1)  # ``st_size`` is 0 for a file in /proc: limit the read itself
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_JSON_BYTES} bytes, got more")
    return data
