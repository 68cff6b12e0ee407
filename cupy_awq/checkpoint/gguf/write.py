# SPDX-License-Identifier: Apache-2.0
"""Writing of GGUF files: 4-bit modules as Q4_0 or Q4_1, 16-bit vectors as F32, all other tensors in their own dtype.

Both types have groups of 32 rows of W. Larger groups, whose size must be a multiple of 32, are split by repeating their
scales. Symmetric weights become Q4_0, all others Q4_1 with offsets. Scales and offsets are float16 and never rounded:
ValueError is raised for a weight whose scales, or products of scale and zero point, need more bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq import atomic
from cupy_awq.check import BFLOAT16, FLOAT16
from cupy_awq.checkpoint import nibbles
from cupy_awq.checkpoint.contents import Contents
from cupy_awq.checkpoint.gguf.container import ARRAY_TYPE, MAGIC, MAX_RANK, SCALAR_FORMATS, STRING_TYPE, TYPES
from cupy_awq.checkpoint.gguf.names import find, find_permuted_heads
from cupy_awq.checkpoint.gguf.q4 import GROUP
from cupy_awq.checkpoint.gguf.tensors import interleave
from cupy_awq.checkpoint.module import Module, ModuleSpec
from cupy_awq.packing import unpack_int4

Array = npt.NDArray[Any]

VERSION, ALIGNMENT = 3, 32

CHUNK_COLUMNS = 256
"""The number of columns of W that are packed into blocks at a time, which bounds the memory for copies."""

KINDS = {name: (kind, values, size) for kind, (name, values, size) in TYPES.items()}
"""(type number, values per block, bytes per block) for each GGML type name."""

DENSE_KINDS: dict[np.dtype[Any], str] = {
    FLOAT16: "F16",
    BFLOAT16: "BF16",
    **{np.dtype(f"float{bits}"): f"F{bits}" for bits in (32, 64)},
    **{np.dtype(f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)},
}
"""The GGML type for each dtype of a dense tensor; 16-bit vectors are stored as F32 instead."""

ARRAY_TYPES = {np.dtype(form): number for number, form in SCALAR_FORMATS.items()}
"""The GGUF type number for each dtype of the elements of a metadata array."""

_SCALAR_NUMBERS = {form: number for number, form in SCALAR_FORMATS.items()}

Metadata = Mapping[str, str | bool | int | float | list[str] | Array]


class _Entry(NamedTuple):
    """A tensor of the file to write.

    Attributes:
        name: the GGUF name.
        kind: the name of the GGML type.
        shape: the shape, outermost axis first.
        sources: the names of the tensors in the checkpoint: one per expert for a tensor of experts, else one.
        heads: the number of heads if the rows of each head are to be interleaved, else None.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    sources: list[str]
    heads: int | None

    @property
    def nbytes(self) -> int:
        _, values, size = KINDS[self.kind]
        return math.prod(self.shape) // values * size


