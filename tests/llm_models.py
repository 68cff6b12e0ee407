# SPDX-License-Identifier: Apache-2.0
"""Small language models for tests: files in each format, and a float64 forward pass by the papers' formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from cupy_awq.checkpoint import Module
from cupy_awq.llm import Decoder, ModelFiles, families
from cupy_awq.llm.families.table import Table
from cupy_awq.tools import testing
from tests.products import float64_weight

VOCAB, SPECIAL = 264, ("<|end|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GROUP = 16

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 258,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_attention_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
WIDTH = {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2}
EXPERT_FAMILIES = {
    "qwen3_moe": {**QWEN3, "model_type": "qwen3_moe", **WIDTH, "norm_topk_prob": True},
    "qwen2_moe": {
        **QWEN2, "model_type": "qwen2_moe", **WIDTH, "norm_topk_prob": False, "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
    },
    "mixtral": {
        **LLAMA, "model_type": "mixtral", "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "glm4_moe": {
        **QWEN3, "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2,
        "tie_word_embeddings": False, "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    },
}  # fmt: skip
"""Configurations of mixtures of experts, by model type; those of Qwen2 and GLM have a dense layer first."""


def decoder(*, divisors: tuple[float, ...] = (), **changes: Any) -> Decoder:
    """Return the decoder that the configuration `LLAMA` with these changes describes."""
    return families.describe(Table({**LLAMA, **changes}, divisors))


def dense_layers(config: dict[str, Any]) -> Any:
    """Return the indices of the layers without experts of a mixture of experts."""
    return config.get("mlp_only_layers", range(config.get("first_k_dense_replace", 0)))


def linears(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (K, N) of each linear layer by its name."""
    d, i, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    sizes = {"self_attn.q_proj": (d, wide), "self_attn.k_proj": (d, narrow), "self_attn.v_proj": (d, narrow)}
    sizes["self_attn.o_proj"] = wide, d

    def mlp(prefix: str, width: int, names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        return dict(zip((f"{prefix}.{name}" for name in names), ((d, width), (d, width), (width, d)), strict=True))

    projections = "gate_proj", "up_proj", "down_proj"
    dense = mlp("mlp", i, projections)
    experts: dict[str, tuple[int, int]] = {}
    for e in range(config.get("num_experts", config.get("n_routed_experts", 0))):
        experts |= mlp(f"mlp.experts.{e}", config["moe_intermediate_size"], projections)
    for e in range(config.get("num_local_experts", 0)):
        experts |= mlp(f"block_sparse_moe.experts.{e}", i, ("w1", "w3", "w2"))
    if "shared_expert_intermediate_size" in config:
        experts |= mlp("mlp.shared_expert", config["shared_expert_intermediate_size"], projections)
    if "n_shared_experts" in config:
        width = config["n_shared_experts"] * config["moe_intermediate_size"]
        experts |= mlp("mlp.shared_experts", width, projections)
    return {
        f"model.layers.{n}.{name}": size
        for n in range(config["num_hidden_layers"])
        for name, size in (sizes | (experts if experts and n not in dense_layers(config) else dense)).items()
    }


def tensors(
    config: dict[str, Any], *, plain: tuple[str, ...] = (), seed: int = 0, group: int = GROUP
) -> dict[str, np.ndarray]:
    """Return random tensors by Hugging Face name; layers whose names end in one of ``plain`` are not quantized."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0, around: float = 0.0) -> np.ndarray:
        return (around + scale * rng.standard_normal(shape)).astype(np.float16)

    d, h = config["hidden_size"], config["head_dim"]
    found = {
        "model.embed_tokens.weight": normal(config["vocab_size"], d, scale=0.2),
        "model.norm.weight": normal(d, around=1),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = normal(config["vocab_size"], d, scale=0.3)
    for name, (k, n) in linears(config).items():
        if name.endswith(plain) and plain:
            found[f"{name}.weight"] = normal(n, k, scale=k**-0.5)
        else:
            weight = testing.random_weight(rng, k, n, group)
            found |= {f"{name}.{part}": getattr(weight, part) for part in ("qweight", "scales", "qzeros")}
        has_bias = config["model_type"].startswith("qwen2") or config.get("attention_bias")
        if has_bias and name.endswith(("q_proj", "k_proj", "v_proj")):
            found[f"{name}.bias"] = normal(n)
    for i in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{norm}.weight"] = normal(d, scale=0.2, around=1)
        counts = (config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config)
        if n_experts := next(counts, 0):
            block = "block_sparse_moe" if "num_local_experts" in config else "mlp"
            if i not in dense_layers(config):
                found[f"model.layers.{i}.{block}.gate.weight"] = normal(n_experts, d, scale=d**-0.5)
                if "n_routed_experts" in config:
                    correction = normal(n_experts, scale=0.2).astype(np.float32)
                    found[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] = correction
                if "shared_expert_intermediate_size" in config:
                    found[f"model.layers.{i}.mlp.shared_expert_gate.weight"] = normal(1, d, scale=d**-0.5)
        if config["model_type"].startswith("qwen3") or config.get("use_qk_norm"):
            for norm in ("q_norm", "k_norm"):
                found[f"model.layers.{i}.self_attn.{norm}.weight"] = normal(h, scale=0.2, around=1)
    return found


def tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with one token for each byte, and three special tokens with ids from 256 on."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return inner


def folder(path: Path, config: dict[str, Any], group: int = GROUP, **options: Any) -> Path:
    """Write a Hugging Face folder with quantized weights of group size ``group`` and return its path."""
    path.mkdir(exist_ok=True)
    quantization = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True}
    save_file(tensors(config, group=group, **options), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokenizer().save(str(path / "tokenizer.json"))
    return path


def gguf_file(path: Path, kinds: dict[str, str], *, arch: str = "llama") -> dict[str, np.ndarray]:
    """Write a GGUF file of a Llama-like model and return the dequantized values of its tensors.

    ``kinds`` gives the quantization type of linear layers by their GGUF name; all others are Q4_1. The values have
    Hugging Face names and Hugging Face's order of rows.
    """
    heads, kv_heads, h, d, i, layers = 4, 2, 16, 64, 96, 2
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(256)
    writer.add_embedding_length(d)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(i)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    inner = tokenizer()
    tokens = [inner.id_to_token(n) or f"<unused{n}>" for n in range(VOCAB)]
    tokens[-3:] = ["ab", "ĠĠ", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(["a b", "Ġ Ġ", "1 2"])
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    values = {}

    def add(name: str, target: str, shape: tuple[int, ...], kind: str, permute: int = 0) -> None:
        w = rng.standard_normal(shape).astype(np.float32) * (shape[-1] ** -0.5 if len(shape) == 2 else 1)
        form = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(w, form)
        w = gguf.quants.dequantize(data, form)
        # GGUF interleaves the two halves of each head's rows, which Hugging Face stores one after the other.
        if permute:
            order = np.arange(shape[0]).reshape(permute, 2, -1).swapaxes(1, 2).reshape(-1)
            w = w[np.argsort(order)]
        values[target] = w
        writer.add_tensor(name, data, raw_dtype=form)

    add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, d), kinds.get("token_embd", "Q8_0"))
    add("output_norm.weight", "model.norm.weight", (d,), "F32")
    for n in range(layers):
        at = f"model.layers.{n}"
        add(f"blk.{n}.attn_norm.weight", f"{at}.input_layernorm.weight", (d,), "F32")
        add(f"blk.{n}.ffn_norm.weight", f"{at}.post_attention_layernorm.weight", (d,), "F32")
        turned = arch == "llama"
        for name, target, shape, permute in (
            ("attn_q", "self_attn.q_proj", (heads * h, d), heads * turned),
            ("attn_k", "self_attn.k_proj", (kv_heads * h, d), kv_heads * turned),
            ("attn_v", "self_attn.v_proj", (kv_heads * h, d), 0),
            ("attn_output", "self_attn.o_proj", (d, heads * h), 0),
            ("ffn_gate", "mlp.gate_proj", (i, d), 0),
            ("ffn_up", "mlp.up_proj", (i, d), 0),
            ("ffn_down", "mlp.down_proj", (d, i), 0),
        ):
            add(f"blk.{n}.{name}.weight", f"{at}.{target}", shape, kinds.get(name, "Q4_1"), permute)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def weight(files: ModelFiles, name: str) -> np.ndarray:
    """Return the weight [K, N] of a linear layer in float64, dequantized if it is quantized."""
    if name in files.tensors:
        module = files.tensors[name]()
        assert isinstance(module, Module)
        return float64_weight(module.weight.qweight, module.weight.scales, module.weight.qzeros)
    return files.tensors[f"{name}.weight"]().astype(np.float64).T


def forward(files: ModelFiles, ids: list[int]) -> np.ndarray:
    """Return the logits [S, V] in float64, computed token by token and head by head by the papers' formulas."""
    c, attention = files.config, files.config.layers[0].mixer

    def vector(name: str) -> np.ndarray:
        return files.tensors[name]().astype(np.float64)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        y = x @ weight(files, name)
        bias = files.tensors.get(f"{name}.bias")
        module = files.tensors[name]() if name in files.tensors else None
        if isinstance(module, Module) and module.bias is not None:
            return y + module.bias.astype(np.float64)
        return y if bias is None else y + bias().astype(np.float64)

    def norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + c.norm.eps) * w

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        """Return a head's vector x after RoPE: x[i] + j x[i + half] turned by the position's angle number i."""
        frequencies, factor = attention.rope.frequencies()
        half = attention.rope.dim // 2
        turned = (x[:half] + 1j * x[half : 2 * half]) * np.exp(1j * position * frequencies) * factor
        return np.concatenate([turned.real, turned.imag, x[2 * half :]])

    def mlp(x: np.ndarray, at: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> np.ndarray:
        gate, up = linear(x, f"{at}.{names[0]}"), linear(x, f"{at}.{names[1]}")
        return linear(gate / (1 + np.exp(-gate)) * up, f"{at}.{names[2]}")

    def experts(x: np.ndarray, at: str) -> np.ndarray:
        """Return the output of a mixture of experts for each token of x, one token and one expert at a time."""
        is_mixtral = c.model_type == "mixtral"
        at = f"{at}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
        block = next(layer.feed_forward for layer in c.layers if hasattr(layer.feed_forward, "router"))
        names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        y = np.zeros_like(x)
        for s, row in enumerate(x):
            logits = row @ weight(files, f"{at}.gate")
            if c.model_type == "glm4_moe":
                p = 1 / (1 + np.exp(-logits))
                rank = (p + vector(f"{at}.gate.e_score_correction_bias")).reshape(block.router.groups[0], -1)
                dropped = np.argsort(-np.sort(rank)[:, -2:].sum(axis=1))[block.router.groups[1] :]
                rank[dropped] = -np.inf
            else:
                rank = p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            chosen = np.argsort(-rank.ravel(), kind="stable")[: block.router.top_k]
            total = p[chosen].sum() if block.router.renormalize else 1.0
            for e in chosen:
                y[s] += block.router.scale * p[e] / total * mlp(row[None], f"{at}.experts.{e}", names)[0]
        if f"{at}.shared_expert_gate.weight" in files.tensors:
            gate = x @ weight(files, f"{at}.shared_expert_gate")
            y += mlp(x, f"{at}.shared_expert") / (1 + np.exp(-gate))
        if block.shared is not None and block.shared_gate is None:
            y += mlp(x, f"{at}.shared_experts")
        return y

    h = vector("model.embed_tokens.weight")[ids]
    for n in range(len(c.layers)):
        at = f"model.layers.{n}"
        x = norm(h, vector(f"{at}.input_layernorm.weight"))
        q, k, v = (linear(x, f"{at}.self_attn.{p}_proj").reshape(len(ids), -1, attention.head_dim) for p in "qkv")
        if attention.q_norm is not None:
            q, k = norm(q, vector(f"{at}.self_attn.q_norm.weight")), norm(k, vector(f"{at}.self_attn.k_norm.weight"))
        out = np.zeros_like(q)
        for s in range(len(ids)):
            for head in range(attention.heads):
                shared = head // (attention.heads // attention.kv_heads)
                scores = [
                    rotate(q[s, head], s) @ rotate(k[t, shared], t) / np.sqrt(attention.head_dim) for t in range(s + 1)
                ]
                p = np.exp(scores - np.max(scores))
                out[s, head] = p / p.sum() @ v[: s + 1, shared]
        h = h + linear(out.reshape(len(ids), -1), f"{at}.self_attn.o_proj")
        x = norm(h, vector(f"{at}.post_attention_layernorm.weight"))
        is_sparse = hasattr(c.layers[n].feed_forward, "router")
        h = h + (experts(x, at) if is_sparse else mlp(x, f"{at}.mlp"))
    x = norm(h, vector("model.norm.weight"))
    return x @ (vector("model.embed_tokens.weight").T if c.tied else weight(files, "lm_head"))
