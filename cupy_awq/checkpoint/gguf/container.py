# SPDX-License-Identifier: Apache-2.0
"""The GGUF container: metadata, and tensors as views of the memory-mapped file.

The header is untrusted: every count and length is checked against the number of remaining bytes before use. (The
reader of the package ``gguf`` has no such check; a huge array length keeps it busy for hours.)
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint.files import CheckpointError, check_downloaded, map_file

MAGIC = b"GGUF"

SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The `struct` format character for each scalar metadata type."""

STRING_TYPE, ARRAY_TYPE = 8, 9
VERSIONS = (2, 3)
MAX_RANK = 4

MAX_ENTRIES, MAX_TEXTS = 1 << 16, 1 << 21
"""The largest accepted numbers in a file: of metadata fields and of tensors each; of texts in all metadata arrays.

The tokenizer of Gemma 3, the largest in use, has 777,050 texts.
"""

MAX_TEXT_BYTES = 1 << 26
"""The largest accepted size of all texts in the headers of a file and of the other parts of it together, in bytes.

The texts of Gemma 3 have 13 MB. A sparse file can hold long texts of zeros that take no space on the disk.
"""

MAX_PARTS = 1000
"""The largest accepted number of parts of a split file."""

PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""The regular expression for the name of a part of a split file; its groups are the stem, the number and the count."""

SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
"""The metadata fields of a split file: the part's number from 0, the number of parts, the number of all tensors."""

TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
"""(name, values per block, bytes per block) for each GGML type number."""


class Blocks(NamedTuple):
    """A tensor of a GGUF file, stored as quantization blocks.

    Attributes:
        kind: the name of the GGML quantization type, such as "Q4_0" or "F16".
        shape: the shape of the tensor, outermost axis first.
        data: the blocks, uint8 [rows, bytes per row], a view of the memory-mapped file; the number of rows is the
            product of all axes of ``shape`` but the last.
    """

    kind: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass
class _Limits:
    """The limits that remain for the headers of the next parts of a split file, as all parts share one limit.

    Attributes:
        entries: the numbers of metadata fields and of tensors.
        texts: the number of texts in arrays.
        text_bytes: the number of bytes of all texts.
    """

    entries: tuple[int, int] = (MAX_ENTRIES, MAX_ENTRIES)
    texts: int = MAX_TEXTS
    text_bytes: int = MAX_TEXT_BYTES