def write_gguf(
    path: Path,
    contents: Contents,
    metadata: Metadata,
    progress: Callable[[int, int], None] | None = None,
    *,
    mode: int = 0o666,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Write a checkpoint as a GGUF file.

    Hugging Face names become GGUF names; other names are kept. The rows of q and k are interleaved if the architecture
    in ``metadata`` requires it (`names.Names.permuted`). Modules are converted one by one. No partial file remains
    after an error.

    Args:
        path: the path of the file, which is replaced if it exists.
        contents: a checkpoint from `cupy_awq.checkpoint.read`.
        metadata: the metadata fields by key.
        progress: a callback (number of the current tensor, total number), or None.
        mode, check: the permissions and the check of the complete file, as in `atomic.create`.

    Raises:
        ValueError: GGUF cannot represent a module or a tensor exactly.
        OSError: the file cannot be written.
    """
    entries = list(_plan_entries(path, contents, metadata))
    with atomic.create(path, mode=mode, check=check) as file:
        _write_header(file, entries, metadata)
        for done, entry in enumerate(entries):
            if progress is not None:
                progress(done + 1, len(entries))
            for source in entry.sources:
                rows = _pack_rows(contents, source, entry)
                if rows.nbytes * len(entry.sources) != entry.nbytes:
                    expected = entry.nbytes // len(entry.sources)
                    raise ValueError(f"{source:.200}: expected {expected} bytes in the file, got {rows.nbytes}")
                file.write(np.ascontiguousarray(interleave(rows, entry.heads)).reshape(-1).view(np.uint8).data)
            file.write(bytes(-file.tell() % ALIGNMENT))


def _plan_entries(path: Path, contents: Contents, metadata: Metadata) -> Iterator[_Entry]:
    """Yield the tensors in file order. All experts of a projection form one tensor [E, N, K]."""
    names, heads = find(metadata), find_permuted_heads(path, metadata)
    forms, specs = _choose_forms(contents), contents.specs
    experts: dict[str, dict[int, str]] = {}
    for source, (kind, shape) in forms.items():
        is_module = contents.is_module(source)
        name, expert = names.to_gguf(f"{source}.weight" if is_module else source)
        if expert is not None:
            experts.setdefault(name, {})[expert] = source
            continue
        part = name.split(".")[2] if name.startswith("blk.") else ""
        permuted = heads.get(part)
        if permuted is not None and shape[0] % (2 * permuted):
            raise ValueError(f"{source:.200}: expected rows in multiples of {2 * permuted}, got {shape[0]}")
        yield _Entry(name, kind, shape, [source], permuted)
        if is_module and specs[source].bias_dtype is not None:
            yield _Entry(f"{name.removesuffix('weight')}bias", "F32", shape[:1], [source], permuted)
    for name, sources in experts.items():
        stored = [sources.get(expert, "") for expert in range(len(sources))]
        if "" in stored:
            raise ValueError(
                f"{name:.200}: expected experts 0 to {len(stored) - 1}, got none number {stored.index('')}"
            )
        if len({forms[source] for source in stored}) > 1:
            raise ValueError(f"{name:.200}: expected experts of one type and shape, got several")
        kind, shape = forms[stored[0]]
        yield _Entry(name, kind, (len(stored), *shape), stored, None)


def _choose_forms(contents: Contents) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (GGML type, shape) of each tensor by name. Raises ValueError if no type can represent a tensor."""
    specs = contents.specs
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in contents:
        if contents.is_module(name):
            spec = specs[name]
            _check_spec(name, spec)
            forms[name] = "Q4_0" if spec.zeros == "symmetric" else "Q4_1", (spec.n, spec.k)
            continue
        shape, dtype = contents.dense_form(name)
        if dtype not in DENSE_KINDS or not 1 <= len(shape) <= MAX_RANK or 0 in shape:
            raise ValueError(f"{name:.200}: expected a float or int tensor of 1 to 4 axes, got {dtype} {list(shape)}")
        # Vectors are stored in float32, the dtype in which llama.cpp adds and multiplies them.
        is_short_vector = len(shape) == 1 and dtype in (FLOAT16, BFLOAT16)
        forms[name] = "F32" if is_short_vector else DENSE_KINDS[dtype], shape
    return forms


def _check_spec(name: str, spec: ModuleSpec) -> None:
    where = f"module {name!r:.200}"
    if spec.has_order:
        raise ValueError(
            f"{where}: expected no activation order for gguf, got one; `convert --round` quantizes the weight again"
        )
    if spec.k % GROUP:
        raise ValueError(f"{where}: expected K to be a multiple of 32 for gguf, got {spec.k}; other formats hold it")
    if spec.group_size % GROUP:
        raise ValueError(
            f"{where}: expected a group size that is a multiple of 32 for gguf, got {spec.group_size};"
            " `convert --round` quantizes the weight again"
        )


def _write_header(file: BinaryIO, entries: Sequence[_Entry], metadata: Metadata) -> None:
    file.write(MAGIC + struct.pack("<IQQ", VERSION, len(entries), len(metadata)))
    for key, value in metadata.items():
        file.write(_encode_text(key) + _encode_field(value))
    position = 0
    for entry in entries:
        axes = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *entry.shape[::-1])
        file.write(_encode_text(entry.name) + axes + struct.pack("<IQ", KINDS[entry.kind][0], position))
        position += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
    file.write(bytes(-file.tell() % ALIGNMENT))


