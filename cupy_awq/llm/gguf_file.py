# SPDX-License-Identifier: Apache-2.0
"""The GGUF container: metadata and tensors, as views of the mapped file.

The header is hostile input: every count and length is held against the bytes that are left before it is followed. (The
reader of the package ``gguf`` follows them first: a lying array length keeps it busy for ever.)
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm.extra import needed

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
MAX_RANK = 4


class Blocks(NamedTuple):
    """A tensor [rows, columns], whose rows are runs of quantization blocks: ``data`` uint8 [rows, bytes]."""

    kind: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


class _Cursor:
    """A place in the file that only moves over bytes that are there."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data, self.position, self.path = data, 0, path

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.position:
            raise CheckpointError(f"{self.path}: not a GGUF file, or a truncated one, at byte {self.position}")
        self.position += count
        return self.data[self.position - count : self.position]

    def scalar(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        try:
            return str(self.take(self.scalar("Q")), "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: text before byte {self.position}: {error}") from None

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind != ARRAY:
            raise CheckpointError(f"{self.path}: metadata before byte {self.position} has the unknown type {kind}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item == STRING:
            self.expect(8 * count)
            return [self.text() for _ in range(count)]
        if item not in SCALARS:
            raise CheckpointError(f"{self.path}: an array before byte {self.position} has the unknown type {item}")
        form = np.dtype(SCALARS[item]).newbyteorder("<")
        return np.frombuffer(self.take(count * form.itemsize), form)

    def expect(self, count: int) -> None:
        """At least ``count`` more bytes are there."""
        here = self.position
        self.take(count)
        self.position = here


def read(path: Path) -> tuple[dict[str, Any], dict[str, Blocks]]:
    """Metadata and tensors of a file.

    The file must not be truncated while a view lives. Raises CheckpointError for a malformed file, OSError for one that
    cannot be opened.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(memoryview(mapped), path)
    cursor.take(4)
    version, tensors, fields = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: expected GGUF version 2 or 3, got {version}")
    cursor.expect(12 * fields + 24 * tensors)
    metadata: dict[str, Any] = {}
    for _ in range(fields):
        key = cursor.text()
        if key in metadata:
            raise CheckpointError(f"{path}: {key!r:.200} is there twice")
        metadata[key] = cursor.value()
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"{path}: general.alignment must be a positive integer, got {alignment!r:.80}")
    start = -(-cursor.position // alignment) * alignment
    found: dict[str, Blocks] = {}
    for name, shape, kind, offset in entries:
        if name in found:
            raise CheckpointError(f"{path}: tensor {name!r:.200} is there twice")
        found[name] = _tensor(mapped, f"{path}: tensor {name!r:.200}", shape, kind, start + offset)
    return metadata, found


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (outermost axis first), type and offset of one tensor."""
    name, rank = cursor.text(), cursor.scalar("I")
    if not 1 <= rank <= MAX_RANK:
        raise CheckpointError(f"{cursor.path}: tensor {name!r:.200}: expected 1 to {MAX_RANK} axes, got {rank}")
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor(mapped: mmap.mmap, where: str, shape: tuple[int, ...], kind: int, start: int) -> Blocks:
    constants = needed("gguf.constants")
    try:
        form = constants.GGMLQuantizationType(kind)
    except ValueError:
        raise CheckpointError(f"{where}: unknown type {kind}") from None
    per_block, block_bytes = constants.GGML_QUANT_SIZES[form]
    *leading, columns = shape
    if columns % per_block:
        raise CheckpointError(f"{where}: expected rows of whole blocks of {per_block} for {form.name}, got {columns}")
    rows, row_bytes = math.prod(leading), columns // per_block * block_bytes
    left = max(len(mapped) - start, 0)
    if rows * row_bytes > left:
        raise CheckpointError(f"{where}: {form.name} {list(shape)} takes {rows * row_bytes} bytes, got {left}")
    return Blocks(form.name, shape, np.ndarray((rows, row_bytes), np.uint8, mapped, start))
