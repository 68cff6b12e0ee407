# SPDX-License-Identifier: Apache-2.0
"""Write a model as a Hugging Face folder of dense float16 tensors: ``python -m tests.tools.write_dense_model SRC DST``.

A quantizer takes 16-bit models, but the models that packages install, such as "smollm2", are quantized GGUF files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq import llm, reference
from cupy_awq.checkpoint import Module, safetensors
from cupy_awq.llm import ModelConfig, ModelFiles


def dense(value: Any) -> np.ndarray:
    """Return a tensor, or a module's weight [N, K], in float16."""
    if isinstance(value, Module):
        weight = value.weight
        value = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32).T
    return np.ascontiguousarray(value.astype(np.float16))


def describe(config: ModelConfig, stop_ids: tuple[int, ...]) -> dict[str, Any]:
    """Return the config.json of a model."""
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": dict(config.rope_scaling) or None,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "torch_dtype": "float16",
        "eos_token_id": list(stop_ids),
    }


def write(files: ModelFiles, folder: Path) -> Path:
    """Write the model with its tokenizer and return the folder."""
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
    (folder / "config.json").write_text(json.dumps(describe(files.config, files.stop_ids), indent=2))
    tokenizer = files.load_tokenizer()
    tokenizer.inner.save(str(folder / "tokenizer.json"))
    if tokenizer.template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": tokenizer.template}))
    return folder


if __name__ == "__main__":
    print(write(llm.read(sys.argv[1]), Path(sys.argv[2])))