def _encode_text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _encode_field(value: str | bool | int | float | list[str] | Array) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING_TYPE) + _encode_text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY_TYPE, STRING_TYPE, len(value)) + b"".join(map(_encode_text, value))
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", ARRAY_TYPE, ARRAY_TYPES[value.dtype], len(value)) + value.tobytes()
    if isinstance(value, bool):
        form = "?"
    elif isinstance(value, float):
        with np.errstate(over="ignore"):
            form = "f" if float(np.float32(value)) == value else "d"
    else:
        form = "I" if 0 <= value < 1 << 32 else "q" if value < 1 << 63 else "Q"
    return struct.pack(f"<I{form}", _SCALAR_NUMBERS[form], value)


def _pack_rows(contents: Contents, source: str, entry: _Entry) -> Array:
    """Return the rows of a tensor for writing: blocks, uint8 [N, bytes], or values in the dtype of the entry."""
    item = contents.read(source)
    if isinstance(item, Module):
        if entry.kind == "F32":
            return np.asarray(item.bias, np.float32)
        return _pack_module(item, f"module {source!r:.200}")
    return item.astype(np.float32) if entry.kind == "F32" else item


def _pack_module(module: Module, where: str) -> Array:
    """Return a module as blocks of Q4_0 (if symmetric) or Q4_1, uint8 [N, K/32 * bytes per block]."""
    weight = module.weight
    k, n = weight.shape
    floats = [_to_float16(weight.scales, f"{where}: scales")]
    if weight.qzeros is not None:
        floats.append(_compute_offsets(module, floats[0], where))
    header = 2 * len(floats)
    out = np.empty((n, k // GROUP, header + GROUP // 2), np.uint8)
    for i, values in enumerate(floats):
        columns = np.repeat(nibbles.transpose_matrix(values), weight.group_size // GROUP, axis=1)
        out[..., 2 * i : 2 * i + 2] = columns[..., None].view(np.uint8)
    words = nibbles.convert_to_column_words(weight.qweight).view(np.uint8).reshape(n, k // GROUP, GROUP // 2)
    for start in range(0, n, CHUNK_COLUMNS):
        part = words[start : start + CHUNK_COLUMNS]
        codes = np.stack([part & 15, part >> 4], axis=-1).reshape(*part.shape[:2], GROUP)
        out[start : start + CHUNK_COLUMNS, :, header:] = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return out.reshape(n, -1)


def _compute_offsets(module: Module, scales: Array, where: str) -> Array:
    """Return the offsets of a module, float16 [K/G, N]: its weight's float offsets, or -scale * zero point."""
    zeros: Any = module.weight.qzeros
    if module.weight.spec.zeros == "float":
        return _to_float16(zeros, f"{where}: offsets")
    products = -scales.astype(np.float32) * unpack_int4(zeros)  # exact: a scale has 11 significant bits, a zero point 4
    return _to_float16(products, f"{where}: products of scale and zero point")


def _to_float16(values: Array, where: str) -> Array:
    """Convert values to float16. Raises ValueError if a value changes."""
    with np.errstate(over="ignore"):
        converted: Array = values.astype(FLOAT16)
    if not np.array_equal(converted.astype(np.float32), values.astype(np.float32)):
        raise ValueError(
            f"{where}: expected values that float16 holds exactly, as gguf stores them, got others; `convert --round`"
            " rounds them, and symmetric weights (`quantize --symmetric`) have no products"
        )
    return converted
