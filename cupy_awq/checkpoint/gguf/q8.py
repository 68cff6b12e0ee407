# SPDX-License-Identifier: Apache-2.0
"""GGUF weights that stay 8-bit on a GPU: codes with one scale per block of 32 values (Q6_K: 16 values).

Q8_0, Q5_0 and IQ4_NL are d * q with a float16 scale d and a code q from -128 to 127, so their conversion is exact. In
Q6_K, a block of 16 values has the scale d * sc with a 6-bit q and an 8-bit sc; the product is rounded to float16, which
changes a weight by at most 2^-11 of its magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.gguf.container import Blocks
from cupy_awq.checkpoint.gguf.dense import CHUNK

Array = npt.NDArray[Any]
Bytes = npt.NDArray[Any]
"""An array of quantization blocks, uint8 [rows, blocks per row, bytes per block]."""

IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # the 16 values that codes of IQ4_NL stand for, kvalues_iq4nl in ggml-common.h of llama.cpp
BIAS = 128
"""The offset that is added to a signed 8-bit code to store it as uint8."""


def read_weight(block: Blocks, where: str) -> BlockQuantizedWeight:
    """Convert a matrix [N, K] of a type in `CONVERTERS` to a weight [N, 1, 1, K] of 8-bit codes with float16 scales.

    Raises CheckpointError, whose message starts with ``where``, if a scale is not finite.
    """
    n, k = block.shape
    block_bytes, values, convert = CONVERTERS[block.kind]
    codes, scales = np.empty((n, k), np.uint8), np.empty((n, k // values), np.float16)
    step = max(1, CHUNK // k)
    with np.errstate(over="ignore", invalid="ignore"):  # no warning: scales that are not finite raise an error below
        for start in range(0, n, step):
            rows = slice(start, start + step)
            part = np.ascontiguousarray(block.data[rows])
            found, scales[rows] = convert(part.reshape(len(part), -1, block_bytes))
            codes[rows] = found.reshape(len(part), k)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{where}: expected finite float16 scales, got others")
    return BlockQuantizedWeight(codes.reshape(n, 1, 1, k), scales, None, bits=8, block_size=values)


def _scales(blocks: Bytes, start: int) -> Array:
    """Return the float16 scale at byte ``start`` of each block, [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _nibbles(codes: Bytes) -> Bytes:
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _convert_q8_0(blocks: Bytes) -> tuple[Bytes, Array]:
    return blocks[..., 2:] ^ BIAS, _scales(blocks, 0)


def _convert_q5_0(blocks: Bytes) -> tuple[Bytes, Array]:
    high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    return (_nibbles(blocks[..., 6:]) | high << 4) + np.uint8(BIAS - 16), _scales(blocks, 0)


def _convert_iq4_nl(blocks: Bytes) -> tuple[Bytes, Array]:
    return (IQ4_NL_VALUES.view(np.uint8) ^ BIAS)[_nibbles(blocks[..., 2:])], _scales(blocks, 0)


def _convert_q6_k(blocks: Bytes) -> tuple[Bytes, Array]:
    shape = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*shape, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*shape, 2, 4, 32)
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    sc = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    scales = (_scales(blocks, 208).astype(np.float32)[..., None] * sc).astype(np.float16)
    return (low | high << 4) + np.uint8(BIAS - 32), scales.reshape(shape[0], -1)


CONVERTERS: dict[str, tuple[int, int, Callable[[Bytes], tuple[Bytes, Array]]]] = {
    "Q8_0": (34, 32, _convert_q8_0),
    "Q5_0": (22, 32, _convert_q5_0),
    "IQ4_NL": (18, 32, _convert_iq4_nl),
    "Q6_K": (210, 16, _convert_q6_k),
}
"""(bytes per block, values per scale, function from blocks to codes and scales) for each GGML type."""
