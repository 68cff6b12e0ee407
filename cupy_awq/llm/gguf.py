# SPDX-License-Identifier: Apache-2.0
"""The reader of GGUF files: Q4_0 and Q4_1 weights carry over exactly, all other tensors become float16.

A quantization block of 32 values along K becomes a group of 32, with the same codes. Q4_0 is W = (q - 8) * d, the
symmetric form with d as the scale; Q4_1 is W = q * d + m, the form with float offsets.

The header is hostile input: every count and length is checked against the remaining bytes before it is used. (The
reader of the package ``gguf`` does not check: a huge array length keeps it in a loop for hours.)
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.llm.config import ModelConfig
from cupy_awq.llm.extra import import_extra
from cupy_awq.llm.model_files import Array, ModelFiles
from cupy_awq.llm.tokenizer import Tokenizer
from cupy_awq.packing import pack_int4
from cupy_awq.weight import PackedWeight

SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The `struct` format of each scalar type of metadata values."""
STRING_TYPE, ARRAY_TYPE = 8, 9
VERSIONS = (2, 3)
MAX_RANK = 4

GROUP_SIZE = 32
EXACT_TYPES = ("Q4_0", "Q4_1")

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{p}": f"self_attn.{p}_proj" for p in "qkv"},
    **{f"attn_{p}_norm": f"self_attn.{p}_norm" for p in "qk"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}

