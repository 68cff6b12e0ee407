# SPDX-License-Identifier: Apache-2.0
"""The reader and writer of OrinMLLM's model file format "ak48", version 5: Qwen3 with weights in the AWQ layout.

A file consists of a header of 256 bytes and the tensors without padding, ordered by kind and then by layer. RoPE's
theta and RMSNorm's epsilon are not stored; Qwen3's values apply. The tokenizer is read from the folder of the file.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupy_awq import atomic
from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.llm.config import ModelConfig
from cupy_awq.llm.files import hugging_face
from cupy_awq.llm.files.model_files import Array, ModelFiles, Progress
from cupy_awq.packing import pack_int4
from cupy_awq.weight import PackedWeight

MAGIC, VERSION, HEADER_BYTES = 0x616B3438, 5, 256
HEADER = struct.Struct("<I8iB2i")
THETA, EPS = 1e6, 1e-6
STOP_IDS = (151645, 151643)
"""The token ids of Qwen3's <|im_end|> and <|endoftext|>."""

FLOAT16, INT32 = np.dtype("<f2"), np.dtype("<i4")


class QuantizedEntry(NamedTuple):
    """An AWQ weight in the body of a file: qweight, qzeros and scales.

    Attributes:
        name: the Hugging Face name; ``{}`` stands for the layer index.
        k, n: the shape [K, N] of the weight.
    """

    name: str
    k: int
    n: int


class TensorEntry(NamedTuple):
    """A float16 tensor in the body of a file.

    Attributes:
        name: the Hugging Face name; ``{}`` stands for the layer index.
        shape: the shape of the tensor.
    """

    name: str
    shape: tuple[int, ...]


def _kinds(config: ModelConfig) -> list[QuantizedEntry | TensorEntry]:
    """Return the body's entries in file order; one entry, with ``{}`` in its name, stands for those of all layers."""
    d, i, wide, narrow = config.hidden, config.intermediate, config.q_width, config.kv_width
    attention, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    head = [] if config.tied else [TensorEntry("lm_head.weight", (config.vocab, d))]
    return [
        TensorEntry("model.layers.{}.input_layernorm.weight", (d,)),
        TensorEntry("model.layers.{}.post_attention_layernorm.weight", (d,)),
        TensorEntry("model.norm.weight", (d,)),
        TensorEntry("model.embed_tokens.weight", (config.vocab, d)),
        QuantizedEntry(attention + "q_proj", d, wide),
        QuantizedEntry(attention + "k_proj", d, narrow),
        QuantizedEntry(attention + "v_proj", d, narrow),
        QuantizedEntry(attention + "o_proj", wide, d),
        QuantizedEntry(mlp + "gate_proj", d, i),
        QuantizedEntry(mlp + "down_proj", i, d),
        QuantizedEntry(mlp + "up_proj", d, i),
        *head,
        TensorEntry(attention + "q_norm.weight", (config.head_dim,)),
        TensorEntry(attention + "k_norm.weight", (config.head_dim,)),
    ]


