# SPDX-License-Identifier: Apache-2.0
"""A reader of ``torch.save`` files that does not need PyTorch and never executes the pickle.

The file is an uncompressed zip archive: ``<root>/data.pkl`` describes a flat dictionary of tensors, and
``<root>/data/<number>`` holds the bytes of each storage. A stack machine interprets the few opcodes that such a
dictionary needs. It builds only strings, integers, tuples, dictionaries and tensor descriptions, and never imports or
calls a name from the pickle.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint.files import CheckpointError, check_downloaded, map_file

MAGIC = b"PK"
SUFFIXES = (".pt", ".pth", ".bin")

MAX_RANK = 8

MAX_PICKLE_BYTES = 1 << 24
"""The largest accepted size of the pickle in bytes. A pickle of 62,000 tensors has 9 MB."""

MAX_OPCODES = 1 << 20
"""The largest accepted number of opcodes in the pickle, enough for 25,000 tensors; interpreting them takes seconds."""

MAX_DIRECTORY_BYTES = 1 << 23
"""The largest accepted size of the zip archive's directory in bytes, enough for about 100,000 entries."""

MAX_STACK = 1 << 16
"""The largest accepted number of stack items. torch.save needs few: it stores a dictionary in batches of 1000 items."""

STORAGES = {
    "torch HalfStorage": np.dtype(np.float16),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch FloatStorage": np.dtype(np.float32),
    "torch IntStorage": np.dtype(np.int32),
    "torch ShortStorage": np.dtype(np.int16),
    "torch CharStorage": np.dtype(np.int8),
    "torch ByteStorage": np.dtype(np.uint8),
    "torch LongStorage": np.dtype(np.int64),
}
"""The NumPy dtype for each storage class that a pickle may name."""

ORDERED_DICT = "collections OrderedDict"
REBUILD = "torch._utils _rebuild_tensor_v2"

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")


class _Global(NamedTuple):
    """A global that the pickle refers to; it is never imported."""

    name: str
    """The module and the attribute, separated by a space."""


class _Storage(NamedTuple):
    """A tensor storage that the pickle refers to.

    Attributes:
        dtype: the dtype of the elements.
        key: the name of the archive entry below ``<root>/data/``.
        elements: the number of elements.
    """

    dtype: np.dtype[Any]
    key: str
    elements: int


class _Description(NamedTuple):
    """The unvalidated arguments that describe a tensor in the pickle.

    Attributes:
        storage: the storage of the tensor's elements.
        offset: the index of the first element in the storage.
        size: the shape of the tensor.
        stride: the strides of the tensor in elements.
    """

    storage: _Storage
    offset: Any
    size: tuple[Any, ...]
    stride: tuple[Any, ...]


_MARK = object()
"""The stack item that marks the start of the items of a tuple or dictionary."""


def read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return all tensors of a ``torch.save`` file by name as read-only views of the memory-mapped file.

    The file must not be truncated while a view is in use. Raises CheckpointError if the file is not an archive of a
    flat dictionary of plain tensors, and OSError if it cannot be opened.
    """
    with open(path, "rb") as file:
        begin = file.read(64)
        check_downloaded(begin, str(path))
        if not begin.startswith(MAGIC):
            raise CheckpointError(f"{path}: expected the zip archive of torch.save, got another file")
        mapped = map_file(file)
    entries = _list_entries(path, mapped)
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{path}: expected one data.pkl, got {len(pickles)}")
    root = pickles[0].removesuffix("data.pkl")
    start, size = entries[pickles[0]]
    if size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path}: data.pkl: expected at most {MAX_PICKLE_BYTES} bytes, got {size}")
    order = entries.get(f"{root}byteorder")
    if order is not None and mapped[order[0] : order[0] + order[1]] != b"little":
        raise CheckpointError(f"{path}: byteorder: expected little, got {mapped[order[0] : order[0] + 20]!r}")
    table = _unpickle(mapped[start : start + size], path)
    tensors = {}
    total = 0
    for name, description in table.items():
        tensors[name] = _view_tensor(mapped, entries, root, description, f"{path}: tensor {name!r:.200}")
        total += tensors[name].nbytes
    if total > 2 * len(mapped):  # tied weights may share a storage, but a small file must not describe many gigabytes
        raise CheckpointError(f"{path}: expected tensors of at most twice the file's {len(mapped)} bytes, got {total}")
    return tensors


class _ShortReads(io.FileIO):
    """A file whose reads are limited to `MAX_DIRECTORY_BYTES`: zipfile reads the whole directory at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of more than {MAX_DIRECTORY_BYTES} bytes")
        return super().read(size) or b""