class _Cursor:
    """A read position in the bytes of a file.

    Every read advances the position, or raises CheckpointError if too few bytes or limits remain.
    """

    def __init__(self, data: memoryview, path: Path, limits: _Limits) -> None:
        self.data, self.position, self.path, self.limits = data, 0, path, limits

    def require(self, count: int) -> None:
        """Raise CheckpointError unless ``count`` more bytes remain."""
        if count > len(self.data) - self.position:
            raise CheckpointError(f"{self.path}: expected a GGUF file, got a damaged or truncated one")

    def take(self, count: int) -> memoryview:
        self.require(count)
        self.position += count
        return self.data[self.position - count : self.position]

    def scalar(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        length = self.scalar("Q")
        self.require(length)
        self._take_text_bytes(length)
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: expected UTF-8 before byte {self.position}, got {error}") from None

    def _take_text_bytes(self, count: int) -> None:
        self.limits.text_bytes -= count
        if self.limits.text_bytes < 0:
            raise CheckpointError(f"{self.path}: expected at most {MAX_TEXT_BYTES} bytes of texts, got more")

    def _read_texts(self, count: int) -> list[str]:
        """Read an array of ``count`` texts, as `text` reads each."""
        self.limits.texts -= count
        if self.limits.texts < 0:
            raise CheckpointError(f"{self.path}: expected at most {MAX_TEXTS} texts in arrays, got more")
        data, end, read_length = self.data, self.position, struct.Struct("<Q").unpack_from
        last = min(len(data), end + 8 * count + self.limits.text_bytes)
        texts = []
        try:
            for _ in range(count):
                begin = end + 8
                end = begin + read_length(data, end)[0]
                if end > last:
                    break
                texts.append(str(data[begin:end], "utf-8"))
        except (struct.error, OverflowError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.path}: expected UTF-8 before byte {begin}, got {error}") from None
        self.require(end - self.position)
        self._take_text_bytes(end - self.position - 8 * count)
        self.position = end
        return texts

    def value(self) -> Any:
        """Read a metadata value: a scalar, a str, a NumPy array of scalars or a list of str."""
        kind = self.scalar("I")
        if kind == STRING_TYPE:
            return self.text()
        if kind in SCALAR_FORMATS:
            return self.scalar(SCALAR_FORMATS[kind])
        if kind != ARRAY_TYPE:
            raise CheckpointError(
                f"{self.path}: expected a known metadata type before byte {self.position}, got {kind}"
            )
        item, count = self.scalar("I"), self.scalar("Q")
        if item == STRING_TYPE:
            self.require(8 * count)
            return self._read_texts(count)
        if item not in SCALAR_FORMATS:
            raise CheckpointError(f"{self.path}: expected a known array type before byte {self.position}, got {item}")
        form = np.dtype(SCALAR_FORMATS[item]).newbyteorder("<")
        return np.frombuffer(self.take(count * form.itemsize), form)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Blocks]]:
    """Return the metadata by key and the tensors by name of a GGUF file, or of all parts if ``path`` is the first one.

    The tensors are views of the memory-mapped files, which must not be truncated while they are in use. The metadata
    are those of the first part, without the fields that describe the parts.

    Raises:
        CheckpointError: a file is malformed, or a part is missing.
        OSError: the file cannot be opened.
    """
    limits = _Limits()
    metadata, found = _read_file(path, limits)
    count = metadata.get(SPLIT_COUNT, 1)
    if count != 1:
        found = dict(found)
        for number, part in enumerate(list_parts(path, metadata)):
            fields, tensors = (metadata, {}) if number == 0 else _read_file(part, limits)
            if (fields.get(SPLIT_NUMBER), fields.get(SPLIT_COUNT)) != (number, count):
                got = f"{fields.get(SPLIT_NUMBER)!r:.80} of {fields.get(SPLIT_COUNT)!r:.80}"
                raise CheckpointError(f"{part}: expected part {number} of {count}, got {SPLIT_NUMBER} {got}")
            if both := found.keys() & tensors.keys():
                raise CheckpointError(f"{part}: expected a tensor {min(both)!r:.200} in one part, got it in two")
            found |= tensors
    total = metadata.get(SPLIT_TENSORS, len(found))
    if total != len(found):
        raise CheckpointError(f"{path}: {SPLIT_TENSORS}: expected {len(found)} tensors, got {total!r:.80}")
    return {key: value for key, value in metadata.items() if not key.startswith("split.")}, found


