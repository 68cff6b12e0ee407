# SPDX-License-Identifier: Apache-2.0
"""Compare the logits of cupy_awq with those of Hugging Face transformers on tiny random models, both on the CPU.

Configurations of every supported architecture are drawn at random: sizes, biases, tied heads, and RoPE with valid, odd
and unknown parameters. transformers builds and stores each model, and both read it from the same folder. The script
needs transformers 5 and torch beside cupy_awq[llm], prints the number of models by outcome, and exits with 1 if logits
differ:

    python -m tests.peers.compare_transformers --models 200
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from cupy_awq import llm
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.families import FAMILIES
from tests.logits import logits_of

TOKENS, VOCAB = 60, 96
TOLERANCE = 2e-4
"""The largest accepted difference of a logit, relative to the largest logit. Both sides compute in float32."""


def draw_rope(rng: random.Random) -> dict[str, Any]:
    """Return random RoPE entries of a config.json, sometimes with a key that the RoPE type does not have."""
    kind = rng.choice(["none", "default", "linear", "llama3", "yarn", "yarn", "yarn", "dynamic", "factors"])
    if kind == "none":
        return {}
    table: dict[str, Any] = {rng.choice(["rope_type", "rope_type", "type"]): kind}

    def maybe(name: str, *values: Any, chance: float = 0.5) -> None:
        if rng.random() < chance:
            table[name] = rng.choice(values)

    if kind != "default":
        table["factor"] = rng.choice([1.0, 2.0, 4, 8.0, 40.0, 0.5])
    if kind == "factors":
        table["factors"] = [1.0, 2.0]
    if kind == "llama3":
        table |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0, 4])}
    if kind in ("llama3", "yarn"):
        maybe("original_max_position_embeddings", 8, 16, 64, 100, chance=0.8)
    if kind == "yarn":
        maybe("factor", None, chance=0.1)
        maybe("mscale", 1.0, 0.707, 2, 0, None)
        maybe("mscale_all_dim", 1.0, 0.5, 0, None)
        maybe("attention_factor", 1.3, 0.8, None, chance=0.2)
        maybe("beta_fast", 32, 4.0, 64.0, 1.0, None)
        maybe("beta_slow", 1, 0.25, 2.0, None)
        maybe("truncate", True, False)
    maybe("rope_theta", 50.0, 10000.0, chance=0.3)
    maybe(rng.choice(["mscale", "alpha", "mrope_section", "partial_rotary_factor"]), 0.5, [2, 3], chance=0.15)
    return {rng.choice(["rope_scaling", "rope_parameters"]): table}


def draw_config(rng: random.Random) -> dict[str, Any]:
    """Return a config.json with a random architecture, sizes, biases, tied or untied head, and RoPE."""
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    table: dict[str, Any] = {
        "model_type": rng.choice(list(FAMILIES)),
        "hidden_size": heads * rng.choice([8, 16]),
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": rng.choice([1, 2]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCAB,
        "max_position_embeddings": rng.choice([128, 256]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 0.01]),
        **draw_rope(rng),
    }
    if rng.random() < 0.4 or table["model_type"] == "qwen3":
        table["head_dim"] = rng.choice([8, 16, 24])
    optional = {
        "rope_theta": [100.0, 10000.0, 1000000.0, 500],
        "tie_word_embeddings": [True, False],
        "attention_bias": [True, False],
        "num_key_value_heads": [None],
        "original_max_position_embeddings": [16, 32],
        "use_sliding_window": [False, True],
        "partial_rotary_factor": [0.5, 1.0],
        "hidden_act": ["silu", "gelu"],
    }
    rare = ("num_key_value_heads", "original_max_position_embeddings", "use_sliding_window")
    for name, values in optional.items():
        if rng.random() < (0.15 if name in rare or name in ("partial_rotary_factor", "hidden_act") else 0.5):
            table[name] = rng.choice(values)
    return table | draw_experts(rng)


def draw_experts(rng: random.Random) -> dict[str, Any]:
    """Return entries of a config.json for experts under the names of every family; other models ignore them."""
    count = rng.choice([4, 6, 8])
    return {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count),
        "num_experts_per_tok": rng.choice([1, 2]),
        "moe_intermediate_size": rng.choice([16, 24]),
        "shared_expert_intermediate_size": rng.choice([16, 40]),
        "n_shared_experts": rng.choice([1, 2]),
        "first_k_dense_replace": rng.choice([0, 1]),
        "mlp_only_layers": rng.choice([[], [0]]),
        "decoder_sparse_step": 1,
        "norm_topk_prob": rng.choice([True, False]),
        "n_group": rng.choice([1, 2]),
        "topk_group": 1,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "use_qk_norm": rng.choice([True, False]),
    }


def write_model(table: dict[str, Any], folder: Path, seed: int) -> None:
    """Write a model of random weights, in which no norm weight is 1 and no bias is 0."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(table)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = 1.0 if "norm" in name else 0.0
            parameter.copy_(offset + torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.25))
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**table, "architectures": [type(model).__name__]}))


def their_logits(folder: Path, ids: list[int]) -> np.ndarray:
    """Return the logits [S, V] that transformers computes for a model's folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def our_logits(folder: Path, ids: list[int]) -> np.ndarray:
    """Return the logits [S, V] that cupy_awq computes for a model's folder on the CPU."""
    files = llm.read(folder)
    model = build_model(files, NumpyOps(files.config))
    return logits_of(model, ids)


def compare(table: dict[str, Any], seed: int) -> tuple[str, str]:
    """Compare the logits of one random model; return "equal", "different" or who refused it, and why."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, TOKENS).tolist()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            write_model(table, folder, seed)
            theirs = their_logits(folder, ids)
        except Exception as error:  # transformers raises errors of many types for the configurations that it refuses
            return "refused by transformers", f"{type(error).__name__}: {error}"
        try:
            ours = our_logits(folder, ids)
        except ValueError as error:
            return "refused by cupy_awq", str(error).replace(temporary, "")
    difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    return ("equal" if difference <= TOLERANCE else "different"), f"{difference:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for i in range(options.seed, options.seed + options.models):
        table = draw_config(random.Random(i))
        outcome, detail = compare(table, i)
        outcomes[table["model_type"], outcome] += 1
        if outcome == "different":
            print(f"model {i}: difference {detail}: {json.dumps(table)}")
        elif outcome == "refused by cupy_awq":
            reasons[detail] += 1
    for (model_type, outcome), count in sorted(outcomes.items()):
        print(f"{model_type:8} {outcome:25} {count}")
    for reason, count in reasons.most_common():
        print(f"{count:5} {reason:.150}")
    return int(any(outcome == "different" for _, outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
