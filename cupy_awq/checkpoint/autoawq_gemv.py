# SPDX-License-Identifier: Apache-2.0
"""The AutoAWQ formats "gemv" and "gemv_fast", which llm-awq calls v1 and v2.

    gemv       qweight [N, K/8] int32, nibble k % 8 is the code of W[k, n]; qzeros [N, zw] int32, nibble g % 8 is the
               zero point of group g; scales [N, 8 zw] float16 or bfloat16
    gemv_fast  qweight [N/4, K] int16 in the order of `nibbles.convert_interleaved_words`; offsets -(s z), named qzeros
               by AutoAWQ and scaled_zeros by llm-awq, and scales, both [8 zw, N] float16 or bfloat16

zw is the number of 32-bit words per column for the zero points of K/G groups, including padding (`count_zero_words`).
The tensors do not record the group size G.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from cupy_awq.checkpoint import nibbles
from cupy_awq.checkpoint.groups import resolve_group_size
from cupy_awq.checkpoint.module import Module, ModuleSpec, Pending
from cupy_awq.checkpoint.module_tensors import INT32, SCALES, ModuleTensors, check_columns
from cupy_awq.checkpoint.tensors import Array
from cupy_awq.weight import PackedWeight

INT16 = (np.dtype(np.int16),)

CANDIDATES = (32, 64, 128)
"""The group sizes that are tried for a file without a configuration, in addition to K."""


def count_zero_words(k: int, group_size: int) -> int:
    """Return zw: the number of 32-bit words for the zero points of K / group_size groups, including AutoAWQ's padding.

    >>> count_zero_words(4096, 128), count_zero_words(4096, 64), count_zero_words(4096, 32)
    (4, 8, 16)
    """
    multiple = 1 if group_size >= 128 else 2 if group_size == 64 else 4
    words = -(-(k // group_size) // 8)
    return -(-words // multiple) * multiple


@dataclass(frozen=True)
class Gemv:
    """The "gemv" format with the settings of one checkpoint.

    Attributes:
        group_size: the configured number of rows of W per group; -1 means K, None infers it from the padding of scales.
        name: the name of the format for messages: "awq gemv" or "llm-awq v1".
    """

    group_size: int | None
    name: str = "awq gemv"

    codes_suffix = "qweight"
    other_suffixes = ("qzeros", "scales", "bias")
    dependent_suffixes = ("qzeros", "scales")

    def is_quantized(self, array: Array) -> bool:
        return True

    def open_module(self, tensors: ModuleTensors) -> Pending:
        qweight = tensors.matrix("qweight", INT32, "[N, K/8]")
        n, k = check_columns(tensors, qweight.shape[0]), 8 * qweight.shape[1]
        scales = tensors.matrix("scales", SCALES, "[N, 8 zw]")
        group_size = _find_group_size(tensors, k, self.group_size, scales.T)
        width = count_zero_words(k, group_size)
        scales = tensors.finite("scales", tensors.array("scales", SCALES, "[N, 8 zw]", (n, 8 * width)))
        qzeros = tensors.array("qzeros", INT32, "[N, zw]", (n, width))
        bias = tensors.bias(n)
        spec = ModuleSpec(k, n, group_size, "packed", scales.dtype, bias_dtype=tensors.bias_dtype())
        return Pending(spec, partial(_convert_gemv, k // group_size), arrays=(qweight, qzeros, scales, bias))


def _convert_gemv(groups: int, qweight: Array, qzeros: Array, scales: Array, bias: Array | None) -> Module:
    zeros = nibbles.convert_column_words(qzeros)[:groups]
    weight = PackedWeight(nibbles.convert_column_words(qweight), nibbles.transpose_matrix(scales[:, :groups]), zeros)
    return Module(weight, bias)


@dataclass(frozen=True)
class GemvFast:
    """The "gemv_fast" format with the settings of one checkpoint.

    Attributes:
        group_size: the configured number of rows of W per group; -1 means K, None infers it from the padding of scales.
        offsets: the suffix of the tensor of offsets: "qzeros" or "scaled_zeros".
        name: the name of the format for messages: "awq gemv_fast" or "llm-awq v2".
    """

    group_size: int | None
    offsets: str = "qzeros"
    name: str = "awq gemv_fast"

    codes_suffix = "qweight"

    @property
    def other_suffixes(self) -> tuple[str, ...]:
        return (self.offsets, "scales", "bias")

    @property
    def dependent_suffixes(self) -> tuple[str, ...]:
        return (self.offsets, "scales")

    def is_quantized(self, array: Array) -> bool:
        return True

    def open_module(self, tensors: ModuleTensors) -> Pending:
        qweight = tensors.matrix("qweight", INT16, "[N/4, K]")
        n, k = check_columns(tensors, 4 * qweight.shape[0]), qweight.shape[1]
        if k % 64:
            raise tensors.error(f"K={k} is not a multiple of 64")
        scales = tensors.matrix("scales", SCALES, "[8 zw, N]")
        group_size = _find_group_size(tensors, k, self.group_size, scales)
        padded = 8 * count_zero_words(k, group_size), n
        scales = tensors.finite("scales", tensors.array("scales", SCALES, "[8 zw, N]", padded))
        offsets = tensors.finite(self.offsets, tensors.array(self.offsets, (scales.dtype,), "[8 zw, N]", padded))
        bias = tensors.bias(n)
        groups = k // group_size
        spec = ModuleSpec(k, n, group_size, "float", scales.dtype, bias_dtype=tensors.bias_dtype())
        return Pending(spec, _convert_fast, arrays=(qweight, scales[:groups], offsets[:groups], bias))


def _convert_fast(qweight: Array, scales: Array, offsets: Array, bias: Array | None) -> Module:
    return Module(PackedWeight(nibbles.convert_interleaved_words(qweight), scales, offsets), bias)


def _find_group_size(tensors: ModuleTensors, k: int, group_size: int | None, scales: Array) -> int:
    """Return the configured ``group_size``, or infer it from the rows of zeros that pad ``scales`` [8 zw, N].

    Raises CheckpointError if not exactly one candidate fits, or if the configured group size is not supported.
    """
    if group_size is None:
        sizes = {size for size in (*CANDIDATES, k) if k % size == 0 and _fits(scales, k, size)}
        if len(sizes) != 1:
            raise tensors.error("group_size: expected scales whose padding determines it, got others; give group_size=")
        return sizes.pop()
    size = resolve_group_size(tensors, k, group_size)
    if k % size or (size < 128 and size not in CANDIDATES):
        raise tensors.error(f"group_size: expected 32, 64 or at least 128, and a divisor of K={k}, got {size}")
    return size


def _fits(scales: Array, k: int, size: int) -> bool:
    """Return whether ``scales`` [8 zw, N] have the padding that ``size``, a group size, implies.

    K / size rows with a nonzero value are followed by rows of zeros. zw is the result of `count_zero_words`.
    """
    groups = k // size
    if len(scales) != 8 * count_zero_words(k, size):
        return False
    used = (scales.astype(np.float32) != 0).any(axis=1)
    return bool(used[:groups].all()) and not bool(used[groups:].any())
