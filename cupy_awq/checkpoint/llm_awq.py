# SPDX-License-Identifier: Apache-2.0
"""The files of llm-awq: a ``.pt`` without a configuration, in one of three layouts.

The first generation has AutoAWQ's "gemm" layout, the second ("v1") its "gemv" and the third ("v2") its "gemv_fast",
whose offsets are named ``scaled_zeros``. The group sizes of the last two follow from the padding of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cupy_awq.checkpoint.autoawq import AutoAwq
from cupy_awq.checkpoint.autoawq_gemv import Gemv, GemvFast
from cupy_awq.checkpoint.detect import Detected
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.module import Format
from cupy_awq.checkpoint.tensors import Tensor

SCALED = ".act.scales"
"""The end of the name of a tensor that x is divided by at run time, in models with GELU."""


def detect(path: Path, tensors: Mapping[str, Tensor], group_size: int | None) -> Detected:
    """Return the layout of a file's modules.

    Raises CheckpointError for modules that divide x by scales of its own.
    """
    for name in tensors:
        if name.endswith(SCALED):
            parent = name.removesuffix(SCALED)
            raise CheckpointError(f"{path}: module {parent!r:.200}: act.scales divide x, which is not supported")
    layout = _find_layout(tensors, group_size)
    return Detected(layout, f"Format {layout.name}: the file of torch.save {path}.")


def _find_layout(tensors: Mapping[str, Tensor], group_size: int | None) -> Format:
    for name, tensor in tensors.items():
        if not name.endswith("qweight"):
            continue
        scales = tensors.get(name.removesuffix("qweight") + "scales")
        if tensor.array.dtype == np.int16:
            return GemvFast(group_size, "scaled_zeros", "llm-awq v2")
        if scales is not None and scales.array.shape[:1] == tensor.array.shape[:1]:
            return Gemv(group_size, "llm-awq v1")
        break
    return AutoAwq(group_size)
