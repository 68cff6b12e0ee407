# SPDX-License-Identifier: Apache-2.0
"""The contract between the decoder and its back ends: `Model` calls `DecoderOps`; each back end implements it.

In shapes, B is the number of sequences of a batch, S the number of new tokens of each, V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.checkpoint import Module
from cupy_awq.llm.kv_cache import KvCache
from cupy_awq.llm.model_files import DenseLinear
from cupy_awq.llm.sampling import Sampling

Projection = Callable[[Array], Array]
"""One linear layer, or several that share x: x [B, S, K] -> y [B, S, N]."""

StepLogits = Callable[[Array], Array]
"""The forward pass of one decode step: tokens int [B] -> logits float32 [B, V]."""


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream of the decoder, h + delta, float32 [B, S, hidden].

    Only the back end that made a stream reads its fields. A back end may leave the sum h + delta or the RMSNorm of h to
    the next operation, which can fuse it.

    Attributes:
        h: float32 [B, S, hidden]. Operations may overwrite it: use only the newest stream.
        delta: [B, S, hidden] of the activations' dtype: the output of the last block, where it is not yet part of h.
        inverse_rms: float32 [B * S], 1 / RMS of each row of h at the last RMSNorm; None before the first.
        unnormalized_x: [B, S, hidden] of the activations' dtype: h times the next RMSNorm's weight, to be divided by
            the RMS of each row by a GEMM with ``Fusion("rms_norm_x")``; None if that norm is a kernel of its own.
        square_sums: float32 [B * S, ceil(hidden / 32)]: the sums of h^2 that belong to ``unnormalized_x``.
    """

    h: Array
    delta: Array | None = None
    inverse_rms: Array | None = None
    unnormalized_x: Array | None = None
    square_sums: Array | None = None


class DecodeLoop(Protocol):
    """A loop that generates one token after the other for every sequence of a KV cache."""

    def start(self, sequence: int, logits: Array) -> int:
        """Choose and return the first token of a sequence, from the logits [V] of its prompt."""
        ...

    def step(self) -> list[int]:
        """Feed the newest token of every sequence to the model and return the next ones.

        Raises ValueError if the logits hold NaN.
        """
        ...

    def close(self) -> None:
        """Wait for work that still uses the KV cache."""
        ...


class DecoderOps(Protocol):
    """The operations of one back end on one device, for a model of one configuration."""

    device_index: int
    """The number of the GPU, or `check.HOST`."""
    prefill_chunk: int
    """The largest number of prompt tokens in one forward pass."""

    def prepare_tensor(self, a: npt.NDArray[Any]) -> Array:
        """Bring a norm's weight [size] or an embedding table [V, hidden] to the device, in the back end's dtype."""
        ...

    def prepare_tokens(self, ids: Sequence[int]) -> Array:
        """Bring token ids to the device, as integers [len(ids)]."""
        ...

    def make_projection(self, parts: Sequence[Module | DenseLinear], *, gated: bool = False) -> Projection:
        """Return the projection x -> outputs of all parts side by side; ``gated``: silu(gate) * up of (gate, up)."""
        ...

    def make_head(self, part: Module | DenseLinear) -> Projection:
        """Return the projection of hidden states to logits in float32."""
        ...

    def make_cache(self, sequences: int, capacity: int) -> KvCache:
        """Return an empty KV cache. Raises ValueError if it needs more memory than is free."""
        ...

    def make_decode_loop(self, step_logits: StepLogits, cache: KvCache, sampling: Sampling) -> DecodeLoop:
        """Return the decode loop over a cache; call its `start` once for each sequence, then `step`, then `close`."""
        ...

    def embed(self, table: Array, tokens: Array) -> ResidualStream:
        """Return the rows of the embedding table [V, hidden] for tokens [B, S], which begin the residual stream."""
        ...

    def norm_and_project(
        self, stream: ResidualStream, norm_weight: Array, projection: Projection
    ) -> tuple[ResidualStream, Array]:
        """Return the stream and projection(RMSNorm(stream) * norm_weight)."""
        ...

    def project_and_add(
        self, stream: ResidualStream, x: Array, projection: Projection, next_norm_weight: Array | None
    ) -> ResidualStream:
        """Return the stream plus projection(x).

        ``next_norm_weight`` is what the following `norm_and_project` takes, so that the two can be fused; None if none
        follows.
        """
        ...

    def rms_norm(self, stream: ResidualStream, norm_weight: Array) -> Array:
        """Return RMSNorm(stream) * norm_weight [B, S, hidden]."""
        ...

    def attend(self, qkv: Array, q_norm: Array | None, k_norm: Array | None, cache: KvCache, layer: int) -> Array:
        """Append the new tokens to one layer of the cache and return their causal attention [B, S, q_width].

        Args:
            qkv: [B, S, (heads + 2 * kv_heads) * head_dim]. Each head of q and k is normalized (if there are weights)
                and rotated by RoPE; k and v are written to the cache behind the tokens of their sequence.
            q_norm, k_norm: float32 [head_dim], RMSNorm weights of the heads, or None.
        """
        ...

    def to_numpy(self, a: Array) -> npt.NDArray[np.float32]:
        """Copy float32 logits to the host."""
        ...
