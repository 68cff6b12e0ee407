# SPDX-License-Identifier: Apache-2.0
"""The AutoAWQ "gemm" format: ``<module>.qweight``, ``.scales``, ``.qzeros`` and ``.bias`` make one module.

The tensors already have the layout of `PackedWeight`, so none is repacked or copied. A module without a ``qweight``
(``modules_to_not_convert`` in the configuration) was not quantized; its tensors stay plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_awq.checkpoint.module import INT32, SCALES, Array, ModuleSpec, Parts, Pending
from cupy_awq.checkpoint.rules import Rules
from cupy_awq.checkpoint.tensors import Module
from cupy_awq.weight import PackedWeight

SYMMETRIC = 0x88888888
"""A word of eight zero points of 8."""


@dataclass(frozen=True)
class AutoAwq:
    """The "gemm" layout of one checkpoint.

    Attributes:
        group_size: the configured group size; -1 stands for K, None takes it from each module's shapes.
        zero_point: whether modules must have zero points; where False, zero points that are all 8 are dropped.
        source: the configuration file, for messages.
        rules: per-module settings (``extra_config`` of auto-round).
    """

    group_size: int | None = None
    zero_point: bool | None = None
    source: str = ""
    rules: Rules = field(default_factory=Rules)

    name = "awq gemm"
    codes = "qweight"
    parts = ("scales", "qzeros", "bias")
    orphans = ("scales", "qzeros")

    def is_codes(self, array: Array) -> bool:
        return True

    def open_module(self, parts: Parts) -> Pending:
        settings: Mapping[str, Any] = self.rules.settings(parts)
        qweight = parts.matrix("qweight", INT32, "[K, N/8]")
        scales = parts.finite("scales", parts.matrix("scales", SCALES, "[K/G, N]"))
        qzeros = None
        if "qzeros" in parts:
            qzeros = parts.matrix("qzeros", INT32, "[K/G, N/8]")
            if self.zero_point is False and bool((qzeros.view(np.uint32) == np.uint32(SYMMETRIC)).all()):
                qzeros = None
        elif self.zero_point:
            raise parts.refuse(f"qzeros: expected a tensor since {self.source} has zero_point true, got none")
        try:
            weight = PackedWeight(qweight, scales, qzeros)
        except (TypeError, ValueError) as error:
            raise parts.refuse(str(error)) from None
        k, n = weight.shape
        configured = settings.get("group_size", self.group_size)
        expected = k if configured == -1 else configured
        if expected is not None and weight.group_size != expected:
            stated = f"{expected!r:.80} as in {self.source}"
            raise parts.refuse(f"group_size: expected {stated}, got {weight.group_size} from the shapes")
        bias = parts.bias(n)
        module = Module(weight, bias)
        spec = ModuleSpec(k, n, weight.group_size, weight.spec.zeros, weight.dtype, bias_dtype=parts.bias_dtype())
        return Pending(spec, lambda: module)
