# SPDX-License-Identifier: Apache-2.0
"""The GPTQ format, versions 1 and 2, as written by AutoGPTQ, GPTQModel and auto-round.

qweight [K/8, N] int32: nibble k % 8 of word [k // 8, n] is the code of W[k, n]
qzeros [ceil(K/G), N/8] int32: nibble n % 8 of word [g, n // 8] is the zero point of group g in column n; version 1
    stores each word minus 0x11111111
scales [ceil(K/G), N] float16 or bfloat16
g_idx [K] int32: the group index of each row of W; if absent, row k belongs to group k // G
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cupy_awq.checkpoint import nibbles
from cupy_awq.checkpoint.groups import Groups, regroup, resolve_group_size
from cupy_awq.checkpoint.module import Module, ModuleSpec, Pending
from cupy_awq.checkpoint.module_tensors import INT32, SCALES, ModuleTensors
from cupy_awq.checkpoint.rules import Rules
from cupy_awq.checkpoint.tensors import Array
from cupy_awq.packing import SYMMETRIC
from cupy_awq.weight import PackedWeight

ONES = 0x11111111
"""The constant that version 1 subtracts from every word of zero points."""


@dataclass(frozen=True)
class Gptq:
    """The GPTQ format with the settings of one checkpoint.

    Attributes:
        version: 1 if 0x11111111 is subtracted from the stored words of zero points, else 2.
        group_size: the configured number of rows of W per group; -1 means K, None infers it from each module's shapes.
        rules: the per-module settings (``dynamic`` or ``extra_config``).
        is_default: whether the shapes of a module take precedence over ``group_size`` (auto-round).
        checks_zeros: whether to warn about zero points that AutoGPTQ's packer may have corrupted.
    """

    version: int
    group_size: int | None
    rules: Rules = field(default_factory=Rules)
    is_default: bool = False
    checks_zeros: bool = False

    codes_suffix = "qweight"
    other_suffixes = ("qzeros", "scales", "g_idx", "bias")
    dependent_suffixes = ("qzeros", "scales", "g_idx")

    @property
    def name(self) -> str:
        return f"gptq v{self.version}"

    def is_quantized(self, array: Array) -> bool:
        return True

    def open_module(self, tensors: ModuleTensors) -> Pending:
        settings = self.rules.settings(tensors)
        qweight = tensors.matrix("qweight", INT32, "[K/8, N]")
        rows, n = qweight.shape
        k = 8 * rows
        scales = tensors.matrix("scales", SCALES, "[ceil(K/G), N]")
        group_size = self._find_group_size(tensors, k, len(scales), settings)
        count = -(-k // group_size)
        scales = tensors.finite("scales", tensors.array("scales", SCALES, "[ceil(K/G), N]", (count, n)))
        if n % 8:
            raise tensors.error(f"N={n} is not a multiple of 8")
        qzeros = tensors.array("qzeros", INT32, "[ceil(K/G), N/8]", (count, n // 8))
        bias = tensors.bias(n)
        g_idx = tensors.array("g_idx", INT32, "[K]", (k,)) if "g_idx" in tensors else None
        groups = regroup(tensors, k, group_size, g_idx, "g_idx")
        words = qzeros.view(np.uint32)
        symmetric = SYMMETRIC - ONES if self.version == 1 else SYMMETRIC
        zeros = "symmetric" if bool((words == np.uint32(symmetric)).all()) else "packed"
        warning = ""
        if self.checks_zeros and zeros == "packed" and bool((words >= np.uint32(0xF0000000)).any()):
            warning = f"{tensors.where}: qzeros: words end in nibbles of 15; AutoGPTQ corrupts zero points of 0"
        spec = ModuleSpec(
            k, n, groups.size, zeros, scales.dtype, has_order=groups.order is not None, bias_dtype=tensors.bias_dtype()
        )
        stored = None if zeros == "symmetric" else qzeros
        return Pending(spec, partial(_convert, groups, self.version), warning, arrays=(qweight, stored, scales, bias))

    def _find_group_size(self, tensors: ModuleTensors, k: int, count: int, settings: Mapping[str, Any]) -> int:
        configured = settings.get("group_size", self.group_size)
        if configured is not None:
            size = resolve_group_size(tensors, k, configured)
            matches = count == -(-k // size)
            if matches or "group_size" in settings or not self.is_default:
                return size
        if k % count:
            raise tensors.error(f"scales: expected a number of groups that divides K={k}, got {count}")
        return k // count


def _convert(
    groups: Groups, version: int, qweight: Array, qzeros: Array | None, scales: Array, bias: Array | None
) -> Module:
    words = nibbles.convert_row_words(qweight)
    if groups.order is not None:
        nibbles.take_rows(words, groups.order)
    if qzeros is not None:
        # Version 1 subtracts 1 from all nibbles at once, so a zero point of 0 borrows from the next nibble. Adding to
        # the whole word, not to each nibble, undoes that.
        true = qzeros.view(np.uint32) + np.uint32(ONES if version == 1 else 0)
        qzeros = groups.expand(nibbles.reorder_columns(true))
    return Module(PackedWeight(words, groups.expand(scales), qzeros), bias, groups.order)
