# SPDX-License-Identifier: Apache-2.0
"""The safetensors container: the header length (8 bytes), a JSON header, then the bytes of all tensors.

The header is untrusted and completely validated before any tensor is returned: the number of bytes of each tensor must
match its dtype and shape, and the tensors must cover the data without overlaps or gaps. Tensors are read-only views of
the memory-mapped file, so the only copy is the upload to a GPU. The package ``safetensors`` is not used because it
copies each tensor, and most of its errors do not name the tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupy_awq import atomic
from cupy_awq.checkpoint.files import (
    MAX_JSON_BYTES,
    CheckpointError,
    HeaderLimits,
    check_downloaded,
    map_file,
    parse_object,
)

MAX_RANK = 32
"""The largest accepted number of axes of a tensor."""

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
"""The NumPy dtype for each safetensors dtype name."""


METADATA = "__metadata__"
"""The key of a header that holds texts and no tensor."""


def read(path: Path, limits: HeaderLimits | None = None) -> dict[str, npt.NDArray[Any]]:
    """Return all tensors of a file by name as read-only views of the memory-mapped file.

    The file must not be truncated while a view is in use. ``limits`` says what the headers of the checkpoint's files
    may still take, and this call subtracts its own: pass one object for all files, or None for a checkpoint of one
    file.

    Raises:
        CheckpointError: the file is malformed, or its header exceeds ``limits``.
        OSError: the file cannot be opened.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        check_downloaded(file.read(64), str(path))
        file.seek(0)
        if size < 8:
            raise CheckpointError(f"{path}: expected a safetensors file of at least 8 bytes, got {size} bytes")
        length = int.from_bytes(file.read(8), "little")
        limit = min(size - 8, MAX_JSON_BYTES)
        if length > limit:
            raise CheckpointError(
                f"{path}: expected a safetensors file with a header of at most {limit} bytes, got a length of "
                f"{length}; the file may be truncated"
            )
        limits = limits or HeaderLimits()
        limits.take(str(path), length)
        header = parse_object(file.read(length), f"{path}: header")
        mapped = map_file(file)
    header.pop(METADATA, None)
    limits.take(str(path), 0, len(header))
    start = 8 + length
    spans, views = [], {}
    for name, entry in header.items():
        try:
            dtype, shape, begin, end = _entry(entry, size - start)
        except ValueError as error:
            raise CheckpointError(f"{path}: tensor {name!r:.200}: {error}") from None
        try:
            views[name] = np.ndarray(shape, dtype, mapped, start + begin)
        except (ValueError, OverflowError) as error:
            where = f"{path}: tensor {name!r:.200}"
            raise CheckpointError(
                f"{where}: expected a shape that NumPy supports, got {list(shape)}: {error}"
            ) from None
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            kind = "an overlap" if begin < position else "a gap"
            where = f"{path}: tensor {name!r:.200}"
            raise CheckpointError(f"{where}: expected data_offsets from {position} on, got {begin}: {kind}")
        position = end
    if position != size - start:
        raise CheckpointError(f"{path}: expected {position} bytes of tensors, got {size - start}")
    return views


def _entry(entry: Any, data_bytes: int) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Parse the header entry of a tensor: return its dtype, its shape, and its offsets begin and end.

    The tensor takes the bytes [begin, end) of the file's data section, which has ``data_bytes`` bytes.

    Raises ValueError for a malformed entry.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object with dtype, shape and data_offsets, got {entry!r:.80}")
    name: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"expected a dtype of {', '.join(DTYPES)}, got {name!r:.80}")
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise ValueError(f"expected a shape of at most {MAX_RANK} int64 >= 0, got {shape!r:.80}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"expected data_offsets [begin, end] in int64, 0 <= begin <= end, got {offsets!r:.80}")
    begin, end = offsets
    if end > data_bytes:
        raise ValueError(f"expected data within {data_bytes} bytes, got data_offsets [{begin}, {end}]")
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise ValueError(f"expected {expected} bytes for {dtype} {list(shape)}, got {end - begin}")
    return dtype, tuple(shape), begin, end


def _naturals(value: Any) -> bool:
    """Return whether a JSON value is a list of integers in 0..2**63-1."""
    return isinstance(value, list) and not [item for item in value if type(item) is not int or not 0 <= item < 2**63]


def write(
    path: Path, tensors: Mapping[str, npt.NDArray[Any]], *, check: Callable[[Path], object] | None = None
) -> None:
    """Write tensors by name to a safetensors file, with the data of each tensor aligned to its item size.

    The file is written atomically; ``check`` is as in `atomic.create`.

    Raises:
        OSError: the file cannot be written; the error names it.
        ValueError: the format has no name for the dtype of a tensor, or reserves the name of a tensor.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, array in tensors.items():
        if name == METADATA or array.dtype not in names:
            expected = f"a dtype of {', '.join(DTYPES)}" if name != METADATA else "another name, which is not reserved"
            raise ValueError(f"{path}: tensor {name!r:.200}: expected {expected}, got {array.dtype}")
    # The format forbids padding between tensors. Sorted by decreasing item size, all tensors are aligned without it.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    position = 0
    for name, array in ordered:
        entry = {"dtype": names[array.dtype], "shape": list(array.shape)}
        header[name] = {**entry, "data_offsets": [position, position + array.nbytes]}
        position += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic.create(path, check=check) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
