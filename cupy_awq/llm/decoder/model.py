# SPDX-License-Identifier: Apache-2.0
"""`Model`: a decoder with its weights on a device."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.check import Array
from cupy_awq.llm.decoder.backend import DecoderOps, Forward
from cupy_awq.llm.decoder.forward import Projection


@dataclass(frozen=True)
class Model:
    """A decoder with its weights on a device, created by `build.build_model`.

    Attributes:
        ops: the operations of the back end that holds the weights.
        forward: the forward pass, from new tokens [1, M] and a batch of them to hidden states [1, M, hidden].
        head: the projection from hidden states [.., hidden] to logits, float32 [.., V].
        weight_bytes: the size in bytes of the weights that a decode step reads: those of all projections and the head.
    """

    ops: DecoderOps
    forward: Forward
    head: Projection
    weight_bytes: int

    def logits(self, hidden: Array) -> Array:
        """Return the logits, float32 [.., V], of hidden states [.., hidden]."""
        return self.head(hidden)
