# SPDX-License-Identifier: Apache-2.0
"""Conversion of GGUF tensors that cannot stay packed 4-bit weights to dense arrays, usually float16.

The common GGML types are converted here with NumPy; all other types need the package ``gguf``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.check import BFLOAT16, FLOAT16
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.gguf.container import Blocks
from cupy_awq.checkpoint.threads import run_ranges

Array = npt.NDArray[Any]
Bytes = npt.NDArray[Any]
"""An array of quantization blocks, uint8 [rows, blocks per row, bytes per block], or of unpacked codes, uint8."""

CHUNK = 1 << 17
"""The number of values that are converted at a time, which bounds the memory for float32 copies."""

PLAIN: dict[str, np.dtype[Any]] = {
    "F16": FLOAT16,
    "BF16": BFLOAT16,
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
}
"""The NumPy dtype for each GGML type that needs no conversion: such tensors are returned as views of the file."""


def read_values(block: Blocks, where: str, dtype: np.dtype[Any] = FLOAT16) -> Array:
    """Return the values of a tensor, in its shape.

    A tensor of a type in `PLAIN` is returned as a view of the file; any other is converted to ``dtype``. Raises
    CheckpointError, whose message starts with ``where``, if the type is not supported, or if it needs the package
    ``gguf``, which is not installed.
    """
    if block.kind in PLAIN:
        return block.data.view(PLAIN[block.kind]).reshape(block.shape)
    convert = _find_converter(block.kind, where)
    rows, columns = len(block.data), block.shape[-1]
    out = np.empty((rows, columns), dtype)
    step = max(1, CHUNK // columns)

    def run(start: int, stop: int) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # no warning: a damaged file has any scales
            for first in range(start, stop, step):
                chunk = block.data[first : min(first + step, stop)]
                out[first : first + len(chunk)] = convert(chunk).reshape(len(chunk), columns)

    # one thread for the package gguf, which caches tables
    run_ranges(run, rows, out.nbytes if block.kind in CONVERTERS else 0)
    return out.reshape(block.shape)


def _find_converter(kind: str, where: str) -> Callable[[Bytes], Array]:
    """Return the function that converts rows of blocks, uint8 [rows, bytes], of the GGML type ``kind`` to float32."""
    if kind in CONVERTERS:
        block_bytes, convert = CONVERTERS[kind]
        return lambda rows: convert(rows.reshape(len(rows), -1, block_bytes))
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError:
        hint = "pip install gguf"
        raise CheckpointError(f"{where}: expected the package gguf for type {kind}, got none: {hint}") from None
    form = getattr(gguf.GGMLQuantizationType, kind, None)

    def convert_by_package(rows: Bytes) -> Array:
        try:
            values: Array = gguf.quants.dequantize(np.ascontiguousarray(rows), form)
        except (NotImplementedError, KeyError):
            raise CheckpointError(f"{where}: expected a supported quantization type, got {kind}") from None
        return values

    return convert_by_package


def _read_float16(blocks: Bytes, start: int, count: int) -> Array:
    """Return the ``count`` float16 values at byte offset ``start`` of each block as float32 [..., count]."""
    values: Array = np.ascontiguousarray(blocks[..., start : start + 2 * count]).view(np.float16)
    return values.astype(np.float32)


def _unpack_nibbles(codes: Bytes) -> Bytes:
    """Return the low nibbles of bytes [..., B], followed by the high nibbles: uint8 [..., 2B]."""
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _dequantize_q4_0(blocks: Bytes) -> Array:
    return _read_float16(blocks, 0, 1) * (_unpack_nibbles(blocks[..., 2:]).astype(np.float32) - 8)


def _dequantize_q4_1(blocks: Bytes) -> Array:
    return _read_float16(blocks, 0, 1) * _unpack_nibbles(blocks[..., 4:]) + _read_float16(blocks, 2, 1)


def _unpack_five_bits(blocks: Bytes, start: int) -> Array:
    """Return the 32 codes of each Q5_0 or Q5_1 block as float32.

    At byte ``start`` of a block, 4 bytes hold the fifth bit of each code; the next 16 bytes hold the low nibbles.
    """
    high = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
    codes: Array = _unpack_nibbles(blocks[..., start + 4 :]) | high << 4
    return codes.astype(np.float32)


def _dequantize_q5_0(blocks: Bytes) -> Array:
    values: Array = _read_float16(blocks, 0, 1) * (_unpack_five_bits(blocks, 2) - 16)
    return values


def _dequantize_q5_1(blocks: Bytes) -> Array:
    return _read_float16(blocks, 0, 1) * _unpack_five_bits(blocks, 4) + _read_float16(blocks, 2, 1)


def _dequantize_q8_0(blocks: Bytes) -> Array:
    return _read_float16(blocks, 0, 1) * blocks[..., 2:].view(np.int8)


def unpack_scales(blocks: Bytes) -> tuple[Array, Array]:
    """Return the 6-bit scales sc and minima m of Q4_K or Q5_K super-blocks [..., bytes], each as float32 [8, ...]."""
    # the long axis last: NumPy vectorizes along it
    packed = np.ascontiguousarray(np.moveaxis(blocks[..., 4:16], -1, 0))
    low, mid, high = packed[:4], packed[4:8], packed[8:]
    sc, m = (np.empty((8, *packed.shape[1:]), np.float32) for _ in range(2))
    sc[:4], m[:4] = low & 63, mid & 63
    sc[4:], m[4:] = (high & 15) | (low >> 6) << 4, (high >> 4) | (mid >> 6) << 4
    return sc, m


def _scale_groups(blocks: Bytes, codes: Array) -> Array:
    """Return (d * sc) * q - dmin * m for codes q [..., 8, 32] of super-blocks with Q4_K's header (d, dmin, sc, m)."""
    sc, m = (np.moveaxis(values, 0, -1) for values in unpack_scales(blocks))
    header = _read_float16(blocks, 0, 2)
    values: Array = (header[..., :1] * sc)[..., None] * codes - (header[..., 1:] * m)[..., None]
    return values


