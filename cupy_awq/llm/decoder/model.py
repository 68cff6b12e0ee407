# SPDX-License-Identifier: Apache-2.0
"""The decoder of Llama, Qwen2 and Qwen3: a forward pass composed of the operations of a back end (`DecoderOps`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cupy_awq.check import Array
from cupy_awq.llm.decoder.backend import ColumnOrder, DecoderOps, Projection
from cupy_awq.llm.decoder.kv_cache import KvCache


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, prepared by the back end.

    Projections are described as input width -> output width.

    Attributes:
        attention_norm, mlp_norm: float32 [hidden], the weights of the RMSNorms before attention and before the MLP.
        qkv: the concatenated projections to queries, keys and values: hidden -> (heads + 2 * kv_heads) * head_dim.
        q_norm, k_norm: float32 [head_dim], the weights of the RMSNorms of each head (Qwen3), or None without them.
        o: the output projection of attention: heads * head_dim -> hidden.
        o_order: the activation order of the output projection, or None. Attention writes its columns in this order.
        gate_up: the gate and up projections with SwiGLU, silu(gate) * up: hidden -> intermediate.
        down: the down projection of the MLP: intermediate -> hidden.
    """

    attention_norm: Array
    qkv: Projection
    q_norm: Array | None
    k_norm: Array | None
    o: Projection
    mlp_norm: Array
    gate_up: Projection
    down: Projection
    o_order: ColumnOrder | None = None


@dataclass(frozen=True)
class Model:
    """A decoder with its weights on a device, created by `build.build_model`.

    Attributes:
        ops: the operations of the back end that holds the weights.
        embedding: the embedding table [V, hidden].
        layers: the decoder layers in the order of execution.
        norm: float32 [hidden], the weight of the final RMSNorm.
        head: the projection from hidden states [.., hidden] to logits, float32 [.., V].
        weight_bytes: the size in bytes of the weights that a decode step reads: those of all projections and the head.
    """

    ops: DecoderOps
    embedding: Array
    layers: Sequence[Layer]
    norm: Array
    head: Projection
    weight_bytes: int

    def forward(self, tokens: Array, cache: KvCache) -> Array:
        """Run the forward pass on new tokens [B, S] and return their hidden states [B, S, hidden].

        Row b holds the new tokens of sequence b of the cache. Their keys and values are written to the cache; the
        caller then adds S to `cache.lengths`.
        """
        ops = self.ops
        stream = ops.embed(self.embedding, tokens)
        for i, layer in enumerate(self.layers):
            stream, qkv = ops.norm_and_project(stream, layer.attention_norm, layer.qkv)
            attended = ops.attend(qkv, layer.q_norm, layer.k_norm, cache, i, layer.o_order)
            stream = ops.project_and_add(stream, attended, layer.o, layer.mlp_norm, layer.gate_up)
            stream, activated = ops.norm_and_project(stream, layer.mlp_norm, layer.gate_up)
            after = self.layers[i + 1] if i + 1 < len(self.layers) else None
            follower = (after.attention_norm, after.qkv) if after else (None, None)
            stream = ops.project_and_add(stream, activated, layer.down, *follower)
        return ops.rms_norm(stream, self.norm)

    def prefill(self, cache: KvCache, sequence: int, tokens: Sequence[int]) -> Iterator[Array]:
        """Append tokens to one sequence of the cache, in chunks; yield the hidden states [1, S, hidden] per chunk."""
        view, chunk = cache.select_sequence(sequence), self.ops.prefill_chunk
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            yield self.forward(self.ops.prepare_tokens(part)[None], view)
            view.lengths[:] += len(part)
            cache.tokens[sequence].extend(part)

    def prompt_logits(self, cache: KvCache, sequence: int, tokens: Sequence[int]) -> Array:
        """Append tokens, at least one, to one sequence of the cache; return the logits [V] of the last token."""
        # The deque frees the hidden states of earlier chunks, which take 512 MiB for 131,072 tokens of Llama-3.2-1B.
        hidden = deque(self.prefill(cache, sequence, tokens), maxlen=1).pop()
        return self.logits(hidden[:, -1])[0]

    def step_logits(self, cache: KvCache, tokens: Array) -> Array:
        """Run the newest token of every sequence of the cache, tokens [B]; return their logits [B, V]."""
        return self.logits(self.forward(tokens[:, None], cache))[:, -1]

    def logits(self, hidden: Array) -> Array:
        """Return the logits, float32 [.., V], of hidden states [.., hidden]."""
        return self.head(hidden)