def _list_entries(path: Path, mapped: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Return (offset, size) in bytes of the data of each archive entry by name.

    Raises CheckpointError if an entry is compressed, encrypted, out of bounds or not unique.
    """
    try:
        with _ShortReads(path) as file, zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: expected a zip archive, got {error}") from None
    entries: dict[str, tuple[int, int]] = {}
    for info in infos:
        where = f"{path}: entry {info.filename!r:.200}"
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise CheckpointError(f"{where}: expected stored bytes, got compressed or encrypted ones")
        if info.filename in entries:
            raise CheckpointError(f"{where}: expected a unique name, got it twice")
        start = info.header_offset
        if not 0 <= start <= len(mapped) - _LOCAL_HEADER.size:
            raise CheckpointError(f"{where}: expected a header within the file, got offset {start}")
        header = _LOCAL_HEADER.unpack_from(mapped, start)
        if header[0] != b"PK\x03\x04":
            raise CheckpointError(f"{where}: expected a local header, got {header[0]!r}")
        start += _LOCAL_HEADER.size + header[-2] + header[-1]
        if start + info.file_size > len(mapped):
            raise CheckpointError(f"{where}: expected {info.file_size} bytes at {start}, got {len(mapped)} in the file")
        entries[info.filename] = start, info.file_size
    return entries


def _view_tensor(
    mapped: mmap.mmap, entries: dict[str, tuple[int, int]], root: str, description: Any, where: str
) -> npt.NDArray[Any]:
    """Return a tensor as a view of the file. Raises CheckpointError if its `_Description` is out of bounds."""
    storage, offset, size, stride = description
    dtype, key, elements = storage
    if not key.isascii() or not key.isdigit() or f"{root}data/{key}" not in entries:
        raise CheckpointError(f"{where}: storage {key!r:.80}: expected an entry of this number, got none")
    start, nbytes = entries[f"{root}data/{key}"]
    if elements * dtype.itemsize != nbytes:
        raise CheckpointError(f"{where}: storage {key}: expected {elements} {dtype}, got {nbytes} bytes")
    naturals = all(type(item) is int and 0 <= item < 2**63 for item in (offset, *size, *stride))
    if not naturals or len(size) != len(stride) or len(size) > MAX_RANK:
        # The message has no repr of the values: the repr of nested tuples in a hostile pickle could exhaust the memory.
        raise CheckpointError(f"{where}: expected an offset, a size and a stride of integers >= 0, got others")
    count = math.prod(size)
    last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    # A stride of 0 repeats elements: without this limit, a small storage could expand to an array of any size.
    if count > elements or (count and last >= elements):
        raise CheckpointError(f"{where}: expected elements within {elements}, got {list(size)} with {list(stride)}")
    strides = [step * dtype.itemsize for step in stride]
    try:
        if not count:
            return np.empty(size, dtype)
        return np.ndarray(size, dtype, mapped, start + offset * dtype.itemsize, strides)
    except (ValueError, OverflowError) as error:
        found = f"{list(size)} with {list(stride)}"
        raise CheckpointError(f"{where}: expected a shape that NumPy supports, got {found}: {error}") from None


def _unpickle(text: bytes, path: Path) -> dict[str, Any]:
    """Interpret a pickle and return the flat dictionary of tensor descriptions that it builds."""
    machine = _Machine(path)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(text)):
            if count == MAX_OPCODES:
                raise ValueError(f"more than {MAX_OPCODES} opcodes")
            if machine.execute(opcode.name, argument):
                break
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError, RecursionError, struct.error) as error:
        raise CheckpointError(f"{path}: data.pkl: expected a pickle of tensors, got {error!r:.200}") from None
    result = machine.stack.pop() if len(machine.stack) == 1 else None
    if not isinstance(result, dict) or not all(type(value) is _Description for value in result.values()):
        raise CheckpointError(f"{path}: data.pkl: expected a flat dictionary of tensors, got something else")
    if not all(isinstance(name, str) for name in result):
        raise CheckpointError(f"{path}: data.pkl: expected names of text, got others")
    return result


class _Machine:
    """A stack machine for the pickle opcodes that a dictionary of tensors needs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> bool:
        """Run one opcode and return whether it was STOP. Raises CheckpointError if the opcode is not supported."""
        if len(self.stack) > MAX_STACK:
            raise ValueError(f"more than {MAX_STACK} items on the stack")
        push = self.stack.append
        if name in ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
            push(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            push(self._memo[argument])
        elif name == "GLOBAL":
            push(self._check_global(argument))
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            push({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        elif name == "EMPTY_DICT":
            push({})
        elif name == "EMPTY_TUPLE":
            push(())
        elif name == "MARK":
            push(_MARK)
        elif name == "TUPLE":
            push(tuple(self._pop_to_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            items = self.stack[-count:]
            if len(items) != count:
                raise ValueError("a tuple of items that are not there")
            del self.stack[-count:]
            push(tuple(items))
        elif name == "SETITEM":
            value, key = self.stack.pop(), self.stack.pop()
            self._set_items([key, value])
        elif name == "SETITEMS":
            self._set_items(self._pop_to_mark())
        elif name == "BINPERSID":
            push(_read_storage(self.stack.pop()))
        elif name == "REDUCE":
            arguments, function = self.stack.pop(), self.stack.pop()
            push(self._call(function, arguments))
        elif name == "BUILD":  # BUILD sets the attribute _metadata of an OrderedDict, which is not needed
            self.stack.pop()
        elif name not in ("PROTO", "STOP"):
            raise CheckpointError(f"{self.path}: data.pkl: expected a pickle of tensors, got the opcode {name}")
        return name == "STOP"

    def _check_global(self, name: str) -> _Global:
        if name not in STORAGES and name not in (ORDERED_DICT, REBUILD):
            dotted = name.replace(" ", ".", 1)
            raise CheckpointError(f"{self.path}: data.pkl: expected tensors alone, but it names {dotted:.200}")
        return _Global(name)

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _set_items(self, items: list[Any]) -> None:
        table = self.stack[-1]
        if type(table) is not dict or len(items) % 2:
            raise ValueError("items without a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise ValueError("a key that is no text")
            if key in table:
                raise CheckpointError(f"{self.path}: tensor {key!r:.200}: expected a unique name, got it twice")
            table[key] = value

    def _call(self, function: Any, arguments: Any) -> Any:
        if type(arguments) is not tuple:
            raise ValueError("arguments that are no tuple")
        if type(function) is not _Global:
            raise ValueError("a call of what is no name")
        if function.name == ORDERED_DICT and not arguments:
            return {}
        if function.name == REBUILD and len(arguments) >= 4:
            storage, offset, size, stride = arguments[:4]
            if type(storage) is _Storage and type(size) is tuple and type(stride) is tuple:
                return _Description(storage, offset, size, stride)
        raise ValueError(f"a call of {function.name} with other arguments")


def _read_storage(identity: Any) -> _Storage:
    """Return the storage for a persistent id of the form ("storage", class, key, location, number of elements).

    Raises ValueError for a persistent id of any other form.
    """
    if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
        raise ValueError("a persistent id that is no storage")
    _, kind, key, _, elements = identity
    if type(kind) is not _Global or kind.name not in STORAGES or type(key) is not str or type(elements) is not int:
        raise ValueError("a persistent id that is no storage")
    return _Storage(STORAGES[kind.name], key, elements)
