# SPDX-License-Identifier: Apache-2.0
"""The files of llm-awq: a ``.pt`` file without a configuration, in one of three AutoAWQ formats.

The formats are "gemm" (the first release), "gemv" (v1) and "gemv_fast" (v2), whose tensor of offsets is named
``scaled_zeros``. For v1 and v2, the group size is inferred from the padding of the scales.
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
"""The ending of the names of activation scales: in models with GELU, x is divided by them at run time."""


def detect(path: Path, tensors: Mapping[str, Tensor], group_size: int | None) -> Detected:
    """Detect the format of a file from its tensors by name; ``group_size`` None infers the group size.

    Raises CheckpointError if the file has activation scales, which are not supported.
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