def _dequantize_q4_k(blocks: Bytes) -> Array:
    pairs = np.ascontiguousarray(blocks[..., 16:]).reshape(*blocks.shape[:-1], 4, 1, 32)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=-2)
    return _scale_groups(blocks, codes.reshape(*blocks.shape[:-1], 8, 32))


def _dequantize_q5_k(blocks: Bytes) -> Array:
    pairs = np.ascontiguousarray(blocks[..., 48:]).reshape(*blocks.shape[:-1], 4, 1, 32)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*blocks.shape[:-1], 8, 32)
    # Bit j of each byte is the fifth bit of a code of group j.
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    return _scale_groups(blocks, codes | (high & 1) << 4)


def _dequantize_q6_k(blocks: Bytes) -> Array:
    shape = blocks.shape[:-1]
    low = np.ascontiguousarray(blocks[..., :128]).reshape(*shape, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*shape, 2, 4, 32)
    high = np.ascontiguousarray(blocks[..., 128:192]).reshape(*shape, 2, 1, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (low | high << 4).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    values: Array = (_read_float16(blocks, 208, 1) * scales)[..., None] * codes.reshape(*shape, 16, 16)
    return values


CONVERTERS: dict[str, tuple[int, Callable[[Bytes], Array]]] = {
    "Q4_0": (18, _dequantize_q4_0),
    "Q4_1": (20, _dequantize_q4_1),
    "Q5_0": (22, _dequantize_q5_0),
    "Q5_1": (24, _dequantize_q5_1),
    "Q8_0": (34, _dequantize_q8_0),
    "Q4_K": (144, _dequantize_q4_k),
    "Q5_K": (176, _dequantize_q5_k),
    "Q6_K": (210, _dequantize_q6_k),
}
"""(bytes per block, function from blocks [rows, blocks, bytes] to float32 values) for each GGML type."""
