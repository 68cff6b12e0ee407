# SPDX-License-Identifier: Apache-2.0
"""The forms of a weight that kernels read, made of a `BlockQuantizedWeight` by its own array library."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.conv2d import UNIT
from cupy_awq.kernels.conv2d_sm90 import CHUNK, TILE_CO, co_tiles, parameter_groups
from cupy_awq.kernels.int8 import BLOCK_K, PAD_N, RECORD_N, STEP_K
from cupy_awq.kernels.problem import ceil_div
from cupy_awq.packing import namespace, pack_int4, pack_int8

FP8_CODES = 512
"""In units of what they stand for as e4m3: 4-bit codes are code * 2**-9."""
E4M3 = np.arange(-16, 16).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
"""The bits of -16 .. 15."""


def in_blocks(xq: Array, x_scale: Array, x_offset: Array | None, block: int) -> tuple[Array, Array | None, Array]:
    """x_scale, x_offset and x_sums [M, blocks] of rows that were quantized as one block."""
    xp = namespace(xq)
    m, k = xq.shape
    blocks = ceil_div(k, block)
    padded = xp.zeros((m, blocks * block), np.int8)
    padded[:, :k] = xq
    sums = padded.reshape(m, blocks, block).sum(2, dtype=np.int32)
    scale, offset = (a if a is None else xp.repeat(a, blocks, axis=1) for a in (x_scale, x_offset))
    return scale, offset, sums


def product_codes(weight: BlockQuantizedWeight, fp8: bool = False) -> Array:
    """The codes of a 1x1 weight as the kernels of the integer product want them: see int8/gemm_int8.cuh."""
    if ("product", fp8) not in weight.prepared:
        n, _, _, k = weight.shape
        xp = namespace(weight.codes)
        codes = xp.zeros((n, ceil_div(k, STEP_K) * STEP_K), np.uint8)
        # Two's complement: the lowest 4 or 8 bits of code - 2**(bits - 1).
        codes[:, :k] = weight.codes.reshape(n, k) ^ np.uint8(0 if fp8 else 1 << (weight.bits - 1))
        if weight.bits == 4:
            halves = codes.reshape(n, -1, 2, STEP_K // 2)
            codes = (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(n, -1)
        weight.prepared["product", fp8] = codes
    return weight.prepared["product", fp8]


def product_parameters(weight: BlockQuantizedWeight, block: int, fp8: bool = False) -> Array:
    """Scale, offset, and sum of the codes times scale, float32 [3, blocks of x, N padded]; without the sum for e4m3."""
    if ("parameters", block, fp8) not in weight.prepared:
        n = weight.shape[0]
        scale, offset, sums = _of_blocks(weight, block)
        parameters = namespace(weight.codes).zeros((3, len(scale), ceil_div(n, PAD_N) * PAD_N), np.float32)
        if fp8:
            parameters[0, :, :n] = FP8_CODES * scale
            parameters[1, :, :n] = -8 * scale
        else:
            parameters[0, :, :n] = scale / 16 if weight.bits == 4 else scale
            parameters[2, :, :n] = sums * scale
        if offset is not None:
            parameters[1, :, :n] += offset
        weight.prepared["parameters", block, fp8] = parameters
    return weight.prepared["parameters", block, fp8]


def _of_blocks(weight: BlockQuantizedWeight, block: int) -> tuple[Array, Array | None, Array]:
    """Scale and offset, float32, and sums of the signed codes, int64, of a 1x1 weight: each [blocks of x, N]."""
    n, _, _, k = weight.shape
    xp = namespace(weight.codes)
    begins = range(0, k, block)
    at = xp.asarray([begin // weight.block_size for begin in begins])
    rows = weight.codes.reshape(n, k)
    half = 1 << (weight.bits - 1)
    sums = [rows[:, begin : begin + block].sum(1, dtype=np.int64) - half * min(block, k - begin) for begin in begins]
    scale, offset = (a if a is None else a.astype(np.float32).take(at, axis=1).T for a in (weight.scale, weight.offset))
    return scale, offset, xp.stack(sums)


def whole_zeros(weight: BlockQuantizedWeight) -> Array | None:
    """Offsets / scales, int8 [N, blocks], where all are whole and the codes have room for them, as of AWQ; or None.

    (code + zero) * scale is then the value, and code + zero lies within -16 .. 15, which e4m3 has, too.
    """
    if "zeros" not in weight.prepared:
        zeros = None
        if weight.bits == 4 and weight.offset is not None:
            xp = namespace(weight.codes)
            scale, offset = weight.scale.astype(np.float32), weight.offset.astype(np.float32)
            found = xp.clip(xp.rint(offset / xp.where(scale == 0, np.float32(1), scale)), -8, 8)
            zeros = found.astype(np.int8) if bool((found * scale == offset).all()) else None
        weight.prepared["zeros"] = zeros
    return weight.prepared["zeros"]


def byte_codes(weight: BlockQuantizedWeight, fp8: bool = False) -> Array:
    """The codes of a 1x1 weight with their whole zeros, [N, K]: int8, or the bits of e4m3."""
    if ("bytes", fp8) not in weight.prepared:
        n, _, _, k = weight.shape
        xp = namespace(weight.codes)
        codes = xp.ascontiguousarray(weight.codes.reshape(n, k)) - np.uint8(1 << (weight.bits - 1))
        codes = codes.view(np.int8)  # the subtraction wraps
        zeros = whole_zeros(weight)
        if zeros is not None:
            codes = codes + zeros.take(xp.arange(k) // weight.block_size, axis=1)
        weight.prepared["bytes", fp8] = xp.asarray(E4M3)[codes + np.int8(16)] if fp8 else codes
    return weight.prepared["bytes", fp8]


def tile_parameters(weight: BlockQuantizedWeight, block: int, x_offset: bool) -> Array:
    """What belongs to `byte_codes`, float32 [tiles, steps, parameters]: see int8/gemm_int8_sm90.cu."""
    key = "tiles", block, x_offset
    if key not in weight.prepared:
        n, _, _, k = weight.shape
        xp = namespace(weight.codes)
        tiles, steps = ceil_div(n, RECORD_N), ceil_div(k, BLOCK_K)
        scale, offset, sums = _of_blocks(weight, block)
        begins = xp.arange(0, k, block)[:, None]
        columns = xp.minimum(begins + block, k) - begins
        rows = [scale]
        if offset is not None and whole_zeros(weight) is None:
            rows.append(offset)
        if x_offset:
            rows.append(sums * scale + (0 if offset is None else columns * offset))
        # The scale of each step of 32 or more columns; all else is added with the last of a block alone.
        within = BLOCK_K // block if block < BLOCK_K and len(scale) > 1 else 1
        parameters = xp.zeros((len(rows), steps * within, tiles * RECORD_N), np.float32)
        at = xp.arange(steps * within) * (BLOCK_K // within)
        is_there = at < k
        parameters[0, is_there, :n] = rows[0][at[is_there] // block]
        for part, values in zip(parameters[1:], rows[1:], strict=True):
            part[(xp.minimum(begins[:, 0] + block, k) - 1) // (BLOCK_K // within), :n] = values
        # Step, block, part; warp, column of g, g + 8, g.
        parameters = parameters.reshape(len(rows), steps, within, tiles, 4, 2, 8).transpose(3, 1, 2, 0, 4, 6, 5)
        weight.prepared[key] = xp.ascontiguousarray(parameters).reshape(tiles, steps, -1)
    return weight.prepared[key]


def simt_codes(weight: BlockQuantizedWeight) -> Array:
    """The codes, one a byte, contiguous."""
    return namespace(weight.codes).ascontiguousarray(weight.codes)


def simt_parameters(weight: BlockQuantizedWeight) -> Array:
    """Scale and offset, float32 [2, Co, blocks]."""
    if "simt" not in weight.prepared:
        scale = weight.scale.astype(np.float32)
        offset = scale * 0 if weight.offset is None else weight.offset.astype(np.float32)
        weight.prepared["simt"] = namespace(weight.codes).stack((scale, offset))
    return weight.prepared["simt"]


def unit_words(weight: BlockQuantizedWeight) -> Array:
    """The codes in units of 8 channels, for conv2d/conv2d_sm80.cu: int32 [Co, Kh * Kw, units * 1 or 2]."""
    if "units" not in weight.prepared:
        co, kh, kw, ci = weight.shape
        xp = namespace(weight.codes)
        padded = xp.zeros((co, kh * kw, ceil_div(ci, UNIT) * UNIT), np.uint8)
        padded[..., :ci] = weight.codes.reshape(co, kh * kw, ci)
        packed = pack_int4(padded) if weight.bits == 4 else pack_int8((padded ^ np.uint8(128)).view(np.int8))
        weight.prepared["units"] = packed
    return weight.prepared["units"]


def rounded(weight: BlockQuantizedWeight, dtype: np.dtype[Any]) -> tuple[Array, Array | None]:
    """Scale and offset in the type of x."""
    if ("rounded", dtype.name) not in weight.prepared:
        xp = namespace(weight.codes)
        weight.prepared["rounded", dtype.name] = tuple(
            a if a is None else xp.ascontiguousarray(a.astype(dtype)) for a in (weight.scale, weight.offset)
        )
    scale, offset = weight.prepared["rounded", dtype.name]
    return scale, offset


def hopper_codes(weight: BlockQuantizedWeight) -> Array:
    """The codes in the order of `conv2d/conv2d_sm90.cu."""
    if "hopper" not in weight.prepared:
        co, kh, kw, ci = weight.shape
        xp = namespace(weight.codes)
        tiles, chunks = co_tiles(co), ceil_div(ci, CHUNK)
        padded = xp.zeros((tiles * TILE_CO, kh * kw, chunks * CHUNK), np.uint8)
        padded[:co, :, :ci] = weight.codes.reshape(co, kh * kw, ci)
        # Axes 0 .. 9: tile, warp, row half, g, tap, chunk, k16, k half, t, pair.
        axes = padded.reshape(tiles, 4, 2, 8, kh * kw, chunks, 4, 2, 4, 2)
        if weight.bits == 4:
            # [chunk, tap, tile, warp, g, t, k16][pair, k half, row half]: nibbles from the lowest.
            nibbles = axes.transpose(5, 4, 0, 1, 3, 8, 6, 9, 7, 2).reshape(-1, 8)
            words = nibbles[:, ::2] | nibbles[:, 1::2] << np.uint8(4)
        else:
            # [chunk, tap, tile, two k16, warp, g, t, k16][k half][pair, row half]
            axes = axes.reshape(tiles, 4, 2, 8, kh * kw, chunks, 2, 2, 2, 4, 2)
            words = axes.transpose(5, 4, 0, 6, 1, 3, 9, 7, 8, 10, 2)
        weight.prepared["hopper"] = xp.ascontiguousarray(words)
    return weight.prepared["hopper"]


def hopper_parameters(weight: BlockQuantizedWeight, dtype: np.dtype[Any]) -> Array:
    """Scale and offset in the type of x, in the order of `conv2d/conv2d_sm90.cu: [chunks, tiles, groups, 64, 2]."""
    if ("hopper", dtype.name) not in weight.prepared:
        co, _, _, ci = weight.shape
        xp = namespace(weight.codes)
        tiles, chunks = co_tiles(co), ceil_div(ci, CHUNK)
        groups = parameter_groups(weight.block_size, ci)
        span = CHUNK // groups
        at = xp.asarray([begin // weight.block_size for begin in range(0, ci, span)])
        padded = xp.zeros((chunks * groups, tiles * TILE_CO, 2), dtype)
        for index, a in enumerate((weight.scale, weight.offset)):
            if a is not None:
                padded[: len(at), :co, index] = a.take(at, axis=1).T.astype(dtype)
        ordered = padded.reshape(chunks, groups, tiles, TILE_CO, 2).transpose(0, 2, 1, 3, 4)
        weight.prepared["hopper", dtype.name] = xp.ascontiguousarray(ordered)
    return weight.prepared["hopper", dtype.name]


def dense(weight: BlockQuantizedWeight, dtype: np.dtype[Any]) -> Array:
    """Values in the type of x in the order of `conv2d/conv2d_sm90_large.cu`: uint16 [chunks, taps, tiles, 64, 64]."""
    if ("dense", dtype.name) not in weight.prepared:
        co, kh, kw, ci = weight.shape
        xp = namespace(weight.codes)
        tiles, chunks = co_tiles(co), ceil_div(ci, CHUNK)
        at = xp.arange(ci) // weight.block_size
        scale, offset = (
            a if a is None else a.astype(np.float32).take(at, axis=1)[:, None] for a in rounded(weight, dtype)
        )
        values = (weight.codes.reshape(co, kh * kw, ci) - np.float32(1 << (weight.bits - 1))) * scale
        if offset is not None:
            values += offset
        padded = xp.zeros((tiles * TILE_CO, kh * kw, chunks * CHUNK), dtype)
        padded[:co, :, :ci] = values.astype(dtype)
        # Axes 0 .. 6: tile, 8 rows, row, tap, chunk, 8 channels, channel.
        axes = padded.view(np.uint16).reshape(tiles, 8, 8, kh * kw, chunks, 8, 8).transpose(4, 3, 0, 1, 2, 5, 6)
        row = xp.arange(8)[:, None]
        swizzled = axes[..., row, row ^ xp.arange(8), :]
        weight.prepared["dense", dtype.name] = xp.ascontiguousarray(swizzled).reshape(chunks, kh * kw, tiles, 64, 64)
    return weight.prepared["dense", dtype.name]