def list_parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """Return the paths of all parts of a split file.

    Args:
        path: the path of the first part.
        metadata: the metadata of the first part.

    Raises CheckpointError if the number of parts or the name is malformed, or if a part is missing.
    """
    count, number = metadata.get(SPLIT_COUNT), metadata.get(SPLIT_NUMBER)
    if type(count) is not int or not 0 < count <= MAX_PARTS:
        raise CheckpointError(f"{path}: {SPLIT_COUNT}: expected an integer in 1..{MAX_PARTS}, got {count!r:.80}")
    name = PART_NAME.fullmatch(path.name)
    first = f"{'*' if name is None else name[1]}-00001-of-{count:05}.gguf"
    if number != 0:
        raise CheckpointError(f"{path}: expected the first part of a split model, {first:.200}, got {number!r:.80}")
    if name is None or name[0] != first:
        raise CheckpointError(
            f"{path}: expected the name of the first part of a split model, {first:.200}, got another"
        )
    parts = [path.with_name(f"{name[1]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{path}: expected all {count} parts of a split model, got no {part.name:.200}")
    return parts


def is_gguf(path: Path) -> bool:
    """Return whether a regular file begins as a GGUF file does. Raises OSError if it cannot be read."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == MAGIC


def find_file(folder: Path) -> Path | None:
    """Return the GGUF file of a folder, or its first part; None if the folder holds none or has safetensors files.

    Files of projectors of images, named ``mmproj``, do not count. Raises CheckpointError if there are several models.
    """
    if any(folder.glob("*.safetensors*")):
        return None
    models: dict[str, Path] = {}
    for file in sorted(folder.glob("*.gguf")):
        if file.is_file() and "mmproj" not in file.name.lower():
            part = PART_NAME.fullmatch(file.name)
            models.setdefault(file.name if part is None else f"{part[1]}-of-{part[3]}", file)
    if len(models) > 1:
        names = ", ".join(file.name for file in list(models.values())[:3])
        raise CheckpointError(
            f"{folder}: expected one GGUF model, got {len(models)}; give the path of one: {names:.300}"
        )
    return next(iter(models.values()), None)


def _read_file(path: Path, limits: _Limits) -> tuple[dict[str, Any], dict[str, Blocks]]:
    """Return the metadata and the tensors of one file. Raises the same errors as `read`."""
    with open(path, "rb") as file:
        begin = file.read(64)
        check_downloaded(begin, str(path))
        if not begin.startswith(MAGIC):
            raise CheckpointError(f"{path}: expected a GGUF file, got another kind")
        mapped = map_file(file)
    cursor = _Cursor(memoryview(mapped), path, limits)
    cursor.take(4)
    version, tensor_count, field_count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in VERSIONS:
        is_big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        got = "a big-endian file: convert it to little-endian first" if is_big_endian else version
        raise CheckpointError(f"{path}: expected GGUF version 2 or 3, got {got}")
    limits.entries = limits.entries[0] - field_count, limits.entries[1] - tensor_count
    if min(limits.entries) < 0:
        got = f"{field_count} and {tensor_count}"
        raise CheckpointError(f"{path}: expected at most {MAX_ENTRIES} metadata fields and tensors each, got {got}")
    cursor.require(12 * field_count + 24 * tensor_count)  # a field has at least 12 bytes, a tensor entry 24
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.text()
        if key in metadata:
            raise CheckpointError(f"{path}: expected one metadata field {key!r:.200}, got two")
        metadata[key] = cursor.value()
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"{path}: general.alignment: expected an integer in 1..{1 << 20}, got {alignment!r:.80}")
    start = -(-cursor.position // alignment) * alignment
    found: dict[str, Blocks] = {}
    for name, shape, kind, offset in entries:
        if name in found:
            raise CheckpointError(f"{path}: expected one tensor {name!r:.200}, got two")
        found[name] = _blocks(mapped, f"{path}: tensor {name!r:.200}", shape, kind, start + offset)
    total = sum(block.data.nbytes for block in found.values())
    if total > len(mapped):
        raise CheckpointError(f"{path}: expected tensors that do not overlap, got {total} bytes in {len(mapped)}")
    return metadata, found


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read a tensor's header entry: name, shape (outermost axis first), GGML type, byte offset in the data section."""
    name, rank = cursor.text(), cursor.scalar("I")
    if not 1 <= rank <= MAX_RANK:
        raise CheckpointError(f"{cursor.path}: tensor {name!r:.200}: expected 1 to {MAX_RANK} axes, got {rank}")
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _blocks(mapped: mmap.mmap, where: str, shape: tuple[int, ...], kind: int, start: int) -> Blocks:
    """Return a view of the tensor of GGML type number ``kind`` at byte offset ``start`` of the file.

    Raises CheckpointError, whose message starts with ``where``, for an unknown type, a row that is not a whole number
    of blocks, or a tensor that exceeds the file.
    """
    if kind not in TYPES:
        raise CheckpointError(f"{where}: expected a known quantization type, got {kind}")
    name, block_values, block_bytes = TYPES[kind]
    *leading, columns = shape
    if 0 in shape:
        raise CheckpointError(f"{where}: expected at least one element, got {name} {list(shape)}")
    if columns % block_values:
        raise CheckpointError(f"{where}: {name}: expected rows of whole blocks of {block_values}, got {columns}")
    rows, row_bytes = math.prod(leading), columns // block_values * block_bytes
    remaining = max(len(mapped) - start, 0)
    if rows * row_bytes > remaining:
        raise CheckpointError(f"{where}: {name} {list(shape)}: expected {rows * row_bytes} bytes, got {remaining}")
    return Blocks(name, shape, np.ndarray((rows, row_bytes), np.uint8, mapped, start))
