# SPDX-License-Identifier: Apache-2.0
"""Conversion between the 4-bit words of other formats and the AWQ layout of `PackedWeight`.

Every format packs the codes of eight rows or of eight columns of W into a 32-bit word. So eight words hold a block of
8 x 8 codes, and every conversion transposes such blocks (`transpose`). The formats differ in which eight words form a
block and where the transposed words are stored.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint.threads import run_ranges
from cupy_awq.packing import PACK_ORDER, namespace, pack_int4

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]

CHUNK_BYTES = 1 << 19
"""The number of bytes that `transpose` converts at a time; two chunks fit in the L2 cache of a CPU core."""

GATHER_BYTES = 1 << 23
"""The number of bytes that `take_rows` copies at a time. It exceeds `CHUNK_BYTES` because long rows copy faster."""

LINE_WORDS = 16
"""The number of 32-bit words per cache line. Chunks write whole lines, so that no line is written by two chunks."""


class _Buffers(threading.local):
    """Temporary words of one thread, reused by later calls: newly allocated pages would fault at the first write."""

    def __init__(self) -> None:
        self.words = np.empty(0, np.uint32)

    def take(self, size: int) -> Words:
        """Return ``size`` uninitialized words, which are valid until the next call on this thread."""
        if self.words.size < size:
            self.words = np.empty(size, np.uint32)
        return self.words[:size]


_BUFFERS = _Buffers()


def transpose(sources: Sequence[Array], targets: Sequence[Array]) -> None:
    """Transpose 8 x 8 nibbles: nibble p of ``targets[j][i]`` = nibble j of ``sources[p][i]``, for all i, j, p.

    Args:
        sources: eight NumPy or CuPy arrays of 32-bit words, all of one shape, with any strides.
        targets: eight arrays of the same shape, with any strides, which are overwritten.
    """
    length, *rest = sources[0].shape
    width = math.prod(rest)
    if namespace(sources[0]) is not np:
        words = namespace(sources[0]).empty((12, length, *rest), np.uint32)
        _transpose_chunk(sources, targets, words[:8], words[8:])
        return
    step = max(1, CHUNK_BYTES // (32 * width))
    multiple = 1
    if targets[0].strides[0] == 4:  # the split axis is contiguous: chunks of whole cache lines write no line twice
        multiple = LINE_WORDS
        step = -(-step // LINE_WORDS) * LINE_WORDS

    def run(start: int, stop: int) -> None:
        for first in range(start, stop, step):
            size = min(step, stop - first)
            words = _BUFFERS.take(12 * size * width).reshape(12, size, *rest)
            chunk = slice(first, first + size)
            _transpose_chunk([a[chunk] for a in sources], [a[chunk] for a in targets], words[:8], words[8:])

    run_ranges(run, length, 32 * length * width, multiple)


def _transpose_chunk(sources: Sequence[Array], targets: Sequence[Array], words: Words, scratch: Words) -> None:
    """Do the work of `transpose` for one chunk; ``words`` [8, ...] and ``scratch`` [4, ...] are overwritten."""
    for p, source in enumerate(sources):
        words[p] = source
    _transpose_block(words, scratch)
    for j, target in enumerate(targets):
        target[...] = words[j]


def _transpose_block(words: Words, scratch: Words) -> None:
    """Transpose words [8, ...] as 8 x 8 nibbles in place: swap off-diagonal 4 x 4 blocks, 2 x 2 blocks, nibbles."""
    xp = namespace(words)
    for distance, bits, mask in ((4, 16, 0x0000FFFF), (2, 8, 0x00FF00FF), (1, 4, 0x0F0F0F0F)):
        pairs = words.reshape(4 // distance, 2, distance, *words.shape[1:])
        first, second = pairs[:, 0], pairs[:, 1]
        swapped = scratch.reshape(first.shape)
        xp.right_shift(first, np.uint32(bits), out=swapped)
        xp.bitwise_xor(swapped, second, out=swapped)
        xp.bitwise_and(swapped, np.uint32(mask), out=swapped)
        xp.bitwise_xor(second, swapped, out=second)
        xp.left_shift(swapped, np.uint32(bits), out=swapped)
        xp.bitwise_xor(first, swapped, out=first)


def convert_row_words(words: Array) -> Array:
    """Convert words [K/8, N], where nibble j of word [r, n] is the code of W[8r + j, n] (GPTQ), to AWQ words [K, N/8].

    >>> [hex(word) for word in convert_row_words(np.arange(8, dtype=np.int32)[None])[:, 0]]
    ['0x75316420', '0x0', '0x0', '0x0', '0x0', '0x0', '0x0', '0x0']
    """
    rows, n = words.shape
    out: Array = namespace(words).empty((rows, 8, n // 8), np.int32)
    unsigned, target = words.view(np.uint32), out.view(np.uint32)
    transpose([unsigned[:, p::8] for p in PACK_ORDER], [target[:, j] for j in range(8)])
    return out.reshape(8 * rows, n // 8)


def convert_column_words(words: Array) -> Array:
    """Convert words [N, K/8], where nibble j of word [n, c] is the code of W[8c + j, n], to AWQ words [K, N/8].

    >>> words = np.array([[0x10], [0x32], [0x54], [0x76], [0x98], [0xBA], [0xDC], [0xFE]], np.uint32)
    >>> [hex(word) for word in convert_column_words(words)[:2, 0].view(np.uint32)]
    ['0xea62c840', '0xfb73d951']
    """
    n, groups = words.shape
    out: Array = namespace(words).empty((groups, 8, n // 8), np.int32)
    target = out.view(np.uint32)
    transpose_columns(words, [target[:, j] for j in range(8)])
    return out.reshape(8 * groups, n // 8)


def transpose_columns(words: Array, targets: Sequence[Array]) -> None:
    """Transpose words [N, ...], each of which holds eight codes of one column of W, to AWQ words.

    The codes in nibble j of the words become the AWQ words ``targets[j]`` [..., N/8], each of which packs the codes of
    eight adjacent columns in the order `PACK_ORDER`.
    """
    n, *rest = words.shape
    columns = words.view(np.uint32).reshape(n // 8, 8, *rest)
    axes = len(rest), *range(len(rest))  # the axes of numpy.moveaxis(target, -1, 0), which is slow for small arrays
    transpose([columns[:, p] for p in PACK_ORDER], [target.transpose(axes) for target in targets])


def convert_to_row_words(words: Array) -> Array:
    """Convert AWQ words [K, N/8] to words [K/8, N], where nibble j of word [r, n] is the code of W[8r + j, n].

    This is the inverse of `convert_row_words`.

    >>> words = np.arange(16, dtype=np.int32).reshape(2, 8)
    >>> bool((convert_to_row_words(convert_row_words(words)) == words).all())
    True
    """
    k, groups = words.shape
    rows = words.view(np.uint32).reshape(k // 8, 8, groups)
    out = np.empty((k // 8, 8 * groups), np.uint32)
    transpose([rows[:, j] for j in range(8)], [out[:, p::8] for p in PACK_ORDER])
    return out.view(np.int32)


def convert_to_column_words(words: Array) -> Array:
    """Convert AWQ words [K, N/8] to words [N, K/8], where nibble j of word [n, c] is the code of W[8c + j, n].

    This is the inverse of `convert_column_words`.

    >>> words = np.arange(16, dtype=np.int32).reshape(8, 2)
    >>> bool((convert_to_column_words(convert_column_words(words)) == words).all())
    True
    """
    k, groups = words.shape
    rows = words.view(np.uint32).reshape(k // 8, 8, groups)
    out = np.empty((groups, 8, k // 8), np.uint32)
    transpose([rows[:, j].T for j in range(8)], [out[:, p] for p in PACK_ORDER])
    return out.reshape(8 * groups, k // 8).view(np.int32)


def convert_interleaved_words(words: Array) -> Array:
    """Convert the codes of AutoAWQ's "gemv_fast" (llm-awq v2), int16 [N/4, K], to AWQ words [K, N/8].

    Each input row holds four columns of W. It is a sequence of blocks of 64 rows of W, with 16 int16 (8 32-bit words)
    per column and block. The first four words hold rows 0..31 of the block, the last four rows 32..63. In each half,
    nibble 4c + a of word b is the code of row 8a + 2b + c of the half.
    """
    rows, k = words.shape
    n = 4 * rows
    blocks = words.view(np.uint32).reshape(n // 8, 2, k // 64, 4, 8)
    out: Array = namespace(words).empty((k // 64, 2, 4, 4, 2, n // 8), np.int32)
    target = out.view(np.uint32)
    sources = [blocks[:, p // 4, :, p % 4].reshape(n // 8, k // 64, 2, 4) for p in PACK_ORDER]
    transpose(sources, [target[:, :, a, :, c].transpose(3, 0, 1, 2) for c in range(2) for a in range(4)])
    return out.reshape(k, n // 8)


def convert_byte_halves(codes: npt.NDArray[np.uint8]) -> Array:
    """Convert bytes [N/2, K] to AWQ words [K, N/8]: high nibbles hold columns 0..N/2-1 of W, low nibbles the others.

    >>> hex(convert_byte_halves(np.array([[0x04], [0x15], [0x26], [0x37]], np.uint8))[0, 0])
    '0x75316420'
    """
    half, k = codes.shape
    if half % 8 or k % 4:  # slow path: a half is not whole AWQ words, or a row is not whole 32-bit words
        high, low = codes >> np.uint8(4), codes & np.uint8(15)
        words: Array = pack_int4(namespace(codes).concatenate([high, low]).T.copy())
        return words
    out: Array = namespace(codes).empty((k // 4, 4, 2, half // 8), np.int32)
    target = out.view(np.uint32)
    # Nibble j of a 32-bit word is the low (j even) or high (j odd) nibble of byte j // 2.
    transpose_columns(codes.view(np.uint32), [target[:, j // 2, 1 - j % 2] for j in range(8)])
    return out.reshape(k, half // 4)


def reorder_columns(words: Array) -> Array:
    """Convert words from column order (nibble i holds column i of eight columns) to AWQ order (`PACK_ORDER`).

    >>> hex(reorder_columns(np.array([0x76543210], np.int32))[0])
    '0x75316420'
    """
    unsigned = words.view(np.uint32).copy()
    # Swap the two middle nibbles of each 16 bits, then the two middle bytes of each word.
    for bits, mask in ((4, 0x00F000F0), (8, 0x0000FF00)):
        swapped = ((unsigned >> np.uint32(bits)) ^ unsigned) & np.uint32(mask)
        unsigned ^= swapped | (swapped << np.uint32(bits))
    return unsigned.view(np.int32)


def restore_columns(words: Array) -> Array:
    """Convert words from AWQ order to column order: the inverse of `reorder_columns`.

    >>> hex(restore_columns(np.array([0x75316420], np.int32))[0])
    '0x76543210'
    """
    unsigned = words.view(np.uint32).copy()
    for bits, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        swapped = ((unsigned >> np.uint32(bits)) ^ unsigned) & np.uint32(mask)
        unsigned ^= swapped | (swapped << np.uint32(bits))
    return unsigned.view(np.int32)


def take_rows(words: Array, order: npt.NDArray[np.int32]) -> None:
    """Replace words [K, N/8] by ``words[order]`` in place, a chunk of columns at a time to bound the temporary copy."""
    if namespace(words) is not np:
        words[...] = words[namespace(words).asarray(order)]
        return
    k, n = words.shape
    step = max(LINE_WORDS, GATHER_BYTES // (4 * k))
    for start in range(0, n, step):
        part = words[:, start : start + step]
        part[...] = part[order]


def transpose_matrix(array: Array) -> Array:
    """Return the transpose of a matrix as a contiguous copy.

    >>> transpose_matrix(np.array([[1, 2, 3]], np.float16)).shape
    (3, 1)
    """
    bits = array.view(f"u{array.dtype.itemsize}")  # NumPy copies integers faster than bfloat16
    return bits.T.copy().view(array.dtype)
