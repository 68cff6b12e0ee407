# SPDX-License-Identifier: Apache-2.0
"""The GPTQ format, versions 1 and 2: AutoGPTQ, GPTQModel and auto-round's packings of the same tensors.

qweight [K/8, N] int32: nibble k % 8 of word [k // 8, n] is the code of W[k, n]
qzeros [ceil(K/G), N/8] int32: nibble n % 8 is the zero point; version 1 stores words minus 0x11111111
scales [ceil(K/G), N] float16 or bfloat16
g_idx [K] int32: the group of each row; without it, row k is in group k // G
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cupy_awq.checkpoint import nibbles
from cupy_awq.checkpoint.module import (
    INT32,
    SCALES,
    Array,
    Groups,
    ModuleSpec,
    Parts,
    Pending,
    regroup,
    resolve_group_size,
)
from cupy_awq.checkpoint.rules import Rules
from cupy_awq.checkpoint.tensors import Module
from cupy_awq.weight import PackedWeight

SYMMETRIC = 0x88888888
"""A word of eight zero points of 8."""

ONES = 0x11111111
"""The amount that version 1 subtracts from every word of zero points."""


@dataclass(frozen=True)
class Gptq:
    """The GPTQ format of one checkpoint.

    Attributes:
        version: 1 or 2, the form of the zero points.
        group_size: the configured group size; -1 stands for K, None takes it from each module's shapes.
        rules: per-module settings (``dynamic`` or ``extra_config``).
        is_default: whether a module's shapes may contradict ``group_size``, as auto-round allows.
        checks_zeros: whether to warn of zero points that AutoGPTQ's packer destroys.
    """

    version: int
    group_size: int | None
    rules: Rules = field(default_factory=Rules)
    is_default: bool = False
    checks_zeros: bool = False

    codes = "qweight"
    parts = ("qzeros", "scales", "g_idx", "bias")
    orphans = ("qzeros", "scales", "g_idx")

    @property
    def name(self) -> str:
        return f"gptq v{self.version}"

    def is_codes(self, array: Array) -> bool:
        return True

    def open_module(self, parts: Parts) -> Pending:
        settings = self.rules.settings(parts)
        qweight = parts.matrix("qweight", INT32, "[K/8, N]")
        rows, n = qweight.shape
        k = 8 * rows
        scales = parts.matrix("scales", SCALES, "[ceil(K/G), N]")
        group_size = self._find_group_size(parts, k, len(scales), settings)
        count = -(-k // group_size)
        scales = parts.finite("scales", parts.array("scales", SCALES, "[ceil(K/G), N]", (count, n)))
        if n % 8:
            raise parts.refuse(f"N={n} is not a multiple of 8")
        qzeros = parts.array("qzeros", INT32, "[ceil(K/G), N/8]", (count, n // 8))
        bias = parts.bias(n)
        g_idx = parts.array("g_idx", INT32, "[K]", (k,)) if "g_idx" in parts else None
        groups = regroup(parts, k, group_size, g_idx, "g_idx")
        words = qzeros.view(np.uint32)
        symmetric = SYMMETRIC - ONES if self.version == 1 else SYMMETRIC
        zeros = "symmetric" if bool((words == np.uint32(symmetric)).all()) else "packed"
        warning = ""
        if self.checks_zeros and zeros == "packed" and bool((words >= np.uint32(0xF0000000)).any()):
            warning = f"{parts.where}: qzeros: words end in 15s, as of zero points of 0, which AutoGPTQ loses"
        spec = ModuleSpec(
            k, n, groups.size, zeros, scales.dtype, has_order=groups.order is not None, bias_dtype=parts.bias_dtype()
        )
        stored = None if zeros == "symmetric" else qzeros
        return Pending(spec, partial(_convert, qweight, stored, scales, bias, groups, self.version), warning)

    def _find_group_size(self, parts: Parts, k: int, count: int, settings: Mapping[str, Any]) -> int:
        configured = settings.get("group_size", self.group_size)
        if configured is not None:
            size = resolve_group_size(parts, k, configured)
            tells = count == -(-k // size)
            if tells or "group_size" in settings or not self.is_default:
                return size
        if k % count:
            raise parts.refuse(f"scales: expected a number of groups that divides K={k}, got {count}")
        return k // count


def _convert(
    qweight: Array, qzeros: Array | None, scales: Array, bias: Array | None, groups: Groups, version: int
) -> Module:
    words = nibbles.convert_row_words(qweight)
    if groups.order is not None:
        nibbles.take_rows(words, groups.order)
    if qzeros is not None:
        # Version 1 subtracts from whole words, so a zero point of 0 borrows from its neighbour; only words undo it.
        true = qzeros.view(np.uint32) + np.uint32(ONES if version == 1 else 0)
        qzeros = groups.expand(nibbles.reorder_columns(true))
    return Module(PackedWeight(words, groups.expand(scales), qzeros), bias, groups.order)
