# SPDX-License-Identifier: Apache-2.0
"""The reader and writer of OrinMLLM's model file format "ak48", version 5: Qwen3 with weights in the AWQ layout.

A file consists of a header of 256 bytes and the tensors without padding, ordered by kind and then by layer. RoPE's
theta and RMSNorm's epsilon are not stored; Qwen3's values apply. The tokenizer is read from the folder of the file.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupy_awq import atomic
from cupy_awq.checkpoint import CheckpointError, Contents, Module, ModuleSpec, Tensor
from cupy_awq.checkpoint.files import map_file
from cupy_awq.checkpoint.module import Pending
from cupy_awq.llm import families
from cupy_awq.llm.families.description import Decoder, LayerSpec, LinearSpec, NormSpec
from cupy_awq.llm.families.table import Table
from cupy_awq.llm.files import hugging_face
from cupy_awq.llm.files.model_files import Array, ModelFiles, Progress
from cupy_awq.packing import pack_int4
from cupy_awq.weight import PackedWeight

MAGIC, VERSION, HEADER_BYTES = 0x616B3438, 5, 256
HEADER = struct.Struct("<I8iB2i")
FIXED = {"model_type": "qwen3", "rope_theta": 1e6, "rms_norm_eps": 1e-6}
"""The values of config.json that the format does not store."""
STOP_IDS = (151645, 151643)
"""The token ids of Qwen3's <|im_end|> and <|endoftext|>."""

FLOAT16, INT32 = np.dtype("<f2"), np.dtype("<i4")


class QuantizedEntry(NamedTuple):
    """An AWQ weight in the body of a file: qweight, qzeros and scales.

    Attributes:
        linear: the linear layer.
        layer: the prefix of its name, as for `ModelFiles.read_linear`.
    """

    linear: LinearSpec
    layer: str

    @property
    def name(self) -> str:
        """The Hugging Face name of the weight, with the prefix of its decoder layer."""
        return f"{self.layer}.{self.linear.name}"


class TensorEntry(NamedTuple):
    """A float16 tensor in the body of a file.

    Attributes:
        name: the Hugging Face name.
        shape: the shape of the tensor.
    """

    name: str
    shape: tuple[int, ...]


def _entries(decoder: Decoder) -> Iterator[QuantizedEntry | TensorEntry]:
    """Yield the entries of the body in file order: by kind, then by layer."""

    def all_layers(
        select: Callable[[LayerSpec], LinearSpec | NormSpec | None],
    ) -> Iterator[QuantizedEntry | TensorEntry]:
        for layer in decoder.layers:
            part = select(layer)
            if isinstance(part, LinearSpec):
                yield QuantizedEntry(part, layer.name)
            elif part is not None:
                yield TensorEntry(f"{layer.name}.{part.name}.weight", (part.size,))

    yield from all_layers(lambda layer: layer.mixer_norm)
    yield from all_layers(lambda layer: layer.feed_forward_norm)
    yield TensorEntry(f"{decoder.norm.name}.weight", (decoder.hidden,))
    yield TensorEntry(f"{decoder.embedding}.weight", (decoder.vocab, decoder.hidden))
    yield from all_layers(lambda layer: layer.mixer.q)
    yield from all_layers(lambda layer: layer.mixer.k)
    yield from all_layers(lambda layer: layer.mixer.v)
    yield from all_layers(lambda layer: layer.mixer.o)
    yield from all_layers(lambda layer: layer.mlp.gate)
    yield from all_layers(lambda layer: layer.mlp.down)
    yield from all_layers(lambda layer: layer.mlp.up)
    if not decoder.tied:
        yield TensorEntry(f"{decoder.head.name}.weight", (decoder.vocab, decoder.hidden))
    yield from all_layers(lambda layer: layer.mixer.q_norm)
    yield from all_layers(lambda layer: layer.mixer.k_norm)


