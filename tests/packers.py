# SPDX-License-Identifier: Apache-2.0
"""Plain packers of every checkpoint format, written from the formats' specifications without code of the readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from cupy_awq.packing import pack_int4

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """A quantized weight as plain numbers, before a format packs it.

    Attributes:
        codes: uint8 [K, N], 0..15.
        zeros: the zero points, uint8 [groups, N], 0..15.
        scales: float16 or bfloat16 [groups, N].
        group_size: the number of rows that share a scale; the last group may be shorter.
        g_idx: int32 [K], the group of each row.
    """

    codes: Array
    zeros: Array
    scales: Array
    group_size: int
    g_idx: Array

    def dense(self, offsets: Array | None = None) -> Array:
        """Return the dequantized weight [K, N], rounded once to the dtype of the scales."""
        scales = self.scales.astype(np.float64)[self.g_idx]
        if offsets is None:
            values = (self.codes.astype(np.float64) - self.zeros[self.g_idx]) * scales
        else:
            values = self.codes * scales + offsets.astype(np.float64)[self.g_idx]
        return round_once(values, self.scales.dtype)

    @property
    def is_symmetric(self) -> bool:
        return bool((self.zeros == 8).all())


def round_once(values: Array, dtype: np.dtype[Any]) -> Array:
    """Round float64 values once to another dtype.

    Conversion to bfloat16 uses integer arithmetic, because ml_dtypes rounds to float32 first.
    """
    if dtype != ml_dtypes.bfloat16:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    # bfloat16 keeps 7 of float64's 52 fraction bits: round half to even on the lowest kept bit, bit 45.
    bits = values.view(np.uint64)
    half, one = np.uint64(1 << 44), np.uint64(1)
    rounded = bits + (half - one) + ((bits >> np.uint64(45)) & one)
    kept = (rounded >> np.uint64(45)) << np.uint64(45)
    return kept.view(np.float64).astype(dtype)


@st.composite
def weights(
    draw: st.DrawFn, groups: tuple[int, ...] = (8, 16, 32, 64), *, ordered: bool = False, ragged: bool = False
) -> Packed:
    """Return a random weight with negative and zero scales, on request with an order or a short last group."""
    group_size = draw(st.sampled_from(groups))
    k = group_size * draw(st.integers(1, 4))
    if ragged and draw(st.booleans()):
        k += 8 * draw(st.integers(0, (group_size - 1) // 8))
    k = -(-k // 8) * 8
    n = 8 * draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = -(-k // group_size)
    scales = rng.standard_normal((count, n)) * 10.0 ** rng.integers(-4, 1)
    scales[rng.random((count, n)) < 0.1] = 0
    zeros = rng.integers(0, 16, (count, n), dtype=np.uint8)
    if draw(st.booleans()):
        zeros[:] = 8
    g_idx = np.arange(k, dtype=np.int32) // group_size
    if ordered and k % group_size == 0 and draw(st.booleans()):
        g_idx = rng.permutation(g_idx)
    dtype = draw(st.sampled_from([np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]))
    return Packed(rng.integers(0, 16, (k, n), dtype=np.uint8), zeros, scales.astype(dtype), group_size, g_idx)


def offsets_of(w: Packed) -> Array:
    """Return the offsets o = -(scale * zero point) of W = code * scale + o, rounded to the dtype of the scales."""
    return round_once(-w.scales.astype(np.float64) * w.zeros, w.scales.dtype)


def sequential(codes: Array) -> Array:
    """Pack codes [..., n] to int32 words [..., ceil(n/8)]: nibble j of word c holds element 8c + j."""
    padded = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // 8) * 8), np.uint32)
    padded[..., : codes.shape[-1]] = codes
    words = np.zeros((*padded.shape[:-1], padded.shape[-1] // 8), np.uint32)
    for j in range(8):
        words |= padded[..., j::8] << np.uint32(4 * j)
    return words.view(np.int32)


def gptq(w: Packed, version: int) -> dict[str, Array]:
    zeros = sequential(w.zeros).view(np.uint32)
    if version == 1:
        zeros = zeros - np.uint32(0x11111111)
    return {
        "qweight": np.ascontiguousarray(sequential(w.codes.T).T),
        "qzeros": zeros.view(np.int32),
        "scales": w.scales,
        "g_idx": w.g_idx.astype(np.int32),
    }


def awq_gemm(w: Packed) -> dict[str, Array]:
    return {"qweight": pack_int4(w.codes), "qzeros": pack_int4(w.zeros), "scales": w.scales}


def zeros_width(k: int, group_size: int) -> int:
    multiple = 1 if group_size >= 128 else {64: 2, 32: 4}[group_size]
    words = -(-(k // group_size) // 8)
    return -(-words // multiple) * multiple


def awq_gemv(w: Packed) -> dict[str, Array]:
    k, n = w.codes.shape
    width = zeros_width(k, w.group_size)
    zeros, scales = np.zeros((n, 8 * width), np.uint8), np.zeros((n, 8 * width), np.float16)
    zeros[:, : len(w.zeros)], scales[:, : len(w.scales)] = w.zeros.T, w.scales.T
    return {"qweight": sequential(w.codes.T), "qzeros": sequential(zeros), "scales": scales}


def awq_gemv_fast(w: Packed, offsets: Array, name: str = "qzeros") -> dict[str, Array]:
    k, n = w.codes.shape
    words = np.zeros((n // 4, k), np.uint16)
    for row in range(k):
        a, b, c = row % 32 // 8, row % 8 // 2, row % 2
        i = (8 * b + 2 * a + c) % 8
        p = 32 * (row // 32) + 8 * ((8 * b + 2 * a + c) // 8) + 4 * (i % 2) + i // 2
        for column in range(n):
            flat = 64 * (column % 4) + p % 64
            element = column // 4, 64 * (p // 64) + flat // 4
            words[element] |= np.uint16(int(w.codes[row, column]) << 4 * (flat % 4))
    padded = [np.zeros((8 * zeros_width(k, w.group_size), n), w.scales.dtype) for _ in range(2)]
    for target, values in zip(padded, (offsets, w.scales), strict=True):
        target[: len(values)] = values
    return {"qweight": words.view(np.int16), name: padded[0], "scales": padded[1]}


def compressed_tensors(w: Packed, *, old_zeros: bool = False) -> dict[str, Array]:
    k, n = w.codes.shape
    tensors: dict[str, Array] = {
        "weight_packed": sequential(w.codes.T),
        "weight_scale": np.ascontiguousarray(w.scales.T),
        "weight_shape": np.array([n, k], np.int64),
    }
    if not w.is_symmetric:
        signed = np.ascontiguousarray(w.zeros.T.astype(np.int8) - np.int8(8))
        tensors["weight_zero_point"] = signed if old_zeros else np.ascontiguousarray(sequential(w.zeros).T)
    if (np.diff(w.g_idx) < 0).any():
        tensors["weight_g_idx"] = w.g_idx.astype(np.int32)
    return tensors


def compressed_tensors_config(w: Packed) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": w.is_symmetric, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": {**weights, "group_size": w.group_size}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def mlx(w: Packed, biases: Array, bits: int = 4) -> dict[str, Array]:
    codes = w.codes.T.astype(np.uint8)
    stream = (codes[:, :, None] >> np.arange(bits, dtype=np.uint8) & 1).reshape(len(codes), -1)
    words = np.packbits(stream, axis=1, bitorder="little").view(np.uint32)
    return {
        "weight": words,
        "scales": np.ascontiguousarray(w.scales.T),
        "biases": np.ascontiguousarray(biases.T),
    }


def hqq(w: Packed, zeros: Array, *, as_floats: bool = False) -> dict[str, Array]:
    k, n = w.codes.shape
    g = w.group_size
    rows = np.ascontiguousarray(w.codes.T).reshape(n * k // g, g)
    half = len(rows) // 2
    packed = (rows[:half] << 4 | rows[half:]).astype(np.uint8)
    text = np.frombuffer(b"4bit_u8", np.uint8)
    return {
        "W_q": packed.view(w.scales.dtype) if as_floats else packed,
        "scale": np.ascontiguousarray(w.scales.T).reshape(-1, 1),
        "zero": np.ascontiguousarray(zeros.T).reshape(-1, 1),
        "shape": np.array([n, k], np.int64),
        "nbits": np.array([4], np.int32),
        "axis": np.array([1], np.int32),
        "group_size": np.array([g], np.int32),
        "packing": text,
        "view_as_float": np.array([as_floats], np.uint8),
    }


HQQ_CONFIG = {
    "quant_method": "hqq",
    "quant_config": {"weight_quant_params": {"nbits": 4, "axis": 1, "group_size": 64, "view_as_float": False}},
}


def q4_k(codes: Array, d: Array, dmin: Array, sc: Array, m: Array) -> Array:
    """Pack codes [K, N], d and dmin [N, K/256], and 6-bit scales and minima [N, K/32] to Q4_K rows [N, K/256 * 144]."""
    k, n = codes.shape
    blocks = np.zeros((n, k // 256, 144), np.uint8)
    blocks[..., 0:2] = d.astype(np.float16)[..., None].view(np.uint8)
    blocks[..., 2:4] = dmin.astype(np.float16)[..., None].view(np.uint8)
    sc, m = sc.reshape(n, -1, 8).astype(np.uint8), m.reshape(n, -1, 8).astype(np.uint8)
    for j in range(4):
        blocks[..., 4 + j] = sc[..., j] | sc[..., j + 4] >> 4 << 6
        blocks[..., 8 + j] = m[..., j] | m[..., j + 4] >> 4 << 6
        blocks[..., 12 + j] = sc[..., j + 4] & 15 | (m[..., j + 4] & 15) << 4
    groups = codes.T.reshape(n, k // 256, 4, 2, 32)
    for c in range(4):
        blocks[..., 16 + 32 * c : 48 + 32 * c] = groups[:, :, c, 0] | groups[:, :, c, 1] << 4
    return blocks.reshape(n, -1)
