# SPDX-License-Identifier: Apache-2.0
"""Detection of the format of an llm-awq file: a ``.pt`` file without a configuration, in one of three AutoAWQ formats.

The formats are "gemm" (the first release), "gemv" (v1) and "gemv_fast" (v2). In v2, the offsets are named
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
from cupy_awq.checkpoint.format import Format
from cupy_awq.checkpoint.tensors import Tensor

SCALED = ".act.scales"
"""The ending of the names of activation scales, by which llm-awq divides x at run time in models with GELU."""


def detect(path: Path, tensors: Mapping[str, Tensor], group_size: int | None) -> Detected:
    """Detect the format of a file from its tensors.

    Args:
        path: the path of the file, for error messages.
        tensors: the tensors by name.
        group_size: the number of rows of W per group; None infers it.

    Raises:
        CheckpointError: the file has activation scales, which are not supported.
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