PRE_TOKENIZERS = {
    "gpt-2": None,
    "default": None,
    "smollm": None,
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""The regular expression of each ``tokenizer.ggml.pre`` that splits text into words before merging; None: GPT-2's."""


class Blocks(NamedTuple):
    """A tensor of a GGUF file, stored as quantization blocks.

    Attributes:
        kind: the name of the GGML quantization type, such as "Q4_0" or "F16".
        shape: the shape of the tensor, outermost axis first.
        data: uint8 [rows, bytes of a row], a view of the mapped file; the rows are all axes but the last.
    """

    kind: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


class _Cursor:
    """A read position in the file; every read first checks that the bytes exist."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data, self.position, self.path = data, 0, path

    def require(self, count: int) -> None:
        """Raise CheckpointError unless ``count`` more bytes remain."""
        if count > len(self.data) - self.position:
            raise CheckpointError(f"{self.path}: expected a GGUF file, got a damaged or truncated one")

    def take(self, count: int) -> memoryview:
        self.require(count)
        self.position += count
        return self.data[self.position - count : self.position]

    def scalar(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        try:
            return str(self.take(self.scalar("Q")), "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: expected UTF-8 before byte {self.position}, got {error}") from None

    def value(self) -> Any:
        """Read a metadata value: a scalar, a text, a NumPy array of scalars or a list of texts."""
        kind = self.scalar("I")
        if kind == STRING_TYPE:
            return self.text()
        if kind in SCALAR_FORMATS:
            return self.scalar(SCALAR_FORMATS[kind])
        if kind != ARRAY_TYPE:
            raise CheckpointError(
                f"{self.path}: expected a known metadata type before byte {self.position}, got {kind}"
            )
        item, count = self.scalar("I"), self.scalar("Q")
        if item == STRING_TYPE:
            self.require(8 * count)
            return [self.text() for _ in range(count)]
        if item not in SCALAR_FORMATS:
            raise CheckpointError(f"{self.path}: expected a known array type before byte {self.position}, got {item}")
        form = np.dtype(SCALAR_FORMATS[item]).newbyteorder("<")
        return np.frombuffer(self.take(count * form.itemsize), form)


def read(path: Path) -> ModelFiles:
    """Return the model of a GGUF file.

    Raises:
        CheckpointError: the file is damaged, or the model is of an unsupported kind.
        OSError: the file cannot be read.
    """
    metadata, blocks = read_container(path)
    try:
        config = _config(metadata, blocks)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    tensors: dict[str, Callable[[], Module | Array]] = {}
    for name, block in blocks.items():
        target, heads = _target(name, config)
        if target is None:
            continue
        bias = blocks.get(name.removesuffix("weight") + "bias")
        if block.kind in EXACT_TYPES and len(block.shape) == 2 and block.shape[0] % 8 == 0 and "_proj" in target:
            tensors[target.removesuffix(".weight")] = partial(_quantized, block, heads, bias)
        else:
            tensors[target] = partial(_dense, block, heads)
    stop = metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")
    stop_ids = tuple(i for i in stop if type(i) is int)
    return ModelFiles(path, config, tensors, partial(load_tokenizer, path, metadata), stop_ids)


def read_container(path: Path) -> tuple[dict[str, Any], dict[str, Blocks]]:
    """Return the metadata and the tensors of a GGUF file by name.

    The tensors are views of the mapped file, which must not be truncated while they live.

    Raises:
        CheckpointError: the file is malformed.
        OSError: the file cannot be opened.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path}: expected a GGUF file, got another kind")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(memoryview(mapped), path)
    cursor.take(4)
    version, tensor_count, field_count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: expected GGUF version 2 or 3, got {version}")
    cursor.require(12 * field_count + 24 * tensor_count)  # their smallest sizes
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.text()
        if key in metadata:
            raise CheckpointError(f"{path}: expected one metadata field {key!r:.200}, got two")
        metadata[key] = cursor.value()
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"{path}: general.alignment: expected an integer in 1..{1 << 20}, got {alignment!r:.80}")
    start = -(-cursor.position // alignment) * alignment
    found: dict[str, Blocks] = {}
    for name, shape, kind, offset in entries:
        if name in found:
            raise CheckpointError(f"{path}: expected one tensor {name!r:.200}, got two")
        found[name] = _blocks(mapped, f"{path}: tensor {name!r:.200}", shape, kind, start + offset)
    return metadata, found


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return the name, shape (outermost axis first), type and offset of one tensor."""
    name, rank = cursor.text(), cursor.scalar("I")
    if not 1 <= rank <= MAX_RANK:
        raise CheckpointError(f"{cursor.path}: tensor {name!r:.200}: expected 1 to {MAX_RANK} axes, got {rank}")
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _blocks(mapped: mmap.mmap, where: str, shape: tuple[int, ...], kind: int, start: int) -> Blocks:
    """Return the view of a tensor at byte ``start``; ``where`` opens error messages."""
    constants = import_extra("gguf.constants")
    try:
        form = constants.GGMLQuantizationType(kind)
    except ValueError:
        raise CheckpointError(f"{where}: expected a known quantization type, got {kind}") from None
    block_values, block_bytes = constants.GGML_QUANT_SIZES[form]
    *leading, columns = shape
    if columns % block_values:
        raise CheckpointError(f"{where}: {form.name}: expected rows of whole blocks of {block_values}, got {columns}")
    rows, row_bytes = math.prod(leading), columns // block_values * block_bytes
    remaining = max(len(mapped) - start, 0)
    if rows * row_bytes > remaining:
        raise CheckpointError(f"{where}: {form.name} {list(shape)}: expected {rows * row_bytes} bytes, got {remaining}")
    return Blocks(form.name, shape, np.ndarray((rows, row_bytes), np.uint8, mapped, start))


def _config(metadata: Mapping[str, Any], blocks: Mapping[str, Blocks]) -> ModelConfig:
    arch = metadata.get("general.architecture")

    def get(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        if value is None:
            raise ValueError(f"{arch}.{name}: expected a value, got none")
        return value

    heads, hidden = get("attention.head_count"), get("embedding_length")
    if "token_embd.weight" not in blocks:
        raise ValueError("token_embd.weight: expected a tensor of this name, got none")
    head_dim = get("attention.key_length", hidden // heads if heads else 0)
    for name in ("attention.value_length", "rope.dimension_count"):
        if get(name, head_dim) != head_dim:
            raise ValueError(f"{arch}.{name}: expected the head dimension {head_dim}, got {get(name)!r:.80}")
    scaling: dict[str, Any] = {}
    factors: tuple[float, ...] = ()
    kind = get("rope.scaling.type", "none")
    if "rope_freqs.weight" in blocks:
        factors = tuple(_dense(blocks["rope_freqs.weight"], None).ravel().tolist())
    elif kind != "none":
        original = metadata.get(f"{arch}.rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": get("rope.scaling.factor")}
        scaling["original_max_position_embeddings"] = original
    return ModelConfig(
        model_type=str(arch),
        hidden=hidden,
        intermediate=get("feed_forward_length"),
        layers=get("block_count"),
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=blocks["token_embd.weight"].shape[0],
        context=get("context_length"),
        eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        rope_factors=factors,
        tied="output.weight" not in blocks,
        qk_norm=arch == "qwen3",
    )


def _target(name: str, config: ModelConfig) -> tuple[str | None, int | None]:
    """Return the Hugging Face name of a tensor and the number of heads whose rows are permuted.

    The name is None for a tensor that the model does not use, the number None where no rows are permuted.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}", None
    block, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if block != "blk" or part not in LAYER_NAMES:
        return None, None
    # Files of Llama interleave the two halves of each head of q and k, for a RoPE that rotates adjacent pairs.
    permuted = {"attn_q": config.heads, "attn_k": config.kv_heads} if config.model_type == "llama" else {}
    return f"model.layers.{number}.{LAYER_NAMES[part]}.{suffix}", permuted.get(part)


