# SPDX-License-Identifier: Apache-2.0
"""OrinMLLM's model file "ak48", version 5: Qwen3 with AWQ weights in the canonical layout.

A header of 256 bytes, then the tensors without padding, each kind for all layers. The file holds neither RoPE's theta
nor RMSNorm's epsilon nor a tokenizer: they are Qwen3's, and the tokenizer is read from the folder of the file.
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

from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.llm import folder
from cupy_awq.llm.config import Config
from cupy_awq.llm.model import Progress
from cupy_awq.llm.source import Array, Source
from cupy_awq.packing import pack_int4
from cupy_awq.weight import PackedWeight

MAGIC, VERSION, HEADER_BYTES = 0x616B3438, 5, 256
HEADER = struct.Struct("<I8iB2i")
THETA, EPS = 1e6, 1e-6
STOP = (151645, 151643)
"""<|im_end|> and <|endoftext|> of Qwen3."""

HALF, WORD = np.dtype("<f2"), np.dtype("<i4")


class Linears(NamedTuple):
    """The AWQ weights [K, N] of one module of each layer."""

    name: str
    k: int
    n: int


class Vectors(NamedTuple):
    """A float16 tensor; ``{}`` in its name stands for the layer."""

    name: str
    shape: tuple[int, ...]


def _order(config: Config) -> list[Linears | Vectors]:
    """The body of a file."""
    d, i, wide, narrow = config.hidden, config.intermediate, config.q_width, config.kv_width
    attention, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    head = [] if config.tied else [Vectors("lm_head.weight", (config.vocab, d))]
    return [
        Vectors("model.layers.{}.input_layernorm.weight", (d,)),
        Vectors("model.layers.{}.post_attention_layernorm.weight", (d,)),
        Vectors("model.norm.weight", (d,)),
        Vectors("model.embed_tokens.weight", (config.vocab, d)),
        Linears(attention + "q_proj", d, wide),
        Linears(attention + "k_proj", d, narrow),
        Linears(attention + "v_proj", d, narrow),
        Linears(attention + "o_proj", wide, d),
        Linears(mlp + "gate_proj", d, i),
        Linears(mlp + "down_proj", i, d),
        Linears(mlp + "up_proj", d, i),
        *head,
        Vectors(attention + "q_norm.weight", (config.head_dim,)),
        Vectors(attention + "k_norm.weight", (config.head_dim,)),
    ]


def _entries(config: Config) -> Iterator[Linears | Vectors]:
    """Each tensor or weight of the body, in order."""
    for item in _order(config):
        for layer in range(config.layers) if "{}" in item.name else (0,):
            yield item._replace(name=item.name.format(layer))


def read(path: Path) -> Source:
    """The model in a file. Raises CheckpointError for an unusable one, OSError for one that cannot be read."""
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
        if isinstance(entry, Vectors):
            tensors[entry.name] = view(entry.shape, HALF)
        else:
            groups, words = entry.k // group_size, entry.n // 8
            parts = view((entry.k, words), WORD), view((groups, words), WORD), view((groups, entry.n), HALF)
            tensors[entry.name] = partial(_module, *parts)
    if offset != size:
        raise CheckpointError(f"{path}: expected {offset} bytes for the sizes in the header, got {size}")
    return Source(path, config, tensors, partial(folder.tokenizer, path.parent), STOP)


def _header(data: bytes, path: Path) -> tuple[Config, int]:
    magic, version, *sizes, shared, head_dim, group_size = HEADER.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise CheckpointError(f"{path}: expected magic {MAGIC:#x} and version {VERSION}, got {magic:#x} and {version}")
    hidden, intermediate, layers, heads, kv_heads, vocab, context = sizes
    if shared not in (0, 1):
        raise CheckpointError(f"{path}: expected shared_classifier 0 or 1, got {shared}")
    try:
        config = Config(
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
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    for item in _order(config):
        if isinstance(item, Linears) and (group_size < 1 or item.k % group_size or item.n % 8):
            raise CheckpointError(
                f"{path}: {item.name}: K={item.k} must be whole groups of group_size={group_size}, N={item.n} of 8"
            )
    return config, group_size


def _module(qweight: Callable[[], Array], qzeros: Callable[[], Array], scales: Callable[[], Array]) -> Module:
    return Module(PackedWeight(qweight(), scales(), qzeros()), None)


def write(source: Source, path: Path, progress: Progress | None = None) -> None:
    """Write a model as an ak48 file.

    Raises:
        ValueError: the format cannot hold the model: it is not a Qwen3 with theta 1e6, epsilon 1e-6 and plain RoPE; a
            linear module is not quantized, has a bias or offsets, or a group size of its own.
        CheckpointError, OSError: the source cannot be read or the file cannot be written; none is left then.
    """
    config = source.config
    fixed = config.model_type, config.rope_theta, config.eps, config.frequencies()[0].tolist()
    plain = THETA ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if fixed != ("qwen3", THETA, EPS, plain.tolist()):
        raise ValueError(
            f"{source.path}: an ak48 file holds a qwen3 with rope_theta {THETA} and rms_norm_eps {EPS}, got a"
            f" {config.model_type} with {config.rope_theta} and {config.eps}"
        )
    entries = list(_entries(config))
    group_size = _group_size(source, next(entry for entry in entries if isinstance(entry, Linears)))
    sizes = config.hidden, config.intermediate, config.layers, config.heads, config.kv_heads, config.vocab
    header = HEADER.pack(MAGIC, VERSION, *sizes, config.context, config.tied, config.head_dim, group_size)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(header.ljust(HEADER_BYTES, b"\0"))
            for done, entry in enumerate(entries):
                for array in _arrays(source, entry, group_size):
                    file.write(np.ascontiguousarray(array).data)
                if progress is not None:
                    progress(done + 1, len(entries))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _group_size(source: Source, entry: Linears) -> int:
    module = source.linear(entry.name, entry.k, entry.n)
    return module.weight.group_size if isinstance(module, Module) else 0


def _arrays(source: Source, entry: Linears | Vectors, group_size: int) -> list[Array]:
    """What stands in the file for an entry, in order."""
    if isinstance(entry, Vectors):
        return [_half(source.tensor(entry.name, entry.shape), entry.name)]
    module = source.linear(entry.name, entry.k, entry.n)
    if not isinstance(module, Module) or module.bias is not None or module.weight.spec.zeros == "float":
        raise ValueError(f"{entry.name}: an ak48 file holds quantized modules with integer zero points and no bias")
    weight = module.weight
    if weight.group_size != group_size:
        raise ValueError(f"{entry.name}: expected group_size {group_size} as in all modules, got {weight.group_size}")
    zeros = weight.qzeros
    if zeros is None:  # symmetric: every zero point is 8
        zeros = pack_int4(np.full((entry.k // group_size, entry.n), 8, np.uint8))
    return [weight.qweight, zeros, _half(weight.scales, entry.name)]


def _half(values: Array, name: str) -> Array:
    with np.errstate(over="ignore"):
        half: Array = values.astype(HALF)
    if not np.isfinite(half).all():
        raise ValueError(f"{name}: expected values within float16, got larger ones, NaN or infinity")
    return half
