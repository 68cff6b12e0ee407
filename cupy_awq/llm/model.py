# SPDX-License-Identifier: Apache-2.0
"""The decoder of Llama, Qwen2 and Qwen3: the forward pass, written with the operations of a back end (`DecoderOps`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cupy_awq.check import Array
from cupy_awq.llm.kv_cache import KvCache
from cupy_awq.llm.ops import DecoderOps, Projection


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, in the form that the back end uses.

    A projection is given as width of its input -> width of its output.

    Attributes:
        attention_norm, mlp_norm: float32 [hidden], the weights of the RMSNorms before attention and before the MLP.
        qkv: hidden -> (heads + 2 * kv_heads) * head_dim: queries, keys and values, concatenated.
        q_norm, k_norm: float32 [head_dim], the weights of the RMSNorms on each head (Qwen3), or None without them.
        o: heads * head_dim -> hidden: the output projection of attention.
        gate_up: hidden -> intermediate: gate and up projection with SwiGLU, silu(gate) * up.
        down: intermediate -> hidden: the down projection of the MLP.
    """

    attention_norm: Array
    qkv: Projection
    q_norm: Array | None
    k_norm: Array | None
    o: Projection
    mlp_norm: Array
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class Model:
    """A decoder with its weights on a device; made by `build.build_model`.

    Attributes:
        ops: the operations of the back end that holds the weights.
        embedding: the embedding table [V, hidden].
        layers: the decoder layers in the order of execution.
        norm: float32 [hidden], the weight of the final RMSNorm.
        head: hidden -> logits, float32 [.., V].
        weight_bytes: the size in bytes of the weights that a decode step reads: all projections and the head.
    """

    ops: DecoderOps
    embedding: Array
    layers: Sequence[Layer]
    norm: Array
    head: Projection
    weight_bytes: int

    def forward(self, tokens: Array, cache: KvCache) -> Array:
        """Run new tokens [B, S], one row per sequence of the cache, and return their hidden states [B, S, hidden].

        Writes their keys and values to the cache. The caller must then advance `cache.lengths` by S.
        """
        ops = self.ops
        stream = ops.embed(self.embedding, tokens)
        for i, layer in enumerate(self.layers):
            stream, qkv = ops.norm_and_project(stream, layer.attention_norm, layer.qkv)
            attended = ops.attend(qkv, layer.q_norm, layer.k_norm, cache, i)
            stream = ops.project_and_add(stream, attended, layer.o, layer.mlp_norm, layer.gate_up)
            stream, activated = ops.norm_and_project(stream, layer.mlp_norm, layer.gate_up)
            after = self.layers[i + 1] if i + 1 < len(self.layers) else None
            follower = (after.attention_norm, after.qkv) if after else (None, None)
            stream = ops.project_and_add(stream, activated, layer.down, *follower)
        return ops.rms_norm(stream, self.norm)

    def prefill(self, cache: KvCache, sequence: int, tokens: Sequence[int]) -> Iterator[Array]:
        """Append tokens to one sequence of the cache and yield the hidden states [1, S, hidden] of each chunk."""
        view, chunk = cache.select_sequence(sequence), self.ops.prefill_chunk
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            yield self.forward(self.ops.prepare_tokens(part)[None], view)
            view.lengths[:] += len(part)
            cache.tokens[sequence].extend(part)

    def logits(self, hidden: Array) -> Array:
        """Return the logits, float32 [.., V], of hidden states [.., hidden]."""
        return self.head(hidden)
