# SPDX-License-Identifier: Apache-2.0
"""Writers of folders and files in formats other than AutoAWQ's, for the tests."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[Any]

STORAGES = {
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
}


def save_folder(path: Path, tensors: dict[str, Array], config: dict[str, Any]) -> Path:
    """Write a folder with the tensors in one safetensors file and a config.json, and return the folder."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


class Global:
    """A global name that a pickle imports, such as a function."""

    def __init__(self, name: str) -> None:
        self.name = name


class Call:
    """A function call that a pickle makes when it is loaded (opcode REDUCE)."""

    def __init__(self, function: Global, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments


class TorchPickler:
    """A writer of the opcodes that torch.save writes (pickle protocol 2), for valid and for hostile files."""

    def __init__(self) -> None:
        self.out = bytearray(pickle.PROTO + b"\x02")

    def write(self, value: Any) -> None:
        if isinstance(value, Global):
            self.out += pickle.GLOBAL + value.name.replace(".", "\n", 0).encode() + b"\n"
        elif isinstance(value, Call):
            self.write(value.function)
            self.write(value.arguments)
            self.out += pickle.REDUCE
        elif isinstance(value, bool):
            self.out += pickle.NEWTRUE if value else pickle.NEWFALSE
        elif isinstance(value, int):
            self.out += pickle.LONG1 + bytes([9]) + value.to_bytes(9, "little", signed=True)
        elif isinstance(value, str):
            text = value.encode()
            self.out += pickle.BINUNICODE + len(text).to_bytes(4, "little") + text
        elif isinstance(value, tuple):
            self.out += pickle.MARK
            for item in value:
                self.write(item)
            self.out += pickle.TUPLE
        elif isinstance(value, dict):
            self.out += pickle.EMPTY_DICT
            for key, item in value.items():
                self.write(key)
                self.write(item)
                self.out += pickle.SETITEM
        elif isinstance(value, Persistent):
            self.write(value.identity)
            self.out += pickle.BINPERSID
        else:
            raise TypeError(type(value))


class Persistent:
    """A persistent id of a pickle, by which torch.save refers to a storage."""

    def __init__(self, *identity: Any) -> None:
        self.identity = identity


def global_name(module: str, attribute: str) -> Global:
    """Return the pickle's reference to ``module.attribute``."""
    return Global(f"{module}\n{attribute}")


def tensor(key: str, dtype: str, shape: tuple[int, ...], elements: int, /, **changes: Any) -> Call:
    """Return the call that rebuilds a tensor; ``changes`` replace offset, size, stride, and parts of its storage."""
    stride = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
    given = {"offset": 0, "size": shape, "stride": stride, "key": key, "elements": elements} | changes
    kind = global_name("torch", STORAGES[dtype])
    storage = Persistent("storage", kind, given["key"], "cpu", given["elements"])
    hooks = Call(global_name("collections", "OrderedDict"))
    rebuild = global_name("torch._utils", "_rebuild_tensor_v2")
    return Call(rebuild, storage, given["offset"], given["size"], given["stride"], False, hooks)


def pickled(value: Any) -> bytes:
    writer = TorchPickler()
    writer.write(value)
    return bytes(writer.out + pickle.STOP)


def save_zip(path: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data)
    return path


def save_torch(path: Path, tensors: dict[str, Array]) -> Path:
    """Write a file as torch.save writes an OrderedDict of tensors, and return it."""
    entries = {}
    table: dict[str, Any] = OrderedDict()
    for number, (key, array) in enumerate(tensors.items()):
        table[key] = tensor(str(number), array.dtype.name, array.shape, array.size)
        entries[f"archive/data/{number}"] = np.ascontiguousarray(array).tobytes()
    return save_zip(path, {"archive/data.pkl": pickled(dict(table)), "archive/version": b"3\n", **entries})
