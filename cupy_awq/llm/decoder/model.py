# SPDX-License-Identifier: Apache-2.0
"""`Model`: a decoder with its weights on a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cupy_awq.check import Array
from cupy_awq.llm.decoder.backend import DecoderOps, Forward
from cupy_awq.llm.decoder.forward import Projection
from cupy_awq.llm.decoder.states import Cache


@dataclass(frozen=True)
class Model:
    """A decoder with its weights on a device, created by `build.build_model`.

    Attributes:
        ops: the operations of the back end that holds the weights.
        forward: the forward pass, from new tokens [B, S] and a cache to hidden states [B, S, hidden]. Row b holds the
            new tokens of sequence b of the cache.
        head: the projection from hidden states [.., hidden] to logits, float32 [.., V].
        weight_bytes: the size in bytes of the weights that a decode step reads: those of all projections and the head.
    """

    ops: DecoderOps
    forward: Forward
    head: Projection
    weight_bytes: int

    def prefill(self, cache: Cache, sequence: int, tokens: Sequence[int]) -> Iterator[Array]:
        """Append tokens to one sequence of the cache, in chunks; yield the hidden states [1, S, hidden] per chunk."""
        view, chunk = cache.select_sequence(sequence), self.ops.prefill_chunk
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            yield self.forward(self.ops.prepare_tokens(part)[None], view)
            view.lengths[:] += len(part)
            cache.tokens[sequence].extend(part)

    def prompt_logits(self, cache: Cache, sequence: int, tokens: Sequence[int]) -> Array:
        """Append tokens, at least one, to one sequence of the cache; return the logits [V] of the last token."""
        # The deque frees the hidden states of earlier chunks, which take 512 MiB for 131,072 tokens of Llama-3.2-1B.
        hidden = deque(self.prefill(cache, sequence, tokens), maxlen=1).pop()
        return self.logits(hidden[:, -1])[0]

    def step_logits(self, cache: Cache, tokens: Array) -> Array:
        """Run the newest token of every sequence of the cache, tokens [B]; return their logits [B, V]."""
        return self.logits(self.forward(tokens[:, None], cache))[:, -1]

    def logits(self, hidden: Array) -> Array:
        """Return the logits, float32 [.., V], of hidden states [.., hidden]."""
        return self.head(hidden)
