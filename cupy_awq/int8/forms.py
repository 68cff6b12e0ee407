# SPDX-License-Identifier: Apache-2.0
"""The forms of a weight that kernels read, made of a `PackedConvWeight` by its own array library."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq.check import Array
from cupy_awq.int8.weight import PackedConvWeight
from cupy_awq.kernels.conv2d import UNIT
from cupy_awq.kernels.int8 import PAD_N, STEP_K
from cupy_awq.kernels.problem import ceil_div
from cupy_awq.packing import namespace, pack_int4, pack_int8


def product_codes(weight: PackedConvWeight) -> Array:
    """The codes of a 1x1 weight as the kernels of the integer product want them: see gemm_int8.cuh."""
    if "product" not in weight.prepared:
        n, _, _, k = weight.shape
        xp = namespace(weight.codes)
        signed = xp.zeros((n, ceil_div(k, STEP_K) * STEP_K), np.uint8)
        # Two's complement: the lowest 4 or 8 bits of code - 2**(bits - 1).
        signed[:, :k] = weight.codes.reshape(n, k) ^ np.uint8(1 << (weight.bits - 1))
        if weight.bits == 4:
            halves = signed.reshape(n, -1, 2, STEP_K // 2)
            signed = (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(n, -1)
        weight.prepared["product"] = signed
    return weight.prepared["product"]


def product_parameters(weight: PackedConvWeight, block: int) -> Array:
    """Scale, offset, and sum of the codes times scale, float32 [3, blocks of x, N padded]."""
    if ("parameters", block) not in weight.prepared:
        n, _, _, k = weight.shape
        xp = namespace(weight.codes)
        begins = range(0, k, block)
        at = xp.asarray([begin // weight.block_size for begin in begins])
        rows = weight.codes.reshape(n, k)
        half = 1 << (weight.bits - 1)
        sums = [
            rows[:, begin : begin + block].sum(1, dtype=np.int64) - half * min(block, k - begin) for begin in begins
        ]
        parameters = xp.zeros((3, len(at), ceil_div(n, PAD_N) * PAD_N), np.float32)
        scale = weight.scale.astype(np.float32).take(at, axis=1).T
        parameters[0, :, :n] = scale / 16 if weight.bits == 4 else scale
        if weight.offset is not None:
            parameters[1, :, :n] = weight.offset.astype(np.float32).take(at, axis=1).T
        parameters[2, :, :n] = xp.stack(sums) * scale
        weight.prepared["parameters", block] = parameters
    return weight.prepared["parameters", block]


def simt_codes(weight: PackedConvWeight) -> Array:
    """The codes, one a byte, contiguous."""
    return namespace(weight.codes).ascontiguousarray(weight.codes)


def simt_parameters(weight: PackedConvWeight) -> Array:
    """Scale and offset, float32 [2, Co, blocks]."""
    if "simt" not in weight.prepared:
        scale = weight.scale.astype(np.float32)
        offset = scale * 0 if weight.offset is None else weight.offset.astype(np.float32)
        weight.prepared["simt"] = namespace(weight.codes).stack((scale, offset))
    return weight.prepared["simt"]


def unit_words(weight: PackedConvWeight) -> Array:
    """The codes in units of 8 channels, for conv2d_sm80.cu: int32 [Co, Kh * Kw, units * 1 or 2]."""
    if "units" not in weight.prepared:
        co, kh, kw, ci = weight.shape
        xp = namespace(weight.codes)
        padded = xp.zeros((co, kh * kw, ceil_div(ci, UNIT) * UNIT), np.uint8)
        padded[..., :ci] = weight.codes.reshape(co, kh * kw, ci)
        packed = pack_int4(padded) if weight.bits == 4 else pack_int8((padded ^ np.uint8(128)).view(np.int8))
        weight.prepared["units"] = packed
    return weight.prepared["units"]


def rounded(weight: PackedConvWeight, dtype: np.dtype[Any]) -> tuple[Array, Array | None]:
    """Scale and offset in the type of x."""
    if ("rounded", dtype.name) not in weight.prepared:
        xp = namespace(weight.codes)
        weight.prepared["rounded", dtype.name] = tuple(
            a if a is None else xp.ascontiguousarray(a.astype(dtype)) for a in (weight.scale, weight.offset)
        )
    scale, offset = weight.prepared["rounded", dtype.name]
    return scale, offset
