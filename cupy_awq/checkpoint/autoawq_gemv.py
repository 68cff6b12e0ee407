# SPDX-License-Identifier: Apache-2.0
"""The layouts of AutoAWQ's versions "gemv" and "gemv_fast", which are also llm-awq's first and second version.

    gemv       qweight [N, K/8] int32, nibble k % 8 is the code of W[k, n]; qzeros [N, zw] int32, nibble g % 8 is the
               zero point of group g; scales [N, 8 zw] float16 or bfloat16
    gemv_fast  qweight [N/4, K] int16 in the order of `nibbles.convert_interleaved_words`; offsets -(s z), named qzeros
               by AutoAWQ and scaled_zeros by llm-awq, and scales, both [8 zw, N] float16 or bfloat16

zw, the width of the zero points, pads the number of groups; the group size is not in the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from cupy_awq.checkpoint import nibbles
from cupy_awq.checkpoint.module import (
    INT32,
    SCALES,
    Array,
    ModuleSpec,
    Parts,
    Pending,
    check_columns,
    resolve_group_size,
)
from cupy_awq.checkpoint.tensors import Module
from cupy_awq.weight import PackedWeight

INT16 = (np.dtype(np.int16),)

CANDIDATES = (32, 64, 128)
"""The group sizes that files without a configuration may have, besides K."""


def count_zero_words(k: int, group_size: int) -> int:
    """Return zw, the words of zero points that hold K / group_size groups with the packer's padding.

    >>> count_zero_words(4096, 128), count_zero_words(4096, 64), count_zero_words(4096, 32)
    (4, 8, 16)
    """
    multiple = 1 if group_size >= 128 else 2 if group_size == 64 else 4
    words = -(-(k // group_size) // 8)
    return -(-words // multiple) * multiple


@dataclass(frozen=True)
class Gemv:
    """The "gemv" layout of one checkpoint.

    Attributes:
        group_size: the configured group size; -1 stands for K, None takes it from the padding of the scales.
        name: the format's name.
    """

    group_size: int | None
    name: str = "awq gemv"

    codes = "qweight"
    parts = ("qzeros", "scales", "bias")
    orphans = ("qzeros", "scales")

    def is_codes(self, array: Array) -> bool:
        return True

    def open_module(self, parts: Parts) -> Pending:
        qweight = parts.matrix("qweight", INT32, "[N, K/8]")
        n, k = check_columns(parts, qweight.shape[0]), 8 * qweight.shape[1]
        scales = parts.matrix("scales", SCALES, "[N, 8 zw]")
        group_size = _find_group_size(parts, k, self.group_size, scales.T)
        width = count_zero_words(k, group_size)
        scales = parts.finite("scales", parts.array("scales", SCALES, "[N, 8 zw]", (n, 8 * width)))
        qzeros = parts.array("qzeros", INT32, "[N, zw]", (n, width))
        bias = parts.bias(n)
        spec = ModuleSpec(k, n, group_size, "packed", scales.dtype, bias_dtype=parts.bias_dtype())
        return Pending(spec, partial(_convert_gemv, qweight, qzeros, scales, bias, k // group_size))


def _convert_gemv(qweight: Array, qzeros: Array, scales: Array, bias: Array | None, groups: int) -> Module:
    zeros = nibbles.convert_column_words(qzeros)[:groups]
    weight = PackedWeight(nibbles.convert_column_words(qweight), nibbles.transpose_matrix(scales[:, :groups]), zeros)
    return Module(weight, bias)


@dataclass(frozen=True)
class GemvFast:
    """The "gemv_fast" layout of one checkpoint.

    Attributes:
        group_size: the configured group size; -1 stands for K, None takes it from the padding of the scales.
        offsets: the name of the tensor of offsets, "qzeros" or "scaled_zeros".
        name: the format's name.
    """

    group_size: int | None
    offsets: str = "qzeros"
    name: str = "awq gemv_fast"

    codes = "qweight"

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.offsets, "scales", "bias")

    @property
    def orphans(self) -> tuple[str, ...]:
        return (self.offsets, "scales")

    def is_codes(self, array: Array) -> bool:
        return True

    def open_module(self, parts: Parts) -> Pending:
        qweight = parts.matrix("qweight", INT16, "[N/4, K]")
        n, k = check_columns(parts, 4 * qweight.shape[0]), qweight.shape[1]
        if k % 64:
            raise parts.refuse(f"K={k} is not a multiple of 64")
        scales = parts.matrix("scales", SCALES, "[8 zw, N]")
        group_size = _find_group_size(parts, k, self.group_size, scales)
        padded = 8 * count_zero_words(k, group_size), n
        scales = parts.finite("scales", parts.array("scales", SCALES, "[8 zw, N]", padded))
        offsets = parts.finite(self.offsets, parts.array(self.offsets, (scales.dtype,), "[8 zw, N]", padded))
        bias = parts.bias(n)
        groups = k // group_size
        spec = ModuleSpec(k, n, group_size, "float", scales.dtype, bias_dtype=parts.bias_dtype())
        return Pending(spec, partial(_convert_fast, qweight, scales[:groups], offsets[:groups], bias))


def _convert_fast(qweight: Array, scales: Array, offsets: Array, bias: Array | None) -> Module:
    return Module(PackedWeight(nibbles.convert_interleaved_words(qweight), scales, offsets), bias)


def _find_group_size(parts: Parts, k: int, group_size: int | None, scales: Array) -> int:
    """Return the group size, configured or inferred from which rows of ``scales`` [8 zw, N] are padding."""
    if group_size is None:
        sizes = {size for size in (*CANDIDATES, k) if k % size == 0 and _fits(scales, k, size)}
        if len(sizes) != 1:
            raise parts.refuse("group_size: expected scales whose padding tells it, got others; give group_size=")
        return sizes.pop()
    size = resolve_group_size(parts, k, group_size)
    if k % size or (size < 128 and size not in CANDIDATES):
        raise parts.refuse(f"group_size: expected 32, 64 or at least 128, and a divisor of K={k}, got {size}")
    return size


def _fits(scales: Array, k: int, size: int) -> bool:
    """Return whether exactly the first K / size rows of scales are not all zero."""
    groups = k // size
    if len(scales) != 8 * count_zero_words(k, size):
        return False
    used = (scales.astype(np.float32) != 0).any(axis=1)
    return bool(used[:groups].all()) and not bool(used[groups:].any())