def read(path: Path) -> ModelFiles:
    """Open an ak48 file and validate its header and size. Tensors are read when they are needed.

    Raises:
        CheckpointError: the file is damaged.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < HEADER_BYTES:
            raise CheckpointError(f"{path}: expected a header of {HEADER_BYTES} bytes, got a file of {size}")
        decoder, group_size = _header(file.read(HEADER.size), path)
        mapped = map_file(file)
    tensors: dict[str, Callable[[], Module | Array]] = {}
    offset = HEADER_BYTES

    def view(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Callable[[], Array]:
        nonlocal offset
        start, offset = offset, offset + math.prod(shape) * dtype.itemsize
        return lambda: np.ndarray(shape, dtype, mapped, start)

    for entry in _entries(decoder):
        if isinstance(entry, TensorEntry):
            tensors[entry.name] = view(entry.shape, FLOAT16)
        else:
            k, n = entry.linear.k, entry.linear.n
            groups, words = k // group_size, n // 8
            parts = view((k, words), INT32), view((groups, words), INT32), view((groups, n), FLOAT16)
            tensors[entry.name] = partial(_quantized, *parts)
    if offset != size:
        raise CheckpointError(f"{path}: expected {offset} bytes for the sizes in the header, got {size}")
    return ModelFiles(path, decoder, tensors, partial(hugging_face.load_tokenizer, path.parent), STOP_IDS)


def read_contents(path: Path) -> Contents:
    """Open an ak48 file as the modules and tensors of a checkpoint. Raises the same errors as `read`."""
    entries: dict[str, Pending | Tensor] = {}
    for name, reader in read(path).tensors.items():
        item = reader()  # its arrays are views of the mapped file, so this reads nothing yet
        if isinstance(item, Module):
            weight = item.weight
            spec = ModuleSpec(*weight.shape, weight.group_size, "packed", weight.dtype)
            entries[name] = Pending(spec, partial(_return, item))
        else:
            entries[name] = Tensor(item, path)
    return Contents(entries, f"Format ak48: version {VERSION} in {path}.", "ak48")


def _return(module: Module) -> Module:
    return module


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "head_dim",
)
"""The names in config.json of the values of a header after magic and version, before the group size."""


def _header(data: bytes, path: Path) -> tuple[Decoder, int]:
    """Parse a header into the description and the group size. Raises CheckpointError if the header is invalid."""
    magic, version, *sizes, group_size = HEADER.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise CheckpointError(f"{path}: expected magic {MAGIC:#x} and version {VERSION}, got {magic:#x} and {version}")
    values = dict(zip(SIZES, sizes, strict=True))
    if values["tie_word_embeddings"] not in (0, 1):
        raise CheckpointError(f"{path}: expected shared_classifier 0 or 1, got {values['tie_word_embeddings']}")
    values |= {"vocab_size": abs(values["vocab_size"]), "tie_word_embeddings": values["tie_word_embeddings"] == 1}
    try:
        decoder = families.describe(Table({**values, **FIXED}))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    for linear in decoder.layers[0].linears:
        if group_size < 1 or linear.k % group_size or linear.n % 8:
            raise CheckpointError(
                f"{path}: {linear.name}: expected K a multiple of group_size={group_size} and N a multiple of 8,"
                f" got K={linear.k}, N={linear.n}"
            )
    return decoder, group_size


def _quantized(qweight: Callable[[], Array], qzeros: Callable[[], Array], scales: Callable[[], Array]) -> Module:
    return Module(PackedWeight(qweight(), scales(), qzeros()), None)


def write(
    files: ModelFiles,
    path: Path,
    progress: Progress | None = None,
    *,
    mode: int = 0o666,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Write a model as an ak48 file. ``mode`` and ``check`` are as in `atomic.create`.

    Raises:
        ValueError: the format cannot represent the model: its description is not that of a Qwen3 with theta 1e6,
            epsilon 1e-6, unscaled RoPE and no biases; a linear layer is not quantized or has a bias, an activation
            order or float offsets; two linear layers have different group sizes; or a value is beyond the range of
            float16.
        CheckpointError, OSError: the model cannot be read or the file cannot be written. No partial file remains.
    """
    decoder = files.config
    values = families.find(decoder.model_type).settings(decoder)
    table = {**{name: values[name] for name in SIZES}, **FIXED}
    held = [families.describe(Table(table, biases_as_stored=is_stored)) for is_stored in (False, True)]
    if decoder not in held:
        raise ValueError(
            f"{files.path}: expected a qwen3 with rope_theta {FIXED['rope_theta']}, rms_norm_eps"
            f" {FIXED['rms_norm_eps']}, no rope_scaling and no biases, got a {decoder.model_type} with"
            f" {values['rope_theta']}, {values['rms_norm_eps']} and {values['rope_scaling']!s:.200}"
        )
    entries = list(_entries(decoder))
    group_size = _group_size(files, next(entry for entry in entries if isinstance(entry, QuantizedEntry)))
    header = HEADER.pack(MAGIC, VERSION, *(values[name] for name in SIZES), group_size)
    with atomic.create(path, mode=mode, check=check) as file:
        file.write(header.ljust(HEADER_BYTES, b"\0"))
        for done, entry in enumerate(entries):
            for array in _arrays(files, entry, group_size):
                file.write(np.ascontiguousarray(array).data)
            if progress is not None:
                progress(done + 1, len(entries))


def _group_size(files: ModelFiles, entry: QuantizedEntry) -> int:
    """Return the group size of a weight, or 0 for a dense weight, for which `_arrays` raises an error later."""
    layer = files.read_linear(entry.linear, entry.layer)
    return layer.weight.group_size if isinstance(layer, Module) else 0


def _arrays(files: ModelFiles, entry: QuantizedEntry | TensorEntry, group_size: int) -> list[Array]:
    """Read and return the arrays of an entry in file order. Raises ValueError if the format cannot represent them."""
    if isinstance(entry, TensorEntry):
        return [_float16(files.read_tensor(entry.name, entry.shape), entry.name)]
    layer = files.read_linear(entry.linear, entry.layer)
    if (
        not isinstance(layer, Module)
        or layer.bias is not None
        or layer.order is not None
        or layer.weight.spec.zeros == "float"
    ):
        raise ValueError(
            f"{entry.name}: expected a quantized layer with integer zero points, without bias and activation order, for"
            " an ak48 file; `convert --round` rounds other 4-bit weights, and `quantize` makes them of dense ones"
        )
    weight = layer.weight
    if weight.group_size != group_size:
        raise ValueError(
            f"{entry.name}: expected the group_size {group_size} of the first layer, got {weight.group_size}; only"
            " compressed-tensors and gguf hold several"
        )
    zeros = weight.qzeros
    if zeros is None:  # a symmetric weight stores none: every zero point is 8
        zeros = pack_int4(np.full((entry.linear.k // group_size, entry.linear.n), 8, np.uint8))
    scales = _float16(weight.scales, entry.name)
    if (scales.astype(weight.scales.dtype) != weight.scales).any():
        raise ValueError(
            f"{entry.name}: expected scales that are exact in float16 for an ak48 file, got others;"
            " `convert --round` rounds them"
        )
    return [weight.qweight, zeros, scales]


def _float16(values: Array, name: str) -> Array:
    """Convert values to float16. Raises ValueError if a result is not finite."""
    with np.errstate(over="ignore"):
        converted: Array = values.astype(FLOAT16)
    if not np.isfinite(converted).all():
        raise ValueError(f"{name}: expected values within the range of float16, got larger ones, NaN or infinity")
    return converted
