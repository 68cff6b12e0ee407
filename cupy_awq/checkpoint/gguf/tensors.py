# SPDX-License-Identifier: Apache-2.0
"""The GGUF format. Tensors are renamed to their Hugging Face names.

Linear layers in Q4_0, Q4_1 and Q4_K stay 4-bit if N is a multiple of 8; all other quantized tensors become dense
float16, or dense bfloat16 if they are Q4_K with scales beyond the range of float16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.check import BFLOAT16, FLOAT16, FLOATS
from cupy_awq.checkpoint.contents import Contents, warn_first
from cupy_awq.checkpoint.files import CheckpointError, check_count
from cupy_awq.checkpoint.gguf import container, dense, q4
from cupy_awq.checkpoint.gguf.container import Blocks
from cupy_awq.checkpoint.gguf.names import Names, find, find_permuted_heads
from cupy_awq.checkpoint.module import Module, ModuleSpec, Pending
from cupy_awq.checkpoint.tensors import Tensor, is_finite

Array = npt.NDArray[Any]

PACKED_TYPES = ("Q4_0", "Q4_1", "Q4_K")
"""The GGML types whose codes stay 4-bit in linear layers."""

LINEAR_ENDINGS = ("_proj.weight", "lm_head.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""The endings by which the Hugging Face name of a linear layer is recognized."""


def read(path: Path) -> Contents:
    """Open a GGUF file and return its modules and tensors.

    Raises the same errors as `container.read` and `open_tensors`.
    """
    return open_tensors(path, *container.read(path))


def open_tensors(path: Path, metadata: Mapping[str, Any], blocks: Mapping[str, Blocks]) -> Contents:
    """Return the modules and tensors of a GGUF file by Hugging Face name; an unknown tensor keeps its GGUF name.

    The rows of the q and k projections are permuted to Hugging Face's order, and each expert becomes a module.

    Args:
        path: the path of the file, for error messages.
        metadata: the metadata fields of the file by key.
        blocks: the tensors of the file by GGUF name.

    Raises:
        CheckpointError: tensors or metadata contradict each other, two tensors get the same name, or there are too
            many.
    """
    names, heads = find(metadata), find_permuted_heads(path, metadata)
    entries: dict[str, Pending | Tensor] = {}
    for name, block in blocks.items():
        where = f"{path}: tensor {name!r:.200}"
        for key, part, count in _name_tensors(name, block, names, heads, where):
            bias = blocks.get(name.removesuffix("weight") + "bias") if name.endswith(".weight") else None
            entry = _open_tensor(path, part, key, count, bias, where)
            if isinstance(entry, Pending) and not entry.is_dense:
                key = key.removesuffix(".weight")
            if key in entries:
                raise CheckpointError(f"{where}: expected a unique name, got {key!r:.200} twice")
            entries[key] = entry
        check_count(len(entries), str(path))
    for name in [name for name, entry in entries.items() if isinstance(entry, Pending) and entry.spec.bias_dtype]:
        entries.pop(f"{name}.bias", None)
    warn_first([entry.warning for entry in entries.values() if isinstance(entry, Pending) and entry.warning])
    kinds = sorted({block.kind for block in blocks.values()})
    return Contents(entries, f"Format gguf: types {', '.join(kinds)} in {path}.", "gguf")


def rename_tensors(
    path: Path, metadata: Mapping[str, Any], blocks: Mapping[str, Blocks]
) -> Iterator[tuple[str, Blocks, int | None]]:
    """Yield (Hugging Face name, `Blocks`, heads) for every tensor and expert.

    ``heads`` is None if the rows of the tensor are in Hugging Face's order, else the tensor's number of heads: GGUF
    interleaves the rows of each head, which `restore_rows` reverses. Raises CheckpointError if the metadata has a
    malformed number of heads, or if a tensor has too many experts.
    """
    names, heads = find(metadata), find_permuted_heads(path, metadata)
    for name, block in blocks.items():
        yield from _name_tensors(name, block, names, heads, f"{path}: tensor {name!r:.200}")


def restore_rows(block: Blocks, heads: int | None) -> Blocks:
    """Return a tensor with its rows in Hugging Face's order. ``heads`` is the value that `rename_tensors` yields."""
    return block._replace(data=_deinterleave(block.data, heads))