def _deinterleaved(data: Array, heads: int | None) -> Array:
    """Return rows [N, ...] with rows 2i and 2i + 1 of each head moved to i and i + head_dim / 2."""
    if heads is None:
        return data
    n, *rest = data.shape
    if n % (2 * heads):
        raise CheckpointError(f"expected a multiple of {2 * heads} rows for {heads} heads, got {n}")
    return data.reshape(heads, n // heads // 2, 2, *rest).swapaxes(1, 2).reshape(n, *rest)


def _quantized(block: Blocks, heads: int | None, bias: Blocks | None) -> Module:
    """Return the linear layer of a Q4_0 or Q4_1 tensor, with the same codes, scales and offsets."""
    n, k = block.shape
    halves = 1 if block.kind == "Q4_0" else 2  # a block begins with its scale d, and with m for Q4_1, in float16
    data = _deinterleaved(block.data, heads).reshape(n, k // GROUP_SIZE, 2 * halves + GROUP_SIZE // 2)
    header = np.ascontiguousarray(data[..., : 2 * halves]).view(np.float16)
    # Byte j holds the codes j and j + 16; the axes become (group, half, j, row).
    pairs = np.ascontiguousarray(data[..., 2 * halves :].transpose(1, 2, 0))
    codes = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=1).reshape(k, n)
    scales, *offsets = (np.ascontiguousarray(header[..., i].T) for i in range(halves))
    weight = PackedWeight(pack_int4(codes), scales, offsets[0] if offsets else None)
    return Module(weight, None if bias is None else _dense(bias, heads))


def _dense(block: Blocks, heads: int | None) -> Array:
    """Return the values of a tensor, in float32 if the file has float32, else in float16."""
    if block.kind in ("F16", "F32"):
        values = block.data.view(block.kind.replace("F", "f").replace("16", "2").replace("32", "4"))
    else:
        gguf = import_extra("gguf")
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged file shows in its logits
            try:
                values = gguf.quants.dequantize(block.data, gguf.GGMLQuantizationType[block.kind]).astype(np.float16)
            except NotImplementedError:
                raise CheckpointError(f"expected a supported quantization type, got {block.kind}") from None
    return _deinterleaved(values.reshape(block.shape), heads)


def load_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that the metadata of a file describe. Raises CheckpointError if they describe none."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(
            f"{path}: expected tokenizer.ggml.model gpt2 with pre one of {known}, got {kind!r:.80} with {pre!r:.80}"
        )
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    merges = metadata.get("tokenizer.ggml.merges")
    lists = isinstance(tokens, list) and isinstance(merges, list) and isinstance(types, np.ndarray)
    if not lists or len(tokens) != len(types):  # type: ignore[arg-type]
        raise CheckpointError(f"{path}: expected tokenizer.ggml.tokens, a token_type for each, and merges")
    tokenizers = import_extra("tokenizers")
    try:
        pairs = [tuple(merge.split(" ")) for merge in merges]  # type: ignore[union-attr]
        vocabulary = {token: i for i, token in enumerate(tokens)}  # type: ignore[arg-type]
        bpe = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
        inner = tokenizers.Tokenizer(bpe)
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"{path}: expected a valid tokenizer, got {error}") from None
    inner.pre_tokenizer = _pre_tokenizer(tokenizers, pre)
    inner.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = tokenizers.normalizers.NFC()
    for special, token_type in ((True, 3), (False, 4)):  # control tokens, then user-defined ones
        ids = np.flatnonzero(types == token_type).tolist()
        inner.add_tokens(
            [tokenizers.AddedToken(tokens[i], special=special, normalized=False) for i in ids]  # type: ignore[index]
        )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    texts = {}
    for name in ("bos", "eos"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        texts[f"{name}_token"] = tokens[i] if type(i) is int and 0 <= i < len(tokens) else ""  # type: ignore[index,arg-type]
    # A file says whether to add BOS; without that field, llama-bpe adds it.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        inner, template if isinstance(template, str) else None, texts, bos if adds_bos and type(bos) is int else None
    )


def _pre_tokenizer(tokenizers: Any, pre: str) -> Any:
    """Return the `tokenizers` object that splits text into words and words into bytes."""
    steps = tokenizers.pre_tokenizers
    pattern, to_bytes = PRE_TOKENIZERS[pre], partial(steps.ByteLevel, add_prefix_space=False)
    if pattern is not None:
        return steps.Sequence([steps.Split(tokenizers.Regex(pattern), "isolated"), to_bytes(use_regex=False)])
    digits = [steps.Digits(individual_digits=True)] if pre == "smollm" else []
    return steps.Sequence([*digits, to_bytes(use_regex=True)])
