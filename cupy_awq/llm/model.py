# SPDX-License-Identifier: Apache-2.0
"""The decoder: Llama, Qwen2 and Qwen3 in one forward pass, over the operations of the CPU or of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cupy_awq.check import Array
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm.kv_cache import Cache
from cupy_awq.llm.source import Linear, Source

Ops = Any
"""`HostOps` or `DeviceOps`."""
Project = Callable[[Array], Array]
Progress = Callable[[int, int], None]
"""Called with what is done and the total."""


@dataclass(frozen=True)
class Layer:
    input_norm: Array
    qkv: Project
    q_norm: Array | None
    k_norm: Array | None
    o: Project
    post_norm: Array
    gate_up: Project
    down: Project


@dataclass(frozen=True)
class Model:
    """A decoder that is ready to run.

    ``weight_bytes``: what one token must read of the weights, all but the embedding.
    """

    ops: Ops
    embedding: Array
    layers: Sequence[Layer]
    norm: Array
    head: Project
    weight_bytes: int

    def forward(self, tokens: Array, cache: Cache) -> Array:
        """Hidden states [B, S, hidden] after the final norm, of tokens [B, S] that go on B sequences of a cache.

        Their keys and values go to the cache; `cache.lengths` is left for the caller to move.
        """
        ops = self.ops
        h = ops.embed(self.embedding, tokens)
        for i, layer in enumerate(self.layers):
            h, qkv = ops.project(h, layer.input_norm, layer.qkv)
            x = ops.attend(qkv, layer.q_norm, layer.k_norm, cache, i)
            h = ops.add(h, x, layer.o, layer.post_norm)
            h, x = ops.project(h, layer.post_norm, layer.gate_up)
            h = ops.add(h, x, layer.down, self.layers[i + 1].input_norm if i + 1 < len(self.layers) else None)
        return ops.norm(h, self.norm)

    def append(self, cache: Cache, sequence: int, tokens: Sequence[int]) -> Iterator[Array]:
        """The hidden states [1, S, hidden] of tokens that go on one sequence, chunk by chunk."""
        one, chunk = cache.sequence(sequence), self.ops.chunk
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            yield self.forward(self.ops.tokens(part)[None], one)
            one.lengths[:] += len(part)
            cache.tokens[sequence].extend(part)

    def logits(self, hidden: Array) -> Array:
        """float32 [.., V]."""
        return self.ops.logits(self.head(hidden))


def build(source: Source, ops: Ops, progress: Progress | None = None) -> Model:
    """The model of a source. Raises CheckpointError for a tensor that is missing or does not fit."""
    config = source.config
    d, wide, narrow = config.hidden, config.q_width, config.kv_width
    layers, read = [], 0

    def projection(*names_sizes: tuple[str, int, int], gated: bool = False) -> Project:
        nonlocal read
        parts = [source.linear(*name_size) for name_size in names_sizes]
        read += sum(part.weight.nbytes for part in parts)
        project: Project = ops.projection(parts, gated=gated)
        return project

    def vector(name: str, size: int = d) -> Array:
        return ops.array(source.tensor(f"{name}.weight", (size,)))

    table = source.tensor("model.embed_tokens.weight", (config.vocab, d))
    embedding = ops.array(table)
    for i in range(config.layers):
        if progress is not None:
            progress(i, config.layers + 1)
        at = f"model.layers.{i}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        normed = config.qk_norm
        layers.append(
            Layer(
                input_norm=vector(f"{at}.input_layernorm"),
                qkv=projection(
                    (f"{attention}.q_proj", d, wide),
                    (f"{attention}.k_proj", d, narrow),
                    (f"{attention}.v_proj", d, narrow),
                ),
                q_norm=vector(f"{attention}.q_norm", config.head_dim) if normed else None,
                k_norm=vector(f"{attention}.k_norm", config.head_dim) if normed else None,
                o=projection((f"{attention}.o_proj", wide, d)),
                post_norm=vector(f"{at}.post_attention_layernorm"),
                gate_up=projection(
                    (f"{mlp}.gate_proj", d, config.intermediate), (f"{mlp}.up_proj", d, config.intermediate), gated=True
                ),
                down=projection((f"{mlp}.down_proj", config.intermediate, d)),
            )
        )
    if f"model.layers.{config.layers}.input_layernorm.weight" in source.tensors:
        raise CheckpointError(f"{source.path}: expected {config.layers} layers, got more")
    norm = vector("model.norm")
    last = Linear(table, None) if config.tied else source.linear("lm_head", d, config.vocab)
    head = ops.head(last)
    read += last.weight.nbytes
    if progress is not None:
        progress(config.layers + 1, config.layers + 1)
    return Model(ops, embedding, layers, norm, head, read)
