# SPDX-License-Identifier: Apache-2.0
"""The AutoAWQ "gemm" format: a module is ``<module>.qweight``, ``.scales``, ``.qzeros`` and ``.bias``.

The tensors already have the layout of `PackedWeight` and are used without repacking or copying. A module without
``qweight`` (``modules_to_not_convert`` in the configuration) is not quantized; its tensors are returned as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_awq.checkpoint.module import Module, ModuleSpec, Pending
from cupy_awq.checkpoint.module_tensors import INT32, SCALES, ModuleTensors
from cupy_awq.checkpoint.rules import Rules
from cupy_awq.checkpoint.tensors import Array
from cupy_awq.packing import SYMMETRIC
from cupy_awq.weight import PackedWeight


@dataclass(frozen=True)
class AutoAwq:
    """The "gemm" format with the settings of one checkpoint.

    Attributes:
        group_size: the configured number of rows of W per group, which the shapes must match; -1 means K, None accepts
            any group size.
        zero_point: the configured use of zero points: True requires ``qzeros`` in every module; False drops ``qzeros``
            that hold only zero points of 8; None does neither.
        source: the path of the configuration file, for error messages.
        rules: the per-module settings (``extra_config`` of auto-round).
    """

    group_size: int | None = None
    zero_point: bool | None = None
    source: str = ""
    rules: Rules = field(default_factory=Rules)

    name = "awq gemm"
    codes_suffix = "qweight"
    other_suffixes = ("scales", "qzeros", "bias")
    dependent_suffixes = ("scales", "qzeros")

    def is_quantized(self, array: Array) -> bool:
        return True

    def open_module(self, tensors: ModuleTensors) -> Pending:
        settings: Mapping[str, Any] = self.rules.settings(tensors)
        qweight = tensors.matrix("qweight", INT32, "[K, N/8]")
        scales = tensors.finite("scales", tensors.matrix("scales", SCALES, "[K/G, N]"))
        qzeros = None
        if "qzeros" in tensors:
            qzeros = tensors.matrix("qzeros", INT32, "[K/G, N/8]")
            if self.zero_point is False and bool((qzeros.view(np.uint32) == np.uint32(SYMMETRIC)).all()):
                qzeros = None
        elif self.zero_point:
            raise tensors.error(f"qzeros: expected a tensor since {self.source} has zero_point true, got none")
        try:
            weight = PackedWeight(qweight, scales, qzeros)
        except (TypeError, ValueError) as error:
            raise tensors.error(str(error)) from None
        k, n = weight.shape
        configured = settings.get("group_size", self.group_size)
        expected = k if configured == -1 else configured
        if expected is not None and weight.group_size != expected:
            stated = f"{expected!r:.80} as in {self.source or 'the argument group_size'}"
            raise tensors.error(f"group_size: expected {stated}, got {weight.group_size} from the shapes")
        bias = tensors.bias(n)
        spec = ModuleSpec(k, n, weight.group_size, weight.spec.zeros, weight.dtype, bias_dtype=tensors.bias_dtype())
        return Pending(spec, _make_module, arrays=(qweight, scales, qzeros, bias))


def _make_module(qweight: Array, scales: Array, qzeros: Array | None, bias: Array | None) -> Module:
    return Module(PackedWeight(qweight, scales, qzeros), bias)
