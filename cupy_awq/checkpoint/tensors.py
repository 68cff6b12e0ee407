# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint by name, from one safetensors file or from the shards that an index lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq import check
from cupy_awq.checkpoint import replacement, safetensors
from cupy_awq.checkpoint.files import CheckpointError, HeaderLimits, check_file_name, read_object

Array = npt.NDArray[Any]

INDEX = "model.safetensors.index.json"
"""The name of the file that maps the tensors of a sharded checkpoint to their shards."""

SHARD = re.compile(r"-\d{5}(?:-of-0*(\d+))?\.safetensors$")
"""The regular expression for the end of a shard's file name; its group is the number of shards, if stated."""


_EXPONENTS = {np.dtype(np.float16): 0x7C00, check.BFLOAT16: 0x7F80}
"""The bit mask of the exponent for each 16-bit float dtype: infinity and NaN have all of these bits set."""

_CHUNK = 1 << 20
"""The number of values that `is_finite` tests at a time."""


class Tensor(NamedTuple):
    """A tensor of a checkpoint: a plain tensor, or a part of a quantized module, such as its scales."""

    array: npt.NDArray[Any]
    """The values: a read-only view of the memory-mapped file, or a new array if they were converted."""
    file: Path
    """The path of the file, for error messages."""


def is_finite(values: Array) -> bool:
    """Return whether all values are finite, testing one chunk at a time to keep the temporary arrays small.

    >>> is_finite(np.array([1, np.inf], np.float16))
    False
    """
    flat = values.reshape(-1)
    mask = _EXPONENTS.get(values.dtype)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if mask is None:
            finite = bool(np.isfinite(chunk).all())
        else:
            finite = int((chunk.view(np.uint16) & np.uint16(mask)).max()) != mask
        if not finite:
            return False
    return True


def read(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name.

    ``path`` is a safetensors file, or a folder with either one such file or shards and their index. Raises
    CheckpointError if files are missing, ambiguous or damaged, and OSError if one cannot be opened.
    """
    if not path.is_dir():
        return _read_file(path)
    if (names := replacement.list_names(path)) is not None:
        file = replacement.find(path, INDEX if INDEX in names else "model.safetensors")
        return _read_shards(file, path) if INDEX in names else _read_file(file)
    indices = [path / INDEX] if (path / INDEX).is_file() else _list_files(path, "*.safetensors.index.json")
    if len(indices) == 1:  # AutoGPTQ names files after the settings: gptq_model-4bit-128g.safetensors.index.json
        return _read_shards(indices[0], path)
    files = [path / "model.safetensors"]
    if not files[0].is_file():
        files = _list_files(path, "*.safetensors")
    if len(files) != 1:
        others = sorted(file.name for file in path.iterdir() if file.suffix in (".gguf", ".pt", ".bin", ".pth"))
        found = f"{len(files)} of them" + (f" and {', '.join(others[:3])}; give the path of the file" if others else "")
        raise CheckpointError(f"{path}: expected model.safetensors, {INDEX} or one safetensors file, got {found}")
    if (shard := SHARD.search(files[0].name)) and shard[1] != "1":
        raise CheckpointError(f"{files[0]}: expected all shards and {INDEX}, got one shard")
    return _read_file(files[0])


def _list_files(path: Path, pattern: str) -> list[Path]:
    """Return the regular files of a folder that match a pattern; reading a pipe or a device might never end."""
    return sorted(file for file in path.glob(pattern) if file.is_file())


def _read_file(file: Path, limits: HeaderLimits | None = None) -> dict[str, Tensor]:
    return {name: Tensor(array, file) for name, array in safetensors.read(file, limits).items()}


def _read_shards(index: Path, folder: Path) -> dict[str, Tensor]:
    """Return the tensors that an index file lists, each from its shard in ``folder``.

    Raises the same errors as `read`.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map: expected an object, got {weight_map!r:.80}")
    limits = HeaderLimits()
    shards: dict[str, dict[str, Tensor]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        where = f"{index}: tensor {name!r:.200}"
        check_file_name(shard, where)
        if shard not in shards:
            file = replacement.find(folder, shard)
            if not file.is_file():
                raise CheckpointError(f"{where}: expected its shard {shard:.200} in the folder, got no such file")
            shards[shard] = _read_file(file, limits)
        if name not in shards[shard]:
            raise CheckpointError(f"{where}: expected it in its shard {shard:.200}, got a shard without it")
        tensors[name] = shards[shard][name]
    return tensors
