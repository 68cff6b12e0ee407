# SPDX-License-Identifier: Apache-2.0
"""Quantize a language model to 4 bits with calibration texts; here a tiny Llama with random weights.

    pip install ".[llm]"
    python tests/examples/quantize_language_model.py

On the command line: python -m cupy_awq quantize SRC DST --calibration TEXT.txt
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import tokenizers

from cupy_awq import llm
from cupy_awq.checkpoint import safetensors

CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 256}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
CONFIG |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 0}
SHAPES = {"self_attn.q": (32, 32), "self_attn.k": (16, 32), "self_attn.v": (16, 32), "self_attn.o": (32, 32)}
SHAPES |= {"mlp.gate": (64, 32), "mlp.up": (64, 32), "mlp.down": (32, 64)}


def write_model(folder: Path) -> Path:
    """Write a Hugging Face folder: the tensors, the configuration, and a tokenizer with one token per byte."""
    rng = np.random.default_rng(0)
    tensors = {f"model.layers.0.{name}_proj.weight": rng.standard_normal(shape) / 6 for name, shape in SHAPES.items()}
    tensors |= {f"model.layers.0.{name}_layernorm.weight": np.ones(32) for name in ("input", "post_attention")}
    tensors |= {"model.embed_tokens.weight": rng.standard_normal((256, 32)), "model.norm.weight": np.ones(32)}
    safetensors.write(folder / "model.safetensors", {name: t.astype(np.float16) for name, t in tensors.items()})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
    # For a real model, take documents of the kind that it will be used for.
    texts = [Path(__file__).read_text(encoding="utf-8")]
    print(llm.quantize(write_model(Path(source)), target, texts, group_size=16, samples=2).text())
    answer = llm.load(target, device="cpu").generate("Hello", raw=True, max_tokens=4)[0]
    print(f"generated {len(answer.tokens)} tokens")
