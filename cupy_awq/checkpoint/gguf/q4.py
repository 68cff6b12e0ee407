# SPDX-License-Identifier: Apache-2.0
"""Conversion of GGUF's 4-bit types to packed weights with groups of 32 rows of W; the codes are unchanged.

Q4_0 and Q4_1: a block of 32 values consists of a float16 scale d, for Q4_1 also a float16 offset m, and 16 bytes of
codes; byte i holds the codes of values i (low nibble) and i + 16. For Q4_0, W = (q - 8) * d; for Q4_1, W = q * d + m.
Both conversions are exact.

Q4_K: a super-block of 256 values consists of float16 d and dmin, 12 bytes with the 6-bit scales sc and minima m of 8
groups, and 128 bytes of codes; byte 32c + i holds element i of group 2c (low nibble) and of group 2c + 1.
W = (d * sc) * q - (dmin * m). The products d * sc and dmin * m need up to 17 bits and are rounded to float16, which
changes a weight by at most 2^-11 * (15 * d * sc + dmin * m).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from cupy_awq.check import FLOAT16
from cupy_awq.checkpoint import nibbles
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.gguf.container import Blocks
from cupy_awq.checkpoint.gguf.dense import unpack_scales
from cupy_awq.checkpoint.module import Module, ModuleSpec, Pending
from cupy_awq.checkpoint.tensors import Array, is_finite
from cupy_awq.checkpoint.threads import run_ranges
from cupy_awq.weight import PackedWeight

SUPER_BLOCK = 256
SUPER_BLOCK_BYTES = 144
GROUP = 32
HEADER_BYTES = {"Q4_0": 2, "Q4_1": 4}

ROUNDING = "scales d sc and offsets -dmin m, rounded to float16"

INFINITY = 0x7C00
"""The bits of positive infinity in float16. Those of a NaN without its sign bit are larger, as integers."""

LARGEST_SAFE = int(np.float16(65504 / 63).view(np.uint16)) - 1
"""The bits of the largest float16 value (1039) whose products with all 6-bit numbers are at most 65504."""

CHUNK_BLOCKS = 1 << 14
"""The number of super-blocks whose scales are computed at a time, which bounds the memory for copies."""


def open_module(block: Blocks, where: str, bias: Array | None = None) -> Pending:
    """Validate a matrix of type Q4_0, Q4_1 or Q4_K and return a module with this weight and ``bias`` ([N] or None).

    Raises the same errors as `open_q4` and `open_q4_k`.
    """
    if block.kind == "Q4_K":
        return open_q4_k(block.data, where, bias)
    return open_q4(block.kind, block.data, where, bias)


def open_q4(kind: str, data: npt.NDArray[np.uint8], where: str, bias: Array | None = None) -> Pending:
    """Validate rows of Q4_0 or Q4_1 blocks and return a module with this weight.

    ``data`` is uint8 [N, K/32 * 18] for kind "Q4_0" and [N, K/32 * 20] for "Q4_1". Raises CheckpointError, whose
    message starts with ``where``, if ``data`` has any other dtype or shape, or if N is not a multiple of 8. The scales
    are validated later: the conversion of the module raises CheckpointError if a scale is not finite.
    """
    block_bytes = HEADER_BYTES[kind] + GROUP // 2
    n, blocks = _check_rows(data, f"K/{GROUP} * {block_bytes}", block_bytes, where)
    zeros = "symmetric" if kind == "Q4_0" else "float"
    bias_dtype = None if bias is None else bias.dtype
    spec = ModuleSpec(GROUP * blocks, n, GROUP, zeros, FLOAT16, bias_dtype=bias_dtype)
    return Pending(spec, partial(_convert_q4, kind, where, data, bias))


def _convert_q4(kind: str, where: str, data: npt.NDArray[np.uint8], bias: Array | None) -> Module:
    n, header = len(data), HEADER_BYTES[kind]
    blocks = np.ascontiguousarray(data).reshape(n, -1, header + GROUP // 2)
    count = blocks.shape[1]
    words = np.ascontiguousarray(blocks[:, :, header:]).view(np.uint32)
    out = np.empty((count, 2, 4, 4, n // 8), np.int32)
    target = out.view(np.uint32)
    # Byte t of 32-bit word v holds value 4v + t of the block (low nibble) and value 4v + t + 16 (high nibble).
    nibbles.transpose_columns(words, [target[:, half, :, t] for t in range(4) for half in range(2)])
    floats = np.ascontiguousarray(blocks[:, :, :header]).view(np.float16)
    scales, *offsets = (nibbles.transpose_matrix(floats[:, :, i]) for i in range(header // 2))
    if not all(is_finite(values) for values in (scales, *offsets)):
        raise CheckpointError(f"{where}: d: expected finite scales, got NaN or infinity")
    return Module(PackedWeight(out.reshape(GROUP * count, n // 8), scales, offsets[0] if offsets else None), bias)


def _check_rows(data: npt.NDArray[np.uint8], layout: str, block_bytes: int, where: str) -> tuple[int, int]:
    """Return (N, blocks per row) of the rows ``data`` of a tensor.

    Raises CheckpointError unless ``data`` is uint8 [N, bytes] with rows of whole blocks and N is a multiple of 8.

    ``layout`` describes the bytes per row in the error message, such as "K/32 * 18".
    """
    n, row_bytes = data.shape if data.ndim == 2 else (0, 0)
    if data.dtype != np.uint8 or not n or not row_bytes or row_bytes % block_bytes:
        raise CheckpointError(f"{where}: expected uint8 [N, {layout}], got {data.dtype} {list(data.shape)}")
    if n % 8:
        raise CheckpointError(f"{where}: N={n} is not a multiple of 8")
    return n, row_bytes // block_bytes


def open_q4_k(data: npt.NDArray[np.uint8], where: str, bias: Array | None = None) -> Pending:
    """Validate rows of Q4_K super-blocks, uint8 [N, K/256 * 144], and return a module with this weight.

    Raises CheckpointError, whose message starts with ``where``, if ``data`` has any other dtype or shape, or if N is
    not a multiple of 8. The scales are validated later: the conversion of the module raises CheckpointError if a scale
    is not finite in float16.
    """
    layout = f"K/{SUPER_BLOCK} * {SUPER_BLOCK_BYTES}"
    n, blocks = _check_rows(data, layout, SUPER_BLOCK_BYTES, where)
    k = SUPER_BLOCK * blocks
    spec = ModuleSpec(k, n, GROUP, "float", FLOAT16, bias_dtype=None if bias is None else bias.dtype, rounding=ROUNDING)
    return Pending(spec, partial(_convert_q4_k, where, data, bias))


def _convert_q4_k(where: str, data: npt.NDArray[np.uint8], bias: Array | None) -> Module:
    n = len(data)
    blocks = np.ascontiguousarray(data).reshape(n, -1, SUPER_BLOCK_BYTES)
    count = blocks.shape[1]
    words = blocks.view(np.uint32)[:, :, 4:].reshape(n, 4 * count, 8)
    out = np.empty((4 * count, 2, 8, 4, n // 8), np.int32)
    target = out.view(np.uint32)
    # Byte t of 32-bit word v holds element 4v + t of the first group (low nibble) and of the second (high nibble).
    nibbles.transpose_columns(words, [target[:, half, :, t] for t in range(4) for half in range(2)])
    scales: Array
    offsets: Array
    scales, offsets = (np.empty((count, 8, n), np.float16) for _ in range(2))
    step = max(1, CHUNK_BLOCKS // count)

    def convert_scales(start: int, stop: int) -> None:
        for first in range(start, stop, step):
            rows = slice(first, min(first + step, stop))
            factors, minima = _convert_scales(blocks[rows])
            scales[:, :, rows], offsets[:, :, rows] = factors.transpose(2, 0, 1), minima.transpose(2, 0, 1)

    run_ranges(convert_scales, n, blocks.nbytes)
    scales, offsets = scales.reshape(8 * count, n), offsets.reshape(8 * count, n)
    for name, values in (("d * sc", scales), ("dmin * m", offsets)):
        if not is_finite(values):
            raise CheckpointError(f"{where}: {name}: expected finite float16 values, got others")
    return Module(PackedWeight(out.reshape(SUPER_BLOCK * count, n // 8), scales, offsets), bias)


def overflows(data: npt.NDArray[np.uint8]) -> bool:
    """Return whether d * sc or dmin * m exceeds float16 in any super-block of ``data``, with all d and dmin finite."""
    blocks = data.reshape(len(data), -1, SUPER_BLOCK_BYTES)
    step = max(1, CHUNK_BLOCKS // blocks.shape[1])
    chunks = [blocks[start : start + step] for start in range(0, len(blocks), step)]
    largest = max(int((_read_header(chunk) & np.uint16(0x7FFF)).max()) for chunk in chunks)
    if not LARGEST_SAFE < largest < INFINITY:
        return False
    return not all(is_finite(values) for chunk in chunks for values in _convert_scales(chunk))


def _read_header(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Return the bits of d and dmin of super-blocks, uint8 [n, blocks, 144], as uint16 [n, blocks, 2]."""
    return np.ascontiguousarray(blocks[:, :, :4]).view(np.uint16)


def _convert_scales(blocks: npt.NDArray[np.uint8]) -> tuple[Array, Array]:
    """Return d * sc and -dmin * m of super-blocks, uint8 [n, blocks, 144], as two float16 [8 groups, n, blocks]."""
    header = _read_header(blocks).view(np.float16).astype(np.float32)
    sc, m = unpack_scales(blocks)
    # no warning: `_convert_q4_k` raises the error for infinity and NaN
    with np.errstate(over="ignore", invalid="ignore"):
        sc *= header[..., 0]
        m *= -header[..., 1]
        return sc.astype(np.float16), m.astype(np.float16)
