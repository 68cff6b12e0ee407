# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints as NumPy views of their files: `read` returns packed weights by module name.

`cupy_awq.load` places the weights on a device. To add a format, write a module with a function like
`autoawq.read_modules` and enter it in `FORMATS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from cupy_awq.checkpoint import autoawq, config, tensors
from cupy_awq.checkpoint.config import QuantizationConfig
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.tensors import Module, Tensor

__all__ = ["FORMATS", "CheckpointError", "Module", "Tensor", "read"]

Format = Callable[[Mapping[str, Tensor], QuantizationConfig | None], dict[str, Module | Tensor]]
"""A function from all tensors of a checkpoint, by name, and its configuration to modules and remaining tensors."""

FORMATS: dict[tuple[str, str], Format] = {("awq", "gemm"): autoawq.read_modules}
"""The supported formats by the ``quant_method`` and ``version`` of a configuration."""

DEFAULT = ("awq", "gemm")
"""The format of files without a configuration."""


def read(path: str | os.PathLike[str], /) -> dict[str, Module | Tensor]:
    """Return a checkpoint's quantized modules and other tensors by name, as views of the memory-mapped files.

    Args:
        path: as in `cupy_awq.load`.

    Raises:
        CheckpointError: (a ValueError) the format is not supported, or the files are damaged or contradict each other.
        OSError: a file cannot be opened.
        TypeError: ``path`` is neither a str nor an os.PathLike.

    >>> from cupy_awq.tools.demo import SMOLLM2_MLP
    >>> read(SMOLLM2_MLP)["model.layers.0.mlp.up_proj"].weight
    PackedWeight(K=576, N=1536, group_size=64, float16, packed zeros, 0.48 MB)
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected a str or an os.PathLike, got {type(path).__name__}")
    found = Path(path)
    settings = config.read(found, FORMATS) if found.is_dir() else None
    read_modules = FORMATS[DEFAULT if settings is None else settings.format]
    return read_modules(tensors.read(found), settings)
