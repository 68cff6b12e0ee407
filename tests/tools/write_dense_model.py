# SPDX-License-Identifier: Apache-2.0
"""Write a model as a Hugging Face folder of dense float16 tensors: ``python -m tests.tools.write_dense_model SRC DST``.

A quantizer needs a 16-bit model, but the models in packages, such as "smollm2", are quantized GGUF files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq import llm, reference
from cupy_awq.checkpoint import Module, safetensors
from cupy_awq.llm import ModelFiles
from cupy_awq.llm.files import hugging_face


def dense(value: Any) -> np.ndarray:
    """Return a tensor in float16; a quantized module is dequantized to its weight [N, K]."""
    if isinstance(value, Module):
        weight = value.weight
        value = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32).T
    return np.ascontiguousarray(value.astype(np.float16))


def write(files: ModelFiles, folder: Path) -> Path:
    """Write the model's dense tensors, configuration and tokenizer to ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, read in files.tensors.items():
        value = read()
        if isinstance(value, Module):
            tensors[f"{name}.weight"] = dense(value)
            if value.bias is not None:
                tensors[f"{name}.bias"] = dense(value.bias)
        elif name != "rope_freqs.weight":
            tensors[name] = dense(value)
    safetensors.write(folder / "model.safetensors", tensors)
    hugging_face.write_settings(files, folder)
    return folder


if __name__ == "__main__":
    print(write(llm.read(sys.argv[1]), Path(sys.argv[2])))
