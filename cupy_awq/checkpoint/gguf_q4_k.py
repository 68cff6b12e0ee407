# SPDX-License-Identifier: Apache-2.0
"""Weights in GGUF's Q4_K: super-blocks of 256 rows of W become groups of 32 with float16 scales and offsets.

A super-block has 144 bytes: d and dmin in float16, twelve bytes with 6-bit scales sc and minima m of eight groups, and
128 bytes of codes, whose byte 32 c + i holds element i of groups 2c and 2c + 1. W = (d sc) q - dmin m. Both products
need 17 bits and are rounded to float16 once, which changes a weight by at most 2^-11 (15 d sc + dmin m).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from cupy_awq.check import FLOAT16
from cupy_awq.checkpoint import nibbles
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.module import Array, ModuleSpec, Pending
from cupy_awq.checkpoint.tensors import Module
from cupy_awq.weight import PackedWeight

SUPER_BLOCK = 256
SUPER_BLOCK_BYTES = 144
GROUP = 32

ROUNDING = "scales d sc and offsets -dmin m, rounded to float16"

CHUNK_BLOCKS = 1 << 14
"""The super-blocks whose scales one chunk converts."""


def open_q4_k(data: npt.NDArray[np.uint8], where: str, bias: Array | None = None) -> Pending:
    """Return the module of rows [N, K/256 * 144] of super-blocks.

    Raises CheckpointError, whose message starts with ``where``, for another shape. Scales that are not finite in
    float16 are found when the module is converted.
    """
    n, row_bytes = data.shape if data.ndim == 2 else (0, 0)
    if data.dtype != np.uint8 or not n or not row_bytes or row_bytes % SUPER_BLOCK_BYTES:
        expected = f"uint8 [N, K/{SUPER_BLOCK} * {SUPER_BLOCK_BYTES}]"
        raise CheckpointError(f"{where}: expected {expected}, got {data.dtype} {list(data.shape)}")
    if n % 8:
        raise CheckpointError(f"{where}: N={n} is not a multiple of 8")
    k = row_bytes // SUPER_BLOCK_BYTES * SUPER_BLOCK
    spec = ModuleSpec(k, n, GROUP, "float", FLOAT16, bias_dtype=None if bias is None else bias.dtype, rounding=ROUNDING)
    return Pending(spec, partial(convert, data, where, bias))


def convert(data: npt.NDArray[np.uint8], where: str, bias: Array | None = None) -> Module:
    """Return the packed weight of rows of super-blocks, as `open_q4_k` validated them."""
    n = len(data)
    blocks = np.ascontiguousarray(data).reshape(n, -1, SUPER_BLOCK_BYTES)
    count = blocks.shape[1]
    words = blocks.view(np.uint32)[:, :, 4:].reshape(n, 4 * count, 8)
    out = np.empty((4 * count, 2, 8, 4, n // 8), np.int32)
    target = out.view(np.uint32)
    # Byte t of word v holds element 4v + t; its low nibble is of the first group, its high one of the second.
    nibbles.transpose_columns(words, [target[:, half, :, t] for t in range(4) for half in range(2)])
    scales, offsets = (np.empty((8 * count, n), np.float16) for _ in range(2))
    step = max(1, CHUNK_BLOCKS // count)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        factors, minima = _scales(blocks[rows])
        scales[:, rows], offsets[:, rows] = factors.reshape(-1, 8 * count).T, minima.reshape(-1, 8 * count).T
    for name, values in (("d * sc", scales), ("dmin * m", offsets)):
        if not np.isfinite(values).all():
            raise CheckpointError(f"{where}: {name}: expected finite float16 values, got others")
    return Module(PackedWeight(out.reshape(SUPER_BLOCK * count, n // 8), scales, offsets), bias)


def _scales(blocks: npt.NDArray[np.uint8]) -> tuple[Array, Array]:
    """Return d sc and -dmin m [n, blocks, 8] in float16 of super-blocks [n, blocks, 144]."""
    header = np.ascontiguousarray(blocks[:, :, :4]).view(np.float16).astype(np.float32)
    packed = np.ascontiguousarray(blocks[:, :, 4:16])
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    sc = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1).astype(np.float32)
    m = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], axis=-1).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # of damaged files, which the caller refuses
        sc *= header[..., :1]
        m *= -header[..., 1:]
        return sc.astype(np.float16), m.astype(np.float16)
