# SPDX-License-Identifier: Apache-2.0
"""Text generation with quantized language models: Llama, SmolLM2, Qwen2, Qwen2.5 and Qwen3.

This subpackage needs the extra ``llm`` (packages tokenizers, jinja2 and gguf).
"""

from __future__ import annotations

import os
from typing import Any

from cupy_awq.check import HOST
from cupy_awq.llm.build import build_model
from cupy_awq.llm.config import ModelConfig
from cupy_awq.llm.language_model import Chat, Completion, ContextFullError, LanguageModel, Score, Stats
from cupy_awq.llm.model_files import ModelFiles, Progress
from cupy_awq.llm.model_quantizer import quantize
from cupy_awq.llm.numpy_ops import NumpyOps
from cupy_awq.llm.ops import DecoderOps
from cupy_awq.llm.readers import read
from cupy_awq.llm.sampling import Sampling
from cupy_awq.runtime import placement

__all__ = [
    "Chat",
    "Completion",
    "ContextFullError",
    "LanguageModel",
    "ModelConfig",
    "ModelFiles",
    "Sampling",
    "Score",
    "Stats",
    "load",
    "quantize",
    "read",
]


def load(path: str | os.PathLike[str], /, *, device: Any = None, progress: Progress | None = None) -> LanguageModel:
    """Load a model with its tokenizer onto a device, ready to generate text.

    Args:
        path: a folder, file or model name, as in `read`.
        device: "cpu", a device ordinal, or None for CuPy's current device (the CPU if there is no GPU).
        progress: a callback (number of finished steps, total number of steps), called while tensors are read; or None.

    Raises:
        CheckpointError, OSError, TypeError, ValueError: the same errors as `read`; also ValueError if the device does
            not exist or cannot run the model.
        MemoryError: the memory of the GPU, or of the host, is exhausted.
    """
    index = placement.resolve(device)
    files = read(path)
    tokenizer = files.load_tokenizer()
    with placement.use_device(index):
        ops = NumpyOps(files.config) if index == HOST else _cuda_ops(files, index)
        model = build_model(files, ops, progress)
    return LanguageModel(files.config, model, tokenizer, files.stop_ids)


def _cuda_ops(files: ModelFiles, index: int) -> DecoderOps:
    from cupy_awq.llm.cuda_ops import CudaOps, activation_dtype  # imported here: the CPU path must work without CuPy

    config = files.config
    first = files.read_linear("model.layers.0.self_attn.q_proj", config.hidden, config.q_width)
    return CudaOps(config, index, activation_dtype(first))
