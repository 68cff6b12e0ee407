# SPDX-License-Identifier: Apache-2.0
"""The safetensors container: eight bytes of header length, a JSON header, then the bytes of all tensors.

The header is hostile input and is checked whole before a tensor is shown: each one's bytes must be those of its dtype
and shape, and all together must tile the data without overlap or gap. What comes back are read-only views of the
memory-mapped file, so that a tensor costs nothing until its values are read, and an upload to a GPU is its first copy.
(The reader of the package ``safetensors`` copies each tensor, and names no tensor in most of its errors.)
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint.files import MAX_JSON_BYTES, CheckpointError, parse_object

MAX_RANK = 32

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


def read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Every tensor of the file by name, as read-only views of the mapped file.

    The file must not be truncated while a view lives. Raises CheckpointError for a malformed file, OSError for one that
    cannot be opened.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            claim = f"expected at least 8 bytes, got {size}"
            raise CheckpointError(f"{path}: not a safetensors file, or a truncated one: {claim}")
        length = int.from_bytes(file.read(8), "little")
        limit = min(size - 8, MAX_JSON_BYTES)
        if length > limit:
            claim = f"expected a header of at most {limit} bytes, got a length of {length}"
            raise CheckpointError(f"{path}: not a safetensors file, or a truncated one: {claim}")
        header = parse_object(file.read(length), f"{path}: header")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    start = 8 + length
    spans, views = [], {}
    for name, entry in header.items():
        where = f"{path}: tensor {name!r:.200}"
        dtype, shape, begin, end = _entry(entry, where)
        if end > size - start:
            raise CheckpointError(
                f"{where}: expected data within {size - start} bytes, got data_offsets [{begin}, {end}]"
            )
        expected = math.prod(shape) * dtype.itemsize
        if end - begin != expected:
            raise CheckpointError(f"{where}: {dtype} {list(shape)} takes {expected} bytes, got {end - begin}")
        try:
            views[name] = np.ndarray(shape, dtype, mapped, start + begin)
        except (ValueError, OverflowError) as error:
            raise CheckpointError(f"{where}: shape {list(shape)}: {error}") from None
        spans.append((begin, end, where))
    position = 0
    for begin, end, where in sorted(spans):
        if begin != position:
            kind = "overlap" if begin < position else "leave a gap before"
            raise CheckpointError(
                f"{where}: expected data_offsets to begin at {position}, got {begin}: they {kind} others"
            )
        position = end
    if position != size - start:
        raise CheckpointError(f"{path}: expected {position} bytes of tensors, got {size - start}")
    return views


def _entry(entry: Any, where: str) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """dtype, shape, begin and end of one tensor of the header."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: expected an object with dtype, shape and data_offsets, got {entry!r:.80}")
    name: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: expected a dtype of {', '.join(DTYPES)}, got {name!r:.80}")
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise CheckpointError(f"{where}: expected a shape of at most {MAX_RANK} int64 >= 0, got {shape!r:.80}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{where}: expected data_offsets [begin, end] in int64, 0 <= begin <= end, got {offsets!r:.80}"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