def _entries(config: ModelConfig) -> Iterator[QuantizedEntry | TensorEntry]:
    """Yield all entries of the body in file order, with the layer index inserted into their names."""
    for kind in _kinds(config):
        for layer in range(config.layers) if "{}" in kind.name else (0,):
            yield kind._replace(name=kind.name.format(layer))


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
        config, group_size = _header(file.read(HEADER.size), path)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors: dict[str, Callable[[], Module | Array]] = {}
    offset = HEADER_BYTES

    def view(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Callable[[], Array]:
        nonlocal offset
        start, offset = offset, offset + math.prod(shape) * dtype.itemsize
        return lambda: np.ndarray(shape, dtype, mapped, start)

    for entry in _entries(config):
        if isinstance(entry, TensorEntry):
            tensors[entry.name] = view(entry.shape, FLOAT16)
        else:
            groups, words = entry.k // group_size, entry.n // 8
            parts = view((entry.k, words), INT32), view((groups, words), INT32), view((groups, entry.n), FLOAT16)
            tensors[entry.name] = partial(_quantized, *parts)
    if offset != size:
        raise CheckpointError(f"{path}: expected {offset} bytes for the sizes in the header, got {size}")
    return ModelFiles(path, config, tensors, partial(hugging_face.load_tokenizer, path.parent), STOP_IDS)


def _header(data: bytes, path: Path) -> tuple[ModelConfig, int]:
    """Parse a header into the configuration and the group size. Raises CheckpointError if the header is invalid."""
    magic, version, *sizes, shared, head_dim, group_size = HEADER.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise CheckpointError(f"{path}: expected magic {MAGIC:#x} and version {VERSION}, got {magic:#x} and {version}")
    hidden, intermediate, layers, heads, kv_heads, vocab, context = sizes
    if shared not in (0, 1):
        raise CheckpointError(f"{path}: expected shared_classifier 0 or 1, got {shared}")
    try:
        config = ModelConfig(
            "qwen3",
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            head_dim,
            abs(vocab),
            context,
            EPS,
            THETA,
            tied=shared == 1,
            qk_norm=True,
            biases=frozenset(),
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    for kind in _kinds(config):
        if isinstance(kind, QuantizedEntry) and (group_size < 1 or kind.k % group_size or kind.n % 8):
            raise CheckpointError(
                f"{path}: {kind.name}: expected K a multiple of group_size={group_size} and N a multiple of 8,"
                f" got K={kind.k}, N={kind.n}"
            )
    return config, group_size


def _quantized(qweight: Callable[[], Array], qzeros: Callable[[], Array], scales: Callable[[], Array]) -> Module:
    return Module(PackedWeight(qweight(), scales(), qzeros()), None)


def write(files: ModelFiles, path: Path, progress: Progress | None = None) -> None:
    """Write a model as an ak48 file.

    Raises:
        ValueError: the format cannot represent the model: it is not a Qwen3 with theta 1e6, epsilon 1e-6 and unscaled
            RoPE, a linear layer is not quantized or has a bias, an activation order or float offsets, two linear layers
            have different group sizes, or a value is beyond the range of float16.
        CheckpointError, OSError: the model cannot be read or the file cannot be written. No partial file remains.
    """
    config = files.config
    fixed = config.model_type, config.rope_theta, config.eps, config.rope_frequencies()[0].tolist()
    plain = THETA ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if fixed != ("qwen3", THETA, EPS, plain.tolist()):
        raise ValueError(
            f"{files.path}: expected a qwen3 with rope_theta {THETA}, rms_norm_eps {EPS} and no rope_scaling, got a"
            f" {config.model_type} with {config.rope_theta}, {config.eps} and {dict(config.rope_scaling)!s:.200}"
        )
    entries = list(_entries(config))
    group_size = _group_size(files, next(entry for entry in entries if isinstance(entry, QuantizedEntry)))
    sizes = config.hidden, config.intermediate, config.layers, config.heads, config.kv_heads, config.vocab
    header = HEADER.pack(MAGIC, VERSION, *sizes, config.context, config.tied, config.head_dim, group_size)
    with atomic.create(path) as file:
        file.write(header.ljust(HEADER_BYTES, b"\0"))
        for done, entry in enumerate(entries):
            for array in _arrays(files, entry, group_size):
                file.write(np.ascontiguousarray(array).data)
            if progress is not None:
                progress(done + 1, len(entries))


def _group_size(files: ModelFiles, entry: QuantizedEntry) -> int:
    """Return the group size of a weight, or 0 for a dense weight, for which `_arrays` raises an error later."""
    layer = files.read_linear(entry.name, entry.k, entry.n)
    return layer.weight.group_size if isinstance(layer, Module) else 0


def _arrays(files: ModelFiles, entry: QuantizedEntry | TensorEntry, group_size: int) -> list[Array]:
    """Read and return the arrays of an entry in file order. Raises ValueError if the format cannot represent them."""
    if isinstance(entry, TensorEntry):
        return [_float16(files.read_tensor(entry.name, entry.shape), entry.name)]
    layer = files.read_linear(entry.name, entry.k, entry.n)
    if (
        not isinstance(layer, Module)
        or layer.bias is not None
        or layer.order is not None
        or layer.weight.spec.zeros == "float"
    ):
        raise ValueError(
            f"{entry.name}: expected a quantized layer with integer zero points, without bias and activation order, for"
            " an ak48 file"
        )
    weight = layer.weight
    if weight.group_size != group_size:
        raise ValueError(
            f"{entry.name}: expected the group_size {group_size} of the first layer, got {weight.group_size}"
        )
    zeros = weight.qzeros
    if zeros is None:  # symmetric quantization: every zero point is 8
        zeros = pack_int4(np.full((entry.k // group_size, entry.n), 8, np.uint8))
    scales = _float16(weight.scales, entry.name)
    if (scales.astype(weight.scales.dtype) != weight.scales).any():
        raise ValueError(f"{entry.name}: expected scales that are exact in float16 for an ak48 file, got others")
    return [weight.qweight, zeros, scales]


def _float16(values: Array, name: str) -> Array:
    """Convert values to float16. Raises ValueError if a result is not finite."""
    with np.errstate(over="ignore"):
        converted: Array = values.astype(FLOAT16)
    if not np.isfinite(converted).all():
        raise ValueError(f"{name}: expected values within the range of float16, got larger ones, NaN or infinity")
    return converted