def _name_tensors(
    name: str, block: Blocks, names: Names, heads: Mapping[str, int], where: str
) -> list[tuple[str, Blocks, int | None]]:
    """Return (Hugging Face name, `Blocks`, heads) for a tensor, with ``heads`` as in `rename_tensors`.

    ``heads`` as an argument is the result of `find_permuted_heads`.

    The list has one item, or one per expert if the tensor holds all experts of a layer. Raises CheckpointError, whose
    message starts with ``where``, for too many experts.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in names.outer:
        return [(f"{names.outer[stem]}.{suffix}", block, None)]
    first, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if first != "blk":
        return [(name, block, None)]
    layer = f"model.layers.{number}"
    if (whole := f"{part}.{suffix}") in names.whole:
        return [(f"{layer}.{names.whole[whole]}", block, None)]
    if part in names.experts and len(block.shape) == 3 and suffix == "weight":
        count, n, k = block.shape
        check_count(count, where)
        rows = block.data.reshape(count, n, -1)
        return [
            (f"{layer}.{names.experts[part].format(i)}.weight", Blocks(block.kind, (n, k), rows[i]), None)
            for i in range(count)
        ]
    if part not in names.layer:
        return [(name, block, None)]
    return [(f"{layer}.{names.layer[part]}.{suffix}", block, heads.get(part))]


def _open_tensor(
    path: Path, block: Blocks, key: str, heads: int | None, bias: Blocks | None, where: str
) -> Pending | Tensor:
    """Return a 4-bit module, a dense tensor that is converted on access, or a view of the file.

    Args:
        path: the path of the file.
        block: the tensor's quantization blocks.
        key: the Hugging Face name of the tensor.
        heads: the number of heads if the rows of each head are interleaved, else None.
        bias: the bias of the module, or None.
        where: the start of error messages.

    Raises:
        CheckpointError: the shapes of weight, bias and heads contradict each other, or the bias of a 4-bit module is
            not finite or has an unsupported dtype.
    """
    if heads is not None and block.shape[0] % (2 * heads):
        raise CheckpointError(f"{where}: expected rows in multiples of {2 * heads}, got {block.shape[0]}")
    n, k = math.prod(block.shape[:-1]), block.shape[-1]
    is_packed = block.kind in PACKED_TYPES and len(block.shape) == 2 and n % 8 == 0 and key.endswith(LINEAR_ENDINGS)
    overflows = is_packed and block.kind == "Q4_K" and q4.overflows(block.data)
    if is_packed and not overflows:
        values = None if bias is None else _deinterleave(_read_bias(bias, n, where), heads)
        pending = q4.open_module(block, where, values)
        if heads is None:
            return pending
        return pending._replace(repack=partial(_convert_module, block, heads, where, values))
    if block.kind in dense.PLAIN and heads is None:
        return Tensor(dense.read_values(block, where), path)
    bits = 8 * block.data.shape[-1] // k
    dtype = BFLOAT16 if overflows else dense.PLAIN.get(block.kind, FLOAT16)
    rounding = "" if block.kind in dense.PLAIN else f"{block.kind} to dense {dtype}"
    spec = ModuleSpec(k, n, k, "symmetric", dtype, bits=bits, rounding=rounding)
    warning = f"{where}: scales beyond the range of float16; the weight becomes dense bfloat16" if overflows else ""
    repack = partial(_convert_dense, path, block, heads, where, dtype)
    return Pending(spec, repack, warning, is_dense=True, shape=block.shape)


def _read_bias(bias: Blocks, n: int, where: str) -> Array:
    """Return a bias [N]. Raises CheckpointError if its dtype is not in `FLOATS` or its values are not N finite ones."""
    values = dense.read_values(bias, where)
    if values.dtype not in FLOATS or values.shape != (n,):
        expected = f"{' or '.join(map(str, FLOATS))} [N] = [{n}]"
        raise CheckpointError(f"{where}: bias: expected {expected}, got {values.dtype} {list(values.shape)}")
    if not is_finite(values):
        raise CheckpointError(f"{where}: bias: expected finite values, got NaN or infinity")
    return values


def _convert_module(block: Blocks, heads: int, where: str, bias: Array | None) -> Module | Tensor:
    return q4.open_module(restore_rows(block, heads), where, bias).convert()


def _convert_dense(path: Path, block: Blocks, heads: int | None, where: str, dtype: np.dtype[Any]) -> Tensor:
    return Tensor(_deinterleave(dense.read_values(block, where, dtype), heads), path)


def _deinterleave(rows: Array, heads: int | None) -> Array:
    """Return ``rows`` [N, ...] with rows 2i and 2i + 1 of each head moved to i and i + head_dim / 2.

    If ``heads`` is None, return ``rows`` unchanged.
    """
    if heads is None:
        return rows
    n, *rest = rows.shape
    return rows.reshape(heads, n // heads // 2, 2, *rest).swapaxes(1, 2).reshape(n, *rest)


def interleave(rows: Array, heads: int | None) -> Array:
    """Return ``rows`` [N, ...] with rows i and i + head_dim / 2 of each head moved to 2i and 2i + 1.

    This is GGUF's order of the rows of q and k in Llama models. If ``heads`` is None, return ``rows`` unchanged.

    >>> import numpy as np
    >>> interleave(np.arange(8), heads=2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    if heads is None:
        return rows
    n, *rest = rows.shape
    return rows.reshape(heads, 2, n // heads // 2, *rest).swapaxes(1, 2).reshape(n, *rest)
