# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints as NumPy arrays: `read` returns packed weights by module name.

`cupy_awq.load` copies the weights to a device. To add a format, follow
``.github/contributing/checkpoint-format.md``.
"""

from __future__ import annotations

import os
from pathlib import Path

from cupy_awq.checkpoint import config, detect, experts, gguf, llm_awq, tensors, torch_file
from cupy_awq.checkpoint.contents import Contents, Summary, gather, summarize
from cupy_awq.checkpoint.detect import Detected
from cupy_awq.checkpoint.files import CheckpointError, check_downloaded, paused_collector
from cupy_awq.checkpoint.model_path import locate
from cupy_awq.checkpoint.module import Module, ModuleSpec
from cupy_awq.checkpoint.tensors import Tensor
from cupy_awq.checkpoint.write import save

__all__ = ["CheckpointError", "Contents", "Module", "ModuleSpec", "Summary", "Tensor", "read", "save", "summarize"]

HQQ_FILE = "qmodel.pt"
"""The file name that identifies a folder saved by the hqq package: a nested pickle, which is not supported."""


def read(path: str | os.PathLike[str], /, *, group_size: int | None = None) -> Contents:
    """Open a checkpoint and return its quantized modules and plain tensors by name.

    This function validates headers, scales and permutations; the scales of GGUF tensors are validated at first access.
    The codes of a module are repacked whenever the module is accessed. Plain tensors that need no conversion, and
    modules in AutoAWQ's "gemm" format, are views of the memory-mapped files.

    Args:
        path: a folder, or a safetensors, GGUF or PyTorch file, as in `cupy_awq.load`.
        group_size: the number of rows of W per group, for files that do not record it (AutoAWQ's "gemv" formats without
            a configuration); otherwise None.

    Raises:
        CheckpointError: the format is not supported, or the files are damaged or contradict each other. It is a
            subclass of ValueError.
        OSError: a file cannot be opened.
        TypeError: ``path`` is neither a str nor an os.PathLike.
        ValueError: ``path`` is empty.

    >>> from cupy_awq.tools.demo import SMOLLM2_MLP
    >>> read(SMOLLM2_MLP)["model.layers.0.mlp.up_proj"].weight
    PackedWeight(K=576, N=1536, group_size=64, float16, packed zeros, 0.48 MB)
    """
    found = locate(path)
    with paused_collector():
        return _read_folder(found, group_size) if found.is_dir() else _read_file(found, group_size)


def _read_folder(folder: Path, group_size: int | None) -> Contents:
    if (folder / HQQ_FILE).is_file():
        raise CheckpointError(f"{folder / HQQ_FILE}: expected safetensors, got hqq's own pickle; save as safetensors")
    entry = config.read(folder)
    return _open_safetensors(folder, entry, group_size)


def _read_file(file: Path, group_size: int | None) -> Contents:
    if file.exists() and not file.is_file():  # refuse a pipe: opening it would wait for its writer
        raise CheckpointError(f"{file}: expected a folder or a regular file, got neither")
    with open(file, "rb") as opened:
        begin = opened.read(64)
    check_downloaded(begin, str(file))
    magic = begin[:4]
    if magic == gguf.container.MAGIC:
        return gguf.tensors.read(file)
    if file.suffix in torch_file.SUFFIXES or magic.startswith(torch_file.MAGIC):
        arrays = {name: Tensor(array, file) for name, array in torch_file.read(file).items()}
        return _open_modules(arrays, llm_awq.detect(file, arrays, group_size))
    if file.suffix not in ("", ".safetensors") and not _has_safetensors_header(file):
        expected = "a folder, or a safetensors, GGUF or llm-awq (.pt) file"
        raise CheckpointError(f"{file}: expected {expected}, got a file that begins with {magic!r}")
    return _open_safetensors(file, None, group_size)


def _open_safetensors(path: Path, entry: config.Entry | None, group_size: int | None) -> Contents:
    found = tensors.read(path)
    renamed = experts.rename_fused(found)
    arrays: dict[str, Tensor] = {}
    for name, tensor in found.items():
        key = renamed.get(name, name)
        if key in arrays:
            where = f"{tensor.file}: tensor {name!r:.200}"
            raise CheckpointError(f"{where}: expected a unique name, got {key!r:.200} twice")
        arrays[key] = tensor
    return _open_modules(arrays, detect.detect(arrays, entry, group_size))


def _has_safetensors_header(file: Path) -> bool:
    """Return whether a file begins like a safetensors file: the length of a header within the file, then "{"."""
    with open(file, "rb") as opened:
        begin = opened.read(9)
    return len(begin) == 9 and begin.endswith(b"{") and int.from_bytes(begin[:8], "little") < file.stat().st_size


def _open_modules(arrays: dict[str, Tensor], detected: Detected) -> Contents:
    return Contents(gather(arrays, detected.layout), detected.sentence, detected.layout.name)
